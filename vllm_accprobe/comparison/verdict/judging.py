"""Judges a measured comparison: limits, origins, near ties and notes give a `Comparison`.

The problem: limits, origins, near ties and words must meet in one result, and a saved file must give the same result as
the tensors. The idea: one pass in data-flow order. Row tables of a unit are joined and compared with their limits at
once (`LimitCheck`); rows behind a router's near tie are forgiven (`settle`); each part becomes a pair (words and
numbers) and its rows with an error one `TensorErrors`. Then origins, flips and the verdict follow. A measured floor
comes from further runs of golden's side, compared with golden like any dump (`gather`). Not here: each rule (judge/),
a pair's status (pair_status.py), words (comparison/messages.py), measuring (comparison/engine.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe.align.data_flow import OUTPUT, DataFlow, is_choice, is_logits, kind_of
from vllm_accprobe.align.names import enclosing
from vllm_accprobe.align.tokens import NO_ROWS, RowSet, Union, Unions, subject
from vllm_accprobe.comparison import messages, runner_inputs
from vllm_accprobe.comparison.config_constants import built_notes, with_built
from vllm_accprobe.comparison.coverage import BY_CLASS, by_class, finished
from vllm_accprobe.comparison.gaps import Gap, GapFinder, entry_of, taps_of
from vllm_accprobe.comparison.measure.measured import Measured, MeasuredUnit, Part, SpillBuffer
from vllm_accprobe.comparison.measure.measurer import is_computed
from vllm_accprobe.comparison.notes import (
    ALL_SKIPPED,
    choices,
    nonfinite_steps,
    other_settings,
    unseen_routing,
    with_constants,
    without_tensors,
)
from vllm_accprobe.comparison.pair import FAIL, NONE_JUDGED, PASS, SKIP, Pair, Pairs, counted, was_compared
from vllm_accprobe.comparison.plan.unit import SAMPLER, TOKEN
from vllm_accprobe.comparison.result import CompareError, Comparison, NothingCompared
from vllm_accprobe.comparison.row_table import NOT_KEPT, KeptRows, RowLog, numbered_sets
from vllm_accprobe.comparison.runner_inputs import notes as state_notes
from vllm_accprobe.comparison.verdict import origin_entries, pair_status
from vllm_accprobe.comparison.verdict.limit_check import LimitCheck, PartLimits
from vllm_accprobe.comparison.weight_places import place_notes, with_causes
from vllm_accprobe.dump.decode import value_at
from vllm_accprobe.dump.record_table import LazyTable
from vllm_accprobe.judge.calibration import (
    FLOAT32,
    MARGIN,
    SECOND_RUN,
    Calibration,
    CalibrationError,
    Floors,
    is_calibration,
    joined,
    load,
)
from vllm_accprobe.judge.near_ties import (
    NOT_COMPARED,
    ROWS_BEHIND,
    Routing,
    behind,
    choices_first,
    experts_of,
    golden_leaves,
    in_front_of,
    unknown_routers,
)
from vllm_accprobe.judge.origins import Origin, find_origins, in_all_layers, removed
from vllm_accprobe.judge.rounding_unit import flow_unit, is_exact, is_mask, unit as rounding_unit
from vllm_accprobe.judge.statistic import BEHIND_A_ROUTER, RATE as FALSE_ALARM_RATE
from vllm_accprobe.judge.tensor_errors import (
    NONFINITE,
    RowErrors,
    TensorErrors,
    rows_of,
)
from vllm_accprobe.judge.weights import wrong_weights
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import EXACT, Standard


@dataclass(frozen=True)
class RerouteNote:
    """What choices of experts make of a part. note: for its pair. left: bool [rows], which are not judged. own: keys of
    the rows whose choice is wrong by mine's own logits."""

    note: str = ""
    left: np.ndarray | None = None
    own: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


_UNMOVED = RerouteNote()


def settle(
    unit: MeasuredUnit, part: Part, rows: RowSet, errors: RowErrors, routing: Routing, rounding: float,
    traces: Sequence[TensorErrors], doubted: np.ndarray | None = None, leaves: float = 0.0,
) -> RerouteNote:  # fmt: skip
    """Finds rows sent to other experts at a near tie, adds them to ``routing``, and forgives, in ``errors``, the rows
    that come after one. rows: that the part speaks for; rounding: the model's unit (`flow_unit`); traces:
    of what lies before; doubted: bool [rows], which earlier rows that were not compared may have changed, so that
    logits far apart are no error; leaves: see `near_ties.golden_leaves`."""
    keys = rows.keys
    finite = errors.measure != NONFINITE  # no expert makes NaN of numbers: rows with it are judged
    if part.whole:  # rows sorted by expert: one that goes elsewhere moves all others
        if not routing.after(keys).any() or not finite.all():
            return RerouteNote()
        _forgive(errors, np.ones(len(errors.err), bool))
        why = "not judged: its step has rows after a router's near tie, and it does not say which are theirs"
        return RerouteNote(why, np.ones(len(keys), bool))
    if len(errors.err) != len(keys):
        return RerouteNote()
    wrong = np.zeros(len(keys), bool)
    if is_choice(unit.key[1], unit.cls):
        other = np.flatnonzero(errors.err > 0)
        found = None if part.margins is None else part.margins[other]
        excused, bad = routing.judge(keys[other], found, rounding, unit, traces, leaves)
        excused = excused if doubted is None else (excused | doubted[other]) & ~bad
        routing.add(keys[other[excused]])
        wrong[other[bad]] = True
    mask = routing.after(keys) & ~wrong & finite
    own = keys[wrong]
    if not mask.any():
        return RerouteNote("", None, own)
    _forgive(errors, mask)
    return RerouteNote(f"{int(mask.sum())} rows after a router's near tie are not judged", mask, own)


