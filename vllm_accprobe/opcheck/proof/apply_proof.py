"""The replay as the judge of a comparison: what it convicts, what it explains, and what it leaves of gaps.

The problem: a comparison finds what differs; a small error may stay below every sign of it, and a model that enlarges
rounding resembles a fault. The idea: a module of mine that is wrong for its own inputs is an origin with the evidence
``replay``, before those that are inferred; one that golden runs as wrong is noted, not blamed. The pairs of a blamed
output are measured against the replay's limit, so that a table and the verdict show one factor (`with_replayed`). A
gap that holds a module proved wrong is none any more, and one proved right leaves it (`narrowed`). What a cache of 8
bits alone does is reported apart (`rounded_caches`). A proof is a plain value, made where torch is (make_proof.py),
kept as JSON, and applied here without torch. Not here: figures of caches (opcheck/references/caches.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypedDict, cast

import numpy as np

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.coverage import ModuleCover, to_plain
from vllm_accprobe.comparison.gaps import Gap, entry_of
from vllm_accprobe.comparison.pair import FAIL, NOT_JUDGED, PASS, SKIP, Pair, was_compared
from vllm_accprobe.comparison.plan.unit import SAMPLER, TOKEN, TOP_IDS, TOP_LOGITS
from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.dump.decode import keys, one_of, parse
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.near_ties import NEAR_TIE, RANDOM, UPSTREAM
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.judge.profile import Habit
from vllm_accprobe.judge.statistic import BEYOND_CHANCE, PROVED, SIBLING_OUTLIER, TIERS
from vllm_accprobe.opcheck.proof.explained import NOT_REPLAYED, Explained, place_of


def with_replayed(pairs: Sequence[Pair], origins: Sequence[OriginEntry]) -> Sequence[Pair]:
    """``pairs`` (the same object where nothing changes). origins: entries with the evidence ``replay``."""
    out, changed = list(pairs) if origins else [], False
    for origin in origins:
        created, limit = origin.get("created"), origin.get("floor")
        if not created or not limit or not math.isfinite(created) or not math.isfinite(limit):
            continue
        place = origin["module"], origin["role"]
        row = origin.get("request"), origin.get("position")
        of = [i for i, p in enumerate(out) if (p.tap, p.role) == place and p.allowed and not p.identical]
        own = [i for i in of if out[i].status == FAIL] or sorted(
            (i for i in of if out[i].status != FAIL), key=lambda i: _size(out[i])
        )[-1:]
        # The row that is blamed is mostly its pair's worst; where it is not, the worst pair stands for it.
        there = {i: (out[i].worst_request, out[i].worst_position) == row for i in own}
        named = max(own, key=lambda i: (there[i], _size(out[i])), default=None)
        changed |= bool(own)
        for i in own:
            size = created if i == named else min(_size(out[i]), created)
            text = _checked_message(out[i], size, limit)
            out[i] = replace(out[i], status=FAIL, measure="created", measured=size, allowed=limit, message=text)
    return out if changed else pairs


def _size(pair: Pair) -> float:
    """The relative L2 error of its worst row, or what was created there, where a comparison has judged by that."""
    if pair.measure == "created" and pair.measured is not None:
        return pair.measured
    return pair.worst_row_rel_l2 or pair.rel_l2 or 0.0


def _checked_message(pair: Pair, size: float, limit: float) -> str:
    """Its message, whose first clauses were about other limits."""
    rest = [x for x in pair.message.split("; ") if not x.startswith(_OTHERS)]
    return "; ".join([f"introduces an error of {size:.3g} (limit {limit:.2g}, by replay)", *filter(None, rest)])


_OTHERS = ("introduces an error of ", "row relative L2 ", "row norm is ", "an element is off by ", NOT_JUDGED)
"""How clauses on a comparison's own limits begin (judge/tensor_errors.py, comparison/verdict/origin_entries.py)."""


OtherCache = tuple[str, str, float, float, float]
"""Which side; the format; how far it alone moves the row of an output that it moves most, relative L2; the standard
error that its step gives there; the most that its step allows."""


def rounded_caches(caches: Mapping[str, OtherCache], right: Collection[str]) -> list[str]:
    """Sentences: one for each side and format."""
    groups: dict[tuple[str, str], list[str]] = {}
    for tap, (side, kind, *_) in caches.items():
        groups.setdefault((side, kind), []).append(tap)
    return [_cache_note(side, kind, taps, caches, right) for (side, kind), taps in groups.items()]


