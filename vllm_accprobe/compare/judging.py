"""A measured comparison in, a Comparison out.

The problem: limits, blame, ties and words must meet in one result, and the same result must come from a file as from
the tensors. The idea: one pass in order of the data flow, unit by unit: hold each part against the limits, keep the
pair (words and numbers) and its trace (errors by row); then blame from the traces, flips from the samplers' best
logits, and the verdict from all of it.
Not here: measuring (engine.py), each of those matters (judge/, blame.py, coverage.py, words.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_accprobe.compare import blame, floors, words
from vllm_accprobe.compare.coverage import finished
from vllm_accprobe.compare.measured import Measured, MeasuredUnit, Part
from vllm_accprobe.compare.params import is_computed
from vllm_accprobe.compare.plan import SAMPLER, TOKEN
from vllm_accprobe.compare.result import FAIL, PASS, CompareError, Comparison, NothingCompared
from vllm_accprobe.compare.rows import RowLog
from vllm_accprobe.judge.calibration import MARGIN, Calibration
from vllm_accprobe.judge.floor import flow_unit, is_exact
from vllm_accprobe.judge.floor import unit as rounding_unit
from vllm_accprobe.judge.flow import Tree
from vllm_accprobe.judge.origin import Created, find_origins
from vllm_accprobe.judge.routing import Rerouted, is_choice
from vllm_accprobe.judge.standards import EXACT, Limits, Standard
from vllm_accprobe.judge.trace import Trace, kind_of
from vllm_accprobe.judge.verdict import RowErrors, row_errors
from vllm_accprobe.metrics import oracle

_NO_KEYS = np.zeros(0, np.int64)


def judge(
    measured: Measured, standard: Standard, log: RowLog | None = None, floor: Calibration | None = None
) -> Comparison:
    """The verdict on what was measured. log: filled with errors by row. floor: what golden's own runs differ by.

    Raises CompareError for a floor that fits nothing, and NothingCompared.
    """
    return _Judge(measured, standard, log or RowLog(), floor).run()


@dataclass
class _Judge:
    measured: Measured
    standard: Standard
    log: RowLog
    floor: Calibration | None = None
    pairs: blame.Compared = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    replicas: int = 0
    rerouted: Rerouted = field(default_factory=Rerouted)
    chosen: blame.Chosen = field(default_factory=dict)

    def run(self) -> Comparison:
        setting = self.measured.setting
        self.unit = flow_unit(setting.dtypes)
        self.tree = Tree(setting.classes, dict(setting.parent), dict(setting.children), dict(setting.mixing))
        for unit in self.measured.each():
            self._unit(unit)
        if self._nothing():
            raise NothingCompared(self._why_nothing())
        self._check_floor()
        places = blame.Places(setting)
        created = find_origins(self.traces, self.tree, self.standard, setting.images)
        created, excused = self._not_excused(created)
        first = {c.tap: c for c in reversed(created)}  # a tap is named once, by the first tensor that shows it
        named = [c for c in created if first[c.tap] is c]
        origins = [(c.trace.order, blame.origin_entry(c, setting, places, self.pairs, self.chosen)) for c in named]
        judged = blame.condemn(created, self.pairs)
        flipped, sampler, judged = blame.judge_flips(setting, self.traces, places, judged)
        origins = sorted(origins + sampler, key=lambda o: o[0])
        pairs = sorted((p for p, _ in judged), key=lambda p: (-1 if p.step is None else p.step, p.order))
        failed = any(p.status == FAIL for p in pairs)
        rows = self.log.table(pairs, setting.names)
        about_floor = [s for s in (floors.sentence(self.floor, pairs), excused) if s]
        return Comparison(
            golden_path=setting.golden_path,
            mine_path=setting.mine_path,
            golden_run=setting.golden_run,
            mine_run=setting.mine_run,
            pairs=pairs,
            coverage=finished(setting.coverage, pairs, self.rerouted.rows),
            first_divergence=words.first_divergence(pairs, rows),
            origins=[o for _, o in origins],
            tokens={"compared": setting.tokens_compared, "flipped": flipped},
            verdict=FAIL if failed or origins else PASS,
            notes=words.notes([*setting.notes, *about_floor], pairs, flipped, self.replicas, origins),
            plan=setting.plan,
            standard=self.standard.to_dict(self.unit, setting.layers) | self._floor_facts(),
            rows=rows,
            measured=self.measured,
        )

    def _why_nothing(self) -> str:
        why = self.measured.setting.nothing
        if why.endswith(words.ALL_SKIPPED) and any(p.status == PASS for p, _ in self.pairs):
            return "nothing could be compared but parameters: no captured row of one dump has a partner in the other"
        return why

    def _not_excused(self, created: list[Created]) -> tuple[list[Created], str]:
        """Without what golden's own runs create as strongly; and a sentence about these."""
        if self.floor is None:
            return created, ""
        kept = [c for c in created if not self.floor.excuses(c.tap, blame.size_of(c)[2])]
        taps = sorted({c.tap for c in created} - {c.tap for c in kept})
        if not taps:
            return created, ""
        what = f"{len(taps)} taps create errors that golden's own runs show as well, first {taps[0]}"
        return kept, what + ": not taken for origins"

    def _check_floor(self) -> None:
        if self.floor is None or any(self.floor.floor(p.tap, p.role, None) is not None for p, _ in self.pairs):
            return
        known = {(p.tap, p.role) for p, _ in self.pairs}
        if not known & set(self.floor.floors):
            raise CompareError("the floor fits none of the tensors compared: it was made with another model")

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
        found = [(p.keys, p.choices) for p in unit.parts if p.choices is not None and len(p.choices) == len(p.keys)]
        if found:
            self.chosen[unit.key[0]] = found
        floor = self._row_floor(unit.parts)
        keys: list[np.ndarray] = []
        wrong: list[tuple[np.ndarray, ...]] = []
        everywhere, limit, allowed, weak = 0.0, None, 0.0, False
        for part in unit.parts:
            if part.skip:
                self._skip(unit, part)
                continue
            limits, created = self._limits(unit, part)
            limit = created.row if limit is None else max(limit, created.row)
            allowed = max(allowed, limits.row)
            weak |= part.stats is not None
            errors = self._errors(part, 0.0 if part.whole else floor, limits)
            note = self._reroute(unit, part, errors)
            self._add(unit, part, errors, limits, note=note)
            rows = self._keys_of(part)
            keys.append(rows)
            bad = np.flatnonzero(errors.err > 0)
            if part.whole and len(bad):
                if len(rows):
                    most = np.full(len(rows), errors.err.max())
                    wrong.append((rows, most, most, np.zeros(len(rows))))
                else:
                    everywhere = max(everywhere, float(errors.err.max()))
            elif len(bad):
                spread = errors.err if len(errors.err) == len(rows) else np.full(len(rows), errors.err[0])
                bad = np.flatnonzero(spread > 0)
                alike = len(errors.err) != len(rows)
                rel, gain = (np.full(len(rows), a[0]) if alike else a for a in (errors.rel, errors.gain))
                wrong.append((rows[bad], spread[bad], rel[bad], gain[bad]))
        if limit is not None and unit.key[:2] != (SAMPLER, TOKEN):
            self._trace(unit, keys, wrong, limit, everywhere, allowed, weak)

    def _trace(
        self,
        unit: MeasuredUnit,
        keys: list[np.ndarray],
        wrong: list[Any],
        limit: float,
        everywhere: float = 0.0,
        allowed: float = 0.0,
        weak: bool = False,
    ) -> None:
        seen = np.unique(np.concatenate(keys)) if keys else _NO_KEYS
        k = np.concatenate([w[0] for w in wrong]) if wrong else _NO_KEYS
        e, rel, gain = (np.concatenate([w[i] for w in wrong]) if wrong else np.zeros(0) for i in (1, 2, 3))
        order = np.lexsort((e, k))
        last = order[np.append(np.diff(k[order]) != 0, True)] if len(k) else order
        tap, role, call = unit.key
        keyed = (seen, k[last], e[last], everywhere, unit.vision, allowed, weak)
        part = next((p for p in unit.parts if not p.skip), None)
        dtypes = () if part is None or unit.is_param else (part.dtype_golden or part.dtype_mine, part.dtype_mine)
        rounding = 0.0 if not dtypes or is_exact(*dtypes) else max(self.unit, *map(rounding_unit, dtypes))
        signs = {"rel": rel[last], "gain": gain[last], "rounding": rounding, "columns": unit.columns}
        width = part.width if part is not None else 1
        self.traces.append(Trace(tap, role, call, kind_of(role), unit.order, limit, *keyed, **signs, width=width))

    def _param(self, unit: MeasuredUnit, part: Part) -> None:
        if part.equal is None:
            self._skip(unit, part)
            return
        limits = EXACT
        errors = self._errors(part, 0.0, limits)
        if is_computed(unit.key[1]) and not part.equal:
            limits = self._limits(unit, part)[1]
            errors = self._errors(part, 0.0, limits)
        if part.equal:  # alike but for the rounding to another dtype
            errors = replace(errors, err=np.zeros_like(errors.err))
        self._add(unit, part, errors, limits)
        worst = float(errors.err.max()) if len(errors.err) else 0.0
        self._trace(unit, [], [], limits.row, worst if worst > limits.row else 0.0)

    def _limits(self, unit: MeasuredUnit, part: Part) -> tuple[Limits, Limits]:
        """(what may have piled up, what the tap may create) at a part."""
        dtypes = part.dtype_golden or part.dtype_mine, part.dtype_mine
        if is_exact(*dtypes):
            return EXACT, EXACT
        unit_here = max(self.unit, *(rounding_unit(d) for d in dtypes))
        total = self.standard.total_limits(unit_here, part.width, unit.depth)
        measured = self.floor.floor(*unit.key[:2], None) if self.floor is not None else None
        if measured is not None:
            total = total.at_least(MARGIN * measured)
        return total, self.standard.created_limits(unit_here, part.width)

    def _rounding_floor(self, unit: MeasuredUnit, part: Part) -> float:
        """What honest rounding piles up to by here: one unit, growing with depth as the limits do."""
        here = max(self.unit, *(rounding_unit(d) for d in (part.dtype_golden or part.dtype_mine, part.dtype_mine)))
        return here * (1.0 + max(unit.depth, 0)) ** self.standard.growth

    def _errors(self, part: Part, floor: float, limits: Limits) -> RowErrors:
        if part.table is not None:
            return row_errors(part.table, floor, part.width, self.standard, exact=limits.exact)
        value = max(part.stats[0], part.stats[1] / self.standard.element) if part.stats else 0.0
        err = np.array([np.inf if limits.exact and value > 0 else value])
        return RowErrors(np.array([value]), np.ones(1), err, err, np.zeros(1, np.int8), np.zeros(1))

    def _row_floor(self, parts: list[Part]) -> float:
        """Rows whose norm is below this are not measured against their own norm alone."""
        norms = [np.sqrt(p.table[:, oracle.GG]) for p in parts if p.table is not None and not p.whole]
        norms += [np.full(min(len(p.keys), 1000), p.row_norm) for p in parts if p.identical and p.row_norm]
        every = np.concatenate(norms) if norms else np.zeros(0)
        every = every[every > 0]
        width = next((p.width for p in parts if not p.skip), 1)
        return self.standard.floor_share(width) * float(np.median(every)) if len(every) else 0.0

    def _keys_of(self, part: Part) -> np.ndarray:
        """The rows that a part speaks for: its own, or, without rows, all of its step."""
        return self.measured.setting.moments.get(part.moment, _NO_KEYS) if part.whole else part.keys

    def _add(self, unit: MeasuredUnit, part: Part, errors: RowErrors, limits: Limits, *, note: str = "") -> None:
        self.replicas += bool(part.replicas)
        pair = words.make_pair(unit, part, errors, limits, self.measured.setting)
        pair = replace(pair, message=words.join(pair.message, note)) if note else pair
        model = None if limits.exact else self._rounding_floor(unit, part)
        pair = floors.told(pair, self.floor, model)
        self.pairs.append((pair, part.keys))
        self.log.add(pair, part.keys, errors.err, part.decode)

    def _skip(self, unit: MeasuredUnit, part: Part) -> None:
        self.pairs.append((words.skipped_pair(unit, part), _NO_KEYS))

    def _reroute(self, unit: MeasuredUnit, part: Part, errors: RowErrors) -> str:
        """Finds rows sent to other experts at a near tie, and leaves the rows that come after one unjudged."""
        if part.whole or len(errors.err) != len(part.keys):
            return ""
        if is_choice(unit.key[1]):
            other = np.flatnonzero(errors.err > 0)
            excused = other[self.rerouted.near_ties(part.keys[other], unit, self.traces)] if len(other) else other
            self.rerouted.add(part.keys[excused])
        mask = self.rerouted.after(part.keys)
        if not mask.any():
            return ""
        errors.err[mask], errors.rel[mask], errors.ratio[mask], errors.peak[mask] = 0.0, 0.0, 1.0, 0.0
        errors.gain[mask] = 0.0
        return f"{int(mask.sum())} rows after a router's near tie are not judged"
