"""What a dump knows to be wrong or right without a call: parameters that it holds whole, against the checkpoint's (is
what was loaded what lies on disk?), and what its own ledger has found of its caches.

Not here: parameters of two dumps (comparison/measure/params.py), finding the checkpoint's (calls/weights.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vllm_accprobe.dump.journal.state_lines import sentence
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.judge.statistic import PROVED
from vllm_accprobe.opcheck.calls import grid
from vllm_accprobe.opcheck.calls.records import Calls, Captured, wanted
from vllm_accprobe.opcheck.floors.output_rows import numbers
from vllm_accprobe.opcheck.floors.rounding import judge
from vllm_accprobe.opcheck.measures import measure
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.run.judged_row import judged, on_grid, without_verdict
from vllm_accprobe.opcheck.run.result_row import CACHE, FAIL, SKIP, Checked, unchecked

_MOST_FOUND = 100
"""Findings of a ledger that become rows (chosen: as many as compare.json keeps)."""
OTHER_FORM = "a parameter that the engine keeps in another form than the checkpoint"


def check_stored(calls: Calls, ops: Iterable[str] = ()) -> Iterator[Checked]:
    """Parameters that the dump holds whole against the checkpoint's: a row for each that the checkpoint has, too.

    A parameter that a loader keeps in another form (permuted, folded) is nothing like the checkpoint's; one that is off
    by less than half its size is a wrong weight, and fails."""
    globs = tuple(ops)
    for rank, tap, cls, record, value in calls.parameters.stored():
        if value is None or not wanted(globs, tap, cls):
            continue
        empty = Call(tap, cls)
        captured = Captured(tap, rank, None, record.call, empty, {record.role: record})
        mine = calls.read(record)
        held = grid.narrowed(mine, calls.keeps().get(record.dtype, record.dtype))
        mine = mine if held is None else held
        value, dtype = value.to(mine.dtype), grid.name_of(mine)
        if value.shape != mine.shape:
            yield without_verdict(captured, record.role, record, SKIP, OTHER_FORM)
            continue
        wide, given = numbers(value).reshape(1, -1), numbers(mine).reshape(1, -1)
        v = judge(wide, given, dtype, last=0.0)
        measures = measure(wide.numpy(), given.numpy(), dtype)
        if not v.passed and not (measures.rel_l2 is not None and measures.rel_l2 <= 0.5):
            yield without_verdict(captured, record.role, record, SKIP, OTHER_FORM)
            continue
        message = "" if v.passed else f"{v.value:.0f} of {given.numel()} values are not the checkpoint's"
        what = record.role, record.dtype, record.shape, record.seq
        yield on_grid(judged(captured, what, v, measures, (1, 1, ""), message), record, dtype)


def cache_rows(dump: Dump) -> Iterator[Checked]:
    """What the dump's own ledger has found (docs/state-checks.md): operators that read caches may be right, and
    what they computed is not."""
    for rank, found in getattr(dump, "states", [])[:_MOST_FOUND]:
        tap = found.layer or found.first or f"cache group {found.group}"
        said = f"the cache, not the kernel: {sentence(found)}"
        yield replace(
            unchecked(tap, "cache", rank, None, 0, 0, "", status=FAIL, role=CACHE), message=said,
            request=found.request or None, position=found.low, tier=PROVED,
        )  # fmt: skip
