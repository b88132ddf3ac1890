"""Replay as the judge of a comparison: who is wrong for its own inputs needs no golden to be blamed.

The problem: a comparison finds what differs, and a small error among honest ones may stay below every sign of it; or a
model that enlarges rounding looks like a fault. The idea: mine's calls are run again against references, and golden's
too. A module of mine that is wrong for its own inputs is an origin with the evidence ``replay``, and stands before
those that are only inferred; what golden does as well is how both engines compute, or a reference that does not fit: it
is told, not blamed. What two replays prove is a plain value, made where torch is (prove.py), kept as JSON, and put into
a comparison here, without torch.
Not here: the replays and the proof (prove.py), the comparison (comparison/).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from vllm_accprobe.comparison import words
from vllm_accprobe.comparison.result import FAIL, PASS, SKIP, Comparison

NAME = "replay.json"
SCHEMA = 1
_MOST = 64 << 20


@dataclass(frozen=True, slots=True)
class Blame:
    """The worst output of a module of mine that is wrong for its own inputs.

    seq: its place in the order of execution; created: relative error of the worst row, severity: measured / allowed;
    propagated: what came in with its inputs (propagated.py), None where that is not known; where it is, created,
    request and position are of the row in which most was created. rows: in the tensor; message: for people."""

    tap: str
    cls: str
    role: str
    seq: int
    request: str | None
    position: int | None
    created: float
    propagated: float | None
    severity: float
    rows: int
    message: str


@dataclass(frozen=True)
class Proof:
    """What two replays prove. shared: modules that are as far off in golden; only_golden: wrong there alone; right:
    taps of mine whose every row was checked and is right; checked: outputs of mine with a verdict; partly: only what
    the comparison suspects was replayed; notes: sentences on what mine's outputs were judged by; truncating: those of
    ``right`` that round toward zero, and the most that each created in a row (relative error against its reference)."""

    blamed: tuple[Blame, ...]
    shared: tuple[str, ...]
    only_golden: tuple[str, ...]
    right: frozenset[str]
    checked: int
    partly: bool = False
    notes: tuple[str, ...] = ()
    truncating: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        plain = asdict(self) | {"schema": SCHEMA, "right": sorted(self.right)}
        return json.dumps(plain)

    @staticmethod
    def from_json(text: str) -> Proof:
        """Raises ValueError for what ``to_json`` never wrote."""
        value = json.loads(text) if len(text) <= _MOST else None
        try:
            if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA:
                raise ValueError("not a replay of this version")
            blamed = tuple(_blame(b) for b in value["blamed"])
            names = [tuple(str(t) for t in value[k]) for k in ("shared", "only_golden", "right")]
            return Proof(blamed, names[0], names[1], frozenset(names[2]), int(value["checked"]), bool(value["partly"]),
                         tuple(str(n) for n in value.get("notes", ())),
                         {str(t): float(x) for t, x in value.get("truncating", {}).items()})  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a replay of this version ({error})") from None


def _blame(value: Mapping[str, Any]) -> Blame:
    blame = Blame(**{f.name: value[f.name] for f in fields(Blame)})
    if not all(isinstance(x, str) for x in (blame.tap, blame.cls, blame.role, blame.message)):
        raise TypeError("a name is no text")
    if not all(isinstance(x, (int, float)) for x in (blame.created, blame.severity, blame.seq)):
        raise TypeError("a number is none")
    return blame


def decide(result: Comparison, proof: Proof) -> Comparison:
    """``result`` with the origins that ``proof`` gives."""
    order: dict[str, int] = {}
    for pair in result.pairs:
        if pair.status != SKIP:
            order[pair.tap] = min(pair.order, order.get(pair.tap, pair.order))
    known = {o["module"]: o for o in result.origins}
    proved = {b.tap for b in proof.blamed}
    blamed = sorted(proof.blamed, key=lambda b: (order.get(b.tap, 1 << 60), b.seq))
    first = [_entry(b, known.get(b.tap)) for b in blamed]
    excused = {o["module"] for o in result.origins if _truncation_alone(o, proof)}
    rest = [o for o in result.origins if o["module"] not in proved | excused]
    right, shared, only = proof.right, proof.shared, proof.only_golden
    where = " at and below what is suspected" if proof.partly else ""
    wrong = f"{_modules(len(proved))} wrong for its own inputs"
    notes = [f"replay: {proof.checked} outputs of mine checked{where}, {wrong}"]
    notes += [f"replay: {said}" for said in proof.notes]
    if shared:
        notes.append(f"replay: {_modules(len(shared))} as far off in golden, first {shared[0]}: not blamed")
    if only:
        notes.append(f"replay: {_modules(len(only))} wrong for its own inputs in golden only, first {only[0]}")
    if excused:
        notes.append(
            f"replay: {min(excused)} rounds toward zero and created no more than that: not blamed"
            + (f", nor are {len(excused) - 1} more" if len(excused) > 1 else "")
        )
    doubtful = [o["module"] for o in rest if o["module"] in right]
    if doubtful:
        notes.append(f"replay: {doubtful[0]} is right for its own inputs; what is said of it is inferred")
    rest.sort(key=lambda o: o["module"] in right)  # stable: in data-flow order otherwise
    verdict = FAIL if first else result.verdict
    said = [n for n in result.notes if not (first and n == words.NOBODY)]
    decided = replace(result, origins=[*first, *rest], verdict=verdict, notes=[*notes, *said])
    return decided if decided.origins or proof.partly else _acquitted(decided, right, excused)


def _truncation_alone(origin: Mapping[str, Any], proof: Proof) -> bool:
    """Whether what a comparison takes for an error that a module of mine created is what its replay saw it create, by
    rounding toward zero and nothing else: limits of a comparison are those of rounding to nearest. A weight that is
    not golden's adds to that, and stays an origin."""
    most = proof.truncating.get(str(origin["module"]))
    created = origin.get("created")
    of_output = str(origin.get("role", "")).startswith("output")
    return most is not None and of_output and created is not None and created <= most