def _cache_note(
    side: str, kind: str, taps: list[str], caches: Mapping[str, OtherCache], right: Collection[str]
) -> str:  # fmt: skip
    wrong = [tap for tap in taps if tap not in right]
    worst = max(taps, key=lambda tap: caches[tap][2])
    share, expected, most = caches[worst][2:]
    what = f"{side}'s cache is {kind} in {len(taps)} attention{'s' * (len(taps) > 1)}"
    alone = (
        f"that rounding alone moves a row of their outputs by up to {share:.3g} ({worst}; the format's step gives "
        f"{expected:.3g} there and allows {most:.3g})"
    )
    if wrong:
        return f"{what}: {alone}; what {wrong[0]} differs by is not that rounding"
    return f"{what}: {alone}, and beyond it mine is right for its own inputs: no wrong state, no wrong kernel"


def narrowed(result: Comparison, wrong: Collection[str], right: Collection[str]) -> Comparison:
    """``result`` with its gaps as a replay leaves them. wrong: modules that it proved; right: those whose every row it
    saw to be right for its own inputs."""
    if not any(o.get("gap") for o in result.origins):
        return result
    origins = [_narrowed(o, right) for o in result.origins if not _found_in(o, wrong)]
    return replace(result, origins=origins)


def _found_in(origin: OriginEntry, wrong: Collection[str]) -> bool:
    gap = origin.get("gap") if origin.get("evidence") != "replay" else None
    return gap is not None and any(m in wrong for m in (*gap["contains"], gap["before"]))


def _narrowed(origin: OriginEntry, right: Collection[str]) -> OriginEntry:
    gap = origin.get("gap")
    if not gap:
        return origin
    ends = [str(end).partition("/")[0] for end in (gap["after"] or "", gap["before"])]

    def cleared(module: str) -> bool:
        # A module around one of the ends is in the gap by its own code, which no replay of its output checks alone.
        return module in right and not any(module in (*enclosing(end), ROOT_TAP) for end in ends if end != module)

    return {**origin, "gap": {**gap, "contains": [m for m in gap["contains"] if not cleared(m)]}}


_ABSORBED = re.compile(r"^param\.W_U[KQV](_T)?$")
"""Latent attention's products of kv_b_proj, made by each run for its own ranks; that weight is compared."""
NAME = "replay.json"
SCHEMA = 1
_MOST = 64 << 20
_OF_LOGITS = {NEAR_TIE, UPSTREAM, RANDOM}
"""Flips (judge/near_ties.py) in which each side's sampler did its work, or golden drew its token."""


class ReplayCause(TypedDict):
    family: str
    text: str
    parameter: Any
    residual: float
    chance: float


class ConstantEffect(TypedDict):
    """Whether another constant matters, None where that is not known, and how many times what rounding allows."""

    matters: bool | None
    times: float


@dataclass(frozen=True, slots=True)
class ReplayFinding:
    """The worst output of a module of mine that is wrong for its own inputs.

    seq: its place in the order of execution; created: relative error of the worst row, severity: measured / allowed;
    propagated: what came in with its inputs (make_proof.py), None where that is not known; where it is, created,
    request, position and phase are of the row in which most was created. rows: in the tensor; message: for people;
    tier, times, chance: which floor it breaks, by how much, and how likely rounding alone breaks it (statistic.py),
    chance None where that is not known; layers: {"in", "of"} where it is in every layer, else None; measure: what is
    furthest beyond its limit (floors/verdict.py), "" where that is not known; cause: as compare.json has it
    (opcheck/causes/search.py), None where none is proved."""

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
    tier: Annotated[str, one_of(TIERS)] = BEYOND_CHANCE
    times: float = 0.0
    chance: float | None = None
    layers: Annotated[Mapping[str, int], keys("in", "of")] | None = None
    phase: str | None = None
    measure: str = ""
    cause: ReplayCause | None = None


