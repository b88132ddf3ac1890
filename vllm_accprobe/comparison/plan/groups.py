"""One side's records as groups by place and moment: columns, and a `Group` where one is needed.

The problem: a dump has up to millions of tensors, most of which their lines alone decide, and an object for each of
them costs more than all else. The idea: `PlacedRecords` sorts the records once by (tap, role, call), moment and rank;
`Groups` are some of these groups with the plan of each form (which sites on which ranks) made once, and a `Group` made
when it is requested, and then kept. What a layout does not tell, the other side's shape may (`merged`). Not here: the
joining plans (align/ranks.py), which places are compared (make_plan.py), measuring (measure/).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from vllm_accprobe.align.data_flow import Key
from vllm_accprobe.align.ranks import ONE, MergePlan, RankPiece, Unmergeable, plan_merge, plan_merged
from vllm_accprobe.align.tokens import Space
from vllm_accprobe.comparison.plan.unit import DEALT_OUT, Group, Moment
from vllm_accprobe.dump.record_table import ListedRecords, RecordTable, TensorSite, table_of
from vllm_accprobe.dump.schema import OWN, REPLICATED, Record

Form = tuple["MergePlan | None", str, int]
"""(how records are joined, why they are not, the dimension of their rows)."""


class Spaces(list[Space]):
    """moments: each `Groups.moments` once: most places have the same."""

    @cached_property
    def moments(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def any_vision(self) -> bool:
        return bool(self.vision.any())

    @cached_property
    def vision(self) -> np.ndarray:
        """bool: which are of images; and False, for what has no space (-1)."""
        return np.array([*(name.startswith("vision") for _, _, name in self), False], bool)


_NONE = np.zeros(0, np.int64)
NONE = np.array(None, object)
"""What a hash is compared with that is none."""


class PlacedRecords:
    """Groups are numbered by place and then moment, both in the order in which the journals have them.

    order: int64, the records by group and rank, of a rank the last; start: int64 [groups + 1], where a group's begin in
    it; cell, step (-1: none): int64 [groups]; space: int64 [groups], index into ``spaces``, -1 without rows. form:
    int64 [groups], equal for groups whose records have the same sites, ranks, and hashes: none, the first record's, or
    others. plain: bool [groups], whether one record is the whole, whatever the other side has."""

    def __init__(self, records: Sequence[Record], cell: np.ndarray):
        """cell: int64 [records]."""
        self.records = t = table_of(records)
        c = t.columns
        numbers: dict[tuple[str, str], int] = {}
        place = t.by_site(lambda site: numbers.setdefault((site.tap, site.role), len(numbers)), np.int64)
        step = np.where(t.ran, c["step"], -1)
        key, _ = _numbered(place, c["call"])
        moment = _numbered(cell, step)[0]
        group = _numbered(key, moment)[0]
        order = np.lexsort((c["rank"], group, key))
        last = np.append((np.diff(group[order]) != 0) | (np.diff(c["rank"][order]) != 0), True)[: len(order)]
        order = order[last]
        own = group[order]
        begins = np.flatnonzero(np.append(True, own[1:] != own[:-1])[: len(own)])
        self.order, self.start = order, np.append(begins, len(order))
        firsts = order[begins]
        self.cell, self.step = cell[firsts], step[firsts]
        names: dict[str, int] = {}
        rows = t.by_site(lambda s: -1 if s.rows is None else names.setdefault(s.rows, len(names)), np.int64)[firsts]
        rows[self.step < 0] = -1
        number, at = _numbered(_numbered(self.cell, self.step)[0], rows)
        known = list(names)
        named = zip(self.cell[at].tolist(), self.step[at].tolist(), rows[at].tolist(), strict=True)
        self.spaces = Spaces((cell, step, known[i] if i >= 0 else "") for cell, step, i in named)
        self.space = np.where(rows < 0, -1, number)
        self.form = self._forms(begins)
        self.plain = t.of_sites(_is_plain)[firsts] & (np.diff(self.start) == 1)
        ends = np.append(np.flatnonzero(np.diff(key[firsts])) + 1, len(firsts)) if len(firsts) else ()
        self.keys: dict[Key, np.ndarray] = {}
        calls = c["call"][firsts].tolist()
        for start, stop in pairwise((0, *ends)):
            site = t.sites.all[c["site"][firsts[start]]]
            self.keys[site.tap, site.role, calls[start]] = np.arange(start, stop)

    def _forms(self, begins: np.ndarray) -> np.ndarray:
        c, size = self.records.columns, np.diff(self.start)
        hashes = c["hash"][self.order]
        first = hashes[begins]
        form = np.array([h is None for h in first.tolist()], np.int64) + 2 * (first == "")
        for member in range(int(size.max(initial=0))):
            there = np.flatnonzero(size > member)
            at = begins[there] + member
            own = np.zeros(len(begins), np.int64)
            record = self.order[at]
            kind = np.where(np.equal(hashes[at], NONE), 2, hashes[at] != first[there])
            own[there] = 1 + _numbered(c["site"][record], c["rank"][record])[0] * 3 + kind
            form = _numbered(form, own)[0]
        return form

    def sites(self, groups: np.ndarray) -> Counter[TensorSite]:
        """How many records of these groups each site has."""
        if len(groups) and (np.diff(groups) == 1).all():  # those of one key lie side by side
            at = self.order[self.start[groups[0]] : self.start[groups[-1] + 1]]
        else:
            at = np.concatenate([self.order[:0], *(self.order[self.start[g] : self.start[g + 1]] for g in groups)])
        found = Counter(self.records.columns["site"][at].tolist())
        return Counter({self.records.sites.all[i]: n for i, n in found.items()})

    def calls(self, tap: str, role: str) -> list[int]:
        return sorted(self._calls[tap, role])

    @cached_property
    def _calls(self) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for tap, role, call in self.keys:
            found[tap, role].append(call)
        return found

    def vision(self, key: Key) -> bool:
        return self._vision and any((site.rows or "").startswith("vision") for site in self.sites(self.keys[key]))

    @cached_property
    def _vision(self) -> bool:
        return any((site.rows or "").startswith("vision") for site in self.records.sites.all)

    def find(self, key: Key, any_call: bool) -> np.ndarray:
        """The groups of one key; of all calls in a vision tower, where images may be batched in another way."""
        if not any_call:
            return self.keys.get(key, _NONE)
        return np.concatenate([_NONE, *(self.keys[key[0], key[1], c] for c in self.calls(key[0], key[1]))])

    def of_one_rank(self) -> dict[Key, list[Record]]:
        found: dict[Key, list[Record]] = {}
        for key, groups in self.keys.items():
            ran = groups[self.step[groups] >= 0]
            ran = ran[np.lexsort((self.step[ran], self.cell[ran]))]
            if len(ran):
                found[key] = self.records.made(self.order[self.start[ran]])
        return found

    def hint(self, groups: np.ndarray) -> TensorSite | None:
        """Of the first of ``groups`` that one rank has alone."""
        alone = groups[self.start[groups + 1] - self.start[groups] == 1]
        return self.site(int(alone[0])) if len(alone) else None

    def site(self, group: int) -> TensorSite:
        """Of the first record."""
        return self.records.sites.all[self.records.columns["site"][self.order[self.start[group]]]]

    def pieces(self, group: int) -> tuple[TensorSite, list[RankPiece]]:
        """The site of a group's first record, and what is known of its records."""
        at = self.order[self.start[group] : self.start[group + 1]]
        columns = self.records.columns
        sites = [self.records.sites.all[i] for i in columns["site"][at].tolist()]
        known = zip(sites, columns["rank"][at].tolist(), columns["hash"][at].tolist(), strict=True)
        return sites[0], [RankPiece(rank, s.layout, s.shape, s.dtype, digest) for s, rank, digest in known]


