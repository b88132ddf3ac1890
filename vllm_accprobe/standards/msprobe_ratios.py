"""msprobe's two-sided standard: mine's distance from the CPU against golden's distance from the same CPU.

The problem: a kernel that rounds is never equal to its reference, and how much rounding an operator may show is best
told by a machine that is trusted. The idea: six algorithms, chosen by operator and dtype (msprobe_apis.py), each of
some measures of one side or the ratio of both sides' measures. Two releases of the rules: `CURRENT`, with levels L0,
L1 and L2 and no warnings, and `V1` (1.0.4), one level with warnings above 1. Sources: the documents of
api_precision_compare_details.csv of both releases; where they leave open what a ratio to nothing is, msprobe 26.2
(a smallest divisor by dtype) and, for 1.0.4, plain division, 0 / 0 being 1. Where msprobe's code differs, the documents
are followed (docs/opcheck.md). Beyond the documents: a NaN or infinity that mine has and the CPU has not is
an error unless golden has it too, and a measure that is itself NaN or infinite on both sides is no agreement.
Not here: one machine alone (msprobe.py), where the measures come from (opcheck/diff/verdicts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_accprobe.standards.finding import ERROR, PASS, SKIP, WARNING, Judged, RuleFinding, of, skip
from vllm_accprobe.standards.measures import Values
from vllm_accprobe.standards.msprobe_apis import (
    ABSOLUTE,
    ACCUMULATIVE,
    BENCHMARK,
    BINARY,
    DUAL_1000,
    ULP,
    algorithm_of,
    level_of,
)  # fmt: skip


@dataclass(frozen=True)
class Release:
    """ratios: by level, the largest ratio that is no error, for each measure of the benchmark ratio; warn: above it a
    warning, or None for no warnings; floors: smallest divisor by dtype, empty for plain division; prefix: of the
    measures that depend on what a small value is."""

    name: str
    ratios: Mapping[str, Mapping[str, float]]
    warn: float | None
    floors: Mapping[str, float]
    prefix: str


def _ratios(top: float, rest: float) -> dict[str, float]:
    return {"small_value_err_ratio": 2.0, "normal_rmse": rest, "normal_max_rel_err": top, "normal_mean_rel_err": rest}


CURRENT = Release(
    "msprobe",
    {"L0": _ratios(10.0, 2.0), "L1": _ratios(5.0, 1.5), "L2": _ratios(2.0, 1.2)},
    None,
    {"float16": 2.0**-11, "bfloat16": 2.0**-8, "": 2.0**-14},
    "",
)
V1 = Release("msprobe-1.0", dict.fromkeys(("L0", "L1", "L2"), _ratios(10.0, 2.0)), 1.0, {}, "v1_")
BALANCE = 2.0
"""Limit of the error balance's ratio, which is shown and has no say."""
ULP_MEAN, ULP_SHARE_32, ULP_SHARE_16, DUAL = 64.0, 0.05, 0.001, 0.999
BALANCES = {"float16": 2.0**-20, "bfloat16": 2.0**-7, "": 2.0**-14}
"""The accumulative algorithm's limit of the error balance."""
NAMES = {
    "small_value_err_ratio": "small value error", "normal_rmse": "RMSE", "normal_max_rel_err": "max relative error",
    "normal_mean_rel_err": "mean relative error", "error_balance": "error balance",
    "inf_nan_err_ratio": "inf/nan error rate", "rel_err_ratio": "relative error rate",
    "abs_err_ratio": "absolute error rate", "binary_err_ratio": "binary consistency error rate",
}  # fmt: skip
LABELS = {
    "small_value_err_ratio": "small_value_ratio", "normal_rmse": "rmse_ratio", "normal_max_rel_err": "max_rel_ratio",
    "normal_mean_rel_err": "mean_rel_ratio", "error_balance": "error_balance_ratio",
}  # fmt: skip
"""Names of the benchmark ratios."""
_NEEDS = {
    BENCHMARK: ("normal_rmse", "normal_max_rel_err", "normal_mean_rel_err"), ULP: ("ulp_share",),
    ABSOLUTE: ("rel_err_ratio", "abs_err_ratio"), BINARY: ("binary_err_ratio",), DUAL_1000: ("dual_1000",),
    ACCUMULATIVE: ("rel_err_ratio", "abs_err_ratio", "error_balance"),
}  # fmt: skip
_BOTH = (BENCHMARK, ULP)