def unrouted(settled: RerouteNote, errors: RowErrors, unseen: np.ndarray) -> RerouteNote:
    """Also leaves out ``unseen`` rows (bool [rows]), in which no module was compared, nor what its router chose: a pack
    has the best logits of all rows, and modules of some."""
    if not unseen.any():
        return settled
    _forgive(errors, unseen)
    note = f"{int(unseen.sum())} rows whose experts were not compared are not judged"
    left = unseen if settled.left is None else unseen | settled.left
    return RerouteNote("; ".join(filter(None, (settled.note, note))), left, settled.own)


def unjudged(errors: RowErrors, doubted: np.ndarray, own: np.ndarray, mixing: bool) -> tuple[RowErrors, str]:
    """(``errors`` without rows that earlier rows may have changed which were not compared, and a text about them).

    doubted: bool [rows], these; own: bool [rows], choices that are wrong whatever came in. mixing: whether the module
    reads earlier rows: another is judged by its inputs, which were compared (judge/origins.py)."""
    one = len(errors.err) != len(doubted)
    mask = np.full(len(errors.err), doubted.any()) if one else doubted & ~own
    mask &= (errors.measure != NONFINITE) & (errors.err > 0)  # no other expert makes NaN of numbers
    if not mask.any():
        return errors, ""
    errors = rows_of(errors, np.arange(len(mask)))
    _forgive(errors, mask)
    how = "are not judged" if mixing else "are judged by their inputs alone"
    return errors, f"{int((doubted if one else mask).sum())} rows {how}: earlier rows' experts were not compared"


def _none_judged(before: RowErrors, after: RowErrors, left: np.ndarray | None) -> bool:
    """Whether every row of a part is left out: one of ``left``, or one whose error ``before`` is none ``after``."""
    out = before.err > after.err
    if left is not None:
        out = left if len(left) != len(out) else out | left
    return bool(out.all()) and len(out) > 0


