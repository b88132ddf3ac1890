"""From a tensor at a tap to lines and bytes of the dump.

The problem: hundreds of tensors per step, most of them seen twice (an output is the next module's input), some strided,
some with rows that nobody asked for, some on a device, while the model waits. The idea: one hash per tensor decides
whether its bytes are new in this step; only new bytes are copied, straight into the writer's block; everything else
is a journal line that points at them. Tensors of a device take the detour over device_staging.py and arrive here on its
thread.
Not here: blocks and files (dump/recorder/writer.py), which rows are which (rows.py, rowmaps.py), what is tapped
(hooks.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core.device_staging import DeviceStaging
from vllm_accprobe.capture.core.memory import DTYPE_NAMES, LAZY, Ranges, Scratch, selected
from vllm_accprobe.capture.core.rowmaps import RowMaps
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.step_state import Ticket
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.journal.event_lines import ERROR, MODULE, REQUEST, ROWS, SKIP, STEP
from vllm_accprobe.dump.journal.tensor_lines import TensorHead
from vllm_accprobe.dump.recorder.hashing import digest
from vllm_accprobe.dump.recorder.queued import Event, TensorLine
from vllm_accprobe.dump.recorder.writer import RankWriter
from vllm_accprobe.dump.schema import ROOT_TAP, Failure, Module, Request, Skip, Step
from vllm_accprobe.dump.stats import StatsCell, Sums, moments_at, warm_up


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

    # --- lines -------------------------------------------------------------------------------------------------

    def line(self, line: Event | TensorLine | Callable[[], Event | None]) -> None:
        """A journal line in its place among the tensors. A callable is asked for it on the writer's thread, when the
        lines before it are done."""
        if self._staging is None:  # without a function of its own for each line
            self.writer.line(line)
        else:
            self.arrived((), lambda _: self.writer.line(line))

    def step(self, step: Step) -> None:
        """A step begins; bytes of the last one, parameters' excepted, are no longer known."""
        self.steps += 1
        self.arrived((), lambda _: self._new_step())
        self.line(STEP.to_line(step))

    def step_again(self, step: Step) -> None:
        """More is known of the step that runs: a line that replaces its first one."""
        self.line(STEP.to_line(step))

    def request(self, request: Request) -> None:
        """A request's line, once, before the first row map that names it."""
        self.line(REQUEST.to_line(request))

    def module(self, module: Module) -> None:
        """A tap's line."""
        self.line(MODULE.to_line(module))

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

    # --- tensors -----------------------------------------------------------------------------------------------

    def tensor(
        self,
        head: TensorHead,
        tensor: torch.Tensor,
        space: Space | None,
        ticket: Ticket | None = None,
        lasting: bool = False,
    ) -> None:
        """Stores ``tensor`` (its selected rows, if it has any) and queues its line; ``ticket`` is told of its bytes.
        ``lasting``: the same bytes will come again in later steps. Parameters are always stored."""

        def store(dtype: str, host: torch.Tensor, ranges: Ranges) -> None:
            shape, parts = self.scratch.parts(host, ranges)
            cell = self._store(head, dtype, shape, parts, digest(parts), lasting)
            if ticket is not None:
                ticket.told(cell)

        self._on_host(head, tensor, space, store)

    def after(
        self,
        head: TensorHead,
        tensor: torch.Tensor,
        space: Space | None,
        before: Ticket,
        changed: Callable[[bool], None],
        ticket: Ticket | None = None,
    ) -> None:
        """Stores ``tensor`` only if its bytes are no longer those of ``before``; tells ``changed`` which, and
        ``ticket`` of its bytes if it is stored."""

        def compare(dtype: str, host: torch.Tensor, ranges: Ranges) -> None:
            shape, parts = self.scratch.parts(host, ranges)
            hash = digest(parts)
            different = before.digest is not None and hash != before.digest
            changed(different)
            if different:
                cell = self._store(head, dtype, shape, parts, hash)
                if ticket is not None:
                    ticket.told(cell)

        self._on_host(head, tensor, space, compare)

    def look(self, head: TensorHead, tensor: torch.Tensor, ticket: Ticket) -> None:
        """Tells ``ticket`` hash and statistics of ``tensor``, of which there is no line."""

        def look(dtype: str, host: torch.Tensor, ranges: Ranges) -> None:
            _, parts = self.scratch.parts(host, ranges)
            hash = digest(parts)
            ticket.told(self.seen.get(hash + dtype) or self._measured(StatsCell(None, hash, dtype), parts))

        self._on_host(head, tensor, None, look)

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

    # --- the end -----------------------------------------------------------------------------------------------

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

    def _new_step(self) -> None:
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
