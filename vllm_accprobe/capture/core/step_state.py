"""What taps need during one armed step.

Not here: when a step is armed (session.py), which rows a tensor has (rows.py).
"""

from __future__ import annotations

from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.dump.stats import StatsCell


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

    def told(self, cell: StatsCell) -> None:
        """The cell of its bytes is known."""
        self.digest = cell.hash
