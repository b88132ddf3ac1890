"""From the lines of the taps that measure to the dump: what a capture of statistics would have written of that step.

The problem: a line of numbers may be an old one, or of a graph that has no such tap, and on a device it arrives only
when the device has come so far. The idea: each step has a serial number that the taps copy into their lines; a line
with another one is a skip. Lines in host memory are read at once, those of a device go over the staging together, one
copy a step. Not here: the taps that copy rows (drain.py), the operator (stats_op.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_accprobe.capture.core.memory import DTYPE_NAMES
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.core.step_state import StepState
from vllm_accprobe.capture.graphs.sightings import Sighting
from vllm_accprobe.capture.graphs.stats_op import choose_stats, read_line
from vllm_accprobe.dump.journal.tensor_lines import TensorHead

DROPPED = "dropped, the disk was slower than the model (VLLM_ACCPROBE_GRAPH_FULL=drop)"
NOT_MEASURED = "the compiled graph did not run its tap, or with a tensor of another form"


class StatsDrain:
    """The taps of one placed plan that measure: ``aim`` before the forward, ``take`` of each tap after it,
    ``flush`` when all are taken, ``rest`` when no step runs. select: what they share, see stats_op.stats_selection."""

    def __init__(self, session: Session, select: torch.Tensor):
        self._session = session
        self._select = select
        self._serial = 0
        self._space: Space | None = None
        self._waiting: list[tuple[TensorHead, Sighting, torch.Tensor]] = []

    def aim(self, space: Space) -> None:
        """The rows of ``space`` are measured in the forward that comes."""
        self._space = space
        self._serial += 1
        choose_stats(self._select, self._serial, space.ranges)

    def take(self, state: StepState, one: Sighting, buffer: torch.Tensor) -> None:
        """The forward has returned, and ``buffer`` is the line of the tap at ``one``."""
        session, space = self._session, self._space
        if space is None or not space.n:
            return
        if not space.announced:
            space.announced = True
            session.sink.rows(state.number, space)
        seq = state.seq
        state.seq = seq + 1
        layout = session.layout_event(one.path, one.role, torch.Size((space.n, *one.shape)))
        head = TensorHead(state.number, one.path, one.cls, one.role, one.call, seq, space.name, layout=layout)
        if session.sink.direct:
            self._read(head, one, buffer, self._serial, space.n)
        else:
            self._waiting.append((head, one, buffer))

    def flush(self, drops: bool = False) -> None:
        """All taps of the step are taken: the lines of a device are on their way to the host. drops: where that would
        have to wait, they are counted skips."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self._space is None:
            return
        sink, serial, rows = self._session.sink, self._serial, self._space.n
        if drops and not sink.room([sum(buffer.nbytes for _, _, buffer in waiting)]):
            for _, one, _ in waiting:
                sink.skip(one.path, DROPPED, one.role)
            return

        def arrived(hosts: Sequence[torch.Tensor]) -> None:
            for (head, one, _), line in zip(waiting, hosts[0], strict=True):
                self._read(head, one, line, serial, rows)

        sink.arrived((torch.stack([buffer for _, _, buffer in waiting]),), arrived)

    def rest(self) -> None:
        """Nothing is measured any more."""
        if self._space is not None:
            self._space = None
            self._waiting.clear()
            choose_stats(self._select, 0, ())

    def _read(self, head: TensorHead, one: Sighting, line: torch.Tensor, serial: int, rows: int) -> None:
        found = read_line(line, serial, one.dtype, one.shape)
        if found is None or found.rows != rows:
            self._session.sink.skip(one.path, NOT_MEASURED, one.role)
        else:
            self._session.sink.measured(head, DTYPE_NAMES[one.dtype], (rows, *one.shape), found.sums, found.hash)
