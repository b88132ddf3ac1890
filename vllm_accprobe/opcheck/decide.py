"""Replay as the judge of a comparison: who is wrong for its own inputs needs no golden to be blamed.

The problem: a comparison finds what differs, and a small error among honest ones may stay below every sign of it; or a
model that enlarges rounding looks like a fault. The idea: mine's calls are run again against references, and golden's
too. A module of mine that is wrong for its own inputs is an origin with the evidence ``replay``, and stands before
those that are only inferred; what golden does as well is how both engines compute, or a reference that does not fit: it
is told, not blamed.
Not here: references and verdicts on single calls (replay.py), what came in with the inputs (propagated.py), the
comparison (compare/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_accprobe.compare import words
from vllm_accprobe.compare.result import FAIL, SKIP, Comparison
from vllm_accprobe.opcheck.propagated import Split
from vllm_accprobe.opcheck.replay import FAIL as WRONG
from vllm_accprobe.opcheck.replay import PASS as RIGHT
from vllm_accprobe.opcheck.replay import Checked

ALIKE = 3.0
"""Golden is as wrong as mine where mine's error is at most so many times golden's, both in what is allowed."""


@dataclass(frozen=True)
class Proof:
    """What two replays prove. blamed: the worst output of each module of mine that is wrong for its own inputs, in
    data-flow order; shared: modules that are as far off in golden; only_golden: wrong there alone; right: taps of mine
    whose every row was checked and is right; checked: outputs of mine with a verdict."""

    blamed: tuple[Checked, ...]
    shared: tuple[str, ...]
    only_golden: tuple[str, ...]
    right: frozenset[str]
    checked: int


def prove(result: Comparison, golden: Iterable[Checked], mine: Sequence[Checked]) -> Proof:
    """golden, mine: replay.check's rows of the two dumps that ``result`` compares."""
    wrong, theirs = _worst(mine), _worst(golden)
    shared = sorted(t for t, c in wrong.items() if t in theirs and c.severity <= ALIKE * theirs[t].severity)
    order: dict[str, int] = {}
    for pair in result.pairs:
        if pair.status != SKIP:
            order[pair.tap] = min(pair.order, order.get(pair.tap, pair.order))
    blamed = [c for tap, c in wrong.items() if tap not in shared]
    blamed.sort(key=lambda c: (order.get(c.tap, 1 << 60), c.seq))
    right = {c.tap for c in mine if c.status == RIGHT and c.checked == c.rows} - set(wrong)
    only = sorted(t for t in theirs if t not in wrong)
    checked = sum(c.status in (WRONG, RIGHT) for c in mine)
    return Proof(tuple(blamed), tuple(shared), tuple(only), frozenset(right), checked)


def decide(result: Comparison, proof: Proof, splits: Mapping[str, Split] | None = None) -> Comparison:
    """``result`` with the origins that ``proof`` gives. splits: by tap (propagated.py)."""
    known = {o["module"]: o for o in result.origins}
    proved = {c.tap for c in proof.blamed}
    first = [_entry(c, known.get(c.tap), (splits or {}).get(c.tap)) for c in proof.blamed]
    rest = [o for o in result.origins if o["module"] not in proved]
    right, shared, only = proof.right, proof.shared, proof.only_golden
    notes = [f"replay: {proof.checked} outputs of mine checked, {_modules(len(proved))} wrong for its own inputs"]
    if shared:
        notes.append(f"replay: {_modules(len(shared))} as far off in golden, first {shared[0]}: not blamed")
    if only:
        notes.append(f"replay: {_modules(len(only))} wrong for its own inputs in golden only, first {only[0]}")
    doubtful = [o["module"] for o in rest if o["module"] in right]
    if doubtful:
        notes.append(f"replay: {doubtful[0]} is right for its own inputs; what is said of it is inferred")
    rest.sort(key=lambda o: o["module"] in right)  # stable: in data-flow order otherwise
    verdict = FAIL if first else result.verdict
    said = [n for n in result.notes if not (first and n == words.NOBODY)]
    return replace(result, origins=[*first, *rest], verdict=verdict, notes=[*notes, *said])


def _modules(n: int) -> str:
    return f"{n} module is" if n == 1 else f"{n} modules, each"


def _worst(rows: Iterable[Checked]) -> dict[str, Checked]:
    worst: dict[str, Checked] = {}
    for row in rows:
        if row.status == WRONG and (row.tap not in worst or row.severity > worst[row.tap].severity):
            worst[row.tap] = row
    return worst


def _entry(c: Checked, known: dict[str, Any] | None, split: Split | None) -> dict[str, Any]:
    """compare.json's entry of an origin; where the comparison had found it, its words stay. Without a split, what
    came in is not known: null."""
    at: dict[str, Any] = {} if split is None else {"created": split.created, "request": split.request, "position": split.position}
    at["propagated"] = None if split is None else split.propagated
    if known is not None:
        if str(known.get("role")).startswith("input"):  # what was blamed there was no result of the module
            at |= {"role": c.role, "shape": c.message}
        return known | at | {"evidence": "replay"}
    created = c.created if c.created is not None else 0.0
    return {
        "module": c.tap,
        "class": c.cls,
        "role": c.role,
        "request": c.request,
        "position": c.position,
        "phase": None,
        "created": created,
        "floor": created / c.severity if c.severity else 0.0,
        "evidence": "replay",
        "rows": c.rows,
        "worst": created,
        "shape": c.message,
    } | at
