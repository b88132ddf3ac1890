"""Rows of which a pack has only sketches: what they show of a comparison.

The problem: a sketch gives the distance of two rows with an interval, and no element; a verdict may rest on it no
further than that. The idea: the interval of each row is that of a whole comparison's false-alarm rate, shared by all
sketched rows (Bonferroni). A row is beyond its limit where the lower end is; an output is an origin where its lower end
is beyond what one operator may create and what the upper ends of its inputs, of the same row, explain. Modules that mix
rows are none by a sketch: a replay of mine is. What fails so is said to be estimated; nothing is acquitted by a sketch.
The limits are those of rows (standards/limits.py, limit_check.py). Not here: the estimate (sketch.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import OUTPUT, is_choice, is_logits, kind_of
from vllm_accprobe.align.derived import plain
from vllm_accprobe.align.mapping import Rules
from vllm_accprobe.align.names import enclosing
from vllm_accprobe.align.tokens import POSITION_BITS, POSITION_MASK, Identity, identity
from vllm_accprobe.comparison.engine import compare, find_standard, open_both
from vllm_accprobe.comparison.measure.measured import Measured, MeasuredUnit, Part
from vllm_accprobe.comparison.measure.measurer import NO_PARTNER, NO_PAYLOAD
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.messages import first_divergence
from vllm_accprobe.comparison.pair import FAIL, PASS, SKIP, Pair, Pairs
from vllm_accprobe.comparison.plan.make_plan import Plan, make_plan
from vllm_accprobe.comparison.plan.unit import Group, Key, Unit
from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.comparison.verdict.judging import gather
from vllm_accprobe.comparison.verdict.limit_check import LimitCheck
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.formats.io.pack_file import is_pack
from vllm_accprobe.golden.pack import SketchPlace, is_once_a_row, place_name, sketched_units, sketches_of
from vllm_accprobe.golden.pack_sketches import GoldenPack, open_pack
from vllm_accprobe.golden.sketch import FEW, Sketch, distances, turns_of
from vllm_accprobe.judge.calibration import Calibration
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.judge.rounding_unit import flow_unit
from vllm_accprobe.judge.statistic import BEYOND_CHANCE
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import Limits, Standard

ESTIMATED = "estimated from a sketch"
OTHER_MATRIX = "sketches of two packs that were made by other signs"
ALONE = f"in one sketched row alone: its inputs may differ in a few elements unseen, with the chance {FEW:.1e}"
"""Of an origin that no second sketch agrees with."""
ROUTED = "sketches behind a router, which do not say which experts were chosen"
UNREADABLE = "sketched rows whose tensor cannot be read"
GOLDEN_NONFINITE = "sketched rows where golden holds NaN or infinity: a sketch cannot compare them"
_ROUTING_TAP = re.compile(r"(?:^|\.)(?:experts|gate|router)(?:\.|$)")
_ROUTING_CLASS = re.compile(r"(?:MoE|MoeBlock|Experts)$")


def is_routed(unit: Unit) -> bool:
    """Whether rows from here on may have gone to other experts at a near tie."""
    tap, role, _ = unit.key
    return is_choice(role, unit.cls) or (is_logits(tap, role, unit.cls) and "lm_head" not in tap) or bool(
        _ROUTING_TAP.search(tap) or _ROUTING_CLASS.search(unit.cls)
    )  # fmt: skip


@dataclass(frozen=True)
class ComparedSides:
    """What is compared: folders of dumps, and the packs that they come from, None for a dump of its own."""

    golden: Path
    mine: Path
    packs: tuple[GoldenPack | None, GoldenPack | None]

    def judged(
        self, result: Comparison, *, taps: str | None = None, mapping: Rules | None = None,
        standard: str | Standard = "accprobe", floors: Sequence[str | Path] = (),
    ) -> Comparison:  # fmt: skip
        """``result`` of comparing these two, under the packs' names, with what their sketches show. The sketches are
        judged by accprobe's own limits only. standard, floors: as `compare` had them."""
        if self.packs == (None, None):
            return result
        names = [str(p.path) if p else None for p in self.packs]
        result = replace(_renamed(result, names[0], names[1]), origins=_with_earlier_rows(result))
        rules, other = find_standard(standard)
        dumps = open_both(self.golden, self.mine)
        notes = [_about(side, p, d) for side, p, d in zip(("golden", "mine"), self.packs, dumps, strict=True)
                 if p is not None]  # fmt: skip
        if other is not None:
            unjudged = f"sketches are not judged by --standard {standard}: their rows are not compared"
            return replace(result, notes=[*notes, unjudged, *result.notes])
        return _Estimates(self, dumps, result, taps, mapping, rules, gather(dumps[0], floors, compare)).result(notes)


