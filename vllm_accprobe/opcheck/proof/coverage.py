"""What a replay checked of each module, and how small an error it would have named there.

The problem: "1,240 outputs checked" does not say of which operators, how many of their rows, or how good the check was.
The idea: of each module of mine the calls, the rows, the rows that had a reference, and the smallest error of all rows,
of one column and of one row (floors/pooled.py): an error of that size in any of its outputs, in any call, would have
been named. Plain numbers, kept with the proof, from which the comparison makes its table by operator class.
Not here: the table (comparison/verdict/covered.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm_accprobe.comparison.verdict.covered import ModuleCover
from vllm_accprobe.opcheck.floors.pooled import Pooled
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, Checked

_Output = tuple[int, str]
"""(rank, role)."""


def covers(mine: Iterable[Checked], pooled: Iterable[Pooled]) -> dict[str, ModuleCover]:
    """Tap → what was checked of it. mine: replay.check_tap's rows of mine; pooled: of its taps, all calls together."""
    rows: dict[str, list[Checked]] = {}
    for c in mine:
        if c.step is not None:  # else a parameter
            rows.setdefault(c.tap, []).append(c)
    pools: dict[str, list[Pooled]] = {}
    for p in pooled:
        pools.setdefault(p.tap, []).append(p)
    return {tap: _cover(found, pools.get(tap, ())) for tap, found in rows.items()}


def _cover(rows: Sequence[Checked], pooled: Sequence[Pooled]) -> ModuleCover:
    calls: dict[tuple[int | None, int], dict[int, list[Checked]]] = {}
    for c in rows:
        calls.setdefault((c.step, c.call), {}).setdefault(c.rank, []).append(c)
    counts = [_rows(of) for of in calls.values()]
    least = [_of_output(of, [p for p in pooled if (p.rank, p.role) == place]) for place, of in _outputs(rows).items()]
    known = [x for x in least if x is not None]
    sizes = [max(x[i] for x in known) for i in range(3)] if known else [None] * 3
    whole, checked = (sum(n[i] for n in counts) for i in range(2))
    return ModuleCover(rows[0].cls, len(calls), whole, checked, *sizes)


def _rows(ranks: Mapping[int, Sequence[Checked]]) -> tuple[int, int]:
    """(rows, rows that were checked) of one call: a row is checked where all that came out of it is, on all ranks that
    share it. Ranks with other numbers of rows computed other requests."""
    whole = [max(c.rows for c in of) for of in ranks.values()]
    checked = [min(c.checked if c.status in (PASS, FAIL) else 0 for c in of) for of in ranks.values()]
    if len(set(whole)) == 1:
        return whole[0], min(checked)
    return sum(whole), sum(checked)


def _outputs(rows: Iterable[Checked]) -> dict[_Output, list[Checked]]:
    found: dict[_Output, list[Checked]] = {}
    for c in rows:
        if c.smallest is not None and c.status in (PASS, FAIL):
            found.setdefault((c.rank, c.role), []).append(c)
    return found


def _of_output(calls: Sequence[Checked], pooled: Sequence[Pooled]) -> tuple[float, float, float] | None:
    """An error that is in all calls is named where one of them, or all together, show it; of one row, where that is."""
    sizes = [c.smallest for c in calls if c.smallest is not None]
    together = [p.smallest for p in pooled if p.smallest is not None]
    row = min([s[0] for s in sizes] + [p[0] for p in together])
    column = min([s[1] for s in sizes] + [p[1] for p in together])
    return row, column, max(s[2] for s in sizes)
