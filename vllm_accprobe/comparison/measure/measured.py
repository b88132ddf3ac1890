"""What was measured, apart from what it means: filled once, saved, judged again without tensors.

The problem: what is measured, saved and judged must be the same values, and may be larger than memory. The idea: a
`Part` is one tensor of mine against golden's rows, a `MeasuredUnit` all parts of one tap, role and call, a
`ComparisonContext` what dumps and plan say about the run: plain values and arrays, from which alone judging starts.
Not here: measuring (measurer.py), the files (comparison/store.py), limits and origins (judge/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import Key, Tree
from vllm_accprobe.align.tokens import NO_ROWS, POSITION_BITS, POSITION_MASK, RowSet
from vllm_accprobe.comparison.gaps import NOTHING, Untapped
from vllm_accprobe.comparison.plan.make_plan import Plan
from vllm_accprobe.comparison.plan.relations import Links, Sources
from vllm_accprobe.comparison.plan.unit import Group, Moment, Unit, family
from vllm_accprobe.dump.record_table import LazyTable
from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.spill_buffer import SpillBuffer


@dataclass(slots=True)
class Part:
    """One tensor of mine against the golden's rows, or a parameter.

    golden, mine: names in their dumps; step, rank: mine's; feature: shape of one row (of all, where ``whole``).
    rows: those compared, in mine's order. table: row table float64 [rows, 11]
    (kernels.definition.ROW_FIELDS), None where ``identical`` or judged by ``stats``. stats: (lower bound of the
    relative L2 error, largest error of an extreme in units of the rms), from statistics alone. worst: (row, flat index,
    golden, mine) of the largest |d|. whole: a tensor without rows, measured as one. row_norm: rms norm of the golden's
    rows where nothing was read (identical). elements: kernels.definition.ELEMENT_FIELDS, sums over all elements for
    other tools' standards; None where values were not read. figures: golden's and mine's (max, min, mean, norm), where
    they decided. kl: KL divergence, None where not measured. choices: int64 [rows, k], the experts that mine chose, of
    a tensor that holds such; margins: float64 [rows, 3], how clearly either side chose (judge.near_ties.margins), None
    where the router's logits are not in both dumps or all choices are alike. nonfinite: count where identical;
    own_nonfinite: whether mine's tensor holds NaN or infinity, None where it was not counted; zero: all of it is 0.
    few: its differences are few different ones that come again and again, and so no independent roundings.
    same_bits: both were read, and their bits are equal. equal: of parameters, whether they are equal to the bit. by:
    what decided where that were not the values. skip: why nothing was compared.
    """

    golden: str
    mine: str
    step: int | None
    rank: int | None
    moment: Moment
    dtype_golden: str | None
    dtype_mine: str
    call: int
    feature: tuple[int, ...]
    family: str = "text"
    rows: RowSet = NO_ROWS
    table: np.ndarray | None = None
    identical: bool = False
    stats: tuple[float, float] | None = None
    worst: tuple[int, int, float, float] | None = None
    whole: bool = False
    row_norm: float = 0.0
    nonfinite: int = 0
    zero: bool = False
    equal: bool | None = None
    by: str = ""
    replicas: str = ""
    note: str = ""
    skip: str = ""
    elements: tuple[float, ...] | None = None
    kl: float | None = None
    choices: np.ndarray | None = None
    margins: np.ndarray | None = None
    own_nonfinite: bool | None = None
    figures: tuple[tuple[float | None, ...], ...] | None = None
    same_bits: bool = False
    few: bool = False

    @property
    def width(self) -> int:
        return prod(self.feature)

    @property
    def phase(self) -> str | None:
        return None if self.whole else self.rows.phase

    @classmethod
    def of(cls, mine: Group, golden: Group | None = None, *, whole: bool = False, skip: str = "") -> Part:
        """What a tensor of mine says of itself, before anything is measured."""
        first, stats = mine.first, stats_of(mine)
        ranks = {r.rank for r in mine.records}
        counted = [s for s in stats if s is not None]
        part = cls(
            golden="",
            mine=first.name,
            step=first.step,
            rank=ranks.pop() if len(ranks) == 1 else None,
            moment=mine.moment,
            dtype_golden=None,
            dtype_mine=first.dtype,
            call=first.call,
            feature=(),
            family=family(mine.where[2] if mine.where else ""),
            whole=whole,
            zero=not any(s.l2 for s in counted),
            note=mine.merge.note if mine.merge else "",
            skip=skip,
            own_nonfinite=any(s.nan + s.inf for s in counted) if stats and len(counted) == len(stats) else None,
        )
        if golden is not None:
            part.meet(golden)
        return part

    def meet(self, golden: Group) -> None:
        self.golden, self.dtype_golden = golden.first.name, golden.first.dtype

    def agree(self, mine: Group) -> None:
        """All numbers are equal, by their hashes: what was not read is distinguished from statistics."""
        self.identical = True
        self.nonfinite = sum(s.nan + s.inf for s in stats_of(mine) if s is not None)


def stats_of(group: Group) -> list[Stats | None]:
    """As recorded, of the pieces that are used."""
    return [group.records[i].stats for i in group.merge.use] if group.merge else []


NO_KEYS = np.zeros(0, np.int64)
NO_FLAGS = np.zeros(0, bool)


@dataclass(slots=True)
class MeasuredUnit:
    """All parts of one (tap, role, call), in order of steps. depth, gap: as plan.Unit.

    columns: float64 [6, width] (kernels.structure's sums over some rows of all parts). None where nothing differed, or
    they were not taken.
    """

    key: Key
    cls: str
    rule: str
    order: int
    depth: int
    is_param: bool
    vision: bool
    parts: list[Part] | LazyTable[Part] = field(default_factory=list)
    columns: np.ndarray | None = None
    gap: int = 0

    @classmethod
    def of(cls, unit: Unit, parts: Sequence[Part] = ()) -> MeasuredUnit:
        place = unit.key, unit.cls, unit.rule, unit.order, unit.depth
        return cls(*place, unit.is_param, unit.vision, list(parts), gap=unit.gap)

    def add(self, part: Part, columns: np.ndarray | None = None) -> None:
        """A further part, with its own sums for ``columns``; those of another width are left out."""
        assert isinstance(self.parts, list)
        self.parts.append(part)
        if self.columns is None or columns is None:
            self.columns = columns if self.columns is None else self.columns
        elif self.columns.shape == columns.shape:
            self.columns = self.columns + columns


@dataclass
class ComparisonContext:
    """Facts about both runs and the plan. Everything here is plain: text, numbers, lists, and arrays of row keys.

    names, images: as TokenPlan's. parent, children, mixing, classes: as flow.Tree's. attrs: of mine's modules.
    notes: what must be said first, whatever the verdict. coverage: compare.json's, but for pairs and near ties.
    skipped: by reason, found while planning and measuring. flips: one dict per flipped token with both sides' best
    logits, and what its request asks for (sampler_rows.py); processed: rows without a flip whose processed logits
    differ, as sampler_rows.py tells of them. batches: step → (requests, tokens) of mine. graphs: step → (size of the
    captured graph that computed it, 0 for none; rows of no request) of mine, empty where no step had one.
    padding: what stood in such rows (padding.py). places: all comparable rows of mine as sorted keys, with the
    first step that computed each and whether it was decoding. moments: (cell, step) → keys of its rows.
    nothing: the line to say when there is nothing to judge. other_images: labels of requests whose images have other
    hashes; rehashed: as RequestPlan's. golden_ids: as Comparison's. settings: as notes.differing's. built: causes that
    are known without measuring, by tap. states: as comparison/runner_inputs.py's. weights:
    as judge.weights.weights_between's. links: as comparison/plan/relations.py's. sources: as
    comparison/plan/relations.py's. modules: tap → class of all modules of mine's model, captured or not, where its
    dump names them. untapped: as gaps.py's.
    """

    golden_path: str
    mine_path: str
    golden_run: dict[str, Any]
    mine_run: dict[str, Any]
    plan: list[str]
    notes: list[str]
    coverage: dict[str, Any]
    tokens_compared: int
    flips: list[dict[str, Any]]
    names: dict[int, tuple[str, int | None]]
    images: dict[int, list[tuple[int, int, int]]]
    parent: dict[str, str | None]
    children: dict[str | None, list[str]]
    mixing: dict[str, bool]
    classes: dict[str, str]
    attrs: dict[str, dict[str, Any]]
    layers: int
    dtypes: list[str]
    batches: dict[int, tuple[int, int]]
    nothing: str
    sampler_order: int
    other_images: list[str] = field(default_factory=list)
    rehashed: bool = False
    golden_ids: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    built: dict[str, dict[str, Any]] = field(default_factory=dict)
    graphs: dict[int, tuple[int, int]] = field(default_factory=dict)
    padding: dict[str, str] = field(default_factory=dict)
    places: tuple[np.ndarray, np.ndarray, np.ndarray] = (NO_KEYS, NO_KEYS, NO_FLAGS)
    moments: dict[Moment, np.ndarray] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    links: Links = field(default_factory=dict)
    sources: Sources = field(default_factory=dict)
    processed: list[dict[str, Any]] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    untapped: Untapped = NOTHING

    @property
    def tree(self) -> Tree:
        return Tree(self.classes, dict(self.parent), dict(self.children), dict(self.mixing))

    def name(self, key: int) -> tuple[str, int]:
        return self.names[key >> POSITION_BITS][0], key & POSITION_MASK


@dataclass
class Measured:
    """shelf: where the units' row tables lie, None where all are in memory."""

    setting: ComparisonContext
    units: list[MeasuredUnit]
    shelf: SpillBuffer | None = None

    def each(self) -> Iterator[MeasuredUnit]:
        """The units one after the other, for whoever walks over all row tables: they need not fit into memory."""
        for unit in self.units:
            yield unit
            if self.shelf is not None and self.shelf.on_disk:
                self.shelf.rest()


def places_of(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    keys, steps, decode = [NO_KEYS], [NO_KEYS], [NO_FLAGS]
    for (_, step, name), rows in plan.tokens.mine.rows.items():
        keys.append(rows.keys[rows.keep])
        steps.append(np.full(int(rows.keep.sum()), step))
        decode.append(rows.decode[rows.keep] & (not name.startswith("vision")))
    k, s, d = np.concatenate(keys), np.concatenate(steps), np.concatenate(decode)
    order = np.lexsort((s, k))
    k, s, d = k[order], s[order], d[order]
    first = np.append(True, k[1:] != k[:-1]) if len(k) else NO_FLAGS
    return k[first], s[first], d[first]


def moments_of(plan: Plan) -> dict[Moment, np.ndarray]:
    found: dict[Moment, list[np.ndarray]] = {}
    for (cell, step, name), rows in plan.tokens.mine.rows.items():
        if name != "logits":
            found.setdefault((cell, step), []).append(rows.keys[rows.keep])
    return {moment: np.unique(np.concatenate(keys)) for moment, keys in found.items()}