@dataclass(frozen=True)
class ReplayResult:
    """What two replays prove. shared: modules that are as far off in golden; only_golden: wrong there alone; right:
    taps of mine whose every row was checked and is right; checked: outputs of mine with a verdict; partly: only what
    the comparison suspects was replayed; notes: sentences on what mine's outputs were judged by; truncating: those of
    ``right`` that round toward zero, and the most that each created in a row (relative error against its reference,
    and golden's own with it);
    machines: how "golden" and "mine" compute, habits of judge/profile.py; allowed: those of ``truncating`` that do
    something else that their machine does everywhere, and what; caches: of attentions that have an 8-bit cache on one
    side only, see apply_proof.py; covers: of each module of mine what was checked (make_proof.py);
    constants: of modules with other constants than golden's, whether that matters (make_proof.py)."""

    blamed: tuple[ReplayFinding, ...]
    shared: tuple[str, ...]
    only_golden: tuple[str, ...]
    right: frozenset[str]
    checked: int
    partly: bool = False
    notes: tuple[str, ...] = ()
    truncating: Mapping[str, float] = field(default_factory=dict)
    machines: Mapping[Annotated[str, one_of(("golden", "mine"))], tuple[Habit, ...]] = field(default_factory=dict)
    allowed: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, OtherCache] = field(default_factory=dict)
    explained: Explained = field(default_factory=Explained)
    covers: Mapping[str, ModuleCover] = field(default_factory=dict)
    constants: Mapping[str, ConstantEffect] = field(default_factory=dict)

    def to_json(self) -> str:
        plain = asdict(replace(self, explained=Explained(), covers={})) | {"schema": SCHEMA}
        plain |= {"right": sorted(self.right), "explained": self.explained.plain(), "covers": to_plain(self.covers)}
        if not self.caches:
            del plain["caches"]
        return json.dumps(plain)

    @staticmethod
    def from_json(text: str) -> ReplayResult:
        """Raises DecodeError for what ``to_json`` never wrote."""
        return parse(ReplayResult, text, _MOST, {"schema": SCHEMA})


def decide(result: Comparison, proof: ReplayResult) -> Comparison:
    """``result`` with the origins that ``proof`` gives, and passed where every row that is beyond its limits is
    explained (explained.py)."""
    order: dict[str, int] = {}
    for pair in result.pairs:
        if was_compared(pair):
            order[pair.tap] = min(pair.order, order.get(pair.tap, pair.order))
    known = {o["module"]: o for o in result.origins if not o.get("gap")}
    equal = _equal_outputs(result.pairs)
    same = [b.tap for b in proof.blamed if (b.tap, b.role) in equal and _is_compared(b, result)]
    proved = {b.tap for b in proof.blamed} - set(same)
    blamed = sorted(
        (b for b in proof.blamed if b.tap in proved),
        key=lambda b: (b.tier == SIBLING_OUTLIER, order.get(b.tap, 1 << 60), b.seq),
    )
    first = [_before_sampler(_entry(b, known.get(b.tap)), result.pairs) for b in blamed]
    excused = {o["module"] for o in result.origins if _truncation_alone(o, proof)}
    right, shared, only = proof.right, proof.shared, proof.only_golden
    rows = _Rows(result, proof, excused)
    cleared = {o["module"] for o in result.origins if _cleared(o, rows)} - proved - excused
    # A gap is named by the enclosing module, which another origin may be; what it contains is narrowed by gaps.py.
    rest = [o for o in result.origins if o.get("gap") or o["module"] not in proved | excused | cleared]
    where = " in part" if proof.partly else ""
    wrong = f"{_modules(len(proved))} wrong for its own inputs"
    notes = [f"replay: {proof.checked:,} outputs of mine checked{where}, {wrong}"]
    notes += [f"replay: {kept_notes}" for kept_notes in (*proof.notes, *rounded_caches(proof.caches, right))]
    if shared:
        notes.append(f"replay: {_modules(len(shared))} as far off in golden, first {shared[0]}: not blamed")
    if same:
        notes.append(f"replay: {_modules(len(same))} wrong for its own inputs, and equal to golden's to the bit, first "
                     f"{same[0]}: not blamed")  # fmt: skip
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
    # Stable: in data-flow order otherwise. A wrong weight is proved, though its operator is right.
    rest.sort(key=lambda o: o["module"] in right)
    loaded = [o for o in rest if o.get("evidence") == "values" and str(o["role"]).startswith("param.")]
    named = sorted([*loaded, *first], key=lambda o: (o.get("tier") == SIBLING_OUTLIER, order.get(o["module"], 1 << 60)))
    verdict = FAIL if first else result.verdict
    kept_notes = [n for n in result.notes if not (first and n == messages.NOBODY)]
    machines = {side: [h.plain() for h in habits] for side, habits in proof.machines.items()}
    pairs = with_replayed(result.pairs, first)
    decided = replace(
        result, origins=[*named, *(o for o in rest if o not in loaded)], verdict=verdict, notes=[*notes, *kept_notes],
        machines=machines or result.machines, pairs=pairs,
    )  # fmt: skip
    return decided if decided.origins else _acquitted(decided, proof, rows, cleared, excused)


