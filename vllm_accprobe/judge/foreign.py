"""Other tools' standards: the measures, thresholds and words of torch_xray, msprobe, ait and MindSpore's pre-check.

The problem: a team with a year of msprobe reports cannot compare them with a tool that speaks in rows and floors. The
idea: each standard is a few columns and a rule over whole tensors, made of numbers that the kernel has summed up
anyway; the rule gives that tool's own word. The search for the culprit stays ours, whichever gives the verdict.
Sources: msprobe, the documents of accuracy_checking_details.csv (release 1.0 in Chinese, the present one in English;
the rules of one side against its benchmark are the same in both, the columns' names are each document's own). Where
msprobe's code differs, the documents are followed: its code judges float outputs by benchmark ratios that need a second
machine's csv, which these rules do not. torch_xray: its example table; the document states no threshold, but in the
table all of Max Err 0.0156 fail and none of 0.0078, so 0.01 is taken; IsClose is torch.isclose with its defaults and
GtNum counts |d| > 1e-3. ait: msit's seven metrics, which come without any verdict: the status stays our own.
MindSpore: section 4.1 of its pre-check's document.
Not here: the sums (kernels/definition.py), pairs and files (comparison/verdict/foreign.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_accprobe.kernels import definition

PASS, WARNING, ERROR, SKIPPED, NO_VERDICT = "pass", "warning", "error", "SKIP", ""
COSINE, LARGEST, MINDSPORE_LARGEST, XRAY_LARGEST = 0.99, 1e-3, 1e-4, 1e-2
_NOTHING = 2.220446049250313e-16  # msprobe takes a tensor whose values are all below this for zero
_COARSE = ("float16", "bfloat16", "float8")
Cell = float | int | str | None


@dataclass(frozen=True, slots=True)
class Numbers:
    """One tensor. count: of its elements; cosine and the others as kernels/definition.Metrics; elements:
    oracle.ELEMENT_FIELDS, kl: KL divergence of softmax(golden) from softmax(mine), None where not measured; broken:
    NaN or infinity on one side only."""

    dtype: str
    count: int
    exact: bool
    identical: bool
    zero: bool
    cosine: float | None
    rmse: float | None
    max_abs: float | None
    rel_l2: float | None
    max_rel: float | None
    elements: tuple[float, ...] | None
    kl: float | None
    broken: bool


@dataclass(frozen=True, slots=True)
class Foreign:
    """name: what --standard takes; columns: after our own in compare.csv; rule: the cells of a tensor, its word (pass,
    warning, error, or "" where the tool gives none), and why; needs_kl: whether a further pass is to be made."""

    name: str
    columns: tuple[str, ...]
    rule: Callable[[Numbers], tuple[tuple[Cell, ...], str, str]]
    needs_kl: bool = False


def _sum(n: Numbers, field: int, identical: float) -> float | None:
    if n.elements is not None:
        return n.elements[field]
    return identical if n.identical else None


def _share(n: Numbers, field: int) -> float | None:
    """Of the elements, those that ``field`` counts; of identical tensors all."""
    counted = _sum(n, field, float(n.count))
    return None if counted is None or not n.count else counted / n.count


def _xray(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    close, above = _share(n, definition.CLOSE), _sum(n, definition.ABOVE, 0.0)
    bad = n.broken or (n.max_abs is not None and not n.max_abs <= XRAY_LARGEST)
    cells = n.cosine, n.rmse, None if close is None else 100.0 * close, n.max_abs, None if above is None else int(above)
    why = "NaN or infinity on one side only" if n.broken else f"Max Err above {XRAY_LARGEST:g}" if bad else ""
    return ("Fail" if bad else "", *cells), ERROR if bad else PASS, why


def _msprobe(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    shares = tuple(_share(n, f) for f in (definition.WITHIN_100, definition.WITHIN_1000, definition.WITHIN_10000))
    if n.exact:
        unequal = _sum(n, definition.UNEQUAL, 0.0)
        rate = None if unequal is None or not n.count else unequal / n.count
        word, why = (ERROR, "values differ and must be equal") if n.max_abs or n.broken else (PASS, "")
        return (None, n.max_abs, None, None, None, rate, word, why), word, why
    word, why = _dual(n, shares)
    return (n.cosine, n.max_abs, *shares, None, word, why), word, why


def _dual(n: Numbers, shares: tuple[float | None, ...]) -> tuple[str, str]:
    if n.broken:
        return ERROR, "NaN or infinity on one side only"
    if n.max_abs is None:
        return SKIPPED, "no finite values"
    if n.count > 1 and not n.zero and not n.identical:  # a single element has no direction
        if n.cosine is None and n.max_abs > _NOTHING:
            return ERROR, "one side is all zero"
        if n.cosine is not None and not n.cosine > COSINE:
            return ERROR, f"cosine similarity {n.cosine:.4g} is not above {COSINE}"
    if n.max_abs < LARGEST or n.identical:
        return PASS, ""
    coarse = n.dtype.startswith(_COARSE)
    steps = ((0, 100), (1, 1000)) if coarse else ((1, 1000), (2, 10000))
    for (at, parts), word in zip(steps, (ERROR, WARNING), strict=True):
        share = shares[at]
        if share is None:
            return SKIPPED, "not measured"
        if not share > 1.0 - 1.0 / parts:
            return word, f"dual-{parts}: {share:.6g} is not above {1.0 - 1.0 / parts:g}"
    return PASS, ""


def _ait(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    sums = [_sum(n, f, 0.0) for f in (definition.TOP_REL, definition.SUM_REL, definition.TOP_ABS, definition.SUM_ABS)]
    means = [None if s is None or not n.count else s / n.count for s in sums]
    euclid = 0.0 if n.identical else n.rel_l2
    kl = 0.0 if n.identical else n.kl
    reason = "data contains NaN or Inf" if n.broken else "" if n.elements or n.identical else "not measured"
    cosine = 1.0 if n.identical or n.zero else n.cosine
    return (cosine, sums[0], means[1], sums[2], means[3], kl, euclid, reason), NO_VERDICT, ""


def _mindspore(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    one_sided = n.cosine is None and bool(n.max_abs)
    direction = n.count == 1 or n.identical or n.zero or (n.cosine is not None and n.cosine > COSINE)
    good = not n.broken and direction and not one_sided and n.max_abs is not None and n.max_abs < MINDSPORE_LARGEST
    why = "" if good else f"not (cosine > {COSINE} and max abs < {MINDSPORE_LARGEST:g})"
    if n.max_abs is None:
        return (n.cosine, None, None, SKIPPED, "no finite values"), ERROR if n.broken else SKIPPED, "no finite values"
    return (n.cosine, n.max_abs, n.max_rel, PASS if good else ERROR, why), PASS if good else ERROR, why


_STANDARDS = (
    Foreign("xray", ("Status", "Cosine", "RMSE", "IsClose (%)", "Max Err (t)", "GtNum"), _xray),
    Foreign(
        "msprobe",
        (
            "Cosine similarity", "Maximum absolute error", "Dual-100 metric", "Dual-1000 metric", "Dual-10000 metric",
            "Binary consistency error rate", "Status", "Message",
        ),
        _msprobe,
    ),
    Foreign(
        "msprobe-1.0",
        ("余弦相似度", "最大绝对误差", "双百指标", "双千指标", "双万指标", "二进制一致错误率", "Status", "Message"),
        _msprobe,
    ),
    Foreign(
        "ait",
        (
            "cosine_similarity", "max_relative_error", "mean_relative_error", "max_absolute_error",
            "mean_absolute_error", "kl_divergence", "relative_euclidean_distance", "cmp_fail_reason",
        ),
        _ait,
        needs_kl=True,
    ),
    Foreign("mindspore", ("Cosine", "MaxAbsErr", "MaxRelativeErr", "Status", "Message"), _mindspore),
)  # fmt: skip
FOREIGN: dict[str, Foreign] = {s.name: s for s in _STANDARDS}
