"""What is compared at one place: a `Unit` of the plan, and how ranks' records make a whole.

The problem: a layout may be recorded, be unknown, or be a merged projection's; and a row-parallel layer may leave its
all-reduce to nobody. The idea: a `Group` is one side's records of one tensor in one step, with a plan for joining its
pieces or the reason why there is none (`merged`); the other side's shape may tell. Where a norm reads, bit for bit, a
rank's partial sum, nobody summed it, and each share is compared as it was used (`loose`). Not here: the joining plans
(align/ranks.py), which units there are (units.py), measuring (measure/).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_accprobe.align.data_flow import Key
from vllm_accprobe.align.ranks import MergePlan, RankPiece, Unmergeable, plan_merge, plan_merged
from vllm_accprobe.align.tokens import Space
from vllm_accprobe.dump.record_table import first_of_each_site, of_sites
from vllm_accprobe.dump.schema import DEALT, OWN, Layout, Record
from vllm_accprobe.judge.near_ties import Chooser

DEALT_OUT = "of images that were dealt out to ranks, and without rows"
Moment = tuple[int, "int | None"]
"""(cell, step)."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One side's records of one tensor in one step, by rank. ``merge`` is None where ``problem`` says why.

    Compared by identity, because it stands in the name of what is kept of it (measure/read.py)."""

    records: tuple[Record, ...]
    moment: Moment
    where: Space | None
    merge: MergePlan | None
    problem: str = ""
    row_dim: int = 0

    @property
    def first(self) -> Record:
        return self.records[self.merge.use[0] if self.merge else 0]

    @property
    def readable(self) -> bool:
        return self.merge is not None and all(self.records[i].payload is not None for i in self.merge.use)

    @property
    def fingerprint(self) -> tuple[Any, ...] | None:
        """Equal for two groups with the same bits in the same pieces; None where a hash is missing."""
        if self.merge is None:
            return None
        used = [self.records[i] for i in self.merge.use]
        if any(r.hash is None for r in used):
            return None
        return (self.merge.kind, self.merge.pieces, used[0].dtype, used[0].shape, tuple(r.hash for r in used))


@dataclass(frozen=True)
class Joining:
    """What is known of joining ranks' pieces. widths: of each side, see `widths_of`. partners: golden's step → mine's,
    and mine's → golden's, where steps meet as wholes."""

    widths: tuple[Mapping[str, int], Mapping[str, int]]
    partners: tuple[Mapping[int, int], Mapping[int, int]] | None = None

    def hint(self, side: int, moment: Moment, others: Mapping[Moment, dict[int, Record]]) -> Record | None:
        if self.partners is not None and moment[1] is not None:
            step = self.partners[side].get(moment[1])
            return _hint(by for (_, s), by in others.items() if s == step)
        return _hint(others.values())


def merged(
    golden: list[tuple[Moment, dict[int, Record]]], mine: Mapping[Moment, dict[int, Record]], joining: Joining
) -> tuple[list[Group], list[Group]]:
    """Groups of both sides. Where a layout is unknown, the other side's shape may tell how to join the pieces."""
    usual = _row_dims([r for _, by in golden for r in by.values()] + [r for by in mine.values() for r in by.values()])
    known = dict(golden)
    general = None if joining.partners is not None else (_hint(mine.values()), _hint(by for _, by in golden))
    sides: list[list[Group]] = []
    for side, (own, others) in enumerate(((golden, mine), (list(mine.items()), known))):
        widths = joining.widths[side]
        plans: Plans = {}
        sides.append([
            _group(m, by, general[side] if general else joining.hint(side, m, others), usual, widths, plans)
            for m, by in own
        ])  # fmt: skip
    return sides[0], sides[1]


def alone(record: Record, cell: int) -> Group:
    """One rank's record as a group of its own, for a tensor that only one side has."""
    where = None if record.rows is None or record.step is None else (cell, record.step, record.rows)
    members = [RankPiece(record.rank, record.layout, record.shape, record.dtype, record.hash)]
    return Group((record,), (cell, record.step), where, plan_merge(members), row_dim=record.row_dim)


def _row_dims(records: Iterable[Record]) -> dict[int, int]:
    """Along which dimension the rows of one tap and role lie, by the number of dimensions, from the records where no
    other dimension has their size: three rows of three-dimensional rotary positions are a square in which capture
    cannot tell. Two engines may give one tensor different numbers of dimensions."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for (shape, dim), n in Counter((r.shape, r.row_dim) for r in records if r.rows is not None).items():
        if not _square(shape, dim):
            votes[len(shape)][dim] += n
    return {dims: found.most_common(1)[0][0] for dims, found in votes.items()}


def _square(shape: tuple[int, ...], dim: int) -> bool:
    return dim < len(shape) and shape.count(shape[dim]) > 1


def _hint(groups: Iterable[dict[int, Record]]) -> Record | None:
    for by in groups:
        if len(by) == 1:
            return next(iter(by.values()))
    return None


Plans = dict[tuple[Any, ...], "tuple[MergePlan | None, str, int]"]
"""Of one tap and role: what is known of one rank's record → its plan, or why there is none, and its row dimension."""


def _group(
    moment: Moment, by: dict[int, Record], hint: Record | None, usuals: Mapping[int, int], widths: Mapping[str, int],
    plans: Plans,
) -> Group:  # fmt: skip
    records = tuple(by[rank] for rank in sorted(by)) if len(by) > 1 else tuple(by.values())
    first = records[0]
    where = None if first.rows is None or first.step is None else (moment[0], first.step, first.rows)
    if len(records) > 1:
        return Group(records, moment, where, *_plan(records, where, hint, usuals, widths))
    # Layouts are as many as taps and live as long as their records; their own hash would take longer than all the rest.
    form = first.shape, first.row_dim, first.rows is None, where is None, bool(first.hash)
    place = (id(first.layout), id(hint), *form)
    if place not in plans:
        plans[place] = _plan(records, where, hint, usuals, widths)
    return Group(records, moment, where, *plans[place])