class _Rows:
    """Which rows of a comparison that differ are explained by its replay, and which pairs are."""

    def __init__(self, result: Comparison, proof: ReplayResult, excused: Collection[str] = ()):
        """excused: modules that created no more than their machine's way of rounding does."""
        self._explained, self._table = proof.explained, result.rows
        self._pairs = result.pairs
        self._compared: dict[str, int] = {}
        self._same = _same_parameters(result)
        self._equal = _equal_inputs(result.pairs, {*proof.caches, *excused})
        self._tokens = {str(f.get("why")) for f in result.tokens.get("flipped", ())} <= _OF_LOGITS

    def why_not(self, at: int, *, every: bool = False) -> str:
        """Why a pair is not explained, "" where it is. every: all of its rows that differ must be, else those that are
        beyond its limit."""
        pair = self._pairs[at]
        place = place_of(pair.tap, pair.role, pair.call)
        if pair.role.startswith("param."):
            return "its values should be equal"
        if (pair.tap, pair.role) == (SAMPLER, TOKEN) and self._tokens:
            return ""  # each side took the best of its own logits, which are compared by themselves
        if not self._same(pair.tap):
            return "its parameters are not golden's"
        if pair.role.startswith(("output", "inplace")) and self._equal(pair):
            return "its inputs are equal to the bit"
        rows = self._differing(at, every)
        if rows is None:
            known = self._whole(place) or (pair.step is not None and self._explained.holds(place, "", pair.step))
        else:
            known = all(self._explained.holds(place, label, position) for label, position in rows)
        return "" if known else self._explained.why.get(place, NOT_REPLAYED)

    def _whole(self, place: str) -> bool:
        """Whether all compared rows of a place are explained. Of an input that is within its limits the table of rows
        has none, and any of them may differ."""
        if not self._compared:
            for p in self._pairs:
                if was_compared(p) and p.rows is not None:
                    at = place_of(p.tap, p.role, p.call)
                    self._compared[at] = self._compared.get(at, 0) + p.rows
        return 0 < self._compared.get(place, 0) == self._explained.count(place)

    def why_not_all(self, tap: str, role: str) -> str:
        """Of a place, and of everything inside of its module: "" where every row that differs is explained."""
        own = (i for i, p in enumerate(self._pairs) if was_compared(p) and not p.role.startswith("param.") and (
            (p.tap, p.role) == (tap, role) or tap in enclosing(p.tap)))  # fmt: skip
        found = [(p, self.why_not(i, every=True)) for i in own if not (p := self._pairs[i]).identical]
        return next((why for _, why in found if why), "" if found else NOT_REPLAYED)

    def _differing(self, at: int, every: bool) -> list[tuple[str, int]] | None:
        """(label, position) of each; None for a tensor without rows."""
        table, pair = self._table, self._pairs[at]
        if table is None or not len(table) or pair.rows is None:
            return None
        start, stop = np.searchsorted(table.pair, [at, at + 1])
        bad = table.error[start:stop] > 0
        if not every and bool((table.ratio[start:stop] > 1.0).any()):
            bad &= table.ratio[start:stop] > 1.0  # else another measure than a row's error is beyond its limit
        if not bad.any():
            return None
        where = zip(table.request[start:stop][bad].tolist(), table.position[start:stop][bad].tolist(), strict=True)
        return [(table.requests[r], p) for r, p in where]


def _cleared(origin: OriginEntry, rows: _Rows) -> bool:
    """Whether an origin is inferred of a module whose replay explains, on both sides and in all rows, what differs
    there. Values that must be equal (a weight, a chosen expert), and constants that golden's module has otherwise, are
    no inference: a replay reads them from each side, right or wrong."""
    inferred = origin.get("tier") != PROVED and not origin.get("setting")
    tap, role = str(origin["module"]), str(origin.get("role", ""))
    made = role.startswith("output") or _is_made_inside(tap, role, str(origin.get("class")))
    return inferred and made and not rows.why_not_all(tap, role)