def judge(
    release: Release, golden: Values, mine: Values, api: str, dtype: str, algorithm: str | None = None
) -> RuleFinding:
    """golden, mine: measures of one output on each machine against the CPU; api: msprobe_apis.api_of's name; dtype:
    mine's; algorithm: one of msprobe_apis.ALGORITHMS instead of the documents' choice for ``api``."""
    chosen = algorithm or algorithm_of(api, dtype)
    if chosen is None:
        return skip("", f"{dtype} is not judged by this standard")
    used = next((a for a in (chosen, BENCHMARK, ULP, ABSOLUTE, DUAL_1000) if _has(a, release, golden, mine)), "")
    if not used:
        return skip(chosen, _missing(chosen, release, golden, mine))
    note = "" if used == chosen else f"no measures for {chosen}: judged by {used}"
    rules: dict[str, Callable[..., tuple[list[Judged], list[Judged]]]] = {
        BENCHMARK: _benchmark, ULP: _ulp, ABSOLUTE: _absolute, BINARY: _binary, DUAL_1000: _dual_1000,
        ACCUMULATIVE: _accumulative,
    }  # fmt: skip
    judged, advisory = rules[used](release, golden, mine, api, dtype)
    if used in (BENCHMARK, ULP, DUAL_1000):
        judged += _broken(release, golden, mine)
    return of(used, judged, advisory=advisory, note=note)


def _field(name: str, algorithm: str, release: Release) -> str:
    if algorithm == ACCUMULATIVE and name in ("inf_nan_err_ratio", "rel_err_ratio", "abs_err_ratio"):
        return f"acc_{name}"
    split = name.startswith("normal_") or name in (
        "small_value_err_ratio", "inf_nan_err_ratio", "rel_err_ratio", "abs_err_ratio",
    )  # fmt: skip
    return release.prefix + name if split else name


def _has(algorithm: str, release: Release, golden: Values, mine: Values) -> bool:
    names = [_field(n, algorithm, release) for n in _NEEDS[algorithm]]
    sides = (golden, mine) if algorithm in _BOTH else (mine,)
    return all(side.get(n) is not None for side in sides for n in names)


def _missing(algorithm: str, release: Release, golden: Values, mine: Values) -> str:
    names = [_field(n, algorithm, release) for n in _NEEDS[algorithm]]
    sides = (("golden", golden), ("mine", mine)) if algorithm in _BOTH else (("mine", mine),)
    lacking = [f"{side} has no {n}" for side, values in sides for n in names if values.get(n) is None]
    return f"not measured: {', '.join(lacking)}"


def _broken(release: Release, golden: Values, mine: Values) -> list[Judged]:
    """The NaNs and infinities that the other measures leave out."""
    name = _field("inf_nan_err_ratio", "", release)
    here, there = mine.get(name), golden.get(name)
    if not here:
        return []
    if there and here <= there:
        reason = f"golden has as many wrong NaN or infinite values ({there:.6g} of all, mine {here:.6g})"
        return [Judged("inf_nan_err_ratio", here, there, WARNING, reason)]
    return [Judged("inf_nan_err_ratio", here, 0.0, ERROR, f"{here:.6g} of the values are wrongly NaN or infinite")]


def _benchmark(
    release: Release, golden: Values, mine: Values, api: str, dtype: str
) -> tuple[list[Judged], list[Judged]]:
    level = level_of(api)
    judged = []
    for name, limit in release.ratios[level].items():
        field = _field(name, BENCHMARK, release)
        if name == "small_value_err_ratio" and (mine.get(field) is None or golden.get(field) is None):
            continue
        judged.append(_ratio(name, golden.get(field), mine.get(field), limit, release, dtype, level))
    balance = golden.get("error_balance"), mine.get("error_balance")
    if None in balance:
        return judged, []
    return judged, [_ratio("error_balance", *balance, BALANCE, release, dtype, level)]


def _ratio(
    name: str, golden: float | None, mine: float | None, limit: float, release: Release, dtype: str, level: str
) -> Judged:
    label = LABELS[name]
    if golden is None or mine is None:
        return Judged(label, None, limit, SKIP, f"{NAMES[name]}: not measured on both sides")
    if not (math.isfinite(golden) and math.isfinite(mine)):
        same = golden == mine or (math.isnan(golden) and math.isnan(mine))
        said = f"{NAMES[name]} is {golden} on golden's side and {mine} on mine's"
        return Judged(label, math.nan, limit, SKIP if same else ERROR, said)
    value = ratio(golden, mine, release, dtype)
    where = f" ({level})" if release.warn is None else ""
    said = f"{NAMES[name]} is {value:.4g} times golden's, limit {limit:g}{where}"
    if value > limit:
        return Judged(label, value, limit, ERROR, said)
    if release.warn is not None and value > release.warn:
        said = f"{NAMES[name]} is {value:.4g} times golden's, above {release.warn:g}"
        return Judged(label, value, release.warn, WARNING, said)
    return Judged(label, value, limit, PASS)


