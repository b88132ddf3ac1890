"""A series as JSON: series.json, schema 1.

The idea: an object per dump in the order given, and a row of factors per tap that ever failed, in data-flow order; as
in compare.json a number that JSON lacks is "inf". Not here: compare.json of each dump, which lies in its folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm_accprobe.report.series.dump_entry import SeriesEntry, exit_code, failing_taps
from vllm_accprobe.report.series.series_lines import verdict

SCHEMA = 1


def series_json(golden: str, entries: Sequence[SeriesEntry]) -> dict[str, Any]:
    """``{"schema", "verdict", "exit_code", "golden", "dumps": [...], "taps": [...]}``. taps: {"tap", "class",
    "over_limit": [factor or null per dump], "failed": [pairs per dump]}."""
    return {
        "schema": SCHEMA,
        "verdict": verdict(entries),
        "exit_code": exit_code(entries),
        "golden": golden,
        "dumps": [_dump(e) for e in entries],
        "taps": [_tap(tap, entries) for tap in failing_taps(entries)],
    }


def _dump(e: SeriesEntry) -> dict[str, Any]:
    return {
        "name": e.name,
        "path": e.path,
        "verdict": e.status,
        "exit_code": e.code,
        "says": e.says,
        "page": e.page,
        "over_limit": _number(e.over),
        "pairs": {"passed": e.passed, "failed": e.failed, "skipped": e.skipped, "identical": e.identical},
        "tokens_flipped": e.flipped,
        "origins": [{key: _number(value) for key, value in o.items()} for o in e.origins],
    }


def _tap(tap: str, entries: Sequence[SeriesEntry]) -> dict[str, Any]:
    found = [e.taps.get(tap) for e in entries]
    return {
        "tap": tap,
        "class": next((t.cls for t in found if t), ""),
        "over_limit": [_number(t.over) if t else None for t in found],
        "failed": [t.failed if t else 0 for t in found],
    }


def _number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