def _is_made_inside(tap: str, role: str, cls: str) -> bool:
    """Whether a recurrence computes that place, where no module is: what a module inside reads."""
    from vllm_accprobe.opcheck.references.mixers import KINDS

    kind = KINDS.get(cls)
    inside = role.removeprefix(f"{tap}.").replace("/input.", "/")
    return kind is not None and inside in kind.made


def _is_compared(b: ReplayFinding, result: Comparison) -> bool:
    """Whether the row that is blamed has a partner. A golden pack holds few rows, which may be equal where others are
    not; any other dump has the rows that its run computed."""
    packed = any(run.get("packed") for run in (result.golden_run, result.mine_run))
    if not packed or result.measured is None or b.request is None:
        return True
    name = result.measured.setting.name
    parts = (p for u in result.measured.units if u.key[:2] == (b.tap, b.role) for p in u.parts if not p.skip)
    return any(name(key) == (b.request, b.position) for p in parts for key in p.rows.keys.tolist())


def _equal_outputs(pairs: Sequence[Pair]) -> set[tuple[str, str]]:
    """(tap, role) of outputs that were compared and are golden's to the bit: these are never an origin."""
    found: dict[tuple[str, str], bool] = {}
    for p in pairs:
        if was_compared(p) and not p.role.startswith("param."):
            found[p.tap, p.role] = p.bit_identical and found.get((p.tap, p.role), True)
    return {place for place, same in found.items() if same}


def _same_parameters(result: Comparison) -> Callable[[str], bool]:
    """Whether a module's parameters are known to be golden's: a module is right for its own weights, whatever they are.
    Never where golden shows none of any module's."""
    pairs = [p for p in result.pairs if p.role.startswith("param.")]
    other = {p.tap for p in pairs if p.status != PASS and not (p.status == SKIP and _ABSORBED.search(p.role))}
    known = any(p.status == PASS for p in pairs)
    return lambda tap: known and tap not in other


def _equal_inputs(pairs: Sequence[Pair], otherwise: Iterable[str] = ()) -> Callable[[Pair], bool]:
    """Whether all that was captured of what a call read is the same on both sides, up to its step: another output is
    then no enlarged rounding. Later steps of a module may read what earlier ones wrote; what contains modules whose
    outputs differ enlarges these. otherwise: modules whose right results differ with equal inputs, as keys and values
    that were read back from a cache of another format are no equal ones."""
    differ: dict[str, int] = dict.fromkeys(otherwise, -1)
    read: set[str] = set()
    for p in pairs:
        if not was_compared(p) or p.role.startswith("param."):
            continue
        inputs = p.role.startswith("input")
        if inputs:
            read.add(p.tap)
        if not p.identical:
            step = -1 if p.step is None else p.step
            outer = [t for t in (*enclosing(p.tap), ROOT_TAP) if t != p.tap]
            for tap in [p.tap] if inputs else outer:
                differ[tap] = min(step, differ.get(tap, step))
    return lambda p: p.tap in read and differ.get(p.tap, 1 << 60) > (-1 if p.step is None else p.step)


def _does(proof: ReplayResult, tap: str) -> str:
    text = proof.allowed.get(tap)
    return f"computes as its machine does everywhere ({text})" if text else "rounds toward zero"


def _truncation_alone(origin: OriginEntry, proof: ReplayResult) -> bool:
    """Whether what a comparison takes for an error that a module of mine created is what its replay saw it create, by
    rounding toward zero, or another habit of its machine, and nothing else: limits of a comparison are those of
    rounding to nearest. A weight that is not golden's adds to that, and stays an origin."""
    most = proof.truncating.get(str(origin["module"]))
    created = origin.get("created")
    of_output = str(origin.get("role", "")).startswith("output")
    return most is not None and of_output and created is not None and created <= most


