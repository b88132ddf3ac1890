"""What was measured, apart from what it means: all that judging needs, without tensors.

The problem: whoever wants other limits should not have to read a terabyte again. The idea: measuring ends in plain
values and arrays, `Measured`; judging (judging.py) starts from them and from nothing else, so that a saved comparison
is judged again exactly as it was the first time. A `Part` is one tensor of mine; a `MeasuredUnit` is all of one tap,
role and call; a `Setting` is what both dumps and the plan say about the run.
Not here: measuring (unit.py, params.py), the file (saved.py), limits and blame (judging.py, judge/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from vllm_accprobe.align.final_tokens import POSITION_BITS, POSITION_MASK
from vllm_accprobe.comparison.measure.unit import Piece
from vllm_accprobe.comparison.plan.units import Plan, Unit
from vllm_accprobe.comparison.store.spill import Shelf
from vllm_accprobe.judge.flow import Key
from vllm_accprobe.kernels import definition

Moment = tuple[int, "int | None"]
NO_KEYS = np.zeros(0, np.int64)
NO_FLAGS = np.zeros(0, bool)


@dataclass(slots=True)
class Part:
    """One tensor of mine against the golden's rows, or a parameter.

    golden, mine: names in their dumps; step, rank: mine's; feature: shape of one row (of all, where ``whole``).
    keys, decode: of the rows compared. table: row table float64 [rows, 11] (kernels.definition.ROW_FIELDS), None where
    ``identical`` or judged by ``stats``. stats: (lower bound of the relative L2 error, largest error of an extreme in
    units of the rms), from statistics alone. worst: (row, flat index, golden, mine) of the largest |d|. whole: a tensor
    without rows, measured as one. row_norm: rms norm of the golden's rows where nothing was read (identical).
    elements: kernels.definition.ELEMENT_FIELDS, sums over all elements for other tools' standards; None where values
    were not read. figures: golden's and mine's (max, min, mean, norm), where they decided. kl: KL divergence, None
    where not measured. choices: int64 [rows, k], the experts that mine chose, of a tensor that holds such; margins:
    float64 [rows, 3], how clearly either side chose (judge.routing.margins), None where the router's logits are not in
    both dumps or all choices are alike. nonfinite: count where identical; own_nonfinite: whether mine's tensor holds
    NaN or infinity, None where nobody counted; zero: all of it is 0. same_bits: both were read, and their bits are
    equal. equal, by: parameters: equal to the bit, and how that is known. skip: why nothing was compared.
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
    keys: np.ndarray = field(default_factory=lambda: NO_KEYS)
    decode: np.ndarray = field(default_factory=lambda: NO_FLAGS)
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

    @property
    def width(self) -> int:
        return prod(self.feature)


@dataclass(slots=True)
class MeasuredUnit:
    """All parts of one (tap, role, call), in order of steps. depth, gap: as plan.Unit.

    columns: float64 [6, width] (kernels.structure's sums over some rows of all parts). far: float64 [2, width], the
    sums of d*d and of g*g over the rows that are furthest apart. None where nothing differed, or they were not taken.
    """

    key: Key
    cls: str
    rule: str
    order: int
    depth: int
    is_param: bool
    vision: bool
    parts: list[Part] = field(default_factory=list)
    columns: np.ndarray | None = None
    far: np.ndarray | None = None
    gap: int = 0


