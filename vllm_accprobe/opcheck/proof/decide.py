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
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.result import FAIL, PASS, SKIP, Comparison
from vllm_accprobe.judge.profile import Habit
from vllm_accprobe.judge.tiers import BEYOND_CHANCE, PROVED, TIERS, UNLIKE_KIN
from vllm_accprobe.opcheck.proof.replayed_pairs import with_replayed
from vllm_accprobe.opcheck.proof.rounded_caches import OtherCache, other_caches, rounded_caches

_ABSORBED = re.compile(r"^param\.W_U[KQV](_T)?$")
"""Latent attention's products of kv_b_proj, made by each run for its own ranks; that weight is compared."""
NAME = "replay.json"
SCHEMA = 1
_MOST = 64 << 20


@dataclass(frozen=True, slots=True)
class Blame:
    """The worst output of a module of mine that is wrong for its own inputs.

    seq: its place in the order of execution; created: relative error of the worst row, severity: measured / allowed;
    propagated: what came in with its inputs (propagated.py), None where that is not known; where it is, created,
    request, position and phase are of the row in which most was created. rows: in the tensor; message: for people;
    tier, times, chance: which floor it breaks, by how much, and how likely honest machines break it (judge/tiers.py),
    chance None where that is not known; layers: {"in", "of"} where it is in every layer, else None."""

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
    tier: str = BEYOND_CHANCE
    times: float = 0.0
    chance: float | None = None
    layers: Mapping[str, int] | None = None
    phase: str | None = None


@dataclass(frozen=True)
class Proof:
    """What two replays prove. shared: modules that are as far off in golden; only_golden: wrong there alone; right:
    taps of mine whose every row was checked and is right; checked: outputs of mine with a verdict; partly: only what
    the comparison suspects was replayed; notes: sentences on what mine's outputs were judged by; truncating: those of
    ``right`` that round toward zero, and the most that each created in a row (relative error against its reference,
    and golden's own with it);
    machines: how "golden" and "mine" compute, habits of judge/profile.py; allowed: those of ``truncating`` that do
    something else that their machine does everywhere, and what; caches: of attentions that have an 8-bit cache on one
    side only, see rounded_caches.py."""

    blamed: tuple[Blame, ...]
    shared: tuple[str, ...]
    only_golden: tuple[str, ...]
    right: frozenset[str]
    checked: int
    partly: bool = False
    notes: tuple[str, ...] = ()
    truncating: Mapping[str, float] = field(default_factory=dict)
    machines: Mapping[str, tuple[Habit, ...]] = field(default_factory=dict)
    allowed: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, OtherCache] = field(default_factory=dict)

    def to_json(self) -> str:
        plain = asdict(self) | {"schema": SCHEMA, "right": sorted(self.right)}
        if not self.caches:
            del plain["caches"]
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
                         {str(t): float(x) for t, x in value.get("truncating", {}).items()},
                         {side: tuple(map(Habit.of_plain, value.get("machines", {}).get(side, ())))
                          for side in ("golden", "mine") if value.get("machines")},
                         {str(t): str(h) for t, h in value.get("allowed", {}).items()},
                         other_caches(value.get("caches", {})))  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a replay of this version ({error})") from None


def _blame(value: Mapping[str, Any]) -> Blame:
    blame = Blame(**{f.name: value[f.name] for f in fields(Blame) if f.name in value})
    if not all(isinstance(x, str) for x in (blame.tap, blame.cls, blame.role, blame.message)):
        raise TypeError("a name is no text")
    if not all(isinstance(x, (int, float)) for x in (blame.created, blame.severity, blame.seq)):
        raise TypeError("a number is none")
    if blame.tier not in TIERS or not isinstance(blame.times, (int, float)):
        raise TypeError("its floor is none that we know")
    if not isinstance(blame.phase, (str, type(None))):
        raise TypeError("a phase is no word")
    if not isinstance(blame.chance, (int, float, type(None))):
        raise TypeError("a chance is no number")
    if blame.layers is not None and not (isinstance(blame.layers, dict) and set(blame.layers) == {"in", "of"}):
        raise TypeError("its layers are not counted")
    return blame


