"""What the replay of two dumps proves: who is wrong alone, and who is as wrong in golden.

The problem: an output that fails its reference may be a fault, or a reference that does not fit this model. The idea: a
module that golden runs as well is its own control: what is as far off there is not blamed.
Not here: what the proof does to a comparison (decide.py), the process that makes it (cli/prove.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm_accprobe.comparison.plan import SAMPLER, TOKEN, TOP_IDS
from vllm_accprobe.opcheck.checked import grids
from vllm_accprobe.opcheck.decide import Blame, Proof
from vllm_accprobe.opcheck.propagated import Split
from vllm_accprobe.opcheck.replay import FAIL, PASS, Checked
from vllm_accprobe.opcheck.truncating import sentence

ALIKE = 3.0
"""Golden is as wrong as mine where mine's error is at most so many times golden's, both in what is allowed."""
_SAMPLED = {(SAMPLER, TOKEN), (SAMPLER, TOP_IDS)}


def wrong(rows: Iterable[Checked]) -> dict[str, Checked]:
    """tap → its worst output among those that fail."""
    worst: dict[str, Checked] = {}
    for row in rows:
        if row.status == FAIL and (row.tap not in worst or row.severity > worst[row.tap].severity):
            worst[row.tap] = row
    return worst


def shared(golden: Mapping[str, Checked], mine: Mapping[str, Checked]) -> frozenset[str]:
    """The taps that golden does as wrong as mine."""
    return frozenset(t for t, c in mine.items() if t in golden and c.severity <= ALIKE * golden[t].severity)


def prove(
    golden: Sequence[Checked], mine: Sequence[Checked], splits: Mapping[str, Split] | None = None, partly: bool = False
) -> Proof:
    """golden, mine: replay.check's rows of the two dumps; splits: by tap."""
    found, theirs = wrong(mine), wrong(golden)
    alike = shared(theirs, found)
    right = {c.tap for c in mine if c.status == PASS and c.checked == c.rows} - set(found) - _open(mine)
    return Proof(
        blamed=tuple(_blame(c, (splits or {}).get(t)) for t, c in found.items() if t not in alike),
        shared=tuple(sorted(alike)),
        only_golden=tuple(sorted(t for t in theirs if t not in found)),
        right=frozenset(right),
        checked=sum(c.status in (FAIL, PASS) for c in mine),
        partly=partly,
        truncating={t: x for t, x in _truncated(mine).items() if t in right},
        notes=tuple(filter(None, (*grids(mine), sentence(golden, " in golden"), sentence(mine, " in mine")))),
    )


def _truncated(rows: Iterable[Checked]) -> dict[str, float]:
    """tap → the largest error of a row that it created, of those that round toward zero in an output at least."""
    most: dict[str, float] = {}
    seen: set[str] = set()
    for c in rows:
        if c.status == PASS and c.created is not None and c.role.startswith("output"):
            most[c.tap] = max(c.created, most.get(c.tap, 0.0))
        if c.rounding:
            seen.add(c.tap)
    return {t: x for t, x in most.items() if t in seen}


def _open(rows: Iterable[Checked]) -> frozenset[str]:
    """The taps some of whose outputs or calls have no verdict: what is right elsewhere may be wrong there. Which token
    the sampler took is judged by the logits (judge/flips.py), not by a reference."""
    return frozenset(c.tap for c in rows if c.status not in (PASS, FAIL) and (c.tap, c.role) not in _SAMPLED)


def _blame(c: Checked, split: Split | None) -> Blame:
    created, propagated = c.created if c.created is not None else 0.0, None
    request, position = c.request, c.position
    if split is not None:
        created, propagated, request, position = split.created, split.propagated, split.request, split.position
    return Blame(c.tap, c.cls, c.role, c.seq, request, position, created, propagated, c.severity, c.rows, c.message)
