"""Which rows of a comparison are explained: both sides computed them rightly from what each of them read.

The problem: a row may differ because its operator is wrong, or because what the operator read differed already. Only
the second is no fault of the operator, and only where everything that it read is known. The idea: a row of an output is
explained where the replay checked it on both sides and found it right, and what it read is compared or explained:
golden's reads and mine's, both carried through the reference, then differ by what the outputs differ by. A row of an
input is explained where it is, to the bit, an explained output of the same step, or a slice, sum or product of such
outputs (align/derived.py). What has no reference, was not replayed, or comes from where nothing was captured is not
explained, and the reason is kept; neither is what the two sides' modules would compute otherwise of the same reads
(make_proof.py), and a rank's share that nobody adds up.
Not here: the replays (opcheck/run/pair.py), what follows for the verdict (apply_proof.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_accprobe.align.derived import Derived, Relations, plain, spread
from vllm_accprobe.align.mapping import ROPE
from vllm_accprobe.align.names import enclosing
from vllm_accprobe.align.tokens import SideRows
from vllm_accprobe.comparison.plan.make_plan import Plan
from vllm_accprobe.comparison.plan.unit import Group, Unit, unsummed
from vllm_accprobe.comparison.row_table import row_labels
from vllm_accprobe.dump.decode import Where, decode, refused
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.record_table import of_moment
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, CheckResult

Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""Label of a request (or image) → half-open ranges of positions, ascending. Label "" holds steps of mine: those whose
tensors without rows are explained."""
NOT_REPLAYED = "it was not replayed"
WRONG = "it is wrong for its own inputs"
GOLDEN_TOO = "golden: "
UNSEEN = "what it read was computed where nothing was captured"
TURNED = "mine's rotary embedding does not turn what golden's reads as golden does"
UNSUMMED = "nobody adds up the ranks' partial sums of it"
_NEAREST = 48
"""Chosen: so many tensors in front of an input are tried as what it was built from; a layer of a model has about 30."""
_NONE = np.zeros(0, np.int64)
_NO_REASONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Explained:
    """What two replays explain, of the places that were requested. A place is ``tap/role#call`` of mine.

    rows: by place, the rows that both sides computed rightly from what they read; why: by place, the reason of the
    first row that is not among them."""

    rows: Mapping[str, Ranges] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    def holds(self, place: str, label: str, position: int) -> bool:
        """Whether this row is explained."""
        return any(a <= position < b for a, b in self.rows.get(place, {}).get(label, ()))

    def count(self, place: str) -> int:
        """How many rows of a place are explained, in all steps."""
        return sum(b - a for label, ranges in self.rows.get(place, {}).items() if label for a, b in ranges)

    def plain(self) -> dict[str, Any]:
        """As JSON keeps it: equal sets of rows are written once."""
        sets: list[dict[str, list[list[int]]]] = []
        known: dict[str, int] = {}
        places = {}
        for place, ranges in self.rows.items():
            value = {label: [list(r) for r in found] for label, found in ranges.items()}
            at = known.setdefault(repr(value), len(sets))
            if at == len(sets):
                sets.append(value)
            places[place] = at
        return {"sets": sets, "places": places, "why": dict(self.why)}

    @staticmethod
    def of_plain(value: Any, where: Where = "") -> Explained:
        """Raises DecodeError for what `plain` never wrote."""
        found = decode(_Stored, value, where)
        if any(not 0 <= n < len(found.sets) for n in found.places.values()):
            raise refused(found.places, (where, "places"), "places of rows that are there")
        return Explained({place: found.sets[n] for place, n in found.places.items()}, found.why)


@dataclass(frozen=True)
class _Stored:
    """As JSON keeps it. sets: label → half-open ranges; places: place → which set."""

    sets: list[dict[str, list[tuple[int, int]]]]
    places: dict[str, int]
    why: dict[str, str]


def place_of(tap: str, role: str, call: int) -> str:
    return f"{tap}/{role}#{call}"


