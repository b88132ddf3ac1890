"""What the calls of one tap add up to, output by output, and the rows and figures that come of it at the tap's end.

The problem: a fault that no call shows by itself needs a row of the table like any other. The idea: `Pools` is told
each row with its verdict while a tap is checked, and gives at the end a row for each output that only all calls
together show to be wrong, at the place of the first call, and a `Pooled` for each, which is compared with its kin
(peers.py). An output one of whose calls failed is wrong anyway: nothing more is said of it.
Not here: the statistics (pooled.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_accprobe.opcheck.floors.chance import Budget
from vllm_accprobe.opcheck.floors.peers import Pooled
from vllm_accprobe.opcheck.floors.pooled import Breach, Pool
from vllm_accprobe.opcheck.floors.verdict import BEYOND_CHANCE, Verdict
from vllm_accprobe.opcheck.run.result_row import FAIL, Checked


class Pools:
    """What the calls of one tap add up to, by output."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Pool, Checked]] = {}
        self._wrong: set[str] = set()

    def add(self, row: Checked, v: Verdict) -> None:
        """One output with its verdict."""
        if row.status == FAIL:
            self._wrong.add(row.role)
        elif v.sums is not None:
            self._of.setdefault(row.role, (Pool(), row))[0].add(v.sums, bool(v.rounding))

    def rows(self, budget: Budget) -> Iterator[Checked]:
        """Outputs no call of which failed, and all of which together do."""
        for role, (pool, first) in self._of.items():
            found = pool.breach(budget.tap) if role not in self._wrong else None
            if found is not None:
                yield _together(first, found, pool, budget)

    def pooled(self, budget: Budget) -> Iterator[Pooled]:
        """What is compared with its kin."""
        for role, (pool, first) in self._of.items():
            found = pool.pooled() if role not in self._wrong else None
            if found is not None:
                least = pool.smallest(budget.tap)
                yield Pooled(first.tap, first.cls, role, first.rank, first.dtype, *found, pool.rows, first.seq,
                             pool.created(), None if least is None else (least.row, least.column))  # fmt: skip


def _together(first: Checked, b: Breach, pool: Pool, budget: Budget) -> Checked:
    return replace(
        first, rows=pool.seen, checked=pool.seen, unchecked_because="", created=pool.created(), measure=b.measure,
        measured=b.value, allowed=b.limit, request=None, position=None, column=b.column if b.column >= 0 else None,
        status=FAIL, message=f"{b.severity:.3g}x its limit: {b.words}", measures=None, tier=BEYOND_CHANCE,
        chance=min(1.0, b.chance * budget.taps),
    )  # fmt: skip
