"""What was measured, apart from what it means: all that judging needs, without tensors.

The problem: whoever wants other limits should not have to read a terabyte again. The idea: measuring ends in plain
values and arrays, `Measured`; judging (judging.py) starts from them and from nothing else, so that a saved comparison
is judged again exactly as it was the first time. A `MeasuredUnit` is all parts of one tap, role and call; a `Setting`
is what both dumps and the plan say about the run.
Not here: one part (part.py), measuring (activations.py, params.py), the file (saved.py), limits and blame (judging.py,
judge/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.align.final_tokens import POSITION_BITS, POSITION_MASK
from vllm_accprobe.comparison.measure.part import Part
from vllm_accprobe.comparison.plan.joining import Moment
from vllm_accprobe.comparison.plan.links import Links
from vllm_accprobe.comparison.plan.sources import Sources
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.plan.units import Plan
from vllm_accprobe.comparison.plan.untapped import NOTHING, Untapped
from vllm_accprobe.comparison.store.spill import Shelf
from vllm_accprobe.judge.flow import Key

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
    parts: list[Part] = field(default_factory=list)
    columns: np.ndarray | None = None
    gap: int = 0

    @classmethod
    def of(cls, unit: Unit, parts: Sequence[Part] = ()) -> MeasuredUnit:
        """What the plan says of ``unit``, with what was measured of it so far."""
        place = unit.key, unit.cls, unit.rule, unit.order, unit.depth
        return cls(*place, unit.is_param, unit.vision, list(parts), gap=unit.gap)

    def add(self, part: Part, columns: np.ndarray | None) -> None:
        """A further part, with its own sums for ``columns``; those of another width are left out."""
        self.parts.append(part)
        if self.columns is None or columns is None:
            self.columns = columns if self.columns is None else self.columns
        elif self.columns.shape == columns.shape:
            self.columns = self.columns + columns


@dataclass
class Setting:
    """Facts about both runs and the plan. Everything here is plain: text, numbers, lists, and arrays of row keys.

    names, images: as TokenPlan's. parent, children, mixing, classes: as flow.Tree's. attrs: of mine's modules.
    notes: what must be said first, whatever the verdict. coverage: compare.json's, but for pairs and near ties.
    skipped: by reason, found while planning and measuring. flips: one dict per flipped token with both sides' best
    logits, and what its request asks for (asked_rows.py); processed: rows without a flip whose processed logits differ,
    as asked_rows.py tells of them. batches: step → (requests, tokens) of mine. graphs: step → (size of the captured
    graph that computed it, 0 for none; rows of it that are nobody's) of mine, empty where no step had one. padding:
    what stood in such rows (padding.py). places: all comparable rows of mine as sorted keys, with the
    first step that computed each and whether it was decoding. moments: (cell, step) → keys of its rows.
    nothing: the line to say when there is nothing to judge. other_images: labels of requests whose images have other
    hashes; rehashed: as RequestPlan's. settings: as settings.differing's. states: as comparison/states.py's. weights:
    as judge.weights.between's. links: as plan/links.py's. sources: as plan/sources.py's. modules: tap → class of all
    modules of mine's model, captured or not, where its dump names them. untapped: as plan/untapped.py's.
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
