"""What is compared at one place: a `Unit` of the plan, and how ranks' records make a whole.

The problem: ranks hold pieces or copies of a tensor; and a row-parallel layer may lack its all-reduce. The idea: a
`Group` is one side's records of one tensor in one step, with a plan for joining its pieces or the reason why there is
none. Where a norm reads, bit for bit, a rank's partial sum, it was not summed, and each share is compared as it was
used (`loose`). Not here: the joining plans (align/ranks.py), many groups (groups.py), which units there are
(make_plan.py), measuring (measure/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_accprobe.align.data_flow import Key
from vllm_accprobe.align.ranks import MergePlan, RankPiece, plan_merge
from vllm_accprobe.align.tokens import Space
from vllm_accprobe.dump.record_table import first_of_each_site, of_sites
from vllm_accprobe.dump.schema import DEALT, Layout, Record
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


def alone(record: Record, cell: int) -> Group:
    """One rank's record as a group of its own, for a tensor that only one side has."""
    where = None if record.rows is None or record.step is None else (cell, record.step, record.rows)
    members = [RankPiece(record.rank, record.layout, record.shape, record.dtype, record.hash)]
    return Group((record,), (cell, record.step), where, plan_merge(members), row_dim=record.row_dim)


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
    itself is not in both dumps; else 0. vision: whether its rows are of images."""

    key: Key
    golden_key: Key
    cls: str
    rule: str
    order: int
    depth: int
    golden: Sequence[Group]
    mine: Sequence[Group]
    router: tuple[Sequence[Group], Sequence[Group]] | None = None
    gap: int = 0
    takes: int = 0
    chooser: Chooser | None = None
    bias: tuple[Group, Group] | None = None
    vision: bool = False

    @property
    def is_param(self) -> bool:
        return self.key[1].startswith("param.")


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
