"""All tensors of one place held against their limits at once.

The problem: a dump has hundreds of thousands of tensors, and a dozen numpy calls for each of them cost more than
reading them did. The idea: what is one number per row is worked out over the row tables of a whole unit, joined; what
is one number per tensor, over all tensors with as many rows; limits follow from dtype and width, of which a unit has
one.
Not here: the order in which units are judged, and what follows from a row's error (judging.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_accprobe.align.row_set import MIXED
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.part import Part
from vllm_accprobe.judge.calibration import MARGIN, Calibration
from vllm_accprobe.judge.floor import is_exact
from vllm_accprobe.judge.floor import unit as rounding_unit
from vllm_accprobe.judge.verdict import RowErrors, Worst, alike, row_errors, rows_of, worst_of_each
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import EXACT, Limits, Standard, narrowest

_TOGETHER = 1 << 16
"""Rows whose tables are joined: some megabytes."""
_SAME = Worst(0, 0.0, 0.0, 1.0)


class Holder:
    """unit: the model's rounding unit (judge.floor.flow_unit). floor: what golden's own runs differ by, or None."""

    def __init__(self, standard: Standard, unit: float, floor: Calibration | None):
        self.standard, self.unit, self.floor = standard, unit, floor

    # --- limits ------------------------------------------------------------------------------------------------

    def limits(self, unit: MeasuredUnit, parts: Sequence[Part]) -> list[tuple[Limits, Limits]]:
        """(what may have piled up, what the tap may create) at each part."""
        known: dict[tuple[str | None, str, int], tuple[Limits, Limits]] = {}
        out = []
        for part in parts:
            name = part.dtype_golden, part.dtype_mine, part.width
            if name not in known:
                known[name] = self._limits(unit, part)
            out.append(known[name])
        return out

    def _limits(self, unit: MeasuredUnit, part: Part) -> tuple[Limits, Limits]:
        dtypes = part.dtype_golden or part.dtype_mine, part.dtype_mine
        if is_exact(*dtypes):
            return EXACT, EXACT
        unit_here = max(self.unit, *(rounding_unit(d) for d in dtypes))
        inside = _inside(unit, part)
        total = self.standard.total_limits(unit_here, inside, unit.depth)
        measured = self.floor.floor(*unit.key[:2], None) if self.floor is not None else None
        if measured is not None:
            total = total.at_least(MARGIN * measured)
        return total, self.standard.gap_limits(unit_here, inside, unit.gap)

    def operators(self, unit: MeasuredUnit) -> float:
        """How many times one operator's error may be made in front of this place: 1, or more where layers lie between
        that nobody saw."""
        return self.standard.gap_limits(1.0, 1, unit.gap).row / self.standard.created_limits(1.0, 1).row

    def rounding_floor(self, unit: MeasuredUnit, part: Part) -> float:
        """What honest rounding piles up to by here: one unit, growing with depth as the limits do."""
        here = max(self.unit, *(rounding_unit(d) for d in (part.dtype_golden or part.dtype_mine, part.dtype_mine)))
        return here * (1.0 + max(unit.depth, 0)) ** self.standard.growth

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

    def worst(self, parts: Sequence[Part], errors: Sequence[RowErrors]) -> list[Worst]:
        """Of each part, with its phases."""
        out: list[Worst] = [_SAME] * len(parts)
        differ = [i for i, p in enumerate(parts) if not p.identical]
        for i, found in zip(differ, worst_of_each([errors[i] for i in differ]), strict=True):
            out[i] = found
        return [self._with_phases(w, p, e) for w, p, e in zip(out, parts, errors, strict=True)]

    def _with_phases(self, worst: Worst, part: Part, errors: RowErrors) -> Worst:
        phase = self.phase(part)
        if phase == MIXED and len(errors.rel) == len(part.rows):
            decode = part.rows.decode
            both = float(errors.rel[~decode].max()), float(errors.rel[decode].max())
        elif phase is None:
            return worst
        else:
            first = float(errors.rel[0]) if len(errors.rel) != len(part.rows) else worst.rel
            both = (None if phase == "decode" else first), (None if phase == "prefill" else first)  # type: ignore
        return replace(worst, prefill=both[0], decode=both[1])

    @staticmethod
    def phase(part: Part) -> str | None:
        """prefill, decode or mixed; None for a tensor without rows."""
        return None if part.whole else part.rows.phase


def _inside(unit: MeasuredUnit, part: Part) -> float:
    """What a module takes in was not narrowed by it."""
    tap, role, _ = unit.key
    return narrowest(tap, unit.cls, part.width) if role.startswith("output") else float(part.width)