class SeenTensor(NamedTuple):
    """As in `Record`."""

    step: int | None
    hash: str | None
    dtype: str
    shape: tuple[int, ...]


class Groups(Sequence[Group]):
    """records, order, spaces: as `PlacedRecords`; start, size: int64 [n], where the records of each group lie in
    ``order``; cell, step, space: as there. form: int64 [n], index into ``forms``."""

    def __init__(
        self, records: RecordTable, order: np.ndarray, start: np.ndarray, size: np.ndarray, cell: np.ndarray,
        step: np.ndarray, spaces: Spaces, space: np.ndarray, forms: Sequence[Form], form: np.ndarray,
    ):  # fmt: skip
        self.records, self.order, self.start, self.size = records, order, start, size
        self.cell, self.step, self.spaces, self.space = cell, step, spaces, space
        self.forms, self.form = forms, form
        self._made: list[Group | None] = [None] * len(start)

    @staticmethod
    def placed(placed: PlacedRecords, own: slice | np.ndarray, forms: Sequence[Form], form: np.ndarray) -> Groups:
        start, stop = placed.start[:-1][own], placed.start[1:][own]
        return Groups(placed.records, placed.order, start, stop - start, placed.cell[own], placed.step[own],
                      placed.spaces, placed.space[own], forms, form)  # fmt: skip

    @staticmethod
    def of(groups: Sequence[Group]) -> Groups:
        if isinstance(groups, Groups):
            return groups
        records = ListedRecords([r for g in groups for r in g.records])
        size = np.array([len(g.records) for g in groups], np.int64)
        known: dict[tuple[int, str, int], int] = {}
        form = np.array([known.setdefault((id(g.merge), g.problem, g.row_dim), len(known)) for g in groups], np.int64)
        forms: list[Form] = [(None, "", 0)] * len(known)
        for g, i in zip(groups, form.tolist(), strict=True):
            forms[i] = g.merge, g.problem, g.row_dim
        numbers: dict[Space, int] = {}
        space = np.array(
            [-1 if g.where is None else numbers.setdefault(g.where, len(numbers)) for g in groups], np.int64
        )
        cell, step = (np.array([-1 if g.moment[i] is None else g.moment[i] for g in groups], np.int64) for i in (0, 1))
        spaces = Spaces(numbers)
        found = Groups(records, np.arange(len(records)), np.cumsum(size) - size, size, cell, step, spaces, space,
                       forms, form)  # fmt: skip
        found._made = list(groups)
        return found

    def __len__(self) -> int:
        return len(self.start)

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self._all(range(len(self))[at])
        found = self._made[at]
        return self._all([range(len(self))[at]])[0] if found is None else found

    def __iter__(self) -> Iterator[Group]:
        return iter(self._all(range(len(self))))

    def _all(self, which: Sequence[int]) -> list[Group]:
        new = [i for i in which if self._made[i] is None]
        if new:
            at = np.array(new)
            ends = np.cumsum(self.size[at]).tolist()
            stretches = zip(self.start[at].tolist(), self.size[at].tolist(), strict=True)
            records = self.records.made(np.concatenate([self.order[s : s + n] for s, n in stretches]))
            each = (x[at].tolist() for x in (self.cell, self.space, self.form))
            for i, begin, end, cell, space, form in zip(new, (0, *ends[:-1]), ends, *each, strict=True):
                own, where = tuple(records[begin:end]), None if space < 0 else self.spaces[space]
                self._made[i] = Group(own, (cell, own[0].step), where, *self.forms[form])
        return [g for i in which if (g := self._made[i]) is not None]

    @staticmethod
    def joined(some: Sequence[tuple[Groups, np.ndarray]]) -> Groups:
        """Some groups of each, one after the other: all of one form, and of one side's records."""
        first, at = some[0]
        start, size, cell, step, space = (np.concatenate([getattr(groups, name)[which] for groups, which in some])
                                          for name in ("start", "size", "cell", "step", "space"))  # fmt: skip
        return Groups(first.records, first.order, start, size, cell, step, first.spaces, space,
                      [first.forms[first.form[at[0]]]], np.zeros(len(start), np.int64))  # fmt: skip

    def only(self, which: np.ndarray) -> Groups:
        """Some of them, in this order."""
        start, size, cell, step = (x[which] for x in (self.start, self.size, self.cell, self.step))
        found = Groups(self.records, self.order, start, size, cell, step, self.spaces, self.space[which], self.forms,
                       self.form[which])  # fmt: skip
        found._made = [self._made[i] for i in which.tolist()]
        return found

    def moment(self, at: int) -> Moment:
        step = int(self.step[at])
        return int(self.cell[at]), None if step < 0 else step

    @cached_property
    def moments(self) -> tuple[int, bytes, bytes, bytes]:
        """Equal for groups of the same moments and spaces, in the same order, as long as the spaces live."""
        name = id(self.spaces), self.space.tobytes(), self.cell.tobytes(), self.step.tobytes()
        return self.spaces.moments.setdefault(name, name)

    @cached_property
    def every(self) -> np.ndarray:
        """Indices of the records of all groups."""
        if len(self) and (self.size == 1).all():
            return self.order[self.start]
        each = zip(self.start.tolist(), self.size.tolist(), strict=True)
        return np.concatenate([self.order[:0], *(self.order[s : s + n] for s, n in each)])

    @cached_property
    def hashed(self) -> np.ndarray:
        """The groups whose first record has a hash."""
        return np.flatnonzero(np.not_equal(self.records.columns["hash"][self.order[self.start]], NONE))

    def seen(self, steps: Collection[int]) -> list[SeenTensor]:
        """The first records of groups of these steps that have a hash."""
        own = np.array([s in steps for s in self.step[self.hashed].tolist()], bool)
        at = self.hashed[own] if len(own) else self.hashed
        record = self.order[self.start[at]]
        c, sites = self.records.columns, self.records.sites.all
        each = zip(self.step[at].tolist(), c["hash"][record].tolist(), c["site"][record].tolist(), strict=True)
        return [SeenTensor(None if step < 0 else step, digest, sites[i].dtype, sites[i].shape)
                for step, digest, i in each]  # fmt: skip

    def of_form(self) -> Iterator[tuple[Form, np.ndarray]]:
        """Each form, and which groups have it."""
        if len(self.forms) == 1:
            yield self.forms[0], np.arange(len(self))
            return
        for i, form in enumerate(self.forms):
            yield form, np.flatnonzero(self.form == i)

    def hashes(self, which: np.ndarray, member: int) -> np.ndarray:
        """Of one record of some groups: str or None."""
        return self.records.columns["hash"][self.order[self.start[which] + member]]

    def unequal_copies(self) -> np.ndarray:
        """bool [n]: whether ranks that should hold the same have different hashes."""
        found = np.zeros(len(self), bool)
        for (plan, _, _), which in self.of_form():
            for copies in plan.copies if plan is not None else ():
                seen = self.hashes(which, copies[0])
                for i in copies[1:]:
                    other = self.hashes(which, i)
                    seen = np.where(np.equal(seen, NONE), other, seen)
                    found[which] |= ~np.equal(other, NONE) & np.not_equal(other, seen)
        return found

    @property
    def dtype(self) -> str:
        """Of the first one."""
        plan = self.forms[self.form[0]][0]
        record = self.order[self.start[0] + (0 if plan is None else plan.use[0])]
        return self.records.sites.all[self.records.columns["site"][record]].dtype

    @cached_property
    def payload_bytes(self) -> int:
        return int(self.records.payload_sizes[self.every].sum())

    @property
    def vision(self) -> bool:
        return self.spaces.any_vision and bool(self.spaces.vision[self.space].any())


