"""Whether the rows of a comparison are further off than rounding allows: their errors, and the limits of their places.

The problem: a limit depends on dtype, width, depth and what was not captured in front of a place, and a tensor's rows
come in hundreds of parts. The idea: the limits of a part are made once for each kind of part; tables of parts are
joined and measured together. Not here: the limits' formulas (standards/limits.py), a row's error
(judge/tensor_errors.py), what follows for a pair (judging.py, pair_status.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_accprobe.align.tokens import MIXED
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part
from vllm_accprobe.comparison.verdict import pair_status
from vllm_accprobe.judge.calibration import MARGIN, MODEL, Calibration
from vllm_accprobe.judge.rounding_unit import is_exact, unit as rounding_unit
from vllm_accprobe.judge.tensor_errors import RowErrors, WorstRow, alike, row_errors, rows_of, worst_of_each
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import EXACT, Limits, Standard, narrowest

PartLimits = tuple[Limits, Limits, "float | None"]
"""(what may have piled up, what one operator may create, what rounding alone piles up to: one unit, growing with depth
as the limits do)."""
_TOGETHER = 1 << 16
"""Rows whose tables are joined: some megabytes."""


class LimitCheck:
    """unit: the model's rounding unit (`flow_unit`). floor: what golden's own runs differ by, or None."""

    def __init__(self, standard: Standard, unit: float, floor: Calibration | None):
        self.standard, self.unit, self.floor = standard, unit, floor
        self._known: dict[tuple[float, float, int, int], PartLimits] = {}  # of most layers the same
        self._operators: dict[int, float] = {}

    # --- limits ------------------------------------------------------------------------------------------------

    def limits(self, unit: MeasuredUnit, parts: Sequence[Part]) -> list[PartLimits]:
        known: dict[tuple[str | None, str, int], PartLimits] = {}
        out = []
        for part in parts:
            name = part.dtype_golden, part.dtype_mine, part.width
            if name not in known:
                known[name] = self._limits(unit, part)
            out.append(known[name])
        return out

    def _limits(self, unit: MeasuredUnit, part: Part) -> PartLimits:
        dtypes = part.dtype_golden or part.dtype_mine, part.dtype_mine
        if is_exact(*dtypes):
            return EXACT, EXACT, None
        unit_here = max(self.unit, *(rounding_unit(d) for d in dtypes))
        name = unit_here, _inside(unit, part), unit.depth, unit.gap
        if name not in self._known:
            self._known[name] = self._of(*name)
        total, created, rounding = self._known[name]
        measured = self.floor.floor(*unit.key[:2], None) if self.floor is not None else None
        return total if measured is None else total.at_least(MARGIN * measured), created, rounding

    def _of(self, rounding: float, inside: float, depth: int, gap: int) -> PartLimits:
        total, created = self.standard.total_limits(rounding, inside, depth), self.standard.gap_limits
        return total, created(rounding, inside, gap), rounding * (1.0 + max(depth, 0)) ** self.standard.growth

    def operators(self, unit: MeasuredUnit) -> float:
        """How many times one operator's error may be made in front of this place: 1, or more where layers lie between
        that was not captured."""
        if unit.gap not in self._operators:
            one = self.standard.created_limits(1.0, 1).row
            self._operators[unit.gap] = self.standard.gap_limits(1.0, 1, unit.gap).row / one
        return self._operators[unit.gap]

    def row_floor(self, parts: Sequence[Part]) -> float:
        """Rows whose norm is below this are not measured against their own norm alone."""
        norms = [np.sqrt(p.table[:, definition.GG]) for p in parts if p.table is not None and not p.whole]
        if not norms:
            return 0.0
        norms += [np.full(min(len(p.rows), 1000), p.row_norm) for p in parts if p.identical and p.row_norm]
        every = np.concatenate(norms)
        every = every[every > 0]
        width = next((p.width for p in parts if not p.skip), 1)
        return self.standard.floor_share(width) * float(np.median(every)) if len(every) else 0.0

    # --- errors ------------------------------------------------------------------------------------------------

    def errors(
        self, unit: MeasuredUnit, parts: Sequence[Part], floor: float, limits: Sequence[Limits]
    ) -> list[RowErrors]:
        """Of each part. floor: see `row_floor`; tensors without rows have none."""
        out: list[RowErrors | None] = [None] * len(parts)
        batch: list[int] = []
        rows = 0
        for i, part in enumerate(parts):
            if part.table is None:
                value = max(part.stats[0], part.stats[1] / self.standard.element) if part.stats else 0.0
                out[i] = alike(value, exact=limits[i].exact)
            elif part.whole:
                exact, inside = limits[i].exact, _inside(unit, part)
                out[i] = row_errors(part.table, 0.0, part.width, self.standard, exact=exact, inside=inside)
            else:
                first = parts[batch[0]] if batch else part
                fits = part.width == first.width and limits[i].exact == limits[batch[0] if batch else i].exact
                if batch and (not fits or rows + len(part.table) > _TOGETHER):
                    self._joined(unit, parts, batch, floor, limits[batch[0]], out)
                    batch, rows = [], 0
                batch.append(i)
                rows += len(part.table)
        if batch:
            self._joined(unit, parts, batch, floor, limits[batch[0]], out)
        return [e for e in out if e is not None]

    def _joined(
        self, unit: MeasuredUnit, parts: Sequence[Part], batch: list[int], floor: float, limits: Limits,
        out: list[RowErrors | None],
    ) -> None:  # fmt: skip
        tables = [t for i in batch if (t := parts[i].table) is not None]
        first, rules = parts[batch[0]], self.standard
        exact, inside = limits.exact, _inside(unit, first)
        found = row_errors(np.concatenate(tables), floor, first.width, rules, exact=exact, inside=inside)
        start = 0
        for i, table in zip(batch, tables, strict=True):
            out[i] = rows_of(found, slice(start, start + len(table)))
            start += len(table)

    # --- one number per tensor ---------------------------------------------------------------------------------

    def worst(self, parts: Sequence[Part], errors: Sequence[RowErrors]) -> list[WorstRow]:
        """With the largest relative error of each phase."""
        found = worst_of_each(errors)
        for (_, _, worst), part, error in zip(found, parts, errors, strict=True):
            phase, rel, own = part.phase, error.rel, len(error.rel) == len(part.rows)
            if phase == MIXED and own:
                decode = part.rows.decode
                worst |= {"prefill_rel_l2": float(rel[~decode].max()), "decode_rel_l2": float(rel[decode].max())}
            elif phase is not None:
                most = worst.get("worst_row_rel_l2") if own else float(rel[0])
                worst |= {f"{p}_rel_l2": most for p in ("prefill", "decode") if phase in (p, MIXED)}
        return found

    def floor_of(
        self, key: tuple[str, str, int], phase: str | None, worst: float | None, limit: float, model: float | None
    ) -> pair_status.Floor:
        """key: tap, role, call; worst: its worst row's relative L2 error; model: of rounding, or None."""
        if worst is None or key[1].startswith("param.") or not limit:
            return None, None, None
        known = phase if phase in ("prefill", "decode") else None
        measured = self.floor.floor(key[0], key[1], known) if self.floor is not None else None
        floor, source = (measured, self.floor.source) if measured and self.floor is not None else (model, MODEL)
        return (floor, source, worst / floor) if floor else (None, None, None)


def _inside(unit: MeasuredUnit, part: Part) -> float:
    """What a module takes in was not narrowed by it."""
    tap, role, _ = unit.key
    return narrowest(tap, unit.cls, part.width) if role.startswith("output") else float(part.width)