def explain(
    golden: Dump, mine: Dump, checked: tuple[Iterable[CheckResult], Iterable[CheckResult]], wanted: Collection[str],
    taps: Collection[str], planned: Callable[[], Plan], otherwise: Mapping[str, str] | None = None,
    computed: Callable[[Plan], Callable[[Unit], tuple[np.ndarray, str]]] | None = None,
) -> Explained:  # fmt: skip
    """checked: what the replays of golden and mine gave; wanted: places; taps: modules of which all places, and all
    places inside of them, are wanted as well; planned: makes the plan of the two dumps, where one is needed;
    otherwise: by tap, why golden's module is another operator (make_proof.py); computed: of a plan, which rows of an
    output golden computed rightly though it has no call of it, and why others were not checked (golden_reads.py)."""
    if not wanted and not taps:
        return Explained()
    plan = planned()
    records = [[r for u in plan.units if not u.is_param for g in getattr(u, side) for r in g.records]
               for side in ("golden", "mine")]  # fmt: skip
    sides = (
        _Replayed(golden, plan.tokens.golden, checked[0], {}, records[0]),
        _Replayed(mine, plan.tokens.mine, checked[1], otherwise or {}, records[1]),
    )
    rows: dict[str, Ranges] = {}
    why: dict[str, str] = {}
    inside = frozenset(taps)
    units = [u for u in plan.units if not u.is_param and (
        place_of(*u.key) in wanted or u.key[0] in inside or not inside.isdisjoint(enclosing(u.key[0])))]  # fmt: skip
    right: Callable[[Unit], tuple[np.ndarray, str]] | None = None
    if computed is not None and any(_rotations(g.records) for u in units for g in u.golden):
        right, sides[0].checks_turns = computed(plan), True
        for unit in (u for u in plan.units if u.key[1].startswith(("output", "inplace"))):
            if any(_rotations(g.records) for g in unit.golden):
                sides[0].learn_turned(unit.golden, *right(unit))
    for unit in units:
        if computed is None:
            continue
        if sides[0].groups(unit.golden)[2] not in ("", WRONG) and not sides[1].groups(unit.mine)[2]:
            right = right or computed(plan)
            sides[0].learn(unit.golden, *right(unit))
    for unit in units:
        place = place_of(*unit.key)
        rows[place], reason = _unit(unit, sides, plan)
        if reason:
            why[place] = reason
    return Explained(rows, why)


def _unit(unit: Unit, sides: tuple[_Replayed, _Replayed], plan: Plan) -> tuple[Ranges, str]:
    found = [side.groups(groups) for side, groups in zip(sides, (unit.golden, unit.mine), strict=True)]
    (golden, golden_whole, golden_why), (mine, mine_whole, mine_why) = found
    reason = mine_why or (GOLDEN_TOO + golden_why if golden_why else "")
    ranges = row_labels(plan.tokens.names, np.intersect1d(golden, mine, assume_unique=True))
    # A tensor without rows belongs to its step, and which step of golden is its partner is not known here: all must be.
    whole = mine_whole if not golden_why and (golden_whole or len(golden)) else ()
    return ({**ranges, "": [(step, step + 1) for step in sorted(whole)]} if whole else ranges), reason