@dataclass
class Setting:
    """Facts about both runs and the plan. Everything here is plain: text, numbers, lists, and arrays of row keys.

    names, images: as TokenPlan's. parent, children, mixing, classes: as flow.Tree's. attrs: of mine's modules.
    notes: what must be said first, whatever the verdict. coverage: compare.json's, but for pairs and near ties.
    skipped: by reason, found while planning and measuring. flips: one dict per flipped token with both sides' best
    logits. batches: step → (requests, tokens) of mine. places: all comparable rows of mine as sorted keys, with the
    first step that computed each and whether it was decoding. moments: (cell, step) → keys of its rows.
    nothing: the line to say when there is nothing to judge. other_images: labels of requests whose images have other
    hashes; rehashed: as RequestPlan's. settings: as settings.differing's.
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
    settings: dict[str, str] = field(default_factory=dict)
    places: tuple[np.ndarray, np.ndarray, np.ndarray] = (NO_KEYS, NO_KEYS, NO_FLAGS)
    moments: dict[Moment, np.ndarray] = field(default_factory=dict)

    def name(self, key: int) -> tuple[str, int]:
        """(request label, position) of a row key."""
        return self.names[key >> POSITION_BITS][0], key & POSITION_MASK


@dataclass
class Measured:
    """shelf: where the units' row tables lie, None where all are in memory."""

    setting: Setting
    units: list[MeasuredUnit]
    shelf: Shelf | None = None

    def each(self) -> Iterator[MeasuredUnit]:
        """The units one after the other, for whoever walks over all row tables: they need not fit into memory."""
        for unit in self.units:
            yield unit
            if self.shelf is not None and self.shelf.on_disk:
                self.shelf.rest()


def unit_of(
    unit: Unit, parts: Sequence[Part], columns: np.ndarray | None = None, far: np.ndarray | None = None
) -> MeasuredUnit:
    place = unit.key, unit.cls, unit.rule, unit.order, unit.depth
    return MeasuredUnit(*place, unit.is_param, unit.vision, list(parts), columns, far, unit.gap)


def part_of(piece: Piece, *, equal: bool | None = None, by: str = "", family: str = "text") -> Part:
    """The part that a measured piece leaves behind."""
    golden, mine = (piece.golden[0].first if piece.golden else None), piece.group.first
    ranks = {r.rank for r in piece.group.records}
    stats = [piece.group.records[i].stats for i in piece.group.merge.use] if piece.group.merge else []
    norm = 0.0
    if piece.identical and not piece.whole and golden is not None and golden.stats and golden.stats.l2:
        norm = golden.stats.l2 / max(golden.shape[piece.golden[0].row_dim], 1) ** 0.5
    return Part(
        golden="" if golden is None else golden.name,
        mine=mine.name,
        step=mine.step,
        rank=ranks.pop() if len(ranks) == 1 else None,
        moment=piece.group.moment,
        dtype_golden=None if golden is None else golden.dtype,
        dtype_mine=mine.dtype,
        call=mine.call,
        feature=tuple(piece.feature),
        family=family,
        keys=piece.keys,
        decode=piece.decode,
        table=piece.table,
        identical=piece.identical,
        stats=piece.stat_error,
        worst=piece.worst,
        whole=piece.whole,
        row_norm=norm,
        nonfinite=sum(s.nan + s.inf for s in stats if s is not None) if piece.identical else 0,
        zero=not any(s is not None and s.l2 for s in stats),
        equal=equal,
        by=by or piece.by,
        figures=piece.figures,
        replicas=piece.replicas,
        note=piece.group.merge.note if piece.group.merge else "",
        skip=piece.skip,
        elements=None if piece.elements is None else tuple(piece.elements.tolist()),
        choices=piece.choices,
        same_bits=piece.same_bits,
        margins=piece.margins,
        own_nonfinite=None if not stats or None in stats else any(s.nan + s.inf for s in stats if s is not None),
        kl=None if piece.softmax is None else definition.kl_divergence(piece.softmax),
    )


def places_of(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Setting.places of a plan."""
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
    """Setting.moments of a plan: what tensors without rows speak for."""
    found: dict[Moment, list[np.ndarray]] = {}
    for (cell, step, name), rows in plan.tokens.mine.rows.items():
        if name != "logits":
            found.setdefault((cell, step), []).append(rows.keys[rows.keep])
    return {moment: np.unique(np.concatenate(keys)) for moment, keys in found.items()}
