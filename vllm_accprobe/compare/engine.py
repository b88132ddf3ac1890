"""Two dumps in, a Comparison out.

The problem: plan, numbers, limits, blame and words are five matters that must meet in one result. The idea: one pass in
order of the data flow, unit by unit: measure, hold against the limits, keep the pair (words and numbers) and its trace
(errors by row); then blame from the traces, flips from the sampler's records, and the verdict from all of it.
Not here: each of those matters (plan.py, measure.py, params.py, blame.py, coverage.py, judge/), the words (words.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.compare import blame, words
from vllm_accprobe.compare.coverage import coverage, family
from vllm_accprobe.compare.measure import Measurer, Piece
from vllm_accprobe.compare.params import compare_params, is_computed
from vllm_accprobe.compare.plan import SAMPLER, TOKEN, TOP_IDS, Plan, Unit, make_plan
from vllm_accprobe.compare.read import Loader
from vllm_accprobe.compare.result import FAIL, PASS, CompareError, Comparison, NothingCompared
from vllm_accprobe.compare.rows import RowLog
from vllm_accprobe.compare.samples import take_samples
from vllm_accprobe.formats import DumpError, open_dump
from vllm_accprobe.judge.floor import flow_unit, is_exact
from vllm_accprobe.judge.floor import unit as rounding_unit
from vllm_accprobe.judge.origin import Trace, find_origins, kind_of
from vllm_accprobe.judge.routing import Rerouted, is_choice
from vllm_accprobe.judge.standards import EXACT, Limits, Standard, get_standard
from vllm_accprobe.judge.verdict import RowErrors, row_errors
from vllm_accprobe.metrics import oracle

IDS_ONLY = "ids of the best logits (used for flipped tokens only)"
_NO_KEYS = np.zeros(0, np.int64)
Progress = Callable[[int, int], None]


def compare(
    golden: str | Path | Any,
    mine: str | Path | Any,
    *,
    standard: str | Standard = "accprobe",
    taps: str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compares two dumps (paths, or what `open_dump` gives).

    standard: a name in judge.standards.STANDARDS or a Standard. taps: globs over tap names, comma separated.
    progress: called with (units done, units in all). Raises CompareError, one line, and NothingCompared.
    """
    rules = _standard(standard)
    dumps = open_both(golden, mine)
    plan = make_plan(*dumps, taps=taps)
    return _Run(dumps, plan, rules).run(progress)


def open_both(golden: str | Path | Any, mine: str | Path | Any) -> tuple[Any, Any]:
    """Opens what is a path; raises CompareError for what cannot be read."""
    try:
        opened = [open_dump(d) if isinstance(d, (str, Path)) else d for d in (golden, mine)]
    except DumpError as e:
        raise CompareError(str(e)) from None
    return opened[0], opened[1]


def _standard(standard: str | Standard) -> Standard:
    try:
        return standard if isinstance(standard, Standard) else get_standard(standard)
    except KeyError as e:
        raise CompareError(str(e.args[0])) from None