def decide(result: Comparison, proof: Proof) -> Comparison:
    """``result`` with the origins that ``proof`` gives."""
    order: dict[str, int] = {}
    for pair in result.pairs:
        if pair.status != SKIP:
            order[pair.tap] = min(pair.order, order.get(pair.tap, pair.order))
    known = {o["module"]: o for o in result.origins}
    proved = {b.tap for b in proof.blamed}
    blamed = sorted(proof.blamed, key=lambda b: (b.tier == UNLIKE_KIN, order.get(b.tap, 1 << 60), b.seq))
    first = [_entry(b, known.get(b.tap)) for b in blamed]
    excused = {o["module"] for o in result.origins if _truncation_alone(o, proof)}
    right, shared, only = proof.right, proof.shared, proof.only_golden
    params = _same_parameters(result)
    cleared = {o["module"] for o in result.origins if params(o["module"]) and _cleared(o, right)} - proved - excused
    rest = [o for o in result.origins if o["module"] not in proved | excused | cleared]
    where = " in part" if proof.partly else ""
    wrong = f"{_modules(len(proved))} wrong for its own inputs"
    notes = [f"replay: {proof.checked} outputs of mine checked{where}, {wrong}"]
    notes += [f"replay: {said}" for said in (*proof.notes, *rounded_caches(proof.caches, right))]
    if shared:
        notes.append(f"replay: {_modules(len(shared))} as far off in golden, first {shared[0]}: not blamed")
    if only:
        notes.append(f"replay: {_modules(len(only))} wrong for its own inputs in golden only, first {only[0]}")
    if excused:
        notes.append(
            f"replay: {min(excused)} {_does(proof, min(excused))} and created no more than that: not blamed"
            + (f", nor are {len(excused) - 1} more" if len(excused) > 1 else "")
        )
    came_in = [o["module"] for o in result.origins if o["module"] in cleared - proof.caches.keys()]
    if came_in:
        notes.append(f"replay: {_modules(len(came_in))} suspected and right for its own inputs, first {came_in[0]}: "
                     "what differs there came in with the inputs, and is not blamed")  # fmt: skip
    doubtful = [o["module"] for o in rest if o["module"] in right]
    if doubtful:
        notes.append(f"replay: {doubtful[0]} is right for its own inputs; what is said of it is inferred")
    rest.sort(key=lambda o: o["module"] in right)  # stable: in data-flow order otherwise
    verdict = FAIL if first else result.verdict
    said = [n for n in result.notes if not (first and n == messages.NOBODY)]
    machines = {side: [h.plain() for h in habits] for side, habits in proof.machines.items()}
    decided = replace(
        result, origins=[*first, *rest], verdict=verdict, notes=[*notes, *said], machines=machines or result.machines,
        pairs=with_replayed(result.pairs, first),
    )  # fmt: skip
    if decided.origins or proof.partly:
        return decided
    return _acquitted(decided, proof, excused | cleared, excused)


def _cleared(origin: Mapping[str, Any], right: frozenset[str]) -> bool:
    """Whether an origin is inferred of a module that its replay saw to be right, in all rows and for its own inputs.
    Values that must be equal (a weight, a chosen expert), and constants that golden's module has otherwise, are no
    inference: a replay reads them from mine, right or wrong."""
    inferred = origin.get("tier") != PROVED and not origin.get("setting")
    return inferred and origin["module"] in right and str(origin.get("role", "")).startswith("output")


def _same_parameters(result: Comparison) -> Callable[[str], bool]:
    """Whether a module's parameters are known to be golden's: a module is right for its own weights, whatever they are.
    Never where golden shows none of any module's."""
    pairs = [p for p in result.pairs if p.role.startswith("param.")]
    other = {p.tap for p in pairs if p.status != PASS and not (p.status == SKIP and _ABSORBED.search(p.role))}
    known = any(p.status == PASS for p in pairs)
    return lambda tap: known and tap not in other


