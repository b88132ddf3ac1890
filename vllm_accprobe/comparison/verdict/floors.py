"""Measured floors: from further runs of golden's own side to what honest runs differ by.

The problem: the best measure of honest differences is golden against itself, and the second run may be a dump on this
machine or a file from another. The idea: a dump is compared with the golden like any other, and what its pairs and
origins say is the floor; a calibration made earlier is just read.
Not here: how a floor is used and stored (judge/calibration.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.comparison.pair import counted
from vllm_accprobe.comparison.result import FAIL, SKIP, CompareError, Comparison, Pair
from vllm_accprobe.comparison.verdict.gaps import taps_of
from vllm_accprobe.judge.calibration import (
    FLOAT32,
    MODEL,
    SECOND_RUN,
    Calibration,
    CalibrationError,
    Floors,
    is_calibration,
    joined,
    load,
)
from vllm_accprobe.judge.floor import flow_unit

if TYPE_CHECKING:
    from collections.abc import Callable

    Compare = Callable[[Any, Any], Comparison]


def gather(
    golden: Any, floors: Sequence[str | Path], compare: Compare, option: str = "--floor ", failing: bool = False
) -> Calibration | None:
    """The floor of ``floors``: directories of calibrations, or dumps, each of which is compared with ``golden``.

    golden: a Dump or a path, None where there is none (a comparison that is judged again). option: what the user wrote
    in front of a floor. failing: dumps that fail against golden are taken as well. Raises CompareError.
    """
    return joined(_one(golden, Path(f), compare, option, failing) for f in floors)


def _one(golden: Any, floor: Path, compare: Compare, option: str, failing: bool) -> Calibration:
    if is_calibration(floor):
        try:
            return load(floor)
        except CalibrationError as e:
            raise CompareError(str(e)) from None
    if golden is None:
        why = "--rejudge has no dumps; make one with `accprobe compare --calibrate`"
        raise CompareError(f"--floor {floor} is no calibration: {why}")
    try:
        result = compare(golden, floor)
        found = calibration_of(result, str(floor))
        if result.verdict == FAIL and not failing:
            raise CompareError(_fails(result, golden, floor))
        return found
    except CompareError as e:
        more = "" if str(e).startswith(f"{floor} ") else f"{option}{floor} is no other run of golden's side: "
        raise type(e)(f"{more}{e}") from None


def _fails(result: Comparison, golden: Any, floor: Path) -> str:
    """A faulty run as a floor would hide its fault in every later comparison."""
    first = next((str(o["module"]) for o in result.origins), None)
    first = first or next((p.tap for p in result.pairs if p.status == FAIL), "a sampled token")
    made = f"accprobe compare {getattr(golden, 'path', golden)} {floor} --calibrate accprobe-floor --accept-failing"
    return f"it fails against golden, first at {first}: no floor; if rounding alone does that on this side, `{made}`"


def calibration_of(result: Comparison, run: str) -> Calibration:
    """What a comparison of golden with another honest run of its own side says. Raises CompareError where the two do
    not belong together: other weights, or logits that NaN tells apart."""
    wrong = [p for p in result.pairs if p.role.startswith("param.") and p.status == FAIL]
    if wrong:
        raise CompareError(f"it has other weights than golden ({wrong[0].tap} {wrong[0].role}): no floor of golden's")
    floors: Floors = {}
    for pair in result.pairs:
        if _has_floor(pair):
            here = floors.setdefault((pair.tap, pair.role), {})
            for phase, value in _values(pair):
                here[phase] = max(value, here.get(phase, 0.0))
    if not floors:
        raise CompareError("nothing of it could be compared with golden by value: no floor")
    origins: dict[str, float] = {}
    for o in result.origins:
        worst = o["worst"]
        if math.isfinite(worst):
            for tap in taps_of(o):
                origins[tap] = max(worst, origins.get(tap, 0.0))
    sides = ([p.dtype_golden for p in result.pairs], [p.dtype_mine for p in result.pairs])
    units = [flow_unit(str(d) for d in side) for side in sides]
    about = result.golden_run.get("model")
    model, dtype = (str(about.get(k) or "") if isinstance(about, dict) else "" for k in ("class", "dtype"))
    source = FLOAT32 if 0 < units[0] < units[1] else SECOND_RUN
    return Calibration(floors, origins, model[:500], dtype[:50], (run,), source)


def _has_floor(pair: Pair) -> bool:
    return pair.status != SKIP and pair.worst_row_rel_l2 is not None and not pair.role.startswith("param.")


def _values(pair: Pair) -> list[tuple[str, float]]:
    found = [("prefill", pair.prefill_rel_l2), ("decode", pair.decode_rel_l2), ("any", pair.worst_row_rel_l2)]
    return [(phase, v) for phase, v in found if v is not None and math.isfinite(v)]


def floor_of(
    key: tuple[str, str, int],
    phase: str | None,
    worst: float | None,
    limit: float,
    calibration: Calibration | None,
    model: float | None,
) -> tuple[float | None, str | None, float | None]:
    """(floor of a pair, where that comes from, its error in units of it). key: tap, role, call; worst: its worst row's
    relative L2 error; model: of rounding, or None."""
    if worst is None or key[1].startswith("param.") or not limit:
        return None, None, None
    known = phase if phase in ("prefill", "decode") else None
    measured = calibration.floor(key[0], key[1], known) if calibration is not None else None
    floor, source = (measured, calibration.source) if measured and calibration is not None else (model, MODEL)
    return (floor, source, worst / floor) if floor else (None, None, None)


def sentence(calibration: Calibration | None, pairs: Sequence[Pair]) -> str:
    """Which floor the limits rest on, in one line; "" for the model of rounding alone."""
    if calibration is None:
        return ""
    taps = {(p.tap, p.role) for p in pairs if p.x_floor is not None}
    known = sum(1 for key in taps if key in calibration.floors)
    runs = counted(len(calibration.runs), "run")
    second = calibration.source == SECOND_RUN
    what = "golden against other runs of its side" if second else "a float32 golden's distance to lower precision"
    return f"floor measured by {runs} ({what}) at {known} of {len(taps)} tensors, rounding model elsewhere"
