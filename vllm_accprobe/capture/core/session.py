"""One rank's capture while it runs: the step in progress, and the way of a tensor from a tap to lines and bytes.

The problem: hundreds of tensors per step, most of them seen twice (an output is the next module's input), some strided,
some with rows that are not selected, some on a device, while the model waits; and no error of the probe may reach the
model. The idea: taps ask a Session for the StepState, None while nothing is captured; a failure is written down, said
once, and sets the state to None for good. What is decided of a tap's tensor (rows, layout, the line as a template) is a
Site, made once and again where dtype, form, strides or the step's rows change; `Session.take` then takes each tensor in
the same way. One hash per tensor decides whether its bytes are new in this step; only new bytes are copied, into the
writer's block, and everything else is a line that refers to them. Tensors of a device take the same steps on the thread
on which they arrive (staging.py).

Not here: which rows are which (rows.py), blocks and files (dump/writer.py), what is tapped (taps/hooks.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from vllm_accprobe.capture.core.rows import EncoderDataParallel, RowForm, RowMaps, Space
from vllm_accprobe.capture.core.staging import Callback, DeviceStaging
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.journal import ERROR, MODULE, REQUEST, ROWS, SKIP, STEP, STOP, TensorHead
from vllm_accprobe.dump.journal_writer import Event, TensorLine, TensorTemplate, template_of
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
from vllm_accprobe.dump.stats import MEMORY, StatsCell, Sums, moments_at, warm_up
from vllm_accprobe.dump.writer import DumpCheckpoint, RankWriter

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
        "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "bool", "complex64", "complex128",
    )
    if hasattr(torch, name)
}  # fmt: skip

Ranges = Sequence[tuple[int, int]] | None
"""Wanted [start, stop) rows along dimension 0, or None for all of the tensor."""
LAZY = frozenset(("float32", "float64", "complex64", "complex128"))
"""Dtypes whose tensors may be views with a pending conjugation or negation."""


_NEVER: RowForm = ("never",)
"""Of a site that must be decided anew for each tensor: no step has such rows."""
_PENDING = 64
"""Lines that are queued together, at most."""
_STRIDED = torch.strided


class Scratch:
    """One buffer for all tensors that do not lie in memory as they are written, valid until the next one."""

    def __init__(self) -> None:
        self._bytes = torch.empty(1 << 20, dtype=torch.uint8)

    def dense(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in the buffer."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._bytes.numel():
            self._bytes = torch.empty(nbytes + nbytes // 4, dtype=torch.uint8)
        return self._bytes[:nbytes].view(dtype).view(tuple(shape))


class Site:
    """What was decided of the tensors of one role at one place. Holds for ``part``, ``dtype``, ``shape``, tensors that
    are as ``contiguous``, and steps whose rows of the kind ``space`` have the form ``form`` (None: whatever they are).

    ranges: wanted [start, stop) along dimension ``dim``, None for all. head: what the template was made from. direct:
    the wanted bytes lie one after the other, ``offset`` bytes behind the tensor's first one. pieces: (offset, bytes) of
    each range among them, whose sums are added up, as in a compiled graph. earlier: decisions of the role by what they
    hold for, since prefills and decodes take turns.
    """

    __slots__ = (
        "_dense", "contiguous", "dim", "direct", "dtype", "dtype_name", "earlier", "form", "head", "lazy", "nbytes",
        "offset", "part", "pieces", "ranges", "shape", "space", "template", "view",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, template: TensorTemplate, head: TensorHead | None = None, ranges: Ranges = None,
        dim: int = 0, space: str | None = None, form: RowForm | None = None, part: Part = None,
        known: Site | None = None,
    ) -> None:  # fmt: skip
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.contiguous = tensor.is_contiguous()
        self.view = None if head is None else head.view
        self.space, self.form, self.part, self.head = space, form, part, head
        self.template, self.dtype_name, self.nbytes = template, template.dtype, template.nbytes
        self.lazy = template.dtype in LAZY
        self.ranges, self.dim = ranges, dim
        self.direct = self.contiguous and (ranges is None or (dim == 0 and len(ranges) == 1))
        self.offset = ranges[0][0] * tensor.stride(0) * tensor.element_size() if self.direct and ranges else 0
        self.pieces = [(0, self.nbytes)]
        if self.contiguous and ranges is not None and len(ranges) > 1 and dim == 0:
            row = tensor.stride(0) * tensor.element_size()
            sizes = [(stop - start) * row for start, stop in ranges]
            self.pieces = list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
        self.earlier: dict[Any, Site] = {} if known is None else known.earlier
        self._dense: torch.Tensor | None = None

    def selected(self, tensor: torch.Tensor) -> torch.Tensor:
        """The wanted rows on the tensor's own device: a view where they are one range."""
        if self.ranges is None:
            return tensor
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def address(self, tensor: torch.Tensor, scratch: Scratch) -> int:
        """Where the wanted bytes of a host tensor lie; valid until the next tensor."""
        if self.direct:
            return tensor.data_ptr() + self.offset
        dense = self._dense
        if dense is None:
            dense = self._dense = scratch.dense(self.template.shape, self.dtype)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if self.ranges is None:
            dense.copy_(tensor)
            return dense.data_ptr()
        at = 0
        for start, stop in self.ranges:
            dense.narrow(self.dim, at, stop - start).copy_(tensor.narrow(self.dim, start, stop - start))
            at += stop - start
        return dense.data_ptr()