@dataclass(frozen=True)
class Joining:
    """What is known of joining ranks' pieces. widths: of each side, see `widths_of`. partners: golden's step → mine's,
    and mine's → golden's, where steps meet as wholes."""

    widths: tuple[Mapping[str, int], Mapping[str, int]]
    partners: tuple[Mapping[int, int], Mapping[int, int]] | None = None


def merged(
    sides: tuple[PlacedRecords, PlacedRecords], which: tuple[np.ndarray, np.ndarray], joining: Joining
) -> tuple[Groups, Groups]:
    """Groups of both sides. Where a layout is unknown, the other side's shape may tell how to join the pieces."""
    found = []
    usual: Callable[[], Mapping[int, int]] | None = None
    for side, (placed, own) in enumerate(zip(sides, which, strict=True)):
        at = _stretch(own)
        if placed.plain[at].all():
            form, firsts = _numbered(placed.form[at])
            found.append(Groups.placed(placed, at, [_whole(placed.site(int(own[i]))) for i in firsts.tolist()], form))
            continue
        usual = usual or cache(
            lambda: _row_dims([x for s, w in zip(sides, which, strict=True) for x in s.sites(w).items()])
        )
        hints, hint = _hints(sides[1 - side], which[1 - side], placed.step[own], joining, side)
        form, firsts = _numbered(placed.form[own], hint)
        widths = joining.widths[side]
        forms = [_plan(placed, int(own[i]), hints[hint[i]], usual, widths) for i in firsts.tolist()]
        found.append(Groups.placed(placed, at, forms, form))
    return found[0], found[1]