def _about(side: str, pack: GoldenPack, dump: Any) -> str:
    return (
        f"{side} is a pack: its modules have {_full_rows(dump):,} rows in full and {pack.sketches.count:,} as "
        "sketches; the other rows of modules are not compared, and a row whose inputs it does not hold is never "
        "acquitted"
    )


def _full_rows(dump: Any) -> int:
    """Rows of requests of which a module has a payload; what is stored for every row does not count."""
    spaces = {(r.rank, r.step, r.rows) for r in dump.records if r.step is not None and r.payload is not None
              and r.rows is not None and not is_once_a_row(r)}  # fmt: skip
    spans: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for key in spaces & dump.rows.keys():
        for s in dump.rows[key].segments:
            if (request := dump.requests.get((key[0], s.req))) is not None:
                spans[identity(request), s.image].append((s.pos, s.pos + s.n))
    count = 0
    for of in spans.values():
        end = -1
        for first, after in sorted(of):
            count += max(after - max(first, end), 0)
            end = max(end, after)
    return count


def _with_earlier_rows(result: Comparison) -> list[OriginEntry]:
    """The origins. One that is inferred of a module that reads a request's earlier rows comes behind the others: a pack
    does not hold these rows, and what was read may have differed there."""
    assert result.measured is not None
    mixing = result.measured.setting.mixing

    def unsure(origin: OriginEntry) -> bool:
        return bool(origin.get("evidence") == "jump" and mixing.get(origin["module"]))

    why = "it reads earlier rows, which the pack does not hold: these may have differed"
    entries: list[OriginEntry] = [
        {**o, "shape": "; ".join(filter(None, (o["shape"], why)))} if unsure(o) else o for o in result.origins
    ]
    return sorted(entries, key=unsure)


def _renamed(result: Comparison, golden: str | None, mine: str | None) -> Comparison:
    paths = {k: v for k, v in (("golden_path", golden), ("mine_path", mine)) if v is not None}
    if result.measured is not None:
        measured = result.measured
        paths_of = replace(measured.setting, **paths)  # type: ignore[arg-type]
        return replace(result, **paths, measured=Measured(paths_of, measured.units, measured.shelf))  # type: ignore
    return replace(result, **paths)  # type: ignore[arg-type]


@contextmanager
def compared_sides(golden: Path, mine: Path) -> Iterator[ComparedSides]:
    """The two sides as folders; a pack's folder goes at the end. Raises DumpError for a pack that cannot be used."""
    if not (is_pack(golden) or is_pack(mine)):
        yield ComparedSides(golden, mine, (None, None))
        return
    with TemporaryDirectory(prefix="accprobe-pack-") as home:
        packs = [open_pack(p, Path(home) / side) if is_pack(p) else None
                 for side, p in (("golden", golden), ("mine", mine))]  # fmt: skip
        paths = [path if pack is None else pack.dump for path, pack in zip((golden, mine), packs, strict=True)]
        yield ComparedSides(paths[0], paths[1], (packs[0], packs[1]))


@dataclass
class _SketchedTensor:
    """The sketched rows of one tensor. keys: int64 [n], sorted; estimate, low, high: relative errors, NaN where only
    one side is finite; spoilt: bool [n], that."""

    unit: Unit
    measured: MeasuredUnit
    limits: tuple[Limits, Limits]
    keys: np.ndarray
    sides: tuple[Sketch, Sketch]
    group: np.ndarray
    groups: list[Group]
    width: int
    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray
    spoilt: np.ndarray

    def spoilt_side(self, at: np.ndarray) -> str:
        """Which side of the rows ``at`` holds NaN or infinity."""
        some = at[self.spoilt[at]]
        golden = np.isfinite(self.sides[0].norm[some])
        return "mine" if golden.all() else "one side" if golden.any() else "golden"


