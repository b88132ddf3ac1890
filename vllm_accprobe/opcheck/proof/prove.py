"""What the replay of two dumps proves: who is wrong alone, and who is as wrong in golden.

The problem: an output that fails its reference may be a fault, or a reference that does not fit this model. The idea: a
module that golden runs as well is its own control: what is as far off there is not blamed. Where nobody breaks a floor
of his own, a module whose errors are unlike those of the same class in other layers is blamed for that (pooled.py); not
where somebody does, because what lies behind a fault has other inputs than its kin. What every layer of a class does is
said to be in all of them.
Not here: what the proof does to a comparison (decide.py), the process that makes it (cli/replay/prove.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vllm_accprobe.judge.origins import in_all_layers
from vllm_accprobe.judge.profile import Habit
from vllm_accprobe.judge.statistic import BEYOND_CHANCE, UNLIKE_KIN
from vllm_accprobe.opcheck.floors.pooled import OutlierLayer
from vllm_accprobe.opcheck.habits.decided import sentence
from vllm_accprobe.opcheck.proof.decide import Blame, Proof
from vllm_accprobe.opcheck.proof.explained import Explained
from vllm_accprobe.opcheck.proof.propagated import Split
from vllm_accprobe.opcheck.proof.rounded_caches import OtherCache
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, Checked, grids

ALIKE = 3.0
"""Golden is as wrong as mine where mine's error is at most so many times golden's, both in what is allowed."""


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
    golden: Sequence[Checked], mine: Sequence[Checked], splits: Mapping[str, Split] | None = None,
    partly: bool = False, *, odd: Iterable[OutlierLayer] = (), machines: Mapping[str, tuple[Habit, ...]] | None = None,
    explained: Explained | None = None,
) -> Proof:  # fmt: skip
    """golden, mine: replay.check_tap's rows of the two, settled (decided.py); splits: by tap; odd: outputs of mine
    unlike their kin; machines: how each computes, which is then not said again in a note; explained: explained.py."""
    known = {side: {h.operator for h in habits} for side, habits in (machines or {}).items()}
    found, theirs = wrong(mine), wrong(golden)
    alike = shared(theirs, found)
    blamed = [_blame(c, (splits or {}).get(t)) for t, c in found.items() if t not in alike]
    if not blamed:
        blamed = [_unlike(o) for o in odd if o.pooled.tap not in found]
    wrong_taps = set(found) | {b.tap for b in blamed}
    right = {c.tap for c in mine if c.status == PASS and c.checked == c.rows} - wrong_taps - _open(mine)
    # what a comparison sees of mine holds golden's own rounding, too: at most their sum (the triangle inequality)
    own, allowed = _created(golden), {c.tap: c.habit for c in mine if c.habit and c.tap in right}
    return Proof(
        blamed=tuple(_in_all_layers(blamed, mine)),
        shared=tuple(sorted(alike)),
        only_golden=tuple(sorted(t for t in theirs if t not in found)),
        right=frozenset(right),
        checked=sum(c.status in (FAIL, PASS) for c in mine),
        partly=partly,
        truncating={
            t: x + (own.get(t, 0.0) if t in allowed else 0.0) for t, x in _truncated(mine).items() if t in right
        },
        notes=tuple(
            filter(
                None,
                (
                    *grids(mine),
                    sentence((c for c in golden if c.cls not in known.get("golden", ())), " in golden"),
                    sentence((c for c in mine if c.cls not in known.get("mine", ())), " in mine"),
                ),
            )
        ),
        machines=machines or {},
        allowed=allowed,
        caches=_caches(golden, mine),
        explained=explained or Explained(),
    )


def _caches(golden: Sequence[Checked], mine: Sequence[Checked]) -> dict[str, OtherCache]:
    """tap → Proof.caches, of attentions whose two caches are not of one format."""
    sides = {"golden": _formats(golden), "mine": _formats(mine)}
    found = {}
    for which, other in (("golden", "mine"), ("mine", "golden")):
        for tap, held in sides[which].items():
            if tap not in sides[other] or sides[other][tap][0] != held[0]:
                found[tap] = (which, *held)
    return found


def _formats(rows: Sequence[Checked]) -> dict[str, tuple[str, float, float, float]]:
    """tap → `Checked.cache` of the call in which the format moves a row most."""
    found: dict[str, tuple[str, float, float, float]] = {}
    for c in rows:
        if c.cache is not None and (c.tap not in found or c.cache[1] > found[c.tap][1]):
            found[c.tap] = c.cache
    return found


def _truncated(rows: Sequence[Checked]) -> dict[str, float]:
    """tap → the largest error of a row that it created, of those that round toward zero in an output at least, or do
    another thing that their machine does everywhere (decided.py)."""
    seen = {c.tap for c in rows if c.rounding or c.habit}
    return {t: x for t, x in _created(rows).items() if t in seen}


def _created(rows: Sequence[Checked]) -> dict[str, float]:
    """tap → the largest error of a row that it created, of outputs that are right."""
    most: dict[str, float] = {}
    for c in rows:
        if c.status == PASS and c.created is not None and c.role.startswith("output"):
            most[c.tap] = max(c.created, most.get(c.tap, 0.0))
    return most


def _open(rows: Iterable[Checked]) -> frozenset[str]:
    """The taps some of whose outputs or calls have no verdict: what is right elsewhere may be wrong there."""
    return frozenset(c.tap for c in rows if c.status not in (PASS, FAIL))


def _blame(c: Checked, split: Split | None) -> Blame:
    created, propagated = c.created if c.created is not None else 0.0, None
    request, position, phase = c.request, c.position, None
    if split is not None:
        created, propagated = split.created, split.propagated
        request, position, phase = split.request, split.position, split.phase
    return Blame(c.tap, c.cls, c.role, c.seq, request, position, created, propagated, c.severity, c.rows, c.message,
                 c.tier or BEYOND_CHANCE, c.severity, c.chance, phase=phase)  # fmt: skip


def _unlike(o: OutlierLayer) -> Blame:
    p = o.pooled
    said = f"all {p.rows} rows together: errors {o.times:.3g} times those of {o.peers} other layers' {p.cls}"
    return Blame(p.tap, p.cls, p.role, p.seq, None, None, p.created, None, o.times, p.rows, said, UNLIKE_KIN, o.times,
                 o.chance)  # fmt: skip


def _in_all_layers(blamed: Sequence[Blame], mine: Iterable[Checked]) -> list[Blame]:
    """``blamed``, those that are in every layer of at least two saying so."""
    every = in_all_layers([b.tap for b in blamed], [c.tap for c in mine if c.status in (FAIL, PASS)])
    return [replace(b, layers=every[b.tap]) if b.tap in every else b for b in blamed]