def view_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Stride and storage offset, in elements."""
    return tensor.stride(), tensor.storage_offset()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is captured at all: of a dtype that a dump has, neither sparse, quantised, nor nested."""
    return tensor.dtype in DTYPE_NAMES and tensor.layout is _STRIDED and not tensor.is_quantized


def address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins; 0 for one that has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError, NotImplementedError):
        return 0


Sites = dict[str, Site]
"""By role: what is known of one tap's tensors."""
_EARLIER = 8
"""Chosen: decisions of one role that are kept, 1.1 KB each; one that comes again costs a third of a new one."""


class StepState:
    """What taps need during one armed step. Created once per step; its spaces are filled when first needed.

    ``forms``: of the rows that the journal has, by the name of their space; None is no name. ``taking``: a tap is at
    work, whose own operators are none of the model. ``masked``: something masks logits in this step, and what it leaves
    is still to be taken."""

    __slots__ = ("calls", "forms", "inside", "masked", "number", "prefill", "seq", "spaces", "stack", "taking")

    def __init__(self, number: int, prefill: bool):
        self.number = number
        self.prefill = prefill
        self.seq = 0
        self.forms: dict[str | None, RowForm] = {}
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


class CellTicket(Ticket):
    """Gets the cell itself, too. ``after`` is called then."""

    __slots__ = ("_after", "cell")

    def __init__(self, after: Callable[[StatsCell], None] | None = None) -> None:
        super().__init__()
        self.cell: StatsCell | None = None
        self._after = after

    def resolve(self, cell: StatsCell) -> None:
        """The cell of its bytes is known."""
        self.digest, self.cell = cell.hash, cell
        if self._after is not None:
            self._after(cell)