def _plan(
    records: tuple[Record, ...], where: Space | None, hint: Record | None, usuals: Mapping[int, int],
    widths: Mapping[str, int],
) -> tuple[MergePlan | None, str, int]:  # fmt: skip
    """(how the records are joined, why they are not, the dimension of their rows)."""
    first = records[0]
    dim, usual = first.row_dim, usuals.get(len(first.shape))
    if usual is not None and usual != dim and _square(first.shape, dim) and usual < len(first.shape):
        dim = usual if first.shape[usual] == first.shape[dim] else dim
    other = None
    alike = None if hint is None else _of_rank(hint.shape, len(first.shape))
    if hint is not None and alike is not None:
        other = alike
        if first.rows is not None and hint.row_dim == first.row_dim < len(other):
            other = (*other[: first.row_dim], first.shape[first.row_dim], *other[first.row_dim + 1 :])
    if where is None and first.layout.kind == OWN:
        return None, DEALT_OUT, dim
    try:
        members = [RankPiece(r.rank, r.layout, r.shape, r.dtype, r.hash) for r in records]
        return plan_merged(first, members, other, widths) or plan_merge(members, other), "", dim
    except Unmergeable as e:
        return None, str(e), dim


def _of_rank(shape: tuple[int, ...], dims: int) -> tuple[int, ...] | None:
    """``shape`` with ``dims`` dimensions, where only leading ones make the difference."""
    more = dims - len(shape)
    if more >= 0:
        return (1,) * more + shape
    return shape[-more:] if all(n == 1 for n in shape[:-more]) else None


def widths_of(dump: Any) -> dict[str, int]:
    """What each tap takes in on one rank: the size of its first input's last dimension. Needed where several ranks'
    layouts are unknown."""
    if len(dump.ranks) < 2:
        return {}
    widths: dict[str, int] = {}
    for r in first_of_each_site(dump.records):
        if r.role.startswith("input") and r.shape and r.layout.kind == "unknown":
            widths.setdefault(r.tap, r.shape[-1])
    return widths


SAMPLER = "sampler"
TOKEN, TOP_LOGITS, TOP_IDS = "output.token", "output.top_logits", "output.top_ids"
MASKED_LOGITS, MASKED_IDS = "output.masked_logits", "output.masked_ids"
"""What masks left of the logits, in steps with any: two runs need not mask alike."""
LOOKED_UP = (TOP_IDS, MASKED_LOGITS, MASKED_IDS)
"""Roles of the sampler that are examined where a token flips, and not compared."""


@dataclass(frozen=True)
class Unit:
    """All of one (tap, role, call) of mine, with the golden's groups that may hold its rows.

    depth: layers passed; gap: those of them that were passed unseen since the compared tensor before
    (align/data_flow.py). router: of chosen experts, the groups (golden's, mine's) of the logits by which they were
    chosen, where both are there, with chooser and bias (golden's, mine's) where something else than their size decides
    (judge/near_ties.py). takes: of a router's logits, how many of the highest are taken, where the choice
    itself is not in both dumps; else 0."""

    key: Key
    golden_key: Key
    cls: str
    rule: str
    order: int
    depth: int
    golden: list[Group]
    mine: list[Group]
    router: tuple[list[Group], list[Group]] | None = None
    gap: int = 0
    takes: int = 0
    chooser: Chooser | None = None
    bias: tuple[Group, Group] | None = None

    @property
    def is_param(self) -> bool:
        return self.key[1].startswith("param.")

    @property
    def vision(self) -> bool:
        return any(g.where is not None and g.where[2].startswith("vision") for g in self.mine)


WHOLE = Layout("replicated")
Loose = frozenset[tuple[int, "int | None", str]]
"""(rank, step, hash) of partial sums that were used as they were."""


def loose(dump: Any) -> Loose:
    if len(dump.ranks) < 2:
        return frozenset()
    partial = of_sites(dump.records, lambda site: site.layout.kind == "partial" and site.layout.size > 1)
    shares = {_at(r) for r in partial if r.hash}
    if not shares:
        return frozenset()
    norms = of_sites(dump.records, lambda site: site.role.startswith("input") and "norm" in site.cls.lower()
                     and site.layout.kind == "replicated")  # fmt: skip
    return frozenset(_at(r) for r in norms if r.hash and _at(r) in shares)


def unsummed_taps(dump: Any, found: Loose) -> list[str]:
    """The taps whose shares were used, innermost first of those that give out the same bytes."""
    last: dict[tuple[int, int | None, str], str] = {}
    for r in of_sites(dump.records, lambda site: bool(found) and site.layout.kind == "partial"):
        if r.hash and _at(r) in found:
            last.setdefault(_at(r), r.tap)
    return list(dict.fromkeys(last.values()))


def unsummed(dump: Any) -> frozenset[tuple[int, int | None, int]]:
    """(rank, step, seq) of the shares that were used as they were."""
    found = loose(dump)
    partial = of_sites(dump.records, lambda site: site.layout.kind == "partial")
    return frozenset((r.rank, r.step, r.seq) for r in partial if _at(r) in found)


def _at(r: Record) -> tuple[int, int | None, str]:
    return r.rank, r.step, r.hash or ""


TEXT = "text"


def family(space: str) -> str:
    """Rows of tokens and of logits are the same rows; a vision space's are its own, whatever rank computed them."""
    return space.partition(DEALT)[0] if space.startswith("vision") else TEXT
