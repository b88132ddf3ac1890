"""The pairs that a program labelled itself (``set_label``), compared within one dump.

The problem: two tensors of one run, the reference ("pta") and the accelerator's own ("acl"), are to be compared for a
table with the columns of another tool. The idea: the plan makes each pair a unit (plan/labelled.py) and the engine's
workers measure it; from its `Part` come the formulas of msit's table (docs/labels.md) and, by rows as everywhere here,
the verdict. What cannot be compared keeps its row, with the reason. Not here: csv and words (report/table.py),
capture.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vllm_accprobe.comparison.measure.measured import Part
from vllm_accprobe.comparison.measure.workers import measure_all
from vllm_accprobe.comparison.plan.labelled import LabelSide, LabelView, meeting, places, sides_of
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.label_files import ACL, LABEL_TAP, PTA
from vllm_accprobe.dump.reader import Dump, row_space
from vllm_accprobe.judge.floor import flow_unit, is_exact
from vllm_accprobe.judge.verdict import describe, row_errors, value_and_limit
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import EXACT, Limits, Standard

PASS, FAIL, SKIP = "pass", "fail", "skip"
_UNMEASURED = ""


@dataclass(frozen=True)
class LabelPair:
    """A pair or, with one side None, a label without partner. cosine to rel_euclid: None where not compared.

    request, position: of the worst row, where rows are known. limit: of the measure that decided."""

    data_id: str
    step: int
    rank: int
    call: int
    pta: LabelSide | None
    acl: LabelSide | None
    status: str
    reason: str = ""
    compared: bool = False
    cosine: float | None = None
    max_rel: float | None = None
    mean_rel: float | None = None
    rel_euclid: float | None = None
    nonfinite_mismatch: int = 0
    request: str | None = None
    position: int | None = None
    limit: float | None = None


@dataclass(frozen=True)
class LabelComparison:
    """All pairs in the order of steps, and the labels that have no partner, or were left out by the capture."""

    pairs: list[LabelPair]
    unpaired: list[LabelPair]
    skipped: dict[str, int]

    def count(self, status: str) -> int:
        return sum(p.status == status for p in self.pairs)


def count_pairs(dump: Dump) -> int:
    """How many ids, by step, rank and call, `compare_labels` looks at."""
    return len({key[:4] for key in places(dump)})


def compare_labels(
    dump: Dump, roots: Sequence[Path] = (), limit: float | None = None, done: Callable[[], None] = lambda: None
) -> LabelComparison:
    """Compares the labelled pairs of ``dump``.

    roots: directories, besides the dump itself, in which a labelled file may lie. limit: allowed relative L2 error of a
    row instead of the standard's for the coarser dtype (integers and booleans always have to be equal). done: called
    for each of `count_pairs`.
    """
    view = LabelView(sides_of(dump, [*roots, dump.path]))
    found = {}
    for key in sorted({key[:4] for key in view.sides}):
        step, rank, name, call = key
        found[key] = _begun(name, step, rank, call, *(view.sides.get((*key, role)) for role in (PTA, ACL)))
    units = [view.unit_of(key) for key, pair in found.items() if pair.status == _UNMEASURED]
    parts = (unit.parts[0] for batch in measure_all((view, view), meeting(units), units) for unit in batch)
    for key, pair in found.items():
        if pair.status == _UNMEASURED:
            part = next(parts)
            unread = view.failed.get(key)
            found[key] = replace(pair, status=SKIP, reason=unread) if unread else _judged(dump, pair, part, limit)
        done()
    skipped: Counter[str] = Counter()
    for s in dump.skips:
        if s.tap.startswith(LABEL_TAP):
            skipped[s.reason] += s.count
    pairs = [p for p in found.values() if p.pta is not None and p.acl is not None]
    unpaired = [p for p in found.values() if p.pta is None or p.acl is None]
    return LabelComparison(pairs, unpaired, dict(skipped))


def _begun(name: str, step: int, rank: int, call: int, golden: LabelSide | None, mine: LabelSide | None) -> LabelPair:
    """A pair as far as it is known without its values: all of it, or `_UNMEASURED`."""
    pair = LabelPair(name, step, rank, call, golden, mine, SKIP)
    if golden is None or mine is None:
        return replace(pair, reason=f"no {ACL if mine is None else PTA} label with this id")
    if _same_hash(golden, mine):  # nothing has to be read, or, of a dump of statistics, could be
        return replace(pair, status=PASS, compared=True, cosine=1.0, max_rel=0.0, mean_rel=0.0, rel_euclid=0.0)
    for role, side in ((PTA, golden), (ACL, mine)):
        if side.missing:
            return replace(pair, reason=f"{role}: {side.missing}")
    size = math.prod(golden.shape)
    if size != math.prod(mine.shape):
        return replace(pair, reason=f"{PTA} has {size} elements, {ACL} {math.prod(mine.shape)}", status=FAIL)
    if not size:
        return replace(pair, reason="both are empty")
    for side in (golden, mine):
        if DTYPES[side.dtype].kind == "complex":
            return replace(pair, reason=f"{side.dtype} is not compared here")
    return replace(pair, status=_UNMEASURED)


def _same_hash(golden: LabelSide, mine: LabelSide) -> bool:
    g, m = golden.record, mine.record
    if g is None or m is None or g.hash is None:
        return False
    n = math.prod(g.shape)
    return g.hash == m.hash and g.dtype == m.dtype and n == math.prod(m.shape) and n > 0


def _judged(dump: Dump, pair: LabelPair, part: Part, limit: float | None) -> LabelPair:
    assert pair.pta is not None
    assert pair.acl is not None
    assert part.table is not None
    assert part.elements is not None
    table, standard = part.table, Standard()
    dtypes = pair.pta.dtype, pair.acl.dtype
    metrics = definition.tensor_metrics(table)
    exact = is_exact(*dtypes)
    limits = EXACT if exact else _limits(standard, dtypes, part.width, limit)
    norms = np.sqrt(table[:, definition.GG])
    floor = standard.floor_share(part.width) * float(np.median(norms)) if len(norms) > 1 else 0.0
    errors = row_errors(table, floor, part.width, standard, exact=exact)
    worst = int(errors.err.argmax())
    mismatch = metrics.nonfinite_mismatch
    failed = bool(errors.err[worst] > limits.row) or mismatch > 0
    metric, value, allowed = value_and_limit(errors, worst, limits)
    reason = describe(metric, value, allowed) if failed else ""
    if mismatch:
        reason = f"{mismatch} positions are NaN or infinite on one side only" + (f"; {reason}" if reason else "")
    request, position = _whose(dump, pair.pta, worst) or _whose(dump, pair.acl, worst) or (None, None)
    n, differ = float(table[:, definition.N].sum()), table[:, definition.DD].any()
    return replace(
        pair,
        status=FAIL if failed else PASS,
        reason=reason,
        compared=True,
        # As msit: two zero tensors have the cosine 1; a zero beside something else has none, which is 0 here.
        cosine=(metrics.cosine or 0.0) if differ else 1.0,
        max_rel=part.elements[definition.TOP_REL],
        mean_rel=part.elements[definition.SUM_REL] / n if n else None,
        rel_euclid=(math.inf if differ else 0.0) if metrics.rel_l2 is None else metrics.rel_l2,
        nonfinite_mismatch=mismatch,
        request=request,
        position=position,
        limit=allowed,
    )


def _limits(standard: Standard, dtypes: tuple[str, str], width: int, limit: float | None) -> Limits:
    """By the coarser dtype, as for a tensor behind one layer; all alike where ``limit`` is given."""
    unit = flow_unit(dtypes) if limit is None else limit / (standard.total * math.sqrt(2.0))
    return standard.total_limits(unit, width, 1)


def _whose(dump: Dump, side: LabelSide, row: int) -> tuple[str | None, int] | None:
    """(request, position) of a row, where the tensor's rows are known and lie in front."""
    r = side.record
    if side.dump is not dump or r is None or r.row_dim != 0 or not r.shape:
        return None
    space = row_space(dump, r)
    if space is None or len(r.shape) < 2:
        return None
    row //= math.prod(r.shape[1:-1])
    for segment in space.segments:
        if row < segment.n:
            request = dump.requests.get((r.rank, segment.req))
            return (request.id if request else None), segment.pos + row
        row -= segment.n
    return None