class Sink:
    """Everything that one rank leaves behind. Methods are called from the model's thread; none of them raises for a
    full disk or a spent budget: ``stopped`` then says why, and nothing more is taken.

    Args:
        start: the journal's first line, without its ``event`` key.
        staged: tensors go through DeviceStaging (a device), or, for tests, as if they did.
        on_stop: called once, from any thread, with the reason when the sink gives up.
        begun: see RankWriter.
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
        begun: DumpCheckpoint | None = None,
    ):
        self.keep = config.task == "tensor"
        self._on_stop = on_stop
        self.writer = RankWriter(root, rank, start, budget_bytes=config.budget_bytes, on_stop=on_stop, begun=begun)
        # Compiling takes seconds the first time on a machine: now, not in somebody's request. Not earlier, at import:
        # vLLM 0.32's CPU worker cannot be initialised in a process that has already loaded llvmlite.
        warm_up()
        self._pending = self.writer.pending
        self.seen: dict[str, StatsCell] = {}
        self.lasting: dict[str, StatsCell] = {}  # of parameters: their bytes are stored once per run
        self._rowmaps = RowMaps()
        self.scratch = Scratch()
        self._hash = xxhash.xxh3_128_hexdigest
        self.skipped: Counter[tuple[str, str | None, str]] = Counter()
        self.tensors = 0
        self.steps = 0
        self._lock = threading.RLock()  # a signal may close in the middle of a skip
        self._closed = False
        device = device or torch.device("cpu")
        self._staging = DeviceStaging(device, self._staging_failed) if staged or device.type != "cpu" else None
        self.direct = self._staging is None
        """Whether tensors lie in host memory and are taken where they are."""

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

    def end_step(self) -> None:
        """Nothing more of this step comes."""
        self.arrived((), lambda _: self.writer.release())

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

    def take(
        self, site: Site, address: int, step: int | None, call: int, seq: int, ticket: Ticket | None = None,
        before: Ticket | None = None, changed: Callable[[bool], None] | None = None, line: bool = True,
    ) -> bool:  # fmt: skip
        """Queues the line of the bytes at ``address``, which are those that ``site`` wants, with them if they are new
        in this step; whether there is one. On the thread on which tensors arrive.

        step: None of a parameter, which is always stored. ticket: gets the cell of the bytes. With ``before`` there is
        a line only if they are no longer those that it saw, and ``changed`` gets which is true. line: False where hash
        and statistics are all.
        """
        digest: str = self._hash(MEMORY[address : address + site.nbytes])
        if before is not None:
            different = before.digest is not None and digest != before.digest
            if changed is not None:
                changed(different)
            if not different:
                return False
        key = digest + site.dtype_name
        cell = self.seen.get(key)
        kept = False
        if cell is None:
            cell = StatsCell(None, digest, site.dtype_name)
            kept = line and (self.keep or step is None)
            if not kept:
                (at, nbytes), *others = site.pieces
                cell.sums = moments_at(address + at, nbytes, site.dtype_name)
                for at, nbytes in others:
                    cell.add(moments_at(address + at, nbytes, site.dtype_name))
            if line:
                self.seen[key] = cell
        if step is None:
            self.lasting[key] = cell
        if kept:
            self.writer.tensor((site.template, step, call, seq, cell), address)
        elif line:
            pending = self._pending
            pending.append((site.template, step, call, seq, cell))
            if len(pending) >= _PENDING:
                self.writer.release()
        if ticket is not None:
            ticket.resolve(cell)
        self.tensors += line
        return line

    def stage(self, site: Site, tensor: torch.Tensor, step: int | None, call: int, seq: int, *more: Any) -> None:
        """The same for a tensor of a device as it is now; ``more``: as `take` has them."""
        self.arrived(
            (site.selected(tensor),), lambda hosts: self.take(site, hosts[0].data_ptr(), step, call, seq, *more)
        )

    def parameter(self, template: TensorTemplate, tensor: torch.Tensor) -> None:
        """Stores a parameter."""
        site = Site(tensor, template)
        if self.direct:
            self.take(site, site.address(tensor, self.scratch), None, 0, 0)
        else:
            self.stage(site, tensor, None, 0, 0)

    def measured(self, template: TensorTemplate, step: int, call: int, seq: int, sums: Sums, hash: str | None) -> None:
        """Queues the line of a tensor of which only statistics came, and its hash where that is known. Called on the
        thread on which tensors arrive."""
        cell = None if hash is None else self.seen.get(hash + template.dtype)
        if cell is None:
            cell = StatsCell(None, hash, template.dtype)
            cell.sums = sums
        self.tensors += 1
        self.writer.line((template, step, call, seq, cell))

    def again(self, template: TensorTemplate, state: StepState, call: int, ticket: CellTicket) -> None:
        """Queues a line about the bytes that ``ticket`` saw."""
        step, seq = state.number, state.seq
        state.seq = seq + 1
        self.tensors += 1

        def line(_: Any) -> None:
            if ticket.cell is not None:
                self.writer.line((template, step, call, seq, ticket.cell))

        self.arrived((), line)

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

    def arrived(self, tensors: Sequence[torch.Tensor], take: Callback) -> None:
        """Gives ``take`` the tensors in host memory, in order: now, or on the staging thread."""
        if self._staging is None:
            take(tensors)
        else:
            self._staging.stage(tensors, take)

    def _staging_failed(self, error: BaseException) -> None:
        failure = Failure("staging", f"{type(error).__name__}: {error}"[:2000])
        self.writer.line(ERROR.to_line(failure, "step"))
        self._on_stop(f"the copy from the device failed: {error}")


NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
LANGUAGE, VISION, HEAD = "language", "vision", "head"
"""The three parts of a model as far as rows are concerned: token rows, patch rows, rows that reach the logits."""
OPERATOR = None
"""The part of an operator's tensors, which have no rows and no layout."""
Part = str | Space | None
"""One of these, or the space whose kept rows a tensor has, and no others."""


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
        self._forms: dict[str, RowForm] = {}

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
        if self.state is not None:
            self.state = None
            self.sink.end_step()

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

    def take(
        self,
        state: StepState,
        sites: Sites,
        tap: str,
        cls: str,
        role: str,
        call: int,
        tensor: torch.Tensor,
        part: Part,
        ticket: Ticket | None = None,
        before: Ticket | None = None,
        changed: Callable[[bool], None] | None = None,
        line: bool = True,
    ) -> None:
        """Takes one tensor.

        sites: what is known of this tap's tensors. part: of the model, which says what its rows are. ticket: gets its
        hash. With ``before`` and ``changed``: takes it again, after the call and in a role ``inplace.*``, if it is no
        longer what ``before`` saw, and tells which. line: False where ``ticket`` needs hash and statistics alone.
        """
        if self.flatten is not None and part is not OPERATOR:
            tensor = self.flatten(tensor)
        site = sites.get(role)
        if (
            site is None
            or site.part is not part
            or state.forms.get(site.space) is not site.form
            or tensor.dtype is not site.dtype
            or tensor.shape != site.shape
            or tensor.layout is not _STRIDED
            or tensor.is_contiguous() is not site.contiguous
            or (site.view is not None and view_of(tensor) != site.view)
        ):
            site = self.site(state, sites, tap, cls, role, tensor, part, before is not None)
            if site is None:
                return
        # Half precision has no lazy conjugates, and asking releases the GIL, which the writer's thread may then take.
        if site.lazy and (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.resolve_conj().resolve_neg()
        sink, seq = self.sink, state.seq
        if sink.direct:
            address = tensor.data_ptr() + site.offset if site.direct else site.address(tensor, sink.scratch)
            if sink.take(site, address, state.number, call, seq, ticket, before, changed, line):
                state.seq = seq + 1
        else:
            state.seq = seq + 1
            sink.stage(site, tensor, state.number, call, seq, ticket, before, changed, line)

    def site(
        self, state: StepState, sites: Sites, tap: str, cls: str, role: str, tensor: torch.Tensor, part: Part,
        mutated: bool = False,
    ) -> Site | None:  # fmt: skip
        """Makes or changes the decision for tensors like this one; None where it is not to be stored, which is counted.
        Whatever else of a tensor's form the journal is to have belongs into the template here, and its change into the
        conditions of ``take``."""
        shape, known = tensor.shape, sites.get(role)
        space, dim, name = self._rows(state, part, role, shape)
        if space is not None and not space.n:
            return None
        if space is not None:
            self.announce(state, space)
        elif part is not OPERATOR and not self.whole_step(state):
            # Not all rows of this step are wanted, and it is not known which of this tensor's are: leave it.
            self.sink.skip(tap, "its rows cannot be distinguished, and not all requests are selected", role)
            return None
        if not is_plain(tensor):
            self.sink.skip(tap, "not a plain tensor", role)
            return None
        form = None if part is OPERATOR else _NEVER if name is None else state.forms.get(name, _NEVER)
        contiguous, key = tensor.is_contiguous(), None
        view = None if part is OPERATOR or contiguous else view_of(tensor)
        if form is not _NEVER and not isinstance(part, Space):
            key = part, name, form, tensor.dtype, shape, contiguous, view, mutated
            if known is not None and (site := known.earlier.get(key)) is not None:
                site.form, sites[role] = form, site
                return site
        dtype = DTYPE_NAMES[tensor.dtype]
        ranges: Ranges = None
        wanted = tuple(shape)
        if space is not None and not isinstance(part, Space) and not (space.whole and shape[dim] == space.src):
            ranges = space.ranges
            wanted = (*wanted[:dim], space.n, *wanted[dim + 1 :])
        nbytes = math.prod(wanted) * tensor.element_size()
        rows = None if space is None else space.name
        if part == VISION and self.encoder_share() is not None:
            layout: dict[str, Any] | None = Layout(OWN, "tp", *self.layouts.place).to_event()
        else:
            layout = None if part is OPERATOR else self.layout_event(tap, role, shape)
        head = TensorHead(tap, cls, role, rows, dim, layout, mutated, view=view)
        if known is not None and known.head == head:
            template = known.template.reshaped(dtype, wanted, nbytes)
        else:
            template = template_of(head, dtype, wanted, nbytes)
        site = sites[role] = Site(tensor, template, head, ranges, dim, name, form, part, known)
        if key is not None:
            if len(site.earlier) >= _EARLIER:
                del site.earlier[next(iter(site.earlier))]
            site.earlier[key] = site
        return site

    def announce(self, state: StepState, space: Space) -> None:
        """Writes the row map of ``space``, once."""
        if not space.announced:
            space.announced = True
            self.sink.rows(state.number, space)
            self.know(state, space)

    def know(self, state: StepState, space: Space) -> None:
        """Sites that were decided for rows of this form hold."""
        form, last = space.form(), self._forms.get(space.name)
        if last is not None and last == form:
            form = last  # the same object in step after step: sites compare no numbers
        state.forms[space.name] = self._forms[space.name] = form

    def layout_event(self, tap: str, role: str, shape: torch.Size) -> dict[str, Any] | None:
        """What a line says of how the tensor is split; None where it is whole."""
        if not self.layouts.split:
            return None
        layout = self.layouts.of("" if tap == ROOT_TAP else tap, role, tuple(shape))
        return layout.to_event() if layout.kind != "replicated" else None

    def _rows(
        self, state: StepState, part: Part, role: str, shape: torch.Size
    ) -> tuple[Space | None, int, str | None]:
        """The space of a tensor and its row dimension, by its shape and its role; and the kind of rows whose form this
        depends on, None where there is more to it."""
        if part is OPERATOR:
            return None, 0, None
        if isinstance(part, Space):
            return part, 0, part.name
        space, dim = self._space(state, part, shape) if shape else (None, 0)
        if space is not None and part == LANGUAGE and len(shape) == 2 and role.endswith("positions"):
            dim = 1  # M-RoPE: (3, rows), also in the step that has three rows; an encoder's have a row for each patch
        if part == VISION or (space is None and (part == HEAD or TOKENS not in state.spaces)):
            return space, dim, None
        return space, dim, LOGITS if part == HEAD else TOKENS

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
