"""The pairs that a program labelled itself (``set_label``), compared within one dump.

The problem: two tensors of one run, the reference ("pta") and the accelerator's own ("acl"), are compared for a table
with another tool's columns; a label is a tensor of the dump or a file, and the two may differ in shape and dtype. The
idea: labels of one id, step, rank and call are a pair; a `LabelView` serves both sides as two views of one dump, row i
against row i, and the engine's workers measure it. What cannot be compared keeps its row, with the reason. Not here:
where a library puts a file (dump/label_files.py), csv and words (report/table.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vllm_accprobe.align.ranks import ONE, MergePlan
from vllm_accprobe.align.tokens import Rows, SideRows, Space
from vllm_accprobe.comparison.measure.measured import Part
from vllm_accprobe.comparison.measure.measurer import measure_all
from vllm_accprobe.comparison.plan.make_plan import Indices
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.label_files import ACL, LABEL_TAP, PTA, Label, label_file, locate
from vllm_accprobe.dump.reader import Dump, row_space
from vllm_accprobe.dump.schema import REPLICATED, Record, rank_dir, segment_name
from vllm_accprobe.formats import open_dump
from vllm_accprobe.judge.rounding_unit import flow_unit, is_exact
from vllm_accprobe.judge.tensor_errors import describe, row_errors, value_and_limit
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import EXACT, Limits, Standard

PairKey = tuple[int, int, str, int]
"""Step, rank, id and call."""
SideKey = tuple[int, int, str, int, str]
"""The same and the role: `PTA`, which is golden, or `ACL`, which is mine."""
_MAX_ROWS = 1 << 20
"""Rows of a row table; a tensor with more is measured as one row."""


@dataclass(frozen=True)
class LabelSide:
    """One side of a pair: its path for the table, dtype and shape ("" and () while unknown), where to read it."""

    path: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    dump: Dump | None = None
    record: Record | None = None
    missing: str = ""
    """Why it cannot be read, or ""."""


def places(dump: Dump) -> dict[SideKey, Record | Label]:
    """What was labelled; a file counts where both a value and a file are there."""
    found: dict[SideKey, Record | Label] = {}
    labelled: list[Record | Label] = [*dump.records, *dump.labels.values()]
    for one in labelled:
        if one.tap.startswith(LABEL_TAP) and one.step is not None and one.role in (PTA, ACL):
            found[one.step, one.rank, one.tap[len(LABEL_TAP) :], one.call, one.role] = one
    return found


def sides_of(dump: Dump, roots: Sequence[Path]) -> dict[SideKey, LabelSide]:
    return {
        key: _in_file(dump, one, roots) if isinstance(one, Label) else _stored(dump, one)
        for key, one in places(dump).items()
    }


def _stored(dump: Dump, r: Record) -> LabelSide:
    if r.payload is None:
        kept = "its payload is lost" if r.lost else "VLLM_ACCPROBE_TASK=stats"
        why = f"only statistics were kept of it ({kept})"
        return LabelSide(f"{rank_dir(r.rank)}/{r.step}|{r.tap}|{r.role}|{r.call}", r.dtype, r.shape, dump, r, why)
    path = f"{rank_dir(r.rank)}/{segment_name(r.payload.seg)}:{r.step}|{r.tap}|{r.role}|{r.call}"
    return LabelSide(path, r.dtype, r.shape, dump, r)


def _in_file(dump: Dump, label: Label, roots: Sequence[Path]) -> LabelSide:
    if label.file is not None:
        inside = Path(rank_dir(label.rank)) / label_file(label.file, label.ending)
        file, shown, missing = dump.path / inside, f"{inside}", ""
        if file.is_symlink() or not file.is_file():
            return LabelSide(shown, missing="its file is missing in the dump")
    else:
        found, missing = locate(label, roots)
        if found is None:
            why = label.reason if label.reason and missing == "its file was not found" else missing
            return LabelSide(label.path, missing=f"{why}; --acl DIR names a directory to look in")
        file, shown = found, str(found)
    try:
        opened = open_dump(file)
    except DumpError as error:
        return LabelSide(shown, missing=str(error))
    records = [r for r in opened.records if r.payload is not None]
    if len(records) != 1:
        return LabelSide(shown, missing=f"its file holds {len(records)} tensors, not one")
    return LabelSide(shown, records[0].dtype, records[0].shape, opened, records[0])


@dataclass
class LabelView:
    """All labels as one dump: records by `unit_of`, read from wherever they lie. Serves as golden and as mine.

    failed: why a side of a pair could not be read; problems, unread: what whoever reads a dump notes in it."""

    sides: dict[SideKey, LabelSide]
    failed: dict[PairKey, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def read(self, record: Record, out: np.ndarray | None = None) -> np.ndarray:
        """The stored bits in the record's shape. Raises DumpError."""
        assert record.step is not None
        pair = record.step, record.rank, record.tap, record.call
        side = self.sides[(*pair, record.role)]
        assert side.dump is not None
        assert side.record is not None
        try:
            return side.dump.read(side.record, out).reshape(record.shape)
        except (DumpError, OSError, ValueError) as error:
            self.failed[pair] = " ".join(str(error).split())
            raise DumpError(self.failed[pair]) from None

    def unit_of(self, pair: PairKey) -> Unit:
        """A pair whose sides have a payload and as many elements, above 0."""
        step, rank, name, call = pair
        golden, mine = (self.sides[(*pair, role)] for role in (PTA, ACL))
        shape = _rows_of(golden.shape, mine.shape)
        where = (0, 0, f"{LABEL_TAP}{shape[0]}") if shape[0] > 1 else None

        def alone(role: str, side: LabelSide) -> list[Group]:
            rows, payload = where and where[2], None if side.record is None else side.record.payload
            known = rank, step, name, "", role, call, 0, side.dtype, shape, rows, 0, None, None, REPLICATED, payload
            return [Group((Record(*known),), (0, None), where, MergePlan(ONE, (0,), shape))]

        return Unit((name, ACL, call), (name, PTA, call), "", "", 0, 1, alone(PTA, golden), alone(ACL, mine))


def _rows_of(golden: tuple[int, ...], mine: tuple[int, ...]) -> tuple[int, int]:
    size = math.prod(golden)
    width = golden[-1] if golden == mine and len(golden) > 1 else size
    return (size // width, width) if size // width <= _MAX_ROWS else (1, size)


def meeting(units: Iterable[Unit]) -> Indices:
    """Row i meets row i. Units with as many rows share one space of them."""
    rows: dict[Space, Rows] = {}
    for group in (u.mine[0] for u in units):
        if group.where is not None and group.where not in rows:
            n = group.first.shape[0]
            rows[group.where] = Rows(np.arange(n), np.ones(n, bool), np.zeros(n, bool))
    side = SideRows(rows, {})
    return Indices((side, side))


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
    for s, at in space.stretches():
        if row < at.stop:
            request = dump.requests.get((r.rank, s.req))
            return (request.id if request else None), s.pos + row - at.start
    return None
