"""One rank's capture while it runs: the step in progress, and the way of a tensor from a tap to lines and bytes.

The problem: hundreds of tensors per step, most of them seen twice (an output is the next module's input), some strided,
some with rows that nobody wants, some on a device, while the model waits; and no error of the probe may reach the
model. The idea: taps ask a Session for the StepState, None while nothing is captured; a failure is written down, said
once, and sets the state to None for good. One hash per tensor decides whether its bytes are new in this step; only new
bytes are copied, into the writer's block, and everything else is a journal line that refers to them. What was decided
of a tap's tensor (rows, layout, the line as a template) is kept as a Site and holds while dtype, shape and rows stay:
FastPath. The other tensors, and those of a device, which go through staging.py, take the general way in Sink.

Not here: which rows are which (rows.py), blocks and files (dump/writer.py), what is tapped (taps/hooks.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.rows import EncoderDataParallel, RowMaps, Space
from vllm_accprobe.capture.core.staging import DeviceStaging
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.journal import ERROR, MODULE, REQUEST, ROWS, SKIP, STEP, STOP, TensorHead
from vllm_accprobe.dump.journal_writer import Event, TensorLine, TensorTemplate, digest
from vllm_accprobe.dump.schema import (
    DEALT,
    LOGITS,
    OWN,
    ROOT_TAP,
    TOKENS,
    Failure,
    Layout,
    Module,
    Request,
    Skip,
    Step,
    StepGraph,
    Stop,
)
from vllm_accprobe.dump.stats import StatsCell, Sums, moments_at, warm_up
from vllm_accprobe.dump.writer import RankWriter

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
        "float8_e5m2fnuz", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
        "complex64", "complex128",
    )
    if hasattr(torch, name)
}  # fmt: skip

Ranges = Sequence[tuple[int, int]] | None
"""Wanted [start, stop) rows along dimension 0, or None for all of the tensor."""
LAZY = frozenset(("float32", "float64", "complex64", "complex128"))
"""Dtypes whose tensors may be views with a pending conjugation or negation."""


class Scratch:
    """One buffer for all tensors that do not lie in memory as they are written. Valid until the next one."""

    def __init__(self) -> None:
        self._bytes = torch.empty(1 << 20, dtype=torch.uint8)

    def dense(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in the buffer."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._bytes.numel():
            self._bytes = torch.empty(nbytes + nbytes // 4, dtype=torch.uint8)
        return self._bytes[:nbytes].view(dtype).view(tuple(shape))

    def parts(self, tensor: torch.Tensor, ranges: Ranges) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Shape and memory of the wanted bytes of a host tensor."""
        if tensor.is_contiguous():
            if ranges is None:
                return tuple(tensor.shape), [(tensor.data_ptr(), tensor.nbytes)]
            row = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
            address = tensor.data_ptr()
            shape = (sum(b - a for a, b in ranges), *tensor.shape[1:])
            return shape, [(address + a * row, (b - a) * row) for a, b in ranges]
        rows = tensor.shape[0] if ranges is None else sum(b - a for a, b in ranges)
        dense = self.dense((rows, *tensor.shape[1:]), tensor.dtype)
        if ranges is None:
            dense.copy_(tensor)
        else:
            torch.cat([tensor[a:b] for a, b in ranges], out=dense)
        return tuple(dense.shape), [(dense.data_ptr(), dense.nbytes)]