def _numbered(major: np.ndarray, minor: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [n], a number for each pair of equal values, in order of first appearance; where each appears first).
    major: numbers below n, or few."""
    if len(major) and (major == major[0]).all() and (minor is None or (minor == minor[0]).all()):
        return np.zeros(len(major), np.int64), np.zeros(1, np.int64)
    minor = np.zeros(len(major), np.int64) if minor is None else minor
    low, high = int(minor.min(initial=0)), int(minor.max(initial=0))
    if high - low > len(minor):
        minor = np.unique(minor, return_inverse=True)[1]
        low, high = 0, len(minor)
    code = major.astype(np.int64) * (high - low + 1) + (minor - low)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], first[order]


def _hints(
    others: PlacedRecords, which: np.ndarray, steps: np.ndarray, joining: Joining, side: int
) -> tuple[list[TensorSite | None], np.ndarray]:
    """For each of ``steps`` the other side's record that one rank has alone: (these, which of them); where steps do not
    meet as wholes, one of any step."""
    if joining.partners is None:
        return [others.hint(which)], np.zeros(len(steps), np.int64)
    own, number = np.unique(steps, return_inverse=True)
    partners = joining.partners[side]
    among = (which if s < 0 else which[others.step[which] == partners.get(s, -2)] for s in own.tolist())
    return [others.hint(groups) for groups in among], number


def _row_dims(sites: Iterable[tuple[TensorSite, int]]) -> dict[int, int]:
    """Along which dimension the rows of one tap and role lie, by the number of dimensions, from the records where no
    other dimension has their size: three rows of three-dimensional rotary positions are a square in which capture
    cannot tell. Two engines may give one tensor different numbers of dimensions. sites: with how many records."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for site, n in sites:
        if site.rows is not None and not _square(site.shape, site.row_dim):
            votes[len(site.shape)][site.row_dim] += n
    return {dims: found.most_common(1)[0][0] for dims, found in votes.items()}