def add_undecided(
    part: Part, rows: RowSet, errors: RowErrors, routing: Routing, rounding: float, allowed: float,
    doubted: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Adds rows that a near tie of these logits may have sent elsewhere, where the choice was not captured
    (near_ties.py), to ``routing``: from here on they are not judged. The logits themselves are. allowed: the limit of
    their rows."""
    if part.margins is None or part.choices is not None or len(errors.err) != len(rows.keys):
        return
    other = np.flatnonzero(~np.isnan(part.margins[:, 0]))
    err = errors.err[other]
    keys = rows.keys[other]
    near = (err > 0) & (err <= allowed)
    near = near if doubted is None else near | doubted[other]
    routing.add(keys[routing.undecided(keys, part.margins[other], rounding, near)])


def _forgive(errors: RowErrors, mask: np.ndarray) -> None:
    errors.err[mask], errors.rel[mask], errors.ratio[mask], errors.peak[mask] = 0.0, 0.0, 1.0, 0.0
    errors.gain[mask] = 0.0


_NO_KEYS = np.zeros(0, np.int64)
_NO_ERROR = np.zeros(1)


def shared_rows(parts: list[Part], errors: list[RowErrors], rows: list[RowSet], union: Union) -> np.ndarray:
    """`TensorErrors.shared` of the rows of all parts. union: of these."""
    each = zip(parts, errors, rows, strict=True)
    lengths = np.array([len(known.keys) for known in rows], np.int64)
    one = np.array([part.whole or len(e.err) != len(known.keys) for part, e, known in each], bool) & (lengths > 0)
    return _by_row(union, one, lengths)


def _by_row(union: Union, one: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`TensorErrors.shared`. one: bool [parts], whether all rows of a part have one error; lengths: its rows."""
    if not one.any():
        return _NO_KEYS
    found = np.full(len(union.seen), -1)
    found[union.place] = np.repeat(np.where(one, np.arange(len(one)), -1), lengths)
    return found


RowColumns = tuple[np.ndarray, ...]
"""Of rows with an error: err, rel, gain (float64), broken and own (bool), as `TensorErrors` has them."""
_NO_ROWS = np.zeros(0, np.int64), *[np.zeros(0)] * 3, *[np.zeros(0, bool)] * 2


def rows_with_errors(
    parts: list[Part], errors: list[RowErrors], rows: list[RowSet], own: np.ndarray = _NO_KEYS
) -> tuple[np.ndarray, RowColumns, float]:
    """(which rows of all parts, one after the other, have an error; what is known of these; the largest error that
    belongs to no row). rows: that each part speaks for. own: keys that are wrong whatever came in."""
    found: list[RowColumns] = [_NO_ROWS]
    everywhere, end = 0.0, 0
    for part, e, known in zip(parts, errors, rows, strict=True):
        n = len(known.keys)
        start, end = end, end + n
        if part.identical:
            continue
        at, values = np.arange(n), ()  # type: tuple[np.ndarray, tuple[Any, ...]]
        if part.whole and (e.err > 0).any():
            most = e.err.max()
            values = most, most, 0.0, _broken(part, e).any(), False
            everywhere = everywhere if n else max(everywhere, float(most))
        elif not part.whole and len(e.err) == n:
            at = np.flatnonzero(e.err > 0)
            wrong = np.isin(known.keys[at], own) if len(own) else False
            values = e.err[at], e.rel[at], e.gain[at], _broken(part, e)[at], wrong
        elif not part.whole and e.err[0] > 0:
            values = e.err[0], e.rel[0], e.gain[0], _broken(part, e)[0], False
        if values:
            # np.broadcast_to takes longer than all the rest
            found.append((start + at, *(v if isinstance(v, np.ndarray) else np.full(len(at), v) for v in values)))
    which, *columns = (np.concatenate(column) for column in zip(*found, strict=True))
    return which, tuple(columns), everywhere


def by_key(which: np.ndarray, columns: RowColumns, rows: Union) -> tuple[np.ndarray, RowColumns]:
    """(keys, each once, the columns in their order), of a key with several rows the largest error. rows: of all
    parts."""
    at = rows.place[which]
    if rows.distinct and len(at) == len(rows.seen):
        keys = rows.seen.keys  # all of them: the same array, which whoever compares knows again
        order = np.empty(len(at), np.int64)
        order[at] = np.arange(len(at))
    else:
        order = np.lexsort((columns[0], at))
        order = order[np.append(np.diff(at[order]) != 0, True)] if len(at) else order
        keys = rows.seen.keys[at[order]]
    return keys, tuple(column[order] for column in columns)


def _broken(part: Part, errors: RowErrors) -> np.ndarray:
    """bool [rows]: NaN or infinity on one side only, and not on golden's."""
    return (errors.measure == NONFINITE) & (part.own_nonfinite is not False)


_Compared = tuple[Part, RowErrors, PartLimits, str]
"""A part, its errors and limits, and what near ties say of it."""


if TYPE_CHECKING:
    from collections.abc import Callable

    Compare = Callable[[Any, Any], Comparison]


def gather(
    golden: Any, floors: Sequence[str | Path], compare: Compare, option: str = "--floor ", failing: bool = False
) -> Calibration | None:
    """The floor of ``floors``: directories of calibrations, or dumps, each of which is compared with ``golden``.

    golden: a Dump or a path, None where there is none (a comparison that is judged again). option: what the user wrote
    in front of a floor. failing: dumps that fail against golden are taken as well. Raises CompareError.
    """
    return joined(_one(golden, Path(f), compare, option, failing) for f in floors)


def _one(golden: Any, floor: Path, compare: Compare, option: str, failing: bool) -> Calibration:
    if is_calibration(floor):
        try:
            return load(floor)
        except CalibrationError as e:
            raise CompareError(str(e)) from None
    if golden is None:
        why = "--rejudge has no dumps; make one with `accprobe compare --calibrate`"
        raise CompareError(f"--floor {floor} is no calibration: {why}")
    try:
        result = compare(golden, floor)
        found = calibration_of(result, str(floor))
        if result.verdict == FAIL and not failing:
            raise CompareError(_fails(result, golden, floor))
        return found
    except CompareError as e:
        more = "" if str(e).startswith(f"{floor} ") else f"{option}{floor} is no other run of golden's side: "
        raise type(e)(f"{more}{e}") from None


def _fails(result: Comparison, golden: Any, floor: Path) -> str:
    """A faulty run as a floor would hide its fault in every later comparison."""
    first = next((str(o["module"]) for o in result.origins), None)
    first = first or next((p.tap for p in result.pairs if p.status == FAIL), "a sampled token")
    made = f"accprobe compare {getattr(golden, 'path', golden)} {floor} --calibrate accprobe-floor --accept-failing"
    return f"it fails against golden, first at {first}: no floor; if rounding alone does that on this side, `{made}`"


def calibration_of(result: Comparison, run: str) -> Calibration:
    """What a comparison of golden with another correct run of its own side says. Raises CompareError where the two do
    not belong together: other weights, or logits that NaN tells apart."""
    wrong = [p for p in result.pairs if p.role.startswith("param.") and p.status == FAIL]
    if wrong:
        raise CompareError(f"it has other weights than golden ({wrong[0].tap} {wrong[0].role}): no floor of golden's")
    floors: Floors = {}
    for pair in result.pairs:
        if pair.status != SKIP and pair.worst_row_rel_l2 is not None and not pair.role.startswith("param."):
            here = floors.setdefault((pair.tap, pair.role), {})
            for phase, value in _values(pair):
                here[phase] = max(value, here.get(phase, 0.0))
    if not floors:
        raise CompareError("nothing of it could be compared with golden by value: no floor")
    origins: dict[str, float] = {}
    for o in result.origins:
        worst = o["worst"]
        if worst is not None and math.isfinite(worst):  # another constant, or a cache, has none
            for tap in taps_of(o):
                origins[tap] = max(worst, origins.get(tap, 0.0))
    sides = ([p.dtype_golden for p in result.pairs], [p.dtype_mine for p in result.pairs])
    units = [flow_unit(str(d) for d in side) for side in sides]
    model, dtype = (str(value_at(result.golden_run, "model", k) or "") for k in ("class", "dtype"))
    source = FLOAT32 if 0 < units[0] < units[1] else SECOND_RUN
    return Calibration(floors, origins, model[:500], dtype[:50], (run,), source)


def _values(pair: Pair) -> list[tuple[str, float]]:
    found = [("prefill", pair.prefill_rel_l2), ("decode", pair.decode_rel_l2), ("any", pair.worst_row_rel_l2)]
    return [(phase, v) for phase, v in found if v is not None and math.isfinite(v)]


def sentence(calibration: Calibration | None, pairs: Sequence[Pair]) -> str:
    """Which floor the limits rest on, in one line; "" for the model of rounding alone."""
    if calibration is None:
        return ""
    taps = {(p.tap, p.role) for p in pairs if p.x_floor is not None}
    known = sum(1 for key in taps if key in calibration.floors)
    runs = counted(len(calibration.runs), "run")
    second = calibration.source == SECOND_RUN
    what = "golden against other runs of its side" if second else "a float32 golden's distance to lower precision"
    return f"floor measured by {runs} ({what}) at {known} of {len(taps)} tensors, rounding model elsewhere"


BOUND = 32 << 20
"""Bytes of what is known of each row to find origins (50 a row of each tensor that differs) that stay in memory."""


def judge(
    measured: Measured,
    standard: Standard,
    log: RowLog | None = None,
    floor: Calibration | None = None,
    *,
    rate: float = FALSE_ALARM_RATE,
) -> Comparison:
    """The verdict on what was measured. log: filled with errors by row. floor: what golden's own runs differ by.
    rate: the probability of an origin anywhere in a comparison with rounding alone that is allowed.

    Raises CompareError for a floor that fits nothing, and NothingCompared.
    """
    return _Judge(measured, standard, log or RowLog(), floor, rate).run()


@dataclass
class _Judge:
    measured: Measured
    standard: Standard
    log: RowLog
    floor: Calibration | None = None
    rate: float = FALSE_ALARM_RATE
    tables: list[LazyTable[Pair]] = field(default_factory=list)
    rows: list[RowSet] = field(default_factory=list)
    """Of each pair."""
    units_of: list[np.ndarray] = field(default_factory=list)
    """Of each table, the number of each pair's unit."""
    traces: list[TensorErrors] = field(default_factory=list)
    waiting: list[tuple[int, MeasuredUnit]] = field(default_factory=list)
    """Units in turn, with their numbers, that lines decided and that are judged together."""
    replicas: int = 0
    routing: Routing = field(default_factory=Routing)
    chosen: origin_entries.Chosen = field(default_factory=dict)

    def run(self) -> Comparison:
        setting = self.measured.setting
        self.shelf = (self.measured.shelf or SpillBuffer()).another(BOUND)
        self.unit = flow_unit(setting.dtypes)
        self.limit_check, self.unions = LimitCheck(self.standard, self.unit, self.floor), Unions()
        self.moments = {moment: RowSet(keys) for moment, keys in setting.moments.items()}
        self.tree, self.holders = setting.tree, experts_of(setting.attrs)
        if any(run.get("packed") for run in (setting.golden_run, setting.mine_run)):
            keys = setting.places[0]
            texts = [who for who, (_, image) in setting.names.items() if image is None]
            self.routing.computed = keys[np.isin(subject(keys), texts)]
        for number, unit in enumerate(choices_first(self.measured.each())):
            if self._by_lines(unit):
                self.waiting.append((number, unit))
                continue
            self._judge_waiting()
            known = len(self.rows)
            self._unit(unit)
            self.units_of.append(np.full(len(self.rows) - known, number))
            self.shelf.rest()
        self._judge_waiting()
        numbers = np.concatenate([_NO_KEYS, *self.units_of])
        pairs = self._in_order(Pairs.joined(self.tables), np.argsort(numbers, kind="stable"))
        alone = self._alone(pairs)
        self._check_floor(pairs)
        places = origin_entries.Places(setting)
        reported: dict[str, float] = {}
        flow = DataFlow(self.traces, self.tree)
        created = find_origins(flow, self.standard, setting.images, self.rate, reported, self.shelf)
        created, excused = self._not_excused(created)
        routing = [(t, r, c) for (t, r, _), c in ((u.key, u.cls) for u in self.measured.units)]
        seen = [tap for tap, role, cls in routing if is_choice(role, cls) or is_logits(tap, role, cls)]
        unseen = unknown_routers(setting.attrs, seen)
        created = [origin_entries.unproved(c) if not c.trace.vision and behind(c.tap, unseen) else c for c in created]
        # What all its readers remove gives way to an error that goes on.
        last = {id(c): len(self.measured.units) for c in created if removed(c, flow, self.traces)}
        created.sort(key=lambda c: last.get(id(c), 0))
        finder = GapFinder(setting.untapped, flow)
        gaps = [finder.of(c) for c in created]
        # A tap, or a gap, is named once, by the first tensor that shows it.
        first = {_name(c, gap): c for c, gap in reversed(list(zip(created, gaps, strict=True)))}
        named = [(c, gap) for c, gap in zip(created, gaps, strict=True) if first[_name(c, gap)] is c]
        about = {**setting.untapped.classes, **setting.classes}, setting.settings
        entries = [origin_entries.origin_entry(c, setting, places, pairs, self.chosen) for c, _ in named]
        places_of = [c.trace.order + last.get(id(c), 0) for c, _ in named]
        origins = [(at, entry_of(e, gap, *about)) for at, e, (_, gap) in zip(places_of, entries, named, strict=True)]
        steps = origin_entries.steps_of(created)
        every = in_all_layers([o["module"] for _, o in origins if not o["gap"]], {t.tap for t in self.traces})
        for (c, gap), (_, entry) in zip(named, origins, strict=True):
            entry["nonfinite"] = steps.get(c.tap, 0)
            entry["layers"] = None if gap else every.get(entry["module"])
        origins = with_constants(origins, setting.settings, setting.modules, pairs)
        pairs = origin_entries.condemn(created, pairs, self.rows, [gap.after if gap else "" for gap in gaps])
        unrouted = self.routing.left[NOT_COMPARED]
        judged = origin_entries.judge_flips(setting, self.traces, places, pairs, self.rows, unrouted)
        flipped, sampler, pairs = judged
        placed = sorted([*origins, *((setting.sampler_order, o) for o in sampler)], key=lambda o: o[0])
        blamed = with_causes((o for _, o in placed), setting.weights)
        blamed = with_built(runner_inputs.with_inputs(blamed, places.chunk), setting.built)
        moments = np.array([-1 if step is None else step for step in pairs.column("step")], np.int64)
        pairs = self._in_order(pairs, np.lexsort((np.array(pairs.column("order"), np.int64), moments)))
        if not alone and not blamed:  # all that was left may be tokens whose flips nothing judges
            alone = self._alone(pairs)
        rows = self.log.table(pairs.numbers("limit"), setting.names)
        images = messages.images(setting, self.measured.units, pairs)
        open_to = sum(c.tier == BEHIND_A_ROUTER for c, _ in named)
        lines = [
            *nonfinite_steps(blamed),
            *messages.one_sided(setting.coverage, setting.notes, flipped),
            *built_notes(blamed, setting.built),
            *choices(self.routing),
            *unseen_routing(unseen, open_to),
            *other_settings(setting.settings, {str(o["module"]) for o in blamed if o.get("cause")}),
        ]
        about_floor = [s for s in (sentence(self.floor, pairs), excused) if s]
        of_states = state_notes(setting.states)
        notes = [*place_notes(setting.weights), *alone, *of_states, *setting.notes, *images, *about_floor, *lines]
        return Comparison(
            golden_path=setting.golden_path,
            mine_path=setting.mine_path,
            golden_run=setting.golden_run,
            mine_run=setting.mine_run,
            golden_ids=setting.golden_ids,
            pairs=pairs,
            coverage=finished(setting.coverage, self.routing, flipped)
            | {BY_CLASS: by_class(pairs, setting, self.standard.element)},
            first_divergence=messages.first_divergence(pairs, rows),
            origins=blamed,
            tokens={"compared": setting.tokens_compared, "flipped": flipped},
            verdict=FAIL if pairs.failed.any() or blamed or wrong_weights(setting.weights) else PASS,
            notes=messages.weights(setting.weights) + messages.notes(notes, pairs, flipped, self.replicas, blamed),
            plan=setting.plan,
            standard=self.standard.to_dict(self.unit, setting.layers)
            | (
                {}
                if self.floor is None
                else {"floor": self.floor.source, "floor_runs": list(self.floor.runs), "floor_margin": MARGIN}
            ),
            rows=rows,
            measured=self.measured,
            false_alarm_rate=self.rate,
            by_chance=self.rate,
            states=setting.states,
            weights=setting.weights,
            created=reported,
        )

    def _alone(self, pairs: Pairs) -> list[str]:
        """What is reported of a comparison without judged pairs; nothing where there are some."""
        if not self._nothing(pairs):
            return []
        setting, why = self.measured.setting, self._why_nothing(pairs)
        text = without_tensors(setting, why, bool(self.measured.units))
        if not text:
            raise NothingCompared(f"{why} (golden {setting.golden_path}, mine {setting.mine_path})")
        return [text]

    def _why_nothing(self, pairs: Sequence[Pair]) -> str:
        why = self.measured.setting.nothing
        left = [p.message for p in pairs if p.status == SKIP and was_compared(p)]
        if left:
            return f"nothing could be compared: {NONE_JUDGED if NONE_JUDGED in left else left[0]}"
        if why.endswith(ALL_SKIPPED) and any(p.status == PASS for p in pairs):
            if not self.measured.setting.moments and self._steps_wanted():
                return ("nothing could be compared but parameters, which agree: no dump has a step (the servers ended "
                        "before, or got no request)")  # fmt: skip
            return "nothing could be compared but parameters: no captured row of one dump has a partner in the other"
        return why

    def _not_excused(self, created: list[Origin]) -> tuple[list[Origin], str]:
        if self.floor is None:
            return created, ""
        # A calibration knows an origin in a gap by the tap that showed it.
        kept = [
            c for c in created
            if not any(self.floor.excuses(t, origin_entries.size_of(c)[2]) for t in (c.tap, c.trace.tap))
        ]  # fmt: skip
        taps = sorted({c.tap for c in created} - {c.tap for c in kept})
        if not taps:
            return created, ""
        what = f"{len(taps)} taps create errors that golden's own runs show as well, first {taps[0]}"
        return kept, what + ": not taken for origins"

    def _check_floor(self, pairs: Pairs) -> None:
        known = set(zip(pairs.column("tap"), pairs.column("role"), strict=True))
        if self.floor is None or any(self.floor.floor(*place, None) is not None for place in known):
            return
        if not known & set(self.floor.floors):
            raise CompareError("the floor fits none of the tensors compared: it was made with another model")

    def _steps_wanted(self) -> bool:
        """Whether a probe was to capture more than parameters, so that equal parameters alone are no comparison."""
        probes = [run.get("probe") for run in (self.measured.setting.golden_run, self.measured.setting.mine_run)]
        parts = [p.get("parts") for p in probes if isinstance(p, dict) and p.get("enabled")]
        return any(isinstance(p, list) and (not p or set(p) - {"params"}) for p in parts)

    def _nothing(self, pairs: Pairs) -> bool:
        """Equal weights alone are no comparison where activations were captured and none of them has a partner."""
        seen = self.measured.setting.coverage
        # Rows that one side has alone: both were to compute, and one was killed before it did.
        left = seen.get("rows_only_golden") or seen.get("rows_only_mine")
        ran = bool(left) or any(not u.is_param for u in self.measured.units) or not self.measured.units
        ran = ran or (not self.measured.setting.moments and self._steps_wanted())
        param = pairs.those("role", lambda role: role.startswith("param."))
        return not (pairs.failed | (pairs.having("status", PASS) & (~param | (not ran)))).any()

    def _in_order(self, pairs: Pairs, order: np.ndarray) -> Pairs:
        """``pairs``, and all that is known of each, at ``order``."""
        if np.array_equal(order, np.arange(len(order))):
            return pairs
        self.rows = list(map(self.rows.__getitem__, order.tolist()))
        self.log.reorder(order)
        return pairs.taken(order)

    # --- units -------------------------------------------------------------------------------------------------

    def _unit(self, unit: MeasuredUnit) -> None:
        if unit.is_param:
            for part in unit.parts:
                self._param(unit, part)
            return
        tap, role, _ = unit.key
        routes = self._routes(unit)
        if self._mixes(unit):
            self.routing.mixed()
        chosen = ((p.rows.keys, p.choices) for p in unit.parts if p.choices is not None)
        found = [(keys, choices) for keys, choices in chosen if len(choices) == len(keys)]
        if found:
            self.chosen[unit.key[0]] = found
        parts = [p for p in unit.parts if not p.skip]
        limits = self.limit_check.limits(unit, parts)
        totals = [total for total, *_ in limits]
        errors = self.limit_check.errors(unit, parts, self.limit_check.row_floor(unit.parts), totals)
        rows = [self._rows_of(p) for p in parts]
        doubted = [self.routing.behind(own_rows.keys) for own_rows in rows]
        each = zip(parts, rows, errors, strict=True)
        leaves = golden_leaves([p.margins for p in parts if p.margins is not None], self.unit)
        settled = [
            settle(unit, *one, self.routing, self.unit, self.traces, doubts, leaves)
            if self.routing.first or not one[0].identical else _UNMOVED
            for one, doubts in zip(each, doubted, strict=True)
        ]  # fmt: skip
        if is_choice(role, unit.cls):
            self.routing.seen = True
        if routes and (keys := [own_rows.keys for own_rows in rows if len(own_rows.keys)]):
            self.routing.compared(np.concatenate(keys))
        if tap == SAMPLER and role != TOKEN and self.routing.seen:
            settled = self._unrouted(settled, parts, rows, errors)
        for part, own_rows, error, total, doubts in zip(parts, rows, errors, totals, doubted, strict=True):
            add_undecided(part, own_rows, error, self.routing, self.unit, total.row, doubts)
        shown, notes = list(errors), [s.note for s in settled]
        reads = self.tree.mixes_itself(tap) and kind_of(role) == OUTPUT
        if any(doubts.any() for doubts in doubted):
            for i, (part, own_rows, doubts) in enumerate(zip(parts, rows, doubted, strict=True)):
                if not part.identical:
                    own = np.isin(own_rows.keys, settled[i].own)
                    shown[i], text = unjudged(errors[i], doubts, own, reads)
                    notes[i] = "; ".join(filter(None, (notes[i], text)))
                    self.routing.left[ROWS_BEHIND].update(own_rows.keys[doubts].tolist() if reads and text else ())
        each_part = zip(parts, errors, shown if reads else errors, settled, strict=True)
        flips = (tap, role) == (SAMPLER, TOKEN)  # they judge it
        none_judged = [id(part) for part, a, b, s in each_part if not flips and _none_judged(a, b, s.left)]
        self._add(unit, unit.parts, shown, limits, notes, none_judged)
        if parts and unit.key[:2] != (SAMPLER, TOKEN):
            for i, mask in enumerate(s.left for s in settled):
                if mask is not None:  # a row that is not judged is not one without an error: nothing is learned from it
                    rows[i] = rows[i].only(~mask)
                    errors[i] = errors[i] if parts[i].whole else rows_of(errors[i], ~mask)
            own = np.concatenate([NO_ROWS.keys, *(s.own for s in settled if len(s.own))])
            which, known, everywhere = rows_with_errors(parts, errors, rows, own)
            allowed, created = max(t.row for t in totals), max(limit.row for _, limit, _ in limits)
            weak = any(p.stats is not None for p in parts)
            # Sums over rows and columns have no rows to leave out: what near ties moved would look like odd columns.
            unsure = np.unique(np.concatenate([_NO_KEYS, *map(self._doubted, parts, rows, errors)]))
            columns = None if len(unsure) or any(s.left is not None for s in settled) else unit.columns
            seen = self.unions.of(rows)
            self.traces.append(self._trace(
                replace(unit, columns=columns), seen, which, known, created, everywhere, max(allowed, 0.0), weak,
                shared=shared_rows(parts, errors, rows, seen), doubted=unsure,
            ))  # fmt: skip

    def _routes(self, unit: MeasuredUnit) -> bool:
        """Whether the unit says which experts rows go to: their numbers; with a pack, where these may not have been
        captured, a router's logits, too."""
        tap, role, _ = unit.key
        if is_choice(role, unit.cls) or not len(self.routing.computed):
            return is_choice(role, unit.cls)
        return is_logits(tap, role, unit.cls) and any(in_front_of(tap, holder) for holder in self.holders)

    def _mixes(self, unit: MeasuredUnit) -> bool:
        """Whether rows meet in the unit's module, or in one around it."""
        if not self.routing.lost or unit.vision:
            return False
        return any(map(self.tree.mixes_itself, (unit.key[0], *enclosing(unit.key[0]))))

    def _doubted(self, part: Part, rows: RowSet, errors: RowErrors) -> np.ndarray:
        """Keys of the part's rows that earlier rows may have changed: all where one error stands for them."""
        mask = self.routing.behind(rows.keys)
        one = not part.identical and (part.whole or len(errors.err) != len(mask))
        return rows.keys if one and mask.any() else rows.keys[mask]

    def _unrouted(
        self, settled: list[RerouteNote], parts: Sequence[Part], rows: Sequence[RowSet], errors: Sequence[RowErrors]
    ) -> list[RerouteNote]:
        """What `unrouted` makes of each part."""
        keys = np.concatenate([NO_ROWS.keys, *(of.keys for of in rows)])
        unseen = np.ones(len(keys), bool)
        for known in {id(t.seen): t.seen.keys for t in self.traces if t.rounding and t.tap != SAMPLER}.values():
            unseen &= ~np.isin(keys, known)
        end = 0
        for i, (part, of, error) in enumerate(zip(parts, rows, errors, strict=True)):
            start, end = end, end + len(of.keys)
            if not part.identical and len(error.err) == len(of.keys):
                out = unseen[start:end] & (error.measure != NONFINITE)
                settled[i] = unrouted(settled[i], error, out)
                self.routing.left[NOT_COMPARED].update(of.keys[out].tolist())
        return settled

    def _by_lines(self, unit: MeasuredUnit) -> bool:
        """Whether lines decided all parts, all equal or all by statistics, and no row is forgiven."""
        plain = not unit.is_param and not self.routing.first and not self.routing.lost
        return plain and pair_status.decided_alike(unit.parts) and not self._routes(unit)

    def _judge_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        alike: dict[tuple[bool, bool], list[int]] = defaultdict(list)
        for i, (_, unit) in enumerate(waiting):
            first = _first(unit)
            alike[first.identical, first.whole].append(i)
        traces: dict[int, TensorErrors] = {}
        for (identical, whole), these in alike.items():
            units = [waiting[i][1] for i in these]
            parts = pair_status.PartColumns(units, [unit.parts for unit in units])
            self.units_of.append(np.array([waiting[i][0] for i in these], np.int64)[parts.of])
            traces |= {these[i]: trace for i, trace in self._lines(parts, identical, whole)}
        self.traces += [traces[i] for i in sorted(traces)]
        self.shelf.rest()

    def _lines(
        self, parts: pair_status.PartColumns, identical: bool, whole: bool
    ) -> Iterator[tuple[int, TensorErrors]]:
        """Makes pairs of parts that lines decided; yields what is known of each unit, by number."""
        check, rows, n = self.limit_check, parts.rows, len(parts.rows)
        limits = [check.limits(unit, [_first(unit)])[0] for unit in parts.units]
        spoken = [self.moments.get(m, NO_ROWS) for m in parts.column("moment")] if whole else rows
        sets, set_of = numbered_sets(spoken) if whole else (parts.sets, parts.set_of)
        lengths = np.array([len(own.keys) for own in sets], np.int64)[set_of]

        def floor_of(i: int, phase: str | None, worst: float) -> pair_status.Floor:
            total, _, rounding = limits[i]
            return check.floor_of(parts.units[i].key, phase, worst, total.row, rounding)

        allowed = [total.row for total, *_ in limits]
        errors = values = np.zeros(n)
        if identical:
            pairs = pair_status.equal_pairs(parts, allowed, floor_of)
        else:
            row, peak = np.fromiter(chain.from_iterable(parts.column("stats")), np.float64, 2 * n).reshape(n, 2).T
            values = np.where(peak / self.standard.element > row, peak / self.standard.element, row)
            exact = np.array([total.exact for total, *_ in limits], bool)[parts.of] & (values > 0)
            errors = np.where(exact, np.inf, values)
            pairs = pair_status.statistics_pairs(parts, errors, values, allowed, floor_of, self.measured.setting)
        self.tables.append(pairs)
        self.log.add_alike(parts.rows, errors, [u.key[1] for u in parts.units], allowed, parts.of)
        if whole and not identical:  # a tensor that fails condemns all rows that it speaks for
            failed = [status == FAIL for status in pairs.column("status")]
            rows = [speaks if bad else of for bad, of, speaks in zip(failed, rows, spoken, strict=True)]
        self.rows += rows
        one = ((lengths != 1) | whole) & (lengths > 0)
        shared: dict[Union, np.ndarray] = {}
        there = errors > 0
        for i, here in enumerate(parts.stretches()):
            unit, (total, created, _) = parts.units[i], limits[i]
            if unit.key[:2] == (SAMPLER, TOKEN):
                continue
            seen = self.unions.of(spoken[here])
            if seen not in shared:  # of most places the same
                shared[seen] = _by_row(seen, one[here], lengths[here])
            which, known, everywhere = _NO_ROWS[0], _NO_ROWS[1:], 0.0
            some, long = there[here], lengths[here]
            if some.any():
                which = np.flatnonzero(np.repeat(some, long))
                err, rel = (np.repeat(v[here][some], long[some]) for v in (errors, errors if whole else values))
                known = err, rel, np.zeros(len(which)), *[np.zeros(len(which), bool)] * 2
                everywhere = float(errors[here][some & (long == 0)].max(initial=0.0)) if whole else 0.0
            yield i, self._trace(unit, seen, which, known, created.row, everywhere, max(total.row, 0.0),
                                 not identical, shared=shared[seen])  # fmt: skip

    def _trace(
        self, unit: MeasuredUnit, rows: Union, which: np.ndarray, columns: RowColumns, limit: float,
        everywhere: float = 0.0, allowed: float = 0.0, weak: bool = False, spoilt: bool = False,
        shared: np.ndarray = _NO_KEYS, doubted: np.ndarray = _NO_KEYS,
    ) -> TensorErrors:  # fmt: skip
        bad = which
        if len(which):
            bad, columns = by_key(which, columns, rows)
            keep = self.shelf.keep
            bad = bad if bad is rows.seen.keys else keep(bad)
            columns = tuple(map(keep, columns))
        err, rel, gain, broken, own = columns
        role, parts = unit.key[1], unit.parts
        settled = isinstance(parts, LazyTable)
        part = parts.first if isinstance(parts, LazyTable) else next((p for p in parts if not p.skip), None)
        dtypes = () if part is None or unit.is_param else (part.dtype_golden or part.dtype_mine, part.dtype_mine)
        unread = not dtypes or is_exact(*dtypes) or is_mask(role)
        rounding = 0.0 if unread else self.limit_check.operators(unit) * max(self.unit, *map(rounding_unit, dtypes))
        return TensorErrors(
            *unit.key, kind_of(role), unit.order, limit, rows.seen, bad, err, everywhere, unit.vision, allowed, weak,
            rel, gain, rounding, unit.columns, part.width if part is not None else 1, broken, own, spoilt, unit.gap,
            shared, few=not settled and any(p.few for p in unit.parts), doubted=doubted,
        )  # fmt: skip

    def _param(self, unit: MeasuredUnit, part: Part) -> None:
        if part.equal is None or part.skip:
            self.tables.append(Pairs([pair_status.skipped_pair(unit, part)]))
            self.rows.append(NO_ROWS)
            self.log.add(NOT_KEPT)
            return
        limits = EXACT
        if is_computed(unit.key[1]) and not part.equal:
            limits = self.limit_check.limits(unit, [part])[0][1]
        (errors,) = self.limit_check.errors(unit, [part], 0.0, [limits])
        if part.equal:  # alike but for the rounding to another dtype
            errors = replace(errors, err=np.zeros_like(errors.err))
        self._add(unit, [part], [errors], [(limits, limits, None)], [""])
        worst = float(errors.err.max()) if len(errors.err) else 0.0
        spoilt = part.table is not None and bool(part.table[:, definition.MISMATCH].any())
        everywhere = worst if worst > limits.row else 0.0
        seen = self.unions.of([])
        self.traces.append(self._trace(unit, seen, _NO_ROWS[0], _NO_ROWS[1:], limits.row, everywhere, spoilt=spoilt))

    def _rows_of(self, part: Part) -> RowSet:
        return self.moments.get(part.moment, NO_ROWS) if part.whole else part.rows

    def _add(
        self, unit: MeasuredUnit, parts: Sequence[Part], errors: list[RowErrors], limits: list[PartLimits],
        notes: list[str], none_judged: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Pairs of ``parts``, in order; errors, limits and notes are of those that were compared. none_judged: ids
        of those of which no row is judged."""
        compared = list(zip([p for p in parts if not p.skip], errors, limits, notes, strict=True))
        known = {id(p): (pair, kept) for own in (self._equal(unit, [c for c in compared if c[0].identical]),
                                                 self._other(unit, [c for c in compared if not c[0].identical]))
                 for p, pair, kept in own}  # fmt: skip
        found = []
        for part in parts:
            pair, kept = known.get(id(part)) or (pair_status.skipped_pair(unit, part), NOT_KEPT)
            if id(part) in none_judged and not pair.identical:
                pair = replace(pair, status=SKIP, message=NONE_JUDGED)
            self.replicas += bool(part.replicas)
            rows = NO_ROWS if pair.status == SKIP else self._rows_of(part) if pair.status == FAIL else part.rows
            self.rows.append(rows)
            self.log.add(kept)
            found.append(pair)
        self.tables.append(Pairs(found))

    def _equal(self, unit: MeasuredUnit, compared: Sequence[_Compared]) -> Iterator[tuple[Part, Pair, KeptRows]]:
        alike: dict[PartLimits, list[tuple[Part, str]]] = defaultdict(list)
        for part, _, limits, note in compared:
            alike[limits].append((part, note))
        for (limit, _, rounding), some in alike.items():
            parts, notes = zip(*some, strict=True)
            floor_of = partial(self.limit_check.floor_of, unit.key, limit=limit.row, model=rounding)
            columns = pair_status.PartColumns([unit], [parts])
            pairs = pair_status.equal_pairs(columns, [limit.row], lambda _, *of, by=floor_of: by(*of), notes)
            for part, pair in zip(parts, pairs, strict=True):
                yield part, pair, self.log.kept(pair, part.rows, _NO_ERROR)

    def _other(self, unit: MeasuredUnit, compared: Sequence[_Compared]) -> Iterator[tuple[Part, Pair, KeptRows]]:
        check, setting = self.limit_check, self.measured.setting
        parts = [part for part, *_ in compared]
        metrics = iter(definition.metrics_of_each([p.table for p in parts if p.table is not None]))
        worst = check.worst(parts, [error for _, error, *_ in compared])
        for (part, error, (limit, _, rounding), note), w in zip(compared, worst, strict=True):
            floor = check.floor_of(unit.key, part.phase, w[2].get("worst_row_rel_l2"), limit.row, rounding)
            numbers = None if part.table is None else next(metrics)
            pair = pair_status.make_pair(unit, part, error, limit, setting, w, numbers, floor, note)
            yield part, pair, self.log.kept(pair, part.rows, error.err)


def _first(unit: MeasuredUnit) -> Part:
    return unit.parts.first if isinstance(unit.parts, LazyTable) else unit.parts[0]


def _name(c: Origin, gap: Gap | None) -> tuple[str, str]:
    """What an origin is called once: its tap, or the two ends of its gap."""
    return (c.tap, "") if gap is None else (gap.after, gap.before)