def selected(tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """The wanted rows on the tensor's own device: a view where they are one range."""
    if ranges is None:
        return tensor
    return tensor[slice(*ranges[0])] if len(ranges) == 1 else torch.cat([tensor[a:b] for a, b in ranges])


class StepState:
    """What taps need during one armed step. Created once per step; its spaces are filled when first needed.

    ``rows``: how many token rows there are, where all of them are wanted and none is padding; -1 before that is known
    and where it is not so. ``taking``: a tap is at work, whose own operators are none of the model. ``masked``:
    something masks logits in this step, and what it leaves is still to be taken."""

    __slots__ = ("calls", "inside", "masked", "number", "prefill", "rows", "seq", "spaces", "stack", "taking")

    def __init__(self, number: int, prefill: bool):
        self.number = number
        self.prefill = prefill
        self.seq = 0
        self.rows = -1
        self.taking = 0
        self.masked = False
        self.calls: dict[str, int] = {}
        self.stack: list[str] = []
        self.inside: str | None = None
        self.spaces: dict[str, Space] = {}


class Ticket:
    """Gets the hash of a tensor: at once for host tensors, on the staging thread for a device's."""

    __slots__ = ("digest",)

    def __init__(self) -> None:
        self.digest: str | None = None

    def resolve(self, cell: StatsCell) -> None:
        """The cell of its bytes is known."""
        self.digest = cell.hash


class Sink:
    """Everything that one rank leaves behind. Methods are called from the model's thread; none of them raises for a
    full disk or a spent budget: ``stopped`` then says why, and nothing more is taken.

    Args:
        start: the journal's first line, without its ``event`` key.
        staged: tensors go through DeviceStaging (a device), or, for tests, as if they did.
        on_stop: called once, from any thread, with the reason when the sink gives up.
    """

    def __init__(
        self,
        config: ProbeConfig,
        root: Path,
        rank: int,
        start: dict[str, Any],
        on_stop: Callable[[str], None],
        device: torch.device | None = None,
        staged: bool = False,
    ):
        self.keep = config.task == "tensor"
        self._on_stop = on_stop
        self.writer = RankWriter(root, rank, start, budget_bytes=config.budget_bytes, on_stop=on_stop)
        # Compiling takes seconds the first time on a machine: now, not in somebody's request. Not earlier, at import:
        # vLLM 0.32's CPU worker cannot be initialised in a process that has already loaded llvmlite.
        warm_up()
        self.seen: dict[str, StatsCell] = {}
        self.lasting: dict[str, StatsCell] = {}  # of parameters: their bytes are stored once per run
        self._rowmaps = RowMaps()
        self.scratch = Scratch()
        self.skipped: Counter[tuple[str, str | None, str]] = Counter()
        self.tensors = 0
        self.steps = 0
        self._lock = threading.RLock()  # a signal may close in the middle of a skip
        self._closed = False
        device = device or torch.device("cpu")
        self._staging = DeviceStaging(device, self._staging_failed) if staged or device.type != "cpu" else None

    @property
    def direct(self) -> bool:
        """Whether tensors lie in host memory and are taken where they are."""
        return self._staging is None

    def room(self, sizes: Sequence[int]) -> bool:
        """Whether tensors of so many bytes each can be taken now without waiting for the disk."""
        return self.writer.room(sizes) if self._staging is None else self._staging.room(sizes)

    def idle(self) -> bool:
        """Whether there is as much room as there will ever be."""
        return self.writer.idle() if self._staging is None else self._staging.idle()

    def reserve(self, nbytes: int) -> None:
        """Takes the memory for copies on the device, see DeviceStaging.reserve; nothing where tensors are direct."""
        if self._staging is not None:
            self._staging.reserve(nbytes)

    @property
    def stopped(self) -> str | None:
        """Why nothing more is written, or None."""
        return self.writer.stopped

    def line(self, line: Event | TensorLine | Callable[[], Event | None]) -> None:
        """A journal line in its place among the tensors. A callable makes it on the writer's thread, when the
        lines before it are done."""
        if self._staging is None:  # without a function of its own for each line
            self.writer.line(line)
        else:
            self.arrived((), lambda _: self.writer.line(line))

    def step(self, step: Step) -> None:
        """A step begins; bytes of the last one, parameters' excepted, are no longer known."""
        self.steps += 1
        self.arrived((), lambda _: self._forget_step())
        self.line(STEP.to_line(step))

    def rows(self, step: int, space: Space) -> None:
        """The row map of ``space``; token ids (and true positions) come from its tensors as they are at this moment."""
        tensors, finish = self._rowmaps.of(step, space)
        self.arrived(tensors, lambda hosts: self.writer.line(ROWS.to_line(finish(hosts))))

    def skip(self, tap: str, reason: str, role: str | None = None, count: int = 1) -> None:
        """Counted here and written once, at close: a skip that repeats every step is one line. From any thread."""
        with self._lock:
            self.skipped[tap, role, reason] += count

    def error(self, where: str, message: str, step: int | None) -> None:
        """A failure that was survived; a message of at most 2,000 characters is kept."""
        self.line(ERROR.to_line(Failure(where, message[:2000], step)))

    def tensor(
        self,
        head: TensorHead,
        tensor: torch.Tensor,
        space: Space | None,
        ticket: Ticket | None = None,
        lasting: bool = False,
        before: Ticket | None = None,
        changed: Callable[[bool], None] = lambda different: None,
    ) -> None:
        """Stores ``tensor`` (its selected rows, if it has any) and queues its line; ``ticket`` gets the cell of its
        bytes. ``lasting``: the same bytes will come again in later steps. Parameters are always stored. With
        ``before`` the tensor is stored only if its bytes are no longer those, and ``changed`` gets which is true."""

        def store(dtype: str, host: torch.Tensor, ranges: Ranges) -> None:
            shape, parts = self.scratch.parts(host, ranges)
            hash = digest(parts)
            if before is not None:
                different = before.digest is not None and hash != before.digest
                changed(different)
                if not different:
                    return
            cell = self._store(head, dtype, shape, parts, hash, lasting)
            if ticket is not None:
                ticket.resolve(cell)

        self._on_host(head, tensor, space, store)

    def measure(self, head: TensorHead, tensor: torch.Tensor, ticket: Ticket) -> None:
        """Gives ``ticket`` hash and statistics of ``tensor``, of which there is no line."""

        def measure(dtype: str, host: torch.Tensor, ranges: Ranges) -> None:
            _, parts = self.scratch.parts(host, ranges)
            hash = digest(parts)
            ticket.resolve(self.seen.get(hash + dtype) or self._measured(StatsCell(None, hash, dtype), parts))

        self._on_host(head, tensor, None, measure)

    def measured(self, head: TensorHead, dtype: str, shape: tuple[int, ...], sums: Sums, hash: str | None) -> None:
        """Queues the line of a tensor of which only statistics came, and its hash where that is known. Called on the
        thread on which tensors arrive."""
        self.tensors += 1
        cell = None if hash is None else self.seen.get(hash + dtype)
        if cell is None:
            cell = StatsCell(None, hash, dtype)
            cell.sums = sums
        self.writer.line(TensorLine(head.line(dtype, shape), cell))

    def _on_host(
        self,
        head: TensorHead,
        tensor: torch.Tensor,
        space: Space | None,
        take: Callable[[str, torch.Tensor, Ranges], None],
    ) -> None:
        """Gives ``take`` the dtype's name, the tensor in host memory with its rows along dimension 0 (or whole), and
        which ranges of them are wanted: now, or on the staging thread. What cannot be stored is counted as skipped."""
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided:  # sparse, quantised, nested
            self.skip(head.tap, "not a plain tensor", head.role)
            return
        # Half precision has no lazy conjugates, and asking releases the GIL, which the writer's thread may then take.
        if dtype in LAZY and (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.resolve_conj().resolve_neg()
        ranges: Ranges = None
        row_dim = head.row_dim
        if space is not None and not (space.whole and tensor.shape[row_dim] == space.src):
            if row_dim == 0:
                ranges = space.ranges
            else:
                tensor = torch.cat([tensor.narrow(row_dim, a, b - a) for a, b in space.ranges], row_dim)
        if self._staging is None:
            take(dtype, tensor, ranges)
        else:
            self._staging.stage((selected(tensor, ranges),), lambda hosts: take(dtype, hosts[0], None))

    def _store(
        self,
        head: TensorHead,
        dtype: str,
        shape: tuple[int, ...],
        parts: list[tuple[int, int]],
        hash: str,
        lasting: bool = False,
    ) -> StatsCell:
        """Queues the line, with the bytes if they are new in this step; the cell of these bytes."""
        event = head.line(dtype, shape)
        self.tensors += 1
        key = hash + dtype
        cell = self.seen.get(key)
        if cell is None:
            cell = self.seen[key] = StatsCell(None, hash, dtype)
            if lasting or head.step is None:
                self.lasting[key] = cell
            if self.keep or head.step is None:
                self.writer.put(parts, event, cell)
                return cell
            self._measured(cell, parts)
        self.writer.line(TensorLine(event, cell))
        return cell

    @staticmethod
    def _measured(cell: StatsCell, parts: list[tuple[int, int]]) -> StatsCell:
        """``cell`` with the statistics of its bytes."""
        assert cell.dtype is not None
        for address, nbytes in parts:
            cell.add(moments_at(address, nbytes, cell.dtype))
        return cell

    def close(self, reason: str) -> None:
        """Writes what is still queued, the counted skips and the ``end`` line. Safe to call twice and from atexit."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._staging is not None:
            self._staging.close()
        if self._rowmaps.disbelieved:
            why = "the runner's positions could not be, the scheduler's were taken"
            self.skip(ROOT_TAP, why, "positions", self._rowmaps.disbelieved)
        totals: Counter[str] = Counter()
        for (tap, role, why), count in self.skipped.items():
            self.writer.line(SKIP.to_line(Skip(tap, why, None, role, count)))
            totals[why] += count
        self.writer.close(reason, {"steps": self.steps, "tensors": self.tensors, "skipped": dict(totals)})

    def _forget_step(self) -> None:
        self.seen.clear()
        self.seen.update(self.lasting)
        self._rowmaps.new_step()

    def arrived(self, tensors: Sequence[torch.Tensor], take: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Gives ``take`` the tensors in host memory, in order: now, or on the staging thread."""
        if self._staging is None:
            take(tensors)
        else:
            self._staging.stage(tensors, take)

    def _staging_failed(self, error: BaseException) -> None:
        failure = Failure("staging", f"{type(error).__name__}: {error}"[:2000])
        self.writer.line(ERROR.to_line(failure, "step"))
        self._on_stop(f"the copy from the device failed: {error}")


_STRIDED = torch.strided
_VIEWS = 4096
"""Sizes of tensors that are remembered."""
Sites = dict[str, "Site"]
"""By role: what is known of one tap's tensors."""
View = tuple[tuple[int, ...], int]
"""Stride and storage offset of a tensor, in elements."""


def view_of(tensor: torch.Tensor) -> View:
    return tensor.stride(), tensor.storage_offset()


class Site:
    """What was decided of the tensors of one role: holds for ``dtype``, ``shape`` and ``rows`` rows in the step."""

    __slots__ = (
        "bytes_at", "dense", "dtype", "dtype_name", "head", "lazy", "nbytes", "rows", "shape", "strided", "template",
        "view",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, rows: int, head: TensorHead, template: TensorTemplate,
        bytes_at: Callable[[int], Any],
    ) -> None:  # fmt: skip
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.rows = rows
        self.template = template
        self.dtype_name = template.dtype
        self.lazy = template.dtype in LAZY
        self.nbytes = template.nbytes
        self.bytes_at = bytes_at
        self.dense: torch.Tensor | None = None
        """Where strided tensors are brought together, for as long as they are read."""
        self.head = head
        self.view: View | None = None
        self.strided = template

    def of_view(self, tensor: torch.Tensor) -> TensorTemplate:
        """The template of a tensor that is not contiguous; made again where its strides are not the last one's."""
        view = view_of(tensor)
        if view != self.view:
            self.view = view
            self.strided = TensorTemplate(
                self.head._replace(view=view), self.dtype_name, self.template.shape, self.nbytes
            )
        return self.strided


class FastPath:
    """The common way of one sink's tensors.

    layout_of(tap, role, shape): what a line says of how a tensor is split. decide(state, role, shape): the row space of
    a tensor and its row dimension.
    """

    def __init__(
        self,
        sink: Sink,
        layout_of: Callable[[str, str, torch.Size], dict[str, Any] | None],
        decide: Callable[[StepState, str, torch.Size], tuple[Space | None, int]],
    ) -> None:
        self._layout_of = layout_of
        self._sink = sink
        self._decide = decide
        self._hash = xxhash.xxh3_128_hexdigest
        self._views: dict[int, Callable[[int], Any]] = {}  # making the type costs more than hashing the bytes

    def take(
        self,
        state: StepState,
        sites: Sites,
        tap: str,
        cls: str,
        role: str,
        call: int,
        tensor: torch.Tensor,
        before: str | None = None,
    ) -> str | None:
        """Stores ``tensor`` and queues its line; its hash, or None when this is not the place for it. ``before``: the
        hash of what it was before the call, for a role ``inplace.*``; if it still is, there is no line."""
        site = sites.get(role)
        if (
            site is None
            or state.rows != site.rows
            or tensor.dtype is not site.dtype
            or tensor.shape != site.shape
            or tensor.layout is not _STRIDED
        ):
            site = self._site(state, tap, cls, role, tensor, before is not None)
            if site is None:
                sites.pop(role, None)
                return None
            sites[role] = site
        if site.lazy and (tensor.is_conj() or tensor.is_neg()):
            return None
        sink, template = self._sink, site.template
        if not tensor.is_contiguous():
            template = site.of_view(tensor)
            if site.dense is None:
                site.dense = sink.scratch.dense(site.shape, site.dtype)
            tensor = site.dense.copy_(tensor)
        address = tensor.data_ptr()
        digest: str = self._hash(site.bytes_at(address))
        if digest == before:
            return digest
        seq = state.seq
        state.seq = seq + 1
        sink.tensors += 1
        key = digest + site.dtype_name
        cell = sink.seen.get(key)
        if cell is None:
            cell = sink.seen[key] = StatsCell(None, digest, site.dtype_name)
            if sink.keep:
                sink.writer.tensor((template, state.number, call, seq, cell), address)
                return digest
            cell.sums = moments_at(address, site.nbytes, site.dtype_name)
        sink.writer.line((template, state.number, call, seq, cell))
        return digest

    def _site(
        self, state: StepState, tap: str, cls: str, role: str, tensor: torch.Tensor, mutated: bool
    ) -> Site | None:
        """The decision for tensors like this one, or None for those of the general way."""
        dtype = DTYPE_NAMES.get(tensor.dtype)
        shape = tensor.shape
        if dtype is None or tensor.layout is not torch.strided or not tensor.nbytes:
            return None
        space, dim = self._decide(state, role, shape)
        if space is not None and shape[dim] != space.src:
            return None
        rows, layout = None if space is None else space.name, self._layout_of(tap, role, shape)
        head = TensorHead(state.number, tap, cls, role, 0, 0, rows, dim, layout, mutated)
        nbytes = tensor.nbytes
        bytes_at = self._views.get(nbytes)
        if bytes_at is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            bytes_at = self._views[nbytes] = (ctypes.c_char * nbytes).from_address
        return Site(tensor, state.rows, head, TensorTemplate(head, dtype, tuple(shape), nbytes), bytes_at)


NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
LANGUAGE, VISION, HEAD = "language", "vision", "head"
"""The three parts of a model as far as rows are concerned: token rows, patch rows, rows that reach the logits."""


class OperatorTap(Protocol):
    """What captures operators in armed steps, as far as a session knows it (ops/dispatch.py)."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: Any) -> Any: ...

    def forget_weights(self) -> None:
        """Memory of weights may have others now."""

    def narrow(self, chosen: frozenset[str] | None) -> None:
        """Operators of these modules alone are taken from now on; None: of all that the settings choose."""


class Session:
    """Ties configuration, sink and layouts of one rank together.

    find_space(part, rows): gives the Space of a tensor with ``rows`` rows in a part of the model when the step has
    none yet; may return None. See batch.py and padded_batch.py.
    """

    def __init__(
        self,
        config: ProbeConfig,
        sink: Sink,
        layouts: Layouts,
        say: Callable[[str], None],
        find_space: Callable[[str, int], Space | None],
    ):
        self.config = config
        self.takes_inputs, self.takes_outputs = config.capture_inputs, config.capture_outputs
        self.sink = sink
        self.layouts = layouts
        self.say = say
        self.state: StepState | None = None
        self.everybodys = not config.requests and not config.tokens
        """Whether all rows of all requests are wanted now."""
        self._step = Step(-1)
        self.dead: str | None = None
        self.fired: set[str] = set()
        self.ops: OperatorTap | None = None
        self._find_space = find_space
        self.encoder_share: Callable[[], EncoderDataParallel | None] = lambda: None
        """What this rank's encoder computes at the moment, where images are distributed to ranks (batch.py)."""
        self.flatten: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Brings a batched tensor into rows (torch_model.py); None where tensors already are rows of tokens."""
        self.fast_path = FastPath(
            sink, self.layout_event, lambda state, role, shape: self._rows(state, LANGUAGE, role, shape)
        )

    def begin(self, step: Step, requests: list[Request], prefill: bool) -> StepState | None:
        """Opens an armed step; None when the capture has ended."""
        if self.dead is not None:
            return None
        for request in requests:
            self.sink.line(REQUEST.to_line(request))
        requests.clear()
        self._step = step
        self.sink.step(step)
        self.state = StepState(step.step, prefill)
        return self.state

    def end(self) -> None:
        """The step is over: taps let everything pass until the next one begins."""
        self.state = None

    def computed_by(self, graph: StepGraph) -> None:
        """A captured graph computes the step that runs."""
        if self.state is not None and self._step.graph != graph:
            self._step = dataclasses.replace(self._step, graph=graph)
            self.sink.line(STEP.to_line(self._step))  # replaces the first one

    def module(self, module: Module) -> None:
        """A module is tapped (hooks.py)."""
        self.sink.line(MODULE.to_line(module))

    def skip(self, tap: str, reason: str) -> None:
        """A module is not captured; see Sink.skip."""
        self.sink.skip(tap, reason)

    def operators(self) -> contextlib.AbstractContextManager[Any]:
        """What an armed forward runs in: the operator tap, where there is one."""
        return NOTHING if self.ops is None or self.state is None else self.ops

    def stop(self, reason: str) -> None:
        """Ends the capture in good order (budget, full disk); called from any thread."""
        if self.dead is None:
            self.dead = reason
            self.say(f"capture stopped: {reason}; serving goes on")
        self.state = None

    def fail(self, where: str, error: BaseException) -> None:
        """Ends the capture because the probe itself failed. Never raises."""
        state = self.state
        self.state = None
        try:
            text = f"{type(error).__name__}: {error}"
            last = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
            place = f" ({last[0].filename.rpartition('/')[2]}:{last[0].lineno})" if last else ""
            first = self.dead is None
            self.dead = self.dead or f"the tap at {where} failed: {text}"
            if first:
                self.sink.error(where, text + place, state.number if state else None)
                self.sink.line(STOP.to_line(Stop(self.dead, state.number if state else None)))
                self.say(f"the probe failed at {where}: {text}{place}; capture is off, serving goes on")
        except Exception as again:
            sys.stderr.write(f"accprobe: the probe failed at {where} and could not say so: {again!r}\n")

    def record(
        self,
        state: StepState,
        tap: str,
        cls: str,
        role: str,
        call: int,
        tensor: torch.Tensor,
        part: str,
        ticket: Ticket | None = None,
        sites: Sites | None = None,
        changed: Callable[[bool], None] | None = None,
    ) -> None:
        """Takes one tensor; ``ticket`` gets its hash. ``sites``: what is known of this tap's tensors. With ``changed``:
        takes it again, in role ``inplace.*``, if it is no longer what ``ticket`` saw, and tells which."""
        if self.flatten is not None:
            tensor = self.flatten(tensor)
        before = ticket.digest if ticket is not None and changed is not None else None
        if sites is not None and state.rows > 0 and part == LANGUAGE and (changed is None or before is not None):
            digest = self.fast_path.take(state, sites, tap, cls, role, call, tensor, before)
            if digest is not None:
                if changed is not None:
                    changed(digest != before)
                elif ticket is not None:
                    ticket.digest = digest
                return
        shape = tensor.shape
        space, dim = self._rows(state, part, role, shape) if shape else (None, 0)
        if space is not None:
            if not space.n:
                return
            if not space.announced:
                self.announce(state, space)
                if space.name == TOKENS and space.whole and space.padded == space.src and self.sink.direct:
                    state.rows = space.src
        elif not self.whole_step(state):
            # Not all rows of this step are wanted, and nobody can say which of this tensor's are: leave it.
            self.sink.skip(tap, "its rows cannot be told apart, and not all requests are selected", role)
            return
        seq = state.seq
        state.seq = seq + 1
        if part == VISION and self.encoder_share() is not None:
            layout: dict[str, Any] | None = Layout(OWN, "tp", *self.layouts.place).to_event()
        else:
            layout = self.layout_event(tap, role, shape)
        rows = None if space is None else space.name
        view = view_of(tensor) if tensor.layout is _STRIDED and not tensor.is_contiguous() else None
        head = TensorHead(state.number, tap, cls, role, call, seq, rows, dim, layout, changed is not None, view=view)
        if changed is not None and ticket is not None:
            self.sink.tensor(head, tensor, space, before=ticket, changed=changed)
        else:
            self.sink.tensor(head, tensor, space, ticket)

    def announce(self, state: StepState, space: Space) -> None:
        """Writes the row map of ``space``, once."""
        if not space.announced:
            space.announced = True
            self.sink.rows(state.number, space)

    def layout_event(self, tap: str, role: str, shape: torch.Size) -> dict[str, Any] | None:
        """What a line says of how the tensor is split; None where it is whole."""
        if not self.layouts.split:
            return None
        layout = self.layouts.of("" if tap == ROOT_TAP else tap, role, tuple(shape))
        return layout.to_event() if layout.kind != "replicated" else None

    def _rows(self, state: StepState, part: str, role: str, shape: torch.Size) -> tuple[Space | None, int]:
        """The space of a tensor and its row dimension, by its shape and its role."""
        space, dim = self._space(state, part, shape)
        if space is not None and len(shape) == 2 and role.endswith("positions"):
            dim = 1  # M-RoPE: (3, rows), also in the step that has three rows
        return space, dim

    def _space(self, state: StepState, part: str, shape: torch.Size) -> tuple[Space | None, int]:
        """The space of a tensor and its row dimension. Spaces are made once per step and kind."""
        if part == VISION:
            return self._vision_space(state, shape)
        name = LOGITS if part == HEAD else TOKENS
        space = state.spaces.get(name)
        if space is None:
            space = self._find_space(part, shape[0])
            if space is None:
                return None, 0
            state.spaces[name] = space
        src, padded = space.src, space.padded
        for dim, size in enumerate(shape):
            if size in (src, padded):
                return space, dim
        return None, 0

    def _vision_space(self, state: StepState, shape: torch.Size) -> tuple[Space | None, int]:
        """Patches lie along the first or second dimension; fewer rows than patches only where neither can be patches.

        (q and k stacked in front of the patches, as the vision rotary embedding gets them, are 2 rows of something.)
        """
        few: tuple[Space | None, int] = (None, 0)
        share = self.encoder_share()
        for dim in range(min(2, len(shape))):
            rows = shape[dim]
            key = f"{VISION}:{'' if share is None else share.number}:{rows}"
            found = state.spaces.get(key) or self._find_space(VISION, rows)
            if found is None:
                continue
            # several row counts can be the same kind of row; the journal knows each kind once
            same = next((s for s in state.spaces.values() if s.name == found.name and s.src == found.src), found)
            state.spaces[key] = same
            kind = same.name.partition(DEALT)[0]
            if kind not in ("vision/image", "vision/class") and not kind.startswith("vision/1:"):
                return same, dim
            if dim == 0 and len(shape) > 1:  # a short vector (cu_seqlens) has no rows
                few = (same, dim)
        return few

    def whole_step(self, state: StepState) -> bool:
        """Whether all rows of the step are wanted."""
        space = state.spaces.get(TOKENS) or self._find_space(LANGUAGE, 0)
        if space is not None:
            state.spaces.setdefault(TOKENS, space)
        return space is None or space.whole