def _is_plain(site: TensorSite) -> bool:
    return site.layout.kind == REPLICATED.kind and not _square(site.shape, site.row_dim)


def _whole(site: TensorSite) -> Form:
    """What `_plan` makes of one record of a site that is plain."""
    return MergePlan(ONE, (0,), site.shape), "", site.row_dim


def _stretch(which: np.ndarray) -> slice | np.ndarray:
    """A slice where these indices follow one another, as those of one place do: it copies nothing."""
    first, n = int(which[0]), len(which)
    return slice(first, first + n) if (which == np.arange(first, first + n)).all() else which


def _square(shape: tuple[int, ...], dim: int) -> bool:
    return dim < len(shape) and shape.count(shape[dim]) > 1


def _plan(
    placed: PlacedRecords, group: int, hint: TensorSite | None, usuals: Callable[[], Mapping[int, int]],
    widths: Mapping[str, int],
) -> Form:  # fmt: skip
    first, members = placed.pieces(group)
    dim = first.row_dim
    if _square(first.shape, dim):
        usual = usuals().get(len(first.shape), dim)
        dim = usual if usual < len(first.shape) and first.shape[usual] == first.shape[dim] else dim
    other = None
    alike = None if hint is None else _of_rank(hint.shape, len(first.shape))
    if hint is not None and alike is not None:
        other = alike
        if first.rows is not None and hint.row_dim == first.row_dim < len(other):
            other = (*other[: first.row_dim], first.shape[first.row_dim], *other[first.row_dim + 1 :])
    if (first.rows is None or first.parameter) and first.layout.kind == OWN:
        return None, DEALT_OUT, dim
    try:
        return plan_merged(first, members, other, widths) or plan_merge(members, other), "", dim
    except Unmergeable as e:
        return None, str(e), dim


def _of_rank(shape: tuple[int, ...], dims: int) -> tuple[int, ...] | None:
    """``shape`` with ``dims`` dimensions, where only leading ones make the difference."""
    more = dims - len(shape)
    if more >= 0:
        return (1,) * more + shape
    return shape[-more:] if all(n == 1 for n in shape[:-more]) else None