class _Replayed:
    """One dump: which of its records are explained, and why the others are not."""

    def __init__(
        self, dump: Dump, rows: SideRows, checked: Iterable[CheckResult], otherwise: Mapping[str, str] = _NO_REASONS,
        compared: Collection[Record] = (),
    ):  # fmt: skip
        """compared: what the plan compares with the other side."""
        self._spread = {(r.rank, r.step, r.seq): r for r in spread(compared)}
        """Tensors without rows in the dump, as the plan has them (align/derived.with_rows)."""
        self._compared = {(r.tap, r.role) for r in _parts(compared)}
        self._dump, self._rows, self._otherwise = dump, rows, otherwise
        self._unsummed = unsummed(dump)
        self._right: dict[tuple[int, int | None, int], tuple[int, ...]] = {}
        """Of what is right, the rows that were not checked."""
        self._why: dict[tuple[int, int | None, int], str] = {}
        self._calls: dict[tuple[int, int | None, str, int], str] = {}
        self._pooled: set[tuple[int, str, str]] = set()
        """Outputs of which no call is wrong, and all of them together are."""
        for c in checked:
            at = c.rank, c.step, c.seq
            if c.status == FAIL and at in self._right:
                self._pooled.add((c.rank, c.tap, c.role))
            elif c.status == PASS and c.role:
                self._right[at] = c.left + _left_out(c.replayed, c.shape)
                if self._right[at]:
                    self._why[at] = c.unchecked_because
            else:
                why = WRONG if c.status == FAIL else c.unchecked_because or c.message
                self._why[at] = why
                self._calls[c.rank, c.step, c.tap, c.call] = why
        self._steps: dict[tuple[int, int | None], list[Record]] = {}
        self._made: dict[tuple[int, int | None], dict[str, Record]] = {}
        self._reads: dict[tuple[int, int | None], dict[tuple[str, int], list[Record]]] = {}
        """By call of a module that holds none, floating-point inputs with rows that are compared under no name. (What
        holds modules hands on most of what it reads.)"""
        self._known: dict[tuple[int, int | None, int], tuple[np.ndarray | None, str]] = {}
        self._computed: dict[tuple[int, int | None, int], tuple[np.ndarray | None, str]] = {}
        self._relations: tuple[tuple[int, int | None], Relations] | None = None
        self.checks_turns = False
        self._turned: dict[_Made, tuple[np.ndarray, str]] = {}
        """By rotation of golden, the rows that are what mine's rotary embedding makes of the same inputs."""

    def groups(self, groups: Sequence[Group]) -> tuple[np.ndarray, set[int], str]:
        """(keys of the rows that are explained, steps whose tensors without rows are, why the first other is not)."""
        good, bad = [_NONE], [_NONE]
        whole: set[int] = set()
        why = ""
        for group in groups:
            every = self._keys(group.first) if group.where is not None else None
            found: np.ndarray | None = every
            known = True
            found_by = [self._with_reads(record) for record in _parts(group.records)]
            found_by += [self._turned.get(_made(r), (None, TURNED)) for r in self._turning(group.records)]
            for keys, reason in found_by:
                why = why or reason
                if keys is None:
                    known = False
                elif found is not None:
                    found = np.intersect1d(found, keys)
            if every is None:
                if known and group.moment[1] is not None:
                    whole.add(group.moment[1])
                continue
            found = found if known and found is not None else _NONE
            good.append(found)
            bad.append(np.setdiff1d(every, found))
        return np.setdiff1d(np.unique(np.concatenate(good)), np.concatenate(bad)), whole, why

    def _with_reads(self, r: Record) -> tuple[np.ndarray | None, str]:
        """`record`, without the rows of an output of which the module read something that is neither compared nor
        explained: what was computed in front of it may be wrong, and no pair would show it."""
        (keys, why), moment, made = self.record(r), (r.rank, r.step), r
        if keys is None:
            return keys, why
        if moment not in self._made:
            self._index(moment)
        while (*moment, made.seq) not in self._right and (earlier := self._handed_on(made)) is not None:
            made = earlier
        checked = (*moment, made.seq) in self._right and (*moment, made.seq) not in self._computed
        for x in self._reads[moment].get((made.tap, made.call), ()) if checked else ():
            known, reason = self.record(x)
            why = why or reason
            if known is None:
                return None, why
            keys = np.intersect1d(keys, known) if self._keys(r) is not None else keys
        return keys, why

    def _turning(self, records: Iterable[Record]) -> list[Derived]:
        return _rotations(records) if self.checks_turns else []

    def learn_turned(self, groups: Iterable[Group], keys: np.ndarray, left: str) -> None:
        """These rows of golden are what mine's rotary embedding makes of what golden's reads. A rotation of golden is
        made here, of its cosines: that mine is right for its own settings says nothing of what these should be."""
        for r in (r for g in groups for r in _rotations(g.records)):
            every = self._keys(r)
            if every is not None:
                self._turned[_made(r)] = np.intersect1d(every, keys), left or TURNED

    def learn(self, groups: Iterable[Group], keys: np.ndarray, left: str) -> None:
        """These rows of the groups are right, too, where a group is a tensor of the dump as it is, and no replay found
        it wrong. left: why others were not checked."""
        found: dict[tuple[int, int | None, int], tuple[np.ndarray | None, str]] = {}
        for r in (own for g in groups for one in g.records if (own := plain(one)) is not None):
            every, (known, why) = self._keys(r), self._with_reads(r)
            if every is None or why in ("", WRONG) or not (len(keys) or left):
                continue
            more = np.union1d(np.intersect1d(every, keys), _NONE if known is None else known)
            found[r.rank, r.step, r.seq] = more if len(more) else None, left or why if len(more) < len(every) else ""
        if found:
            self._computed |= found
            self._known.clear()

    def record(self, r: Record) -> tuple[np.ndarray | None, str]:
        """(keys of its explained rows, or an empty array for a tensor without rows that is; None for nothing, why)."""
        at = r.rank, r.step, r.seq
        if at not in self._known:
            self._known[at] = None, UNSEEN  # what is built from itself is built from nothing
            self._known[at] = self._find(r, at)
        return self._known[at]

    def _find(self, r: Record, at: tuple[int, int | None, int]) -> tuple[np.ndarray | None, str]:
        if (r.rank, r.tap, r.role) in self._pooled:
            return None, WRONG
        if at in self._unsummed:
            return None, UNSUMMED
        if at in self._computed:
            return self._computed[at]
        if r.tap in self._otherwise and not r.role.startswith("input"):
            return None, self._otherwise[r.tap]
        if at in self._right:
            keys, left = self._keys(r), self._right[at]
            if keys is None:
                return (None, self._why[at]) if left else (_NONE, "")
            heads = self._spread[at].shape[1] if at in self._spread else 1
            return np.delete(keys, [n // heads for n in left if n // heads < len(keys)]), self._why.get(at, "")
        handed_on = self._handed_on(r)
        if handed_on is not None and self._why.get(at) != WRONG:
            return self.record(handed_on)
        if not r.role.startswith("input"):
            return None, self._why.get(at) or self._calls.get((r.rank, r.step, r.tap, r.call)) or NOT_REPLAYED
        makers = self._computed_from(r)
        if not makers:
            return None, UNSEEN
        every = self._keys(r)
        why = ""
        for maker in makers:
            keys, reason = self.record(maker)
            why = why or reason
            if keys is None:
                return None, why
            if every is not None and self._keys(maker) is not None:
                every = np.intersect1d(every, keys)
        return (every if every is not None else _NONE), why

    def _handed_on(self, r: Record) -> Record | None:
        """The earlier output with the bytes of ``r``: the first to have them made them, and who encloses it hands them
        on."""
        moment = r.rank, r.step
        if moment not in self._made:
            self._index(moment)
        same = self._made[moment].get(r.hash or "")
        return same if same is not None and same.seq < r.seq else None

    def _computed_from(self, r: Record) -> list[Record]:
        """The tensors of the same step that ``r``, an input, is a slice, a sum or a product of, to the bit."""
        moment = r.rank, r.step
        if self._relations is None or self._relations[0] != moment:
            self._relations = moment, Relations(self._dump, rows=None)
        before = [x for x in self._steps[moment] if x.seq < r.seq][-_NEAREST:]
        shown = {str(x.seq): _OfRecord(x) for x in before}
        rows = self._spread.get((*moment, r.seq), r).shape[:1]
        alike = not rows or not rows[0] or r.row_dim or (rows == r.shape[:1] and len(r.shape) < 3)
        flat = [] if alike else [replace(r, shape=(*rows, math.prod(r.shape) // rows[0]))]
        found = (self._relations[1].explain(_OfRecord(one), list(shown.items())) for one in (r, *flat))
        relation = next((each for each in found if each is not None), None)
        return [] if relation is None else [shown[name].record for name in relation.takes]

    def _index(self, moment: tuple[int, int | None]) -> None:
        own = sorted(of_moment(self._dump.records, *moment), key=lambda r: r.seq)
        made: dict[str, Record] = {}
        distinct: dict[str, Record] = {}
        reads = self._reads[moment] = defaultdict(list)
        holding = {tap for inner in {r.tap for r in own} for tap in enclosing(inner)}
        compared = {r.hash for r in own if r.hash is not None and (r.tap, r.role) in self._compared}
        for r in own:
            place = r.tap, r.role
            if r.role.startswith("input") and place not in self._compared and r.hash not in compared and (
                r.tap not in holding and DTYPES[r.dtype].kind == "float" and self._keys(r) is not None
            ):  # fmt: skip
                reads[r.tap, r.call].append(r)
            if r.hash is None:
                continue
            if r.role.startswith(("output", "inplace")):
                made.setdefault(r.hash, r)
            distinct.setdefault(r.hash, r)
        self._made[moment] = made
        # One tensor for each content: an input that no module gave out (the model's own) may be part of a sum, too.
        self._steps[moment] = sorted((made.get(h, r) for h, r in distinct.items()), key=lambda r: r.seq)

    def _keys(self, r: Record) -> np.ndarray | None:
        """The row keys of a tensor, None where it has no rows."""
        r = self._spread.get((r.rank, r.step, r.seq), r)
        if r.rows is None or r.step is None:
            return None
        rows = self._rows.rows.get((self._rows.cells.get(r.rank, 0), r.step, r.rows))
        return None if rows is None else rows.keys


@dataclass(frozen=True)
class _OfRecord:
    """A record as align/derived.py reads it."""

    record: Record

    @property
    def dtype(self) -> str:
        return self.record.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape


def _left_out(runs: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[int, ...]:
    """The rows of a tensor that a replay left out. runs: those that it took, () for all."""
    if not runs:
        return ()
    taken = np.zeros(shape[0], bool)
    for first, stop in runs:
        taken[first:stop] = True
    return tuple(np.flatnonzero(~taken).tolist())


def _parts(records: Iterable[Record]) -> list[Record]:
    """The records of a dump that these are built from."""
    found: list[Record] = []
    for r in records:
        found += _parts(r.parts) if isinstance(r, Derived) else [r]
    return found


_Made = tuple[tuple[tuple[int, int | None, int], ...], tuple[int, ...]]
"""Of which tensors a rotation is made, and the form of it."""


def _made(r: Derived) -> _Made:
    return tuple((p.rank, p.step, p.seq) for p in _parts(r.parts)), r.heads


def _rotations(records: Iterable[Record]) -> list[Derived]:
    """Those of ``records``, and of what they are made of, that are turned by an angle."""
    found: list[Derived] = []
    for r in (x for x in records if isinstance(x, Derived)):
        found += [r] if r.join == ROPE else _rotations(r.parts)
    return found