def _acquitted(
    result: Comparison, proof: ReplayResult, rows: _Rows, cleared: Collection[str], excused: Collection[str]
) -> Comparison:  # fmt: skip
    """``result``, passed where it failed for nothing but size and every row that is beyond its limits is explained:
    both sides computed it rightly from what they read. A model may enlarge rounding; a second golden run (`--floor`)
    would show the same."""
    beyond = [i for i, p in enumerate(result.pairs) if p.status == FAIL]
    if not beyond or not (messages.NOBODY in result.notes or cleared or excused):
        return result
    left = [(result.pairs[i], why) for i in beyond if (why := rows.why_not(i))]
    if left:
        pair, why = min(left, key=lambda found: (found[0].order, found[0].step or 0))
        count = f"{len(left)} of {len(beyond)} pairs beyond their limits are not explained"
        return replace(result, notes=[f"replay: {count}, first {pair.mine}: {why}", *result.notes])
    taps = len({result.pairs[i].tap for i in beyond})
    reason = "this model enlarges rounding", "enlarged rounding"
    if excused:
        reason = "they round toward zero", "rounding toward zero"
    if any(tap in proof.allowed for tap in excused):
        reason = "they compute as their machine does everywhere", "a habit of its machine"
    if proof.caches:
        reason = "a cache of 8 bits rounds what they read", "the rounding of an 8-bit cache"
    text = (
        f"replay: {len(beyond)} pairs of {taps} modules are beyond their limits, and each such row was checked on both "
        f"sides: {reason[0]}, no operator is wrong"
    )
    message = f"{reason[1]}: both sides are right for what they read (replay)"
    pairs = [replace(p, status=PASS, message=message) if p.status == FAIL else p for p in result.pairs]
    notes = [text, *(n for n in result.notes if n != messages.NOBODY)]
    return replace(result, pairs=pairs, verdict=PASS, first_divergence=None, notes=notes)


def _before_sampler(entry: OriginEntry, pairs: Sequence[Pair]) -> OriginEntry:
    """``entry``, as one of the gap in front of the sampler where it is about the best logits: those are what the
    model's ``compute_logits`` returned, and the sampler's own work begins behind them."""
    if entry["module"] != SAMPLER or entry["role"] not in (TOP_LOGITS, TOP_IDS):
        return entry
    made = [p for p in pairs if was_compared(p) and p.role.startswith("output") and p.tap not in (SAMPLER, ROOT_TAP)]
    last = max(made, key=lambda p: p.order, default=None)
    classes = {p.tap: p.cls for p in pairs if p.tap == ROOT_TAP}
    return entry_of(entry, Gap(last.tap if last else "", SAMPLER, (ROOT_TAP,)), classes, {})


def _modules(n: int) -> str:
    return "no module is" if not n else f"{n} module is" if n == 1 else f"{n} modules, each"


def _of_sampler(b: ReplayFinding) -> dict[str, Any] | None:
    """The cause that the replay of a sampler found by its request's parameters (judge/sampling_rules.py)."""
    how = b.message.rpartition("; ")[2].removesuffix(")")
    if b.tap != SAMPLER or not how.startswith(("as ", "with the ")):
        return None
    text = f"the logits are {how}" if how.startswith("as ") else f"the logits are made {how}"
    return {"family": "setting", "text": text, "parameter": None, "residual": 0.0, "chance": None}


def _entry(b: ReplayFinding, known: OriginEntry | None) -> OriginEntry:
    """compare.json's entry of an origin; where the comparison had found it, its words stay."""
    at: dict[str, Any] = {"propagated": b.propagated, "evidence": "replay", "tier": b.tier, "times": b.times}
    at |= {"chance": b.chance, "layers": dict(b.layers) if b.layers else None, "gap": None}
    at |= {"decided_by": b.measure} if b.measure else {}
    # another constant, where there is one, stays beside a cause
    at["cause"] = {**((known and known.get("cause")) or {}), **(b.cause or _of_sampler(b) or {})} or None
    if b.propagated is not None:
        at |= {"created": b.created, "request": b.request, "position": b.position, "phase": b.phase}
    if known is not None:
        # The limit that it breaks so many times is that of its replay, which is another than the comparison's.
        created, by = at.get("created", known.get("created")), b.times or b.severity
        if created and by and math.isfinite(created) and math.isfinite(by):
            at["floor"] = created / by
        if str(known.get("role")).startswith("input"):  # what was blamed there was no result of the module
            at |= {"role": b.role, "shape": b.message}
        return cast("OriginEntry", known | at)
    return cast("OriginEntry", at | {
        "module": b.tap, "class": b.cls, "role": b.role, "request": b.request, "position": b.position, "phase": b.phase,
        "created": b.created, "propagated": b.propagated,
        "floor": b.created / by if (by := b.times or b.severity) and math.isfinite(by) else 0.0,
        "rows": b.rows, "worst": b.created, "shape": b.message,
    })  # fmt: skip