@dataclass
class _Run:
    dumps: tuple[Any, Any]
    plan: Plan
    standard: Standard
    pairs: blame.Compared = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    replicas: int = 0
    rerouted: Rerouted = field(default_factory=Rerouted)
    log: RowLog = field(default_factory=RowLog)

    def run(self, progress: Progress | None) -> Comparison:
        plan = self.plan
        self.unit = flow_unit(g.first.dtype for u in plan.units if not u.is_param for g in (*u.golden[:1], *u.mine[:1]))
        self.loaders = Loader(self.dumps[0]), Loader(self.dumps[1], 64 << 20)
        self.measurer = Measurer(*self.loaders, (plan.tokens.golden, plan.tokens.mine), self.standard)
        self.compared: dict[str, list[np.ndarray]] = {}
        for i, unit in enumerate(plan.units):
            try:
                self._unit(unit)
            except DumpError as e:
                raise CompareError(str(e)) from None
            if progress is not None:
                progress(i + 1, len(plan.units))
        if self._nothing():
            raise NothingCompared(words.nothing(self.dumps, plan, self.skipped))
        places = blame.Places(plan.tokens)
        created = find_origins(self.traces, plan.tree, self.standard, plan.tokens.images)
        first = {c.tap: c for c in reversed(created)}  # a tap is named once, by the first tensor that shows it
        named = [c for c in created if first[c.tap] is c]
        origins = [(c.trace.order, blame.origin_entry(c, plan, places, self.pairs)) for c in named]
        judged = blame.condemn(created, self.pairs)
        flipped, sampler, judged = blame.judge_flips(plan, self.traces, self.loaders, places, judged)
        origins = sorted(origins + sampler, key=lambda o: o[0])
        pairs = sorted((p for p, _ in judged), key=lambda p: (-1 if p.step is None else p.step, p.order))
        failed = any(p.status == FAIL for p in pairs)
        return Comparison(
            golden_path=str(self.dumps[0].path),
            mine_path=str(self.dumps[1].path),
            golden_run=dict(self.dumps[0].run),
            mine_run=dict(self.dumps[1].run),
            pairs=pairs,
            coverage=coverage(plan, self.dumps, pairs, self.compared, self.skipped, self.rerouted.rows),
            first_divergence=words.first_divergence(pairs),
            origins=[o for _, o in origins],
            tokens={"compared": plan.tokens.tokens_compared, "flipped": flipped},
            verdict=FAIL if failed or origins else PASS,
            notes=words.notes(self.dumps, plan, pairs, flipped, self.replicas),
            plan=plan.lines(),
            standard=self.standard.to_dict(self.unit, plan.layers),
            rows=self.log.table(pairs, plan.tokens.names),
            samples=take_samples(plan, self.loaders, pairs, self.log),
        )

    def _nothing(self) -> bool:
        """Equal weights alone are no comparison where activations were captured and none of them has a partner."""
        judged = [p for p, _ in self.pairs if p.status in (PASS, FAIL)]
        ran = any(not u.is_param for u in self.plan.units) or not self.plan.units
        return not any(not p.role.startswith("param.") or not ran or p.status == FAIL for p in judged)

    # --- units -------------------------------------------------------------------------------------------------

    def _unit(self, unit: Unit) -> None:
        if unit.key[:2] == (SAMPLER, TOP_IDS):
            self.skipped[IDS_ONLY] += len(unit.mine)
            return
        if unit.is_param:
            self._param(unit)
            return
        pieces = list(self.measurer.measure(unit))
        floor = self._row_floor(pieces)
        keys: list[np.ndarray] = []
        wrong: list[tuple[np.ndarray, np.ndarray]] = []
        everywhere, limit, allowed, weak = 0.0, None, 0.0, False
        for piece in pieces:
            if piece.skip:
                self._skip(unit, piece)
                continue
            limits, created = self._limits(unit, piece)
            limit = created.row if limit is None else max(limit, created.row)
            allowed = max(allowed, limits.row)
            weak |= piece.stat_error is not None
            errors = self._errors(piece, 0.0 if piece.whole else floor, limits)
            note = self._reroute(unit, piece, errors)
            self._add(unit, piece, errors, limits, note=note)
            rows = self._keys_of(piece)
            keys.append(rows)
            bad = np.flatnonzero(errors.err > 0)
            if piece.whole and len(bad):
                if len(rows):
                    wrong.append((rows, np.full(len(rows), errors.err.max())))
                else:
                    everywhere = max(everywhere, float(errors.err.max()))
            elif len(bad):
                spread = errors.err if len(errors.err) == len(rows) else np.full(len(rows), errors.err[0])
                bad = np.flatnonzero(spread > 0)
                wrong.append((rows[bad], spread[bad]))
            if not piece.whole:
                self.compared.setdefault(_family(piece), []).append(piece.keys)
        if limit is not None and unit.key[:2] != (SAMPLER, TOKEN):
            self._trace(unit, keys, wrong, limit, everywhere, allowed, weak)

    def _trace(
        self,
        unit: Unit,
        keys: list[np.ndarray],
        wrong: list[Any],
        limit: float,
        everywhere: float = 0.0,
        allowed: float = 0.0,
        weak: bool = False,
    ) -> None:
        seen = np.unique(np.concatenate(keys)) if keys else _NO_KEYS
        k = np.concatenate([w[0] for w in wrong]) if wrong else _NO_KEYS
        e = np.concatenate([w[1] for w in wrong]) if wrong else np.zeros(0)
        order = np.lexsort((e, k))
        k, e = k[order], e[order]
        last = np.append(k[1:] != k[:-1], True) if len(k) else np.zeros(0, bool)
        tap, role, call = unit.key
        keyed = (seen, k[last], e[last], everywhere, unit.vision, allowed, weak)
        self.traces.append(Trace(tap, role, call, kind_of(role), unit.order, limit, *keyed))

    def _param(self, unit: Unit) -> None:
        result = compare_params(unit, *self.loaders, self.standard)
        piece = result.piece
        if result.equal is None:
            self._skip(unit, piece)
            return
        limits = EXACT
        errors = self._errors(piece, 0.0, limits)
        if is_computed(unit.key[1]) and not result.equal:
            limits = self._limits(unit, piece)[1]
            errors = self._errors(piece, 0.0, limits)
        self._add(unit, piece, errors, limits, by=result.by)
        worst = float(errors.err.max()) if len(errors.err) else 0.0
        self._trace(unit, [], [], limits.row, worst if worst > limits.row else 0.0)

    def _limits(self, unit: Unit, piece: Piece) -> tuple[Limits, Limits]:
        """(what may have piled up, what the tap may create) at a piece."""
        dtypes = piece.golden[0].first.dtype, piece.group.first.dtype
        if is_exact(*dtypes):
            return EXACT, EXACT
        unit_here = max(self.unit, *(rounding_unit(d) for d in dtypes))
        total = self.standard.total_limits(unit_here, piece.width, unit.depth)
        return total, self.standard.created_limits(unit_here, piece.width)

    def _errors(self, piece: Piece, floor: float, limits: Limits) -> RowErrors:
        if piece.table is not None:
            return row_errors(piece.table, floor, piece.width, self.standard, exact=limits.exact)
        value = piece.stat_error or 0.0
        err = np.array([np.inf if limits.exact and value > 0 else value])
        return RowErrors(np.array([value]), np.ones(1), err, err, np.zeros(1, np.int8))

    def _row_floor(self, pieces: list[Piece]) -> float:
        """Rows whose norm is below this are not measured against their own norm alone."""
        norms = [np.sqrt(p.table[:, oracle.GG]) for p in pieces if p.table is not None and not p.whole]
        for p in pieces:
            stats = p.golden[0].first.stats if p.identical and not p.whole else None
            rows = p.golden[0].first.shape[p.golden[0].row_dim] if stats else 0
            if stats and stats.l2 and rows:
                norms.append(np.full(min(len(p.keys), 1000), stats.l2 / rows**0.5))
        every = np.concatenate(norms) if norms else np.zeros(0)
        every = every[every > 0]
        width = next((p.width for p in pieces if not p.skip), 1)
        return self.standard.floor_share(width) * float(np.median(every)) if len(every) else 0.0

    def _keys_of(self, piece: Piece) -> np.ndarray:
        """The rows that a piece speaks for: its own, or, without rows, all of its step."""
        if not piece.whole:
            return piece.keys
        rows = self.plan.tokens.mine.rows
        own = [rows[w].keys[rows[w].keep] for w in rows if w[:2] == piece.group.moment and w[2] != "logits"]
        return np.unique(np.concatenate(own)) if own else _NO_KEYS

    def _add(
        self, unit: Unit, piece: Piece, errors: RowErrors, limits: Limits, *, by: str = "", note: str = ""
    ) -> None:
        self.replicas += bool(piece.replicas)
        pair = words.make_pair(unit, piece, errors, limits, self.plan.tokens, by)
        pair = replace(pair, message=words.join(pair.message, note)) if note else pair
        self.pairs.append((pair, piece.keys))
        self.log.add(pair, piece.keys, errors.err, piece.decode)

    def _skip(self, unit: Unit, piece: Piece) -> None:
        self.skipped[piece.skip] += 1
        self.pairs.append((words.skipped_pair(unit, piece), _NO_KEYS))

    def _reroute(self, unit: Unit, piece: Piece, errors: RowErrors) -> str:
        """Finds rows sent to other experts at a near tie, and leaves the rows that come after one unjudged."""
        if piece.whole or len(errors.err) != len(piece.keys):
            return ""
        if is_choice(unit.key[1]):
            other = np.flatnonzero(errors.err > 0)
            excused = other[self.rerouted.near_ties(piece.keys[other], unit, self.traces)] if len(other) else other
            self.rerouted.add(piece.keys[excused])
        mask = self.rerouted.after(piece.keys)
        if not mask.any():
            return ""
        errors.err[mask], errors.rel[mask], errors.ratio[mask], errors.peak[mask] = 0.0, 0.0, 1.0, 0.0
        return f"{int(mask.sum())} rows after a router's near tie are not judged"


def _family(piece: Piece) -> str:
    return family(piece.group.where[2] if piece.group.where else "")