def _acquitted(result: Comparison, right: frozenset[str], excused: Collection[str]) -> Comparison:
    """``result``, passed where it failed for nothing but size: nobody adds more than elsewhere, and all that is beyond
    its limit came out of modules that are right for their own inputs. A model may enlarge honest rounding; a second
    golden run (`--floor`) would show the same."""
    beyond = [p for p in result.pairs if p.status == FAIL]
    nobody = words.NOBODY in result.notes or bool(excused)
    if not nobody or not beyond or any(p.tap not in right for p in beyond):
        return result
    taps = len({p.tap for p in beyond})
    said = (
        f"replay: {len(beyond)} pairs of {taps} modules are beyond their limits, and each of these is right for its "
        "own inputs: " + ("they round toward zero" if excused else "this model enlarges honest rounding")
        + ", no operator is wrong"
    )
    why = "rounding toward zero" if excused else "enlarged rounding"
    message = f"{why}: its module is right for its own inputs (replay)"
    pairs = [replace(p, status=PASS, message=message) if p.status == FAIL else p for p in result.pairs]
    notes = [said, *(n for n in result.notes if n != words.NOBODY)]
    return replace(result, pairs=pairs, verdict=PASS, first_divergence=None, notes=notes)


def _modules(n: int) -> str:
    return f"{n} module is" if n == 1 else f"{n} modules, each"


def _entry(b: Blame, known: dict[str, Any] | None) -> dict[str, Any]:
    """compare.json's entry of an origin; where the comparison had found it, its words stay."""
    at: dict[str, Any] = {"propagated": b.propagated, "evidence": "replay"}
    if b.propagated is not None:
        at |= {"created": b.created, "request": b.request, "position": b.position}
    if known is not None:
        if str(known.get("role")).startswith("input"):  # what was blamed there was no result of the module
            at |= {"role": b.role, "shape": b.message}
        return known | at
    return {
        "module": b.tap,
        "class": b.cls,
        "role": b.role,
        "request": b.request,
        "position": b.position,
        "phase": None,
        "created": b.created,
        "propagated": b.propagated,
        "floor": b.created / b.severity if b.severity and math.isfinite(b.severity) else 0.0,
        "evidence": "replay",
        "rows": b.rows,
        "worst": b.created,
        "shape": b.message,
    }
