"""The pairs that a program labelled itself (``set_label``), compared within one dump.

The problem: two tensors of one run, the reference ("pta") and the accelerator's own ("acl"), often of other shapes and
dtypes, one of them perhaps in a file that a library wrote. The idea: what has one id, step, rank and place in the order
of calls is a pair; both sides are read, flattened if need be, and measured in float64, piece by piece, by the formulas
of msit's table (docs/labels.md) and, for the verdict, by rows as everywhere here. What cannot be
compared keeps its row, with the reason. Not here: csv and words (report/label_lines.py), capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vllm_accprobe.comparison.measure.label_sums import LabelSide, LabelSums, measure
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.label_files import ACL, LABEL_TAP, PTA, Label, label_file, locate
from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import Record, rank_dir, segment_name
from vllm_accprobe.dump.select import row_space
from vllm_accprobe.judge.floor import flow_unit, is_exact
from vllm_accprobe.judge.verdict import describe, row_errors, value_and_limit
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import EXACT, Limits, Standard

PASS, FAIL, SKIP = "pass", "fail", "skip"


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
    return len({key[:4] for key in _places(dump)})


def compare_labels(
    dump: Dump, roots: Sequence[Path] = (), limit: float | None = None, done: Callable[[], None] = lambda: None
) -> LabelComparison:
    """Compares the labelled pairs of ``dump``.

    roots: directories, besides the dump itself, in which a labelled file may lie. limit: allowed relative L2 error of a
    row instead of the standard's for the coarser dtype (integers and booleans always have to be equal). done: called
    for each of `count_pairs`.
    """
    sides = _sides(dump, [*roots, dump.path])
    pairs, unpaired = [], []
    for key in sorted({key[:4] for key in sides}):
        done()
        step, rank, name, call = key
        pta, acl = sides.get((*key, PTA)), sides.get((*key, ACL))
        if pta is None or acl is None:
            reason = f"no {ACL if acl is None else PTA} label with this id"
            unpaired.append(LabelPair(name, step, rank, call, pta, acl, SKIP, reason))
            continue
        pairs.append(_pair(dump, LabelPair(name, step, rank, call, pta, acl, SKIP), limit))
    skipped: dict[str, int] = {}
    for s in dump.skips:
        if s.tap.startswith(LABEL_TAP):
            skipped[s.reason] = skipped.get(s.reason, 0) + s.count
    return LabelComparison(pairs, unpaired, skipped)


# --- which sides there are ---------------------------------------------------------------------------------------

_Key = tuple[int, int, str, int, str]


def _places(dump: Dump) -> dict[_Key, Record | Label]:
    """What was labelled, by step, rank, id, call and role; a file counts where both a value and a file are there."""
    found: dict[_Key, Record | Label] = {}
    labelled: list[Record | Label] = [*dump.records, *dump.labels.values()]
    for one in labelled:
        if one.tap.startswith(LABEL_TAP) and one.step is not None and one.role in (PTA, ACL):
            found[one.step, one.rank, one.tap[len(LABEL_TAP) :], one.call, one.role] = one
    return found


def _sides(dump: Dump, roots: Sequence[Path]) -> dict[_Key, LabelSide]:
    return {
        key: _in_file(dump, one, roots) if isinstance(one, Label) else _stored(dump, one)
        for key, one in _places(dump).items()
    }


def _stored(dump: Dump, r: Record) -> LabelSide:
    if r.payload is None:
        why = "only statistics were kept of it (VLLM_ACCPROBE_TASK=stats, or the payload is lost)"
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
    return _open(file, shown)


def _open(file: Path, shown: str) -> LabelSide:
    from vllm_accprobe.formats import open_dump

    try:
        opened = open_dump(file)
    except DumpError as error:
        return LabelSide(shown, missing=str(error))
    records = [r for r in opened.records if r.payload is not None]
    if len(records) != 1:
        return LabelSide(shown, missing=f"its file holds {len(records)} tensors, not one")
    return LabelSide(shown, records[0].dtype, records[0].shape, opened, records[0])


# --- one pair ----------------------------------------------------------------------------------------------------


def _pair(dump: Dump, pair: LabelPair, limit: float | None) -> LabelPair:
    golden, mine = pair.pta, pair.acl
    assert golden is not None
    assert mine is not None
    if _same_hash(golden, mine):  # nothing has to be read, or, of a dump of statistics, could be
        return replace(pair, status=PASS, compared=True, cosine=1.0, max_rel=0.0, mean_rel=0.0, rel_euclid=0.0)
    for name, side in ((PTA, golden), (ACL, mine)):
        if side.missing:
            return replace(pair, reason=f"{name}: {side.missing}")
    size = math.prod(golden.shape)
    if size != math.prod(mine.shape):
        return replace(pair, reason=f"{PTA} has {size} elements, {ACL} {math.prod(mine.shape)}", status=FAIL)
    if not size:
        return replace(pair, reason="both are empty")
    for side in (golden, mine):
        if DTYPES[side.dtype].kind == "complex":
            return replace(pair, reason=f"{side.dtype} is not compared here")
    try:
        found = measure(golden, mine)
    except (DumpError, OSError, ValueError) as error:
        return replace(pair, reason=" ".join(str(error).split()))
    return _judged(dump, pair, golden, mine, found, limit)


def _same_hash(golden: LabelSide, mine: LabelSide) -> bool:
    g, m = golden.record, mine.record
    if g is None or m is None or g.hash is None:
        return False
    n = math.prod(g.shape)
    return g.hash == m.hash and g.dtype == m.dtype and n == math.prod(m.shape) and n > 0


def _judged(
    dump: Dump, pair: LabelPair, golden: LabelSide, mine: LabelSide, found: LabelSums, limit: float | None
) -> LabelPair:
    table, standard = found.table, Standard()
    total = table.sum(axis=0)
    gg, mm, n = (float(total[i]) for i in (definition.GG, definition.MM, definition.N))
    mismatch = int(total[definition.MISMATCH])
    exact = is_exact(golden.dtype, mine.dtype)
    limits = EXACT if exact else _limits(standard, golden, mine, found.width, limit)
    norms = np.sqrt(table[:, definition.GG])
    floor = standard.floor_share(found.width) * float(np.median(norms)) if len(norms) > 1 else 0.0
    errors = row_errors(table, floor, found.width, standard, exact=exact)
    worst = int(errors.err.argmax())
    failed = bool(errors.err[worst] > limits.row) or mismatch > 0
    metric, value, allowed = value_and_limit(errors, worst, limits)
    reason = ""
    if failed:
        reason = describe(metric, value, allowed)
    if mismatch:
        reason = f"{mismatch} positions are NaN or infinite on one side only" + (f"; {reason}" if reason else "")
    request, position = _whose(dump, golden, worst) or _whose(dump, mine, worst) or (None, None)
    return replace(
        pair,
        status=FAIL if failed else PASS,
        reason=reason,
        compared=True,
        # As msit: two zero tensors have the cosine 1; a zero beside something else has none, which is 0 here.
        cosine=float(total[definition.GM]) / math.sqrt(gg * mm) if gg and mm else float(gg == mm),
        max_rel=float(found.elements[definition.TOP_REL]),
        mean_rel=float(found.elements[definition.SUM_REL]) / n if n else None,
        rel_euclid=math.sqrt(float(total[definition.DD]) / gg)
        if gg
        else (0.0 if not total[definition.DD] else math.inf),
        nonfinite_mismatch=mismatch,
        request=request,
        position=position,
        limit=allowed,
    )


def _limits(standard: Standard, golden: LabelSide, mine: LabelSide, width: int, limit: float | None) -> Limits:
    """By the coarser dtype, as for a tensor behind one layer; all alike where ``limit`` is given."""
    unit = flow_unit((golden.dtype, mine.dtype))
    if limit is not None:
        unit = limit / (standard.total * math.sqrt(2.0))
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