def _sketches_of(pack: GoldenPack, first: Record, key: Key) -> SketchPlace | None:
    """The sketches of a tensor under the name that its own tool has for it (transformers' input of down_proj is vLLM's
    output of act_fn); None of one that a mapping puts together of several."""
    own = plain(first)
    if own is not None and own is not first:
        key = own.tap, own.role, own.call
    return None if own is None else pack.sketches.places.get(place_name(key))


class _Estimates:
    """All sketched rows of a comparison."""

    def __init__(
        self, sides: ComparedSides, dumps: tuple[Any, Any], result: Comparison, taps: str | None, mapping: Rules | None,
        standard: Standard, floor: Calibration | None,
    ):  # fmt: skip
        assert result.measured is not None
        self._result, self._sides, self._dumps = result, sides, dumps
        self._plan: Plan = make_plan(*self._dumps, taps=taps, mapping=mapping)
        self._loaders = Loader(self._dumps[0], 1 << 27), Loader(self._dumps[1], 1 << 27)
        self._standard = standard
        self._check = LimitCheck(standard, flow_unit(result.measured.setting.dtypes), floor)
        self._measured = {u.key: u for u in result.measured.units}
        self._subjects = [self._subjects_of(i) for i in range(2)]
        each = [{k for rows in side.rows.values() for k in rows.keys[rows.keep].tolist()}
                for side in (self._plan.tokens.golden, self._plan.tokens.mine)]  # fmt: skip
        self._comparable = each[0] & each[1]
        """Of text: an image's rows do not depend on tokens, and a pack names those alone that it has in full."""
        routed = (u.order for u in self._plan.units if is_routed(u))
        self._routed = min(routed, default=1 << 60)
        self.skipped: Counter[str] = Counter()
        self.places: dict[Key, _SketchedTensor] = {}
        self._calls: dict[Key, list[Key]] = {}
        for unit, keys in sketched_units(self._plan):
            self._calls[unit.key] = keys
            if unit.is_param or (found := self._place(unit)) is None:
                continue
            if unit.order > self._routed:
                self.skipped[ROUTED] += 1
            else:
                self.places[unit.key] = found
        self._estimate()

    def _subjects_of(self, side: int) -> dict[int, int]:
        """Index of a request or image in a pack's list → the number that its rows' keys begin with."""
        pack = self._sides.packs[side]
        if pack is None:
            return {}
        of = (self._plan.tokens.golden, self._plan.tokens.mine)[side]
        numbers: dict[tuple[Identity, int | None], int] = dict(of.images)  # type: ignore[arg-type]
        numbers |= {(identity((g, m)[side]), None): i for i, (g, m, _) in enumerate(self._plan.requests.pairs)}
        found = {}
        for i, (rank, number, image) in enumerate(pack.sketches.subjects):
            request = self._dumps[side].requests.get((rank, number))
            if request is not None and (identity(request), image) in numbers:
                found[i] = numbers[identity(request), image]
        return found

    # --- rows of both sides ----------------------------------------------------------------------------------------

    def _place(self, unit: Unit) -> _SketchedTensor | None:
        packs = self._sides.packs
        firsts = (unit.golden[0].first, unit.golden_key), (unit.mine[0].first, unit.key)
        stored = [None if p is None else _sketches_of(p, *first) for p, first in zip(packs, firsts, strict=True)]
        side = 0 if stored[0] is not None else 1
        place, pack = stored[side], packs[side]
        if place is None or pack is None or not all(
            DTYPES[g.first.dtype].kind == "float" for g in (*unit.golden[:1], *unit.mine[:1])
        ):  # fmt: skip
            return None
        both = stored[0] is not None and stored[1] is not None
        if both and (stored[0].name, stored[0].width, packs[0].seed) != (  # type: ignore[union-attr]
            stored[1].name, stored[1].width, packs[1].seed  # type: ignore[union-attr]
        ):  # fmt: skip
            self.skipped[OTHER_MATRIX] += 1
            return None
        found: list[dict[int, tuple[float, np.ndarray, float, int]]] = []
        for i in range(2):
            at = stored[i]
            found.append(self._sketched(i, at) if at is not None else self._full(i, unit, place, found[0] if i else {}))
        if side == 1 and not both:  # golden's rows are sketched by mine's list
            found[0] = self._full(0, unit, place, found[1])
        shared = sorted(found[0].keys() & found[1].keys() & (found[0].keys() if unit.vision else self._comparable))
        if not shared:
            return None
        known = [k for k in shared if any(math.isfinite(np.float32(f[k][0])) for f in found)]
        if len(known) < len(shared):
            self.skipped[GOLDEN_NONFINITE] += len(shared) - len(known)
        if not (shared := known):
            return None
        sides = [Sketch(*(np.array([f[k][n] for k in shared]) for n in range(3))) for f in found]
        group = np.array([found[1][k][3] for k in shared])
        measured = self._measured.get(unit.key) or MeasuredUnit.of(unit)
        part = Part.of(unit.mine[0], unit.golden[0])
        part.feature = (place.width,)
        total, created, _ = self._check.limits(measured, [part])[0]
        none = np.zeros(0)
        both_sides = np.array(shared, np.int64)
        return _SketchedTensor(unit, measured, (total, created), both_sides, (sides[0], sides[1]), group,
                               list(unit.mine), place.width, none, none, none, none)  # fmt: skip

    def _sketched(self, side: int, place: SketchPlace) -> dict[int, tuple[float, np.ndarray, float, int]]:
        pack = self._sides.packs[side]
        assert pack is not None
        rows, sketch = pack.sketches.of(place)
        subjects = self._subjects[side]
        found = {}
        for i, (request, position) in enumerate(rows.tolist()):
            if request in subjects and position >= 0:
                key = (subjects[request] << POSITION_BITS) | position
                found[key] = float(sketch.norm[i]), sketch.numbers[i], float(sketch.rounding[i]), -1
        return found

    def _full(
        self, side: int, unit: Unit, place: SketchPlace, wanted: Mapping[int, Any]
    ) -> dict[int, tuple[float, np.ndarray, float, int]]:
        """The rows ``wanted`` of a side that has them in full, as its partner's sketches are."""
        found: dict[int, tuple[float, np.ndarray, float, int]] = {}
        pack = self._sides.packs[0] if self._sides.packs[0] is not None and side == 1 else self._sides.packs[1]
        rows = (self._plan.tokens.golden, self._plan.tokens.mine)[side]
        keys = np.fromiter(wanted, np.int64, len(wanted))
        assert pack is not None
        signs = cache(lambda: pack.sketches.signs(place))
        groups = (unit.golden, unit.mine)[side]
        of = sketches_of(groups, rows, self._loaders[side], keys, lambda n: signs() if n == place.width else None)
        for number, those, some in of:
            if some is None:
                self.skipped[UNREADABLE] += len(those)
                continue
            for i, key in enumerate(those.tolist()):
                found[key] = float(some.norm[i]), some.numbers[i], 0.0, number
        return found

    # --- estimates ---------------------------------------------------------------------------------------------------

    def _estimate(self) -> None:
        count = sum(len(p.keys) for p in self.places.values())
        self.count = count
        chance = 2 * self._result.false_alarm_rate / max(count, 1)
        for p in self.places.values():
            norm = p.sides[0].norm
            finite, mine_finite = (np.isfinite(s.norm.astype(np.float32)) for s in p.sides)
            both = finite & mine_finite
            usual = np.median(norm[np.isfinite(norm) & (norm > 0)]) if (norm > 0).any() else 0.0
            size = np.maximum(norm, self._standard.floor_share(p.width) * usual)
            found = distances(p.sides[0], p.sides[1], chance)
            with np.errstate(divide="ignore", invalid="ignore"):
                p.estimate, p.low, p.high = (
                    np.where(both, np.where(size > 0, d / size, np.where(d > 0, np.inf, 0.0)), 0.0) for d in found
                )
            p.spoilt = finite != mine_finite

    def _known(self, key: Key) -> dict[int, float]:
        """Row → the largest relative error that it may have: of a sketch its upper end, of a full row its own."""
        found: dict[int, float] = {}
        units = (self._measured.get(k) for k in self._calls.get(key, [key]))
        for part in (part for unit in units if unit is not None for part in unit.parts):
            if part.whole or part.skip or not len(part.rows):
                continue
            rel = np.zeros(len(part.rows))
            if part.table is not None:
                rel = definition.row_rel_l2(part.table, 0.0)
            elif not part.identical:
                continue
            found.update(zip(part.rows.keys.tolist(), rel.tolist(), strict=True))
        place = self.places.get(key)
        if place is not None:
            found.update(zip(place.keys.tolist(), place.high.tolist(), strict=True))
        return found

    def _origins(self) -> list[tuple[int, OriginEntry]]:
        """(place in the data flow, entry) of each module whose output some row condemns. Where only one row does, the
        upper ends of its inputs rest on one sketch each: it is named where no other module is, and says so."""
        inputs: dict[tuple[str, int], list[Key]] = defaultdict(list)
        for key in self._calls:
            if key[1].startswith("input"):
                inputs[key[0], key[2]].append(key)
        found: dict[str, tuple[int, OriginEntry]] = {}
        for p in self.places.values():
            tap, role, call = p.unit.key
            if kind_of(role) != OUTPUT or self._plan.tree.mixing.get(tap) or not inputs[tap, call]:
                continue
            total, created = p.limits
            bad = np.flatnonzero((p.low > created.row) | p.spoilt)
            if not len(bad):
                continue
            before = [self._known(key) for key in inputs[tap, call]]
            rows: list[tuple[int, float]] = []
            for i in bad.tolist():
                known = [b.get(int(p.keys[i])) for b in before]
                if any(k is None for k in known):
                    continue
                most = max(k for k in known if k is not None)
                times = self._standard.amplification if most <= total.row else self._standard.wild
                if most < self._standard.garbage and (p.spoilt[i] or p.low[i] > created.row + times * most):
                    rows.append((i, most))
            if rows and (tap not in found or p.unit.order < found[tap][0]):
                found[tap] = p.unit.order, self._entry(p, rows)
        inner = {outer for tap in found for outer in enclosing(tap) if outer != tap}
        named = sorted((f for tap, f in found.items() if tap not in inner), key=lambda f: f[0])
        agreed = [f for f in named if ALONE not in f[1]["shape"]]
        return agreed or named

    @staticmethod
    def _alone(p: _SketchedTensor, rows: Sequence[tuple[int, float]]) -> bool:
        """Whether no two rows met other signs: what one sketch hides in an input, all of them may."""
        positions = p.keys[[i for i, _ in rows]] & POSITION_MASK
        return not any(p.spoilt[i] for i, _ in rows) and len(set(turns_of(positions, p.width).tolist())) == 1

    def _entry(self, p: _SketchedTensor, rows: list[tuple[int, float]]) -> OriginEntry:
        first, most = min(rows, key=lambda r: int(p.keys[r[0]]))
        worst = max(float(p.low[i]) for i, _ in rows)
        limit = p.limits[1].row
        request, position = self._plan.tokens.name(int(p.keys[first]))
        text = f"{ESTIMATED}: an error of {p.low[first]:.3g} to {p.high[first]:.3g}, about {p.estimate[first]:.3g}"
        if p.spoilt[first]:
            text = f"{ESTIMATED}: NaN or infinity in {p.spoilt_side(np.array([first]))} only"
        if self._alone(p, rows):
            text += f"; {ALONE}"
        size = float(p.low[first]) if not p.spoilt[first] else math.inf
        tap, role, _ = p.unit.key
        return {
            "module": tap, "class": p.unit.cls, "role": role, "request": request, "position": position,
            "phase": self._phase(p, first), "created": size, "propagated": most, "floor": limit,
            "evidence": "values" if p.spoilt[first] else "jump", "tier": BEYOND_CHANCE,
            "times": worst / limit if limit and math.isfinite(worst) else None, "chance": None, "layers": None,
            "rows": len(rows), "worst": worst, "nonfinite": 0, "shape": text, "setting": "", "cause": None, "gap": None,
        }  # fmt: skip

    def _phase(self, p: _SketchedTensor, row: int) -> str | None:
        group = p.group[row]
        where = p.groups[group].where if group >= 0 else None
        if where is None:
            return None
        rows = self._plan.tokens.mine.rows[where]
        at = np.flatnonzero(rows.keys == p.keys[row])
        return None if not len(at) else "decode" if rows.decode[at[0]] else "prefill"

    # --- the result --------------------------------------------------------------------------------------------------

    def _pairs(self) -> list[Pair]:
        found = []
        for p in self.places.values():
            for number in np.unique(p.group).tolist():
                found.append(self._pair(p, np.flatnonzero(p.group == number), number))
        return found

    def _pair(self, p: _SketchedTensor, at: np.ndarray, number: int) -> Pair:
        unit, limit = p.unit, p.limits[0].row
        mine = (p.groups[number] if number >= 0 else unit.mine[0]).first
        first = unit.golden[0].first
        spoilt = int(p.spoilt[at].sum())
        worst = int(at[np.argmax(np.where(p.spoilt[at], np.inf, p.low[at]))])
        norm = p.sides[0].norm[at]
        total = np.nansum(norm**2)
        wrong = bool(spoilt) or bool((p.low[at] > limit).any())
        text = f"{ESTIMATED}: {len(at)} rows, the worst {p.low[worst]:.3g} to {p.high[worst]:.3g}"
        if spoilt:
            text = f"{ESTIMATED}: NaN or infinity in {spoilt} rows of {p.spoilt_side(at)} only"
        request, position = self._plan.tokens.name(int(p.keys[worst]))
        rel = math.sqrt(float(np.nansum((p.estimate[at] * norm) ** 2)) / total) if total > 0 else 0.0
        return Pair(
            golden=first.name, mine=mine.name, step=mine.step, rank=mine.rank if len(p.groups) else None,
            dtype_golden=first.dtype, dtype_mine=mine.dtype, shape=(len(at), p.width), rel_l2=rel,
            worst_row_rel_l2=float(p.estimate[at].max()), nonfinite_mismatch=spoilt, status=FAIL if wrong else PASS,
            message=text, tap=unit.key[0], cls=unit.cls, role=unit.key[1], call=unit.key[2], order=unit.order,
            rule=unit.rule, rows=len(at), phase=self._phase(p, worst), worst_request=request, worst_position=position,
            limit=limit, measure="row_rel_l2", measured=float(p.low[worst]), allowed=limit,
        )  # fmt: skip

    def result(self, notes: Sequence[str]) -> Comparison:
        """The comparison with the sketched rows: a row of the table that said nothing of a tensor gives way to its
        sketches'; others come behind the last."""
        result = self._result
        pairs = list(result.pairs)
        empty = {(p.tap, p.role, p.call, p.step): i for i, p in enumerate(pairs)
                 if p.status == SKIP and p.message in (NO_PARTNER, NO_PAYLOAD)}  # fmt: skip
        freed: Counter[str] = Counter()
        for pair in self._pairs():
            at = empty.get((pair.tap, pair.role, pair.call, pair.step))
            if at is None:
                pairs.append(pair)
            else:
                freed[pairs[at].message] += 1
                pairs[at] = pair
        origins = self._origins()
        known = {o["module"] for o in result.origins}
        order: dict[str, int] = {}
        for unit in self._plan.units:
            order.setdefault(unit.key[0], unit.order)
        entries = list(result.origins)
        for place, entry in origins:
            if entry["module"] not in known:
                outer = set(enclosing(entry["module"]))
                before = next((i for i, o in enumerate(entries) if o["module"] in outer
                               or order.get(o["module"], 1 << 60) > place), len(entries))  # fmt: skip
                entries.insert(before, entry)
        skipped = Counter(result.coverage.get("skipped", {}))
        skipped.subtract(freed)
        skipped.update(self.skipped)
        failed = [p for p in pairs if p.status == FAIL and p.message.startswith(ESTIMATED)]
        places = max(p.sketches.places_rows for p in self._sides.packs if p is not None)
        line = (f"sketches: {self.count:,} of {places:,} rows of tensors are estimated, {len(failed):,} pairs beyond "
                "their limits")  # fmt: skip
        return replace(
            result, pairs=pairs, origins=entries, notes=[*notes, line, *result.notes],
            verdict=FAIL if failed or origins else result.verdict,
            coverage={**result.coverage, "skipped": {k: n for k, n in skipped.items() if n > 0}},
            first_divergence=result.first_divergence or first_divergence(Pairs(pairs)),
        )  # fmt: skip