def ratio(golden: float, mine: float, release: Release, dtype: str) -> float:
    """|mine| / max(|golden|, the release's smallest divisor); without one, 0 / 0 is 1 and x / 0 infinite."""
    floor = release.floors.get(dtype, release.floors.get("", 0.0))
    below = max(abs(golden), floor)
    if below == 0.0:
        return 1.0 if mine == 0.0 else math.inf
    return abs(mine) / below


def _ulp(release: Release, golden: Values, mine: Values, api: str, dtype: str) -> tuple[list[Judged], list[Judged]]:
    share, theirs, mean = mine.get("ulp_share"), golden.get("ulp_share"), mine.get("ulp_mean")
    if share is None or theirs is None:
        raise ValueError("ULP shares are needed on both sides")
    name = "ulp_share"
    if not (math.isfinite(share) and math.isfinite(theirs)) or (mean is not None and not math.isfinite(mean)):
        said = f"ULP errors are not finite: mean {mean}, shares {theirs}, {share}"
        return [Judged(name, share, None, ERROR, said)], []
    limit = ULP_SHARE_32 if dtype == "float32" else ULP_SHARE_16
    shown = [Judged("ulp_share_ratio", ratio(theirs, share, release, dtype), 1.0, PASS)]
    if mean is not None:
        shown.append(Judged("ulp_mean", mean, ULP_MEAN if dtype == "float32" else None, PASS))
    easy = dtype == "float32" and mean is not None and mean < ULP_MEAN
    if easy or share < limit or (share < theirs and not dtype.startswith("float8")):
        return [Judged(name, share, limit, PASS)], shown
    bound = 32 if dtype == "float32" else 1
    said = f"{100 * share:.4g} % of the values are off by more than {bound} ULP (limit {100 * limit:g} %, golden's "
    said += f"{100 * theirs:.4g} %)"
    if dtype == "float32" and mean is not None:
        said += f", {mean:.4g} ULP on average (limit {ULP_MEAN:g})"
    return [Judged(name, share, limit, ERROR, said)], shown


def _zero(name: str, algorithm: str, release: Release, golden: Values, mine: Values) -> list[Judged]:
    field = _field(name, algorithm, release)
    value, theirs = mine.get(field), golden.get(field)
    if value is None:
        return []
    if value == 0:
        return [Judged(name, value, 0.0, PASS)]
    beside = "" if theirs is None else f" (golden's {theirs:.4g})"
    return [Judged(name, value, 0.0, ERROR, f"{NAMES[name]} is {value:.4g}{beside} and must be 0")]


def _absolute(
    release: Release, golden: Values, mine: Values, api: str, dtype: str
) -> tuple[list[Judged], list[Judged]]:
    names = ("inf_nan_err_ratio", "rel_err_ratio", "abs_err_ratio")
    return [j for n in names for j in _zero(n, ABSOLUTE, release, golden, mine)], []


def _binary(release: Release, golden: Values, mine: Values, api: str, dtype: str) -> tuple[list[Judged], list[Judged]]:
    return _zero("binary_err_ratio", BINARY, release, golden, mine), []


def _dual_1000(
    release: Release, golden: Values, mine: Values, api: str, dtype: str
) -> tuple[list[Judged], list[Judged]]:
    value = mine["dual_1000"]
    good = value is not None and value > DUAL
    theirs = golden.get("dual_1000")
    beside = "" if theirs is None else f" (golden's {theirs:.6g})"
    said = "" if good else f"dual-1000: {value:.6g}{beside} is not above {DUAL:g}"
    return [Judged("dual_1000", value, DUAL, PASS if good else ERROR, said)], []


def _accumulative(
    release: Release, golden: Values, mine: Values, api: str, dtype: str
) -> tuple[list[Judged], list[Judged]]:
    names = ("inf_nan_err_ratio", "rel_err_ratio", "abs_err_ratio")
    judged = [j for n in names for j in _zero(n, ACCUMULATIVE, release, golden, mine)]
    value = mine["error_balance"]
    limit = BALANCES.get(dtype, BALANCES[""])
    good = value is not None and value <= limit
    said = "" if good else f"error balance is {value:.4g}, limit {limit:.4g}"
    return [*judged, Judged("error_balance", value, limit, PASS if good else ERROR, said)], []