def _does(proof: Proof, tap: str) -> str:
    said = proof.allowed.get(tap)
    return f"computes as its machine does everywhere ({said})" if said else "rounds toward zero"


def _truncation_alone(origin: Mapping[str, Any], proof: Proof) -> bool:
    """Whether what a comparison takes for an error that a module of mine created is what its replay saw it create, by
    rounding toward zero, or another habit of its machine, and nothing else: limits of a comparison are those of
    rounding to nearest. A weight that is not golden's adds to that, and stays an origin."""
    most = proof.truncating.get(str(origin["module"]))
    created = origin.get("created")
    of_output = str(origin.get("role", "")).startswith("output")
    return most is not None and of_output and created is not None and created <= most


def _acquitted(
    result: Comparison, proof: Proof, unblamed: Collection[str], excused: Collection[str]
) -> Comparison:  # fmt: skip
    """``result``, passed where it failed for nothing but size: nobody adds more than elsewhere, and all that is beyond
    its limit came out of modules that are right for their own inputs. A model may enlarge honest rounding; a second
    golden run (`--floor`) would show the same."""
    beyond = [p for p in result.pairs if p.status == FAIL]
    nobody = messages.NOBODY in result.notes or bool(unblamed)
    if not nobody or not beyond or any(p.tap not in proof.right for p in beyond):
        return result
    taps = len({p.tap for p in beyond})
    why = "this model enlarges honest rounding", "enlarged rounding"
    if excused:
        why = "they round toward zero", "rounding toward zero"
    if any(tap in proof.allowed for tap in excused):
        why = "they compute as their machine does everywhere", "a habit of its machine"
    if proof.caches:
        why = "a cache of 8 bits rounds what they read", "the rounding of an 8-bit cache"
    said = (
        f"replay: {len(beyond)} pairs of {taps} modules are beyond their limits, and each of these is right for its "
        f"own inputs: {why[0]}, no operator is wrong"
    )
    message = f"{why[1]}: its module is right for its own inputs (replay)"
    pairs = [replace(p, status=PASS, message=message) if p.status == FAIL else p for p in result.pairs]
    notes = [said, *(n for n in result.notes if n != messages.NOBODY)]
    return replace(result, pairs=pairs, verdict=PASS, first_divergence=None, notes=notes)


def _modules(n: int) -> str:
    return "no module is" if not n else f"{n} module is" if n == 1 else f"{n} modules, each"


def _entry(b: Blame, known: dict[str, Any] | None) -> dict[str, Any]:
    """compare.json's entry of an origin; where the comparison had found it, its words stay."""
    at: dict[str, Any] = {"propagated": b.propagated, "evidence": "replay", "tier": b.tier, "times": b.times}
    at |= {"chance": b.chance, "layers": dict(b.layers) if b.layers else None}
    if b.propagated is not None:
        at |= {"created": b.created, "request": b.request, "position": b.position, "phase": b.phase}
    if known is not None:
        # The limit that it breaks so many times is that of its replay, which is another than the comparison's.
        created, by = at.get("created", known.get("created")), b.times or b.severity
        if created and by and math.isfinite(created) and math.isfinite(by):
            at["floor"] = created / by
        if str(known.get("role")).startswith("input"):  # what was blamed there was no result of the module
            at |= {"role": b.role, "shape": b.message}
        return known | at
    return at | {
        "module": b.tap,
        "class": b.cls,
        "role": b.role,
        "request": b.request,
        "position": b.position,
        "phase": b.phase,
        "created": b.created,
        "propagated": b.propagated,
        "floor": b.created / by if (by := b.times or b.severity) and math.isfinite(by) else 0.0,
        "rows": b.rows,
        "worst": b.created,
        "shape": b.message,
    }
