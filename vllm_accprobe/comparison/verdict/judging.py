"""A measured comparison in, a Comparison out.

The problem: limits, blame, ties and words must meet in one result, and the same result must come from a file as from
the tensors. The idea: one pass in order of the data flow, unit by unit: hold each part against the limits, keep the
pair (words and numbers) and its trace (errors by row); then blame from the traces, flips from the samplers' best
logits, and the verdict from all of it.
Not here: measuring (engine.py), each of those matters (judge/, blame.py, coverage.py, messages.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_accprobe.align.row_set import NO_ROWS, RowSet, Unions
from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.beforehand import ALL_SKIPPED
from vllm_accprobe.comparison.measure.measured import Measured, MeasuredUnit
from vllm_accprobe.comparison.measure.params import is_computed
from vllm_accprobe.comparison.measure.part import Part
from vllm_accprobe.comparison.plan.coverage import finished
from vllm_accprobe.comparison.plan.unit import SAMPLER, TOKEN
from vllm_accprobe.comparison.result import FAIL, PASS, CompareError, Comparison, NothingCompared
from vllm_accprobe.comparison.row_table import RowLog
from vllm_accprobe.comparison.states import notes as state_notes
from vllm_accprobe.comparison.store.spill import Shelf
from vllm_accprobe.comparison.verdict import blame, constants_differ, covered, floors, harmless
from vllm_accprobe.comparison.verdict.gaps import Gap, GapFinder, entry_of
from vllm_accprobe.comparison.verdict.remarks import other_settings, remarks, unseen_routing
from vllm_accprobe.comparison.verdict.rerouted_rows import add_undecided, settle
from vllm_accprobe.comparison.verdict.row_limits import Holder
from vllm_accprobe.comparison.verdict.without_tensors import without_tensors
from vllm_accprobe.comparison.verdict.wrong_rows import Wrong, by_key, spoken_for, wrong_rows
from vllm_accprobe.judge.calibration import MARGIN, Calibration
from vllm_accprobe.judge.floor import flow_unit, is_exact, is_mask
from vllm_accprobe.judge.floor import unit as rounding_unit
from vllm_accprobe.judge.flow import Tree
from vllm_accprobe.judge.near_ties import behind, unknown_routers
from vllm_accprobe.judge.origins import Origin, find_origins, in_all_layers
from vllm_accprobe.judge.routing import Rerouted, choices_first, is_choice, is_logits
from vllm_accprobe.judge.statistic import BEHIND_A_ROUTER
from vllm_accprobe.judge.statistic import RATE as FALSE_ALARM_RATE
from vllm_accprobe.judge.tensor_errors import TensorErrors, kind_of
from vllm_accprobe.judge.verdict import RowErrors, rows_of
from vllm_accprobe.judge.weights.faults import wrong_weights
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import EXACT, Limits, Standard

_NO_KEYS = np.zeros(0, np.int64)
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
    rate: the probability of an origin anywhere in a comparison of honest machines that is allowed.

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
    pairs: blame.Compared = field(default_factory=list)
    traces: list[TensorErrors] = field(default_factory=list)
    replicas: int = 0
    rerouted: Rerouted = field(default_factory=Rerouted)
    chosen: blame.Chosen = field(default_factory=dict)

    def run(self) -> Comparison:
        setting = self.measured.setting
        self.shelf = (self.measured.shelf or Shelf()).another(BOUND)
        self.unit = flow_unit(setting.dtypes)
        self.holder, self.unions = Holder(self.standard, self.unit, self.floor), Unions()
        self.moments = {moment: RowSet(keys) for moment, keys in setting.moments.items()}
        self.tree = Tree(setting.classes, dict(setting.parent), dict(setting.children), dict(setting.mixing))
        for unit in choices_first(self.measured.each()):
            self._unit(unit)
            self.shelf.rest()
        alone = [without_tensors(setting, self._why_nothing(), bool(self.measured.units))] if self._nothing() else []
        if alone == [""]:
            raise NothingCompared(f"{self._why_nothing()} (golden {setting.golden_path}, mine {setting.mine_path})")
        self._check_floor()
        places = blame.Places(setting)
        told: dict[str, float] = {}
        created = find_origins(self.traces, self.tree, self.standard, setting.images, self.rate, told, self.shelf)
        created, excused = self._not_excused(created)
        unseen = self._unseen_routers()
        created = [blame.unproved(c) if not c.trace.vision and behind(c.tap, unseen) else c for c in created]
        gaps = self._gaps(created)
        # A tap, or a gap, is named once, by the first tensor that shows it.
        first = {_name(c, gap): c for c, gap in reversed(list(zip(created, gaps, strict=True)))}
        named = [(c, gap) for c, gap in zip(created, gaps, strict=True) if first[_name(c, gap)] is c]
        about = {**setting.untapped.classes, **setting.classes}, setting.settings
        origins = [(c.trace.order, entry_of(self._entry(c, places), gap, *about)) for c, gap in named]
        steps = blame.steps_of(created)
        every = in_all_layers([o["module"] for _, o in origins if not o["gap"]], {t.tap for t in self.traces})
        for (c, gap), (_, entry) in zip(named, origins, strict=True):
            entry["nonfinite"] = steps.get(c.tap, 0)
            entry["layers"] = None if gap else every.get(entry["module"])
        compared = [p for p, _ in self.pairs]
        origins = constants_differ.with_constants(origins, setting.settings, setting.modules, compared)
        judged = blame.condemn(created, self.pairs, [gap.after if gap else "" for gap in gaps])
        flipped, sampler, judged = blame.judge_flips(setting, self.traces, places, judged)
        origins = sorted(origins + sampler, key=lambda o: o[0])
        pairs = sorted((p for p, _ in judged), key=lambda p: (-1 if p.step is None else p.step, p.order))
        rows = self.log.table(pairs, setting.names)
        images = harmless.images(setting, self.measured.units, pairs)
        open_to = sum(c.tier == BEHIND_A_ROUTER for c, _ in named)
        said = [
            *remarks([o for _, o in origins], self.rerouted),
            *unseen_routing(unseen, open_to),
            *other_settings(setting.settings, {str(o["module"]) for _, o in origins if o.get("cause")}),
        ]
        about_floor = [s for s in (floors.sentence(self.floor, pairs), excused) if s]
        notes = [*alone, *state_notes(setting.states), *setting.notes, *images, *about_floor, *said]
        return Comparison(
            golden_path=setting.golden_path,
            mine_path=setting.mine_path,
            golden_run=setting.golden_run,
            mine_run=setting.mine_run,
            pairs=pairs,
            coverage=finished(setting.coverage, self.rerouted)
            | {covered.KEY: covered.by_class(pairs, setting, self.standard.element)},
            first_divergence=messages.first_divergence(pairs, rows),
            origins=[o for _, o in origins],
            tokens={"compared": setting.tokens_compared, "flipped": flipped},
            verdict=FAIL if any(p.status == FAIL for p in pairs) or origins or wrong_weights(setting.weights) else PASS,
            notes=messages.weights(setting.weights) + messages.notes(notes, pairs, flipped, self.replicas, origins),
            plan=setting.plan,
            standard=self.standard.to_dict(self.unit, setting.layers) | self._floor_facts(),
            rows=rows,
            measured=self.measured,
            false_alarm_rate=self.rate,
            by_chance=self.rate, states=setting.states, weights=setting.weights, created=told,
        )

    def _why_nothing(self) -> str:
        why = self.measured.setting.nothing
        if why.endswith(ALL_SKIPPED) and any(p.status == PASS for p, _ in self.pairs):
            return "nothing could be compared but parameters: no captured row of one dump has a partner in the other"
        return why

    def _not_excused(self, created: list[Origin]) -> tuple[list[Origin], str]:
        """Without what golden's own runs create as strongly; and a sentence about these."""
        if self.floor is None:
            return created, ""
        # A calibration knows an origin in a gap by the tap that showed it.
        kept = [c for c in created if not any(self.floor.excuses(t, blame.size_of(c)[2]) for t in (c.tap, c.trace.tap))]
        taps = sorted({c.tap for c in created} - {c.tap for c in kept})
        if not taps:
            return created, ""
        what = f"{len(taps)} taps create errors that golden's own runs show as well, first {taps[0]}"
        return kept, what + ": not taken for origins"

    def _unseen_routers(self) -> list[str]:
        """Modules whose experts nobody can tell, of both dumps' records."""
        units = self.measured.units
        known = [u.key[0] for u in units if is_choice(u.key[1], u.cls) or is_logits(u.key[0], u.key[1], u.cls)]
        return unknown_routers(self.measured.setting.attrs, known)

    def _check_floor(self) -> None:
        if self.floor is None or any(self.floor.floor(p.tap, p.role, None) is not None for p, _ in self.pairs):
            return
        known = {(p.tap, p.role) for p, _ in self.pairs}
        if not known & set(self.floor.floors):
            raise CompareError("the floor fits none of the tensors compared: it was made with another model")

    def _gaps(self, created: list[Origin]) -> list[Gap | None]:
        """Of each origin the gap that it lies in."""
        if not created:
            return []
        gaps = GapFinder(self.measured.setting.untapped, self.traces, self.tree)
        return [gaps.of(c) for c in created]

    def _entry(self, c: Origin, places: blame.Places) -> dict[str, Any]:
        return blame.origin_entry(c, self.measured.setting, places, self.pairs, self.chosen)

    def _floor_facts(self) -> dict[str, Any]:
        if self.floor is None:
            return {}
        return {"floor": self.floor.source, "floor_runs": list(self.floor.runs), "floor_margin": MARGIN}

    def _nothing(self) -> bool:
        """Equal weights alone are no comparison where activations were captured and none of them has a partner."""
        judged = [p for p, _ in self.pairs if p.status in (PASS, FAIL)]
        seen = self.measured.setting.coverage
        # Rows that one side has alone: both were to compute, and one was killed before it did.
        left = seen.get("rows_only_golden") or seen.get("rows_only_mine")
        ran = bool(left) or any(not u.is_param for u in self.measured.units) or not self.measured.units
        return not any(not p.role.startswith("param.") or not ran or p.status == FAIL for p in judged)

    # --- units -------------------------------------------------------------------------------------------------

    def _unit(self, unit: MeasuredUnit) -> None:
        if unit.is_param:
            for part in unit.parts:
                self._param(unit, part)
            return
        chosen = ((p.rows.keys, p.choices) for p in unit.parts if p.choices is not None)
        found = [(keys, choices) for keys, choices in chosen if len(choices) == len(keys)]
        if found:
            self.chosen[unit.key[0]] = found
        parts = [p for p in unit.parts if not p.skip]
        limits = self.holder.limits(unit, parts)
        totals = [total for total, _ in limits]
        errors = self.holder.errors(unit, parts, self.holder.row_floor(unit.parts), totals)
        rows = [self._rows_of(p) for p in parts]
        each = zip(parts, rows, errors, strict=True)
        settled = [settle(unit, *one, self.rerouted, self.unit, self.traces) for one in each]
        notes = [s.note for s in settled]
        facts = self._facts(unit, parts, errors, totals, notes)
        for part, own_rows, error, total in zip(parts, rows, errors, totals, strict=True):
            add_undecided(part, own_rows, error, self.rerouted, self.unit, total.row)
        judged = iter(zip(parts, errors, totals, facts, strict=True))
        for part in unit.parts:
            if part.skip:
                self._skip(unit, part)
            else:
                self._add(unit, *next(judged))
        if parts and unit.key[:2] != (SAMPLER, TOKEN):
            for i, mask in enumerate(s.left for s in settled):
                if mask is not None:  # a row that is not judged is not one without an error: nothing is learned from it
                    rows[i] = rows[i].only(~mask)
                    errors[i] = errors[i] if parts[i].whole else rows_of(errors[i], ~mask)
            own = np.concatenate([s.own for s in settled])
            wrong, everywhere = wrong_rows(parts, errors, rows, own)
            allowed, created = (max(pair[i].row for pair in limits) for i in (0, 1))
            weak = any(p.stats is not None for p in parts)
            # Sums over rows and columns have no rows to leave out: what near ties moved would look like odd columns.
            columns = None if any(s.left is not None for s in settled) else unit.columns
            shared = spoken_for(parts, errors, rows)
            self._trace(replace(unit, columns=columns), rows, wrong, created, everywhere, max(allowed, 0.0), weak,
                        shared=shared)  # fmt: skip

    def _trace(
        self, unit: MeasuredUnit, keys: list[RowSet], wrong: Wrong, limit: float, everywhere: float = 0.0,
        allowed: float = 0.0, weak: bool = False, spoilt: bool = False, shared: np.ndarray = _NO_KEYS,
    ) -> None:  # fmt: skip
        rows = self.unions.of(keys)
        bad, wrong = by_key(wrong, rows)
        keep = self.shelf.keep
        bad = bad if bad is rows.seen.keys else keep(bad)
        tap, role, call = unit.key
        keyed = (rows.seen, bad, keep(wrong.err), everywhere, unit.vision, allowed, weak)
        part = next((p for p in unit.parts if not p.skip), None)
        dtypes = () if part is None or unit.is_param else (part.dtype_golden or part.dtype_mine, part.dtype_mine)
        unread = not dtypes or is_exact(*dtypes) or is_mask(role)
        rounding = 0.0 if unread else self.holder.operators(unit) * max(self.unit, *map(rounding_unit, dtypes))
        signs = (keep(wrong.rel), keep(wrong.gain), rounding, unit.columns, part.width if part is not None else 1)
        if len(shared):
            shared, by_part = np.full(len(rows.seen), -1), shared
            shared[rows.place] = by_part
        few = any(p.few for p in unit.parts)
        known = (keep(wrong.broken), keep(wrong.own), spoilt, unit.gap, shared)
        self.traces.append(TensorErrors(tap, role, call, kind_of(role), unit.order, limit, *keyed, *signs, *known,
                                        few=few))  # fmt: skip

    def _param(self, unit: MeasuredUnit, part: Part) -> None:
        if part.equal is None:
            self._skip(unit, part)
            return
        limits = EXACT
        (errors,) = self.holder.errors(unit, [part], 0.0, [limits])
        if is_computed(unit.key[1]) and not part.equal:
            limits = self.holder.limits(unit, [part])[0][1]
            (errors,) = self.holder.errors(unit, [part], 0.0, [limits])
        if part.equal:  # alike but for the rounding to another dtype
            errors = replace(errors, err=np.zeros_like(errors.err))
        self._add(unit, part, errors, limits, *self._facts(unit, [part], [errors], [limits], [""]))
        worst = float(errors.err.max()) if len(errors.err) else 0.0
        spoilt = part.table is not None and bool(part.table[:, definition.MISMATCH].any())
        none = wrong_rows([], [], [])[0]
        self._trace(unit, [], none, limits.row, worst if worst > limits.row else 0.0, spoilt=spoilt)

    def _facts(
        self, unit: MeasuredUnit, parts: list[Part], errors: list[RowErrors], limits: list[Limits], notes: list[str]
    ) -> list[messages.Facts]:
        """What the pairs say besides names and limits."""
        holder = self.holder
        tables = [p.table for p in parts if p.table is not None]
        metrics = iter(definition.metrics_of_each(tables))
        out = []
        for part, worst, limit, note in zip(parts, holder.worst(parts, errors), limits, notes, strict=True):
            model = None if limit.exact else holder.rounding_floor(unit, part)
            phase = holder.phase(part)
            floor = floors.floor_of(unit.key, phase, worst.rel, limit.row, self.floor, model)
            out.append(messages.Facts(worst, None if part.table is None else next(metrics), phase, floor, note))
        return out

    def _rows_of(self, part: Part) -> RowSet:
        """The rows that a part speaks for: its own, or, without rows, all of its step."""
        return self.moments.get(part.moment, NO_ROWS) if part.whole else part.rows

    def _add(self, unit: MeasuredUnit, part: Part, errors: RowErrors, limits: Limits, facts: messages.Facts) -> None:
        self.replicas += bool(part.replicas)
        pair = messages.make_pair(unit, part, errors, limits, self.measured.setting, facts)
        self.pairs.append((pair, (self._rows_of(part) if pair.status == FAIL else part.rows).keys))
        self.log.add(pair, part.rows, errors.err)

    def _skip(self, unit: MeasuredUnit, part: Part) -> None:
        self.pairs.append((messages.skipped_pair(unit, part), _NO_KEYS))


def _name(c: Origin, gap: Gap | None) -> tuple[str, str]:
    """What an origin is called once: its tap, or the two ends of its gap."""
    return (c.tap, "") if gap is None else (gap.after, gap.before)
