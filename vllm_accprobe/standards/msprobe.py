"""msprobe's standards: cosine and dual metrics by dtype; of two machines, ratios of their distances from the CPU.

One side: the documents of accuracy_checking_details.csv, section "API Pre-check Metrics" (release 1.0 in Chinese, the
present one in English). Two machines: six algorithms, chosen by operator and dtype (`api_of` brings a call to its API's
name; the lists are api_precision_standard.yaml's), in two releases: `CURRENT`, levels L0 to L2 without warnings, and
`V1` (1.0.4), one level with warnings above 1; sources are the documents of api_precision_compare_details.csv. Where
they leave open what a ratio to nothing is: msprobe 26.2's smallest divisor by dtype, and for 1.0.4 plain division, 0 /
0 being 1. Where msprobe's code differs, the documents are followed (docs/opcheck.md). Beyond them: a NaN or infinity
that mine has and the CPU has not is an error unless golden has it too. Not here: measuring (opcheck/measures.py,
opcheck/diff.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from vllm_accprobe.standards.declaration import (
    SKIPPED,
    Cell,
    MachineRule,
    MachineSide,
    NamedStandard,
    Numbers,
    PairRule,
)
from vllm_accprobe.standards.finding import (
    ERROR,
    PASS,
    SKIP,
    WARNING,
    Judged,
    RuleFinding,
    broken,
    of,
    skip,
    unmeasured,
)
from vllm_accprobe.standards.measures import Measures, Values
from vllm_accprobe.standards.two_machines import dtypes_differ

ABSOLUTE, BENCHMARK, BINARY, ULP, DUAL_1000, ACCUMULATIVE = (
    "absolute threshold", "benchmark ratio", "binary consistency", "ULP", "dual-1000", "accumulative error",
)  # fmt: skip
UNSUPPORTED = ("float64", "complex32", "complex64", "complex128")
"""Dtypes that the two-sided standard does not judge."""

_ARITHMETIC = ("mul", "add", "div", "sub")
_ABSOLUTE = {
    *_ARITHMETIC, "divide", "leaky_relu", "prelu", "reciprocal", "rsqrt", "square", "rsub",
    *(f"__{kind}{name}__" for name in _ARITHMETIC for kind in ("", "i")), "__rmul__", "__radd__",
}  # fmt: skip
_BINARY = {
    "abs", "absolute", "argmin", "bitwise_and", "broadcast_to", "ceil", "equal", "fill", "flatten", "floor", "gather",
    "greater", "greater_equal", "histc", "isfinite", "isnan", "less", "less_equal", "logical_and", "logical_not",
    "logical_or", "masked_fill", "max_pool3d", "maximum", "minimum", "neg", "nonzero", "not_equal", "one_hot", "pad",
    "relu", "reshape", "round", "select", "sign", "sort", "tile", "topk", "transpose", "tril", "triu", "type_as",
}  # fmt: skip
_ULP = {
    "__matmul__", "addbmm", "addmm", "baddbmm", "bilinear", "bmm", "chain_matmul", "hspmm", "linear", "matmul", "mm",
    "mv", "smm", "sspaddmm",
}  # fmt: skip
_DUAL_1000 = {"conv1d", "conv2d"}
_LEVEL_1 = {"embedding", "npu_fusion_attention", "npu_fusion_attention_grad", "scatter_", "scatter_add_"}
_LEVEL_2 = {
    "addmm", "npu_cross_entropy_loss", "npu_cross_entropy_loss_backward", "gelu", "layer_norm", "matmul", "mm", "index",
    "one_hot", "sum", "npu_rms_norm", "npu_rms_norm_backward", "nonzero",
}  # fmt: skip
QUANTISERS = ("npu_rms_norm_dynamic_quant", "npu_dynamic_quant", "npu_quant_lightning_indexer")
"""Integer outputs that may be off by one (msprobe 26.2's config.yaml)."""

_CLASSES = {
    "RMSNorm": "npu_rms_norm", "GemmaRMSNorm": "npu_rms_norm", "LayerNorm": "layer_norm", "GroupNorm": "group_norm",
    "Attention": "npu_fusion_attention", "MLAAttention": "npu_fusion_attention",
    "EncoderOnlyAttention": "npu_fusion_attention", "MMEncoderAttention": "npu_fusion_attention",
    "MultiHeadAttention": "npu_fusion_attention", "VocabParallelEmbedding": "embedding", "Embedding": "embedding",
    "LogitsProcessor": "linear", "ParallelLMHead": "linear", "Conv1d": "conv1d", "Conv1dLayer": "conv1d",
    "Conv2d": "conv2d", "Conv2dLayer": "conv2d", "Conv3d": "conv3d", "Conv3dLayer": "conv3d",
    "SiluAndMul": "npu_swiglu", "MulAndSilu": "npu_swiglu", "GELU": "gelu", "NewGELU": "gelu", "FastGELU": "gelu",
    "QuickGELU": "gelu", "GeluAndMul": "gelu", "ReLU": "relu",
}  # fmt: skip
"""Modules of vLLM and torch, and the API that does the same. Others keep their own name, which is in no list."""
_ATEN = {
    "native_layer_norm": "layer_norm", "convolution": "conv2d", "_scaled_mm": "mm", "rms_norm": "npu_rms_norm",
    "fused_add_rms_norm": "npu_rms_norm", "_fused_rms_norm": "npu_rms_norm",
    "scaled_dot_product_attention": "npu_fusion_attention", "eq": "equal", "gt": "greater", "ge": "greater_equal",
    "lt": "less", "le": "less_equal", "ne": "not_equal", "constant_pad_nd": "pad", "expand": "broadcast_to",
    "silu_and_mul": "npu_swiglu", "rotary_embedding": "npu_rotary_mul",
    "unified_attention": "npu_fusion_attention", "unified_attention_with_output": "npu_fusion_attention",
}  # fmt: skip


def api_of(op: str, cls: str = "") -> str:
    """msprobe's API name of a captured call: `aten.add_.Tensor`, `aten::mm`, `torch.ops.npu.npu_rms_norm.default` by
    their last name before the overload; a module by its class; ``cls``, the class, where there is no ``op``."""
    name = (op or cls).replace("::", ".").removeprefix("backward.").removeprefix("torch.ops.")
    if "." not in name:  # a module's class, or an API's own name
        return _CLASSES.get(name) or ("linear" if name.endswith("Linear") else _ATEN.get(name, name))
    name = name.split(".")[1]
    return _ATEN.get(name if name.startswith("__") else name.rstrip("_"), name)


def algorithm_of(api: str, dtype: str) -> str | None:
    """One of ALGORITHMS; None where the standard does not judge ``dtype``."""
    if dtype in UNSUPPORTED:
        return None
    if dtype.startswith("float8"):
        return ULP
    if dtype not in ("float16", "bfloat16", "float32"):
        return BINARY
    twin = api if api.startswith("__") else api.rstrip("_")
    lists = ((ABSOLUTE, _ABSOLUTE), (BINARY, _BINARY), (ULP, _ULP), (DUAL_1000, _DUAL_1000))
    return next((name for name, members in lists if twin in members), BENCHMARK)


def level_of(api: str) -> str:
    """L0, L1 or L2, the strictest (document "Operator Monitoring Levels"); GELU is listed as a class there and is
    meant however it is spelled."""
    name = api.lower()
    return "L2" if name in _LEVEL_2 else "L1" if name in _LEVEL_1 else "L0"


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
_ERRORS = ("inf_nan_err_ratio", "rel_err_ratio", "abs_err_ratio")
_ZERO = {ABSOLUTE: _ERRORS, ACCUMULATIVE: _ERRORS, BINARY: ("binary_err_ratio",)}
"""Measures that must be 0."""


def judge(
    release: Release, golden: Values, mine: Values, api: str, dtype: str, algorithm: str | None = None
) -> RuleFinding:
    """golden, mine: measures of one output on each machine against the CPU; api: api_of's name; dtype:
    mine's; algorithm: one of ALGORITHMS instead of the documents' choice for ``api``."""
    chosen = algorithm or algorithm_of(api, dtype)
    if chosen is None:
        return skip("", f"{dtype} is not judged by this standard")
    used = next((a for a in (chosen, BENCHMARK, ULP, ABSOLUTE, DUAL_1000) if _has(a, release, golden, mine)), "")
    if not used:
        return skip(chosen, _missing(chosen, release, golden, mine))
    note = "" if used == chosen else f"no measures for {chosen}: judged by {used}"
    rules: dict[str, Callable[..., tuple[list[Judged], list[Judged]]]] = {
        BENCHMARK: _benchmark, ULP: _ulp, DUAL_1000: _dual_1000, ACCUMULATIVE: _accumulative,
    }  # fmt: skip
    judged = [j for name in _ZERO.get(used, ()) for j in _zero(name, used, release, golden, mine)]
    more, advisory = rules[used](release, golden, mine, api, dtype) if used in rules else ([], [])
    judged += more
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
        text = f"{NAMES[name]} is {golden} on golden's side and {mine} on mine's"
        return Judged(label, math.nan, limit, SKIP if same else ERROR, text)
    value = ratio(golden, mine, release, dtype)
    where = f" ({level})" if release.warn is None else ""
    text = f"{NAMES[name]} is {value:.4g} times golden's, limit {limit:g}{where}"
    if value > limit:
        return Judged(label, value, limit, ERROR, text)
    if release.warn is not None and value > release.warn:
        text = f"{NAMES[name]} is {value:.4g} times golden's, above {release.warn:g}"
        return Judged(label, value, release.warn, WARNING, text)
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
        text = f"ULP errors are not finite: mean {mean}, shares {theirs}, {share}"
        return [Judged(name, share, None, ERROR, text)], []
    limit = ULP_SHARE_32 if dtype == "float32" else ULP_SHARE_16
    shown = [Judged("ulp_share_ratio", ratio(theirs, share, release, dtype), 1.0, PASS)]
    if mean is not None:
        shown.append(Judged("ulp_mean", mean, ULP_MEAN if dtype == "float32" else None, PASS))
    easy = dtype == "float32" and mean is not None and mean < ULP_MEAN
    if easy or share < limit or (share < theirs and not dtype.startswith("float8")):
        return [Judged(name, share, limit, PASS)], shown
    bound = 32 if dtype == "float32" else 1
    text = f"{100 * share:.4g} % of the values are off by more than {bound} ULP (limit {100 * limit:g} %, golden's "
    text += f"{100 * theirs:.4g} %)"
    if dtype == "float32" and mean is not None:
        text += f", {mean:.4g} ULP on average (limit {ULP_MEAN:g})"
    return [Judged(name, share, limit, ERROR, text)], shown


def _zero(name: str, algorithm: str, release: Release, golden: Values, mine: Values) -> list[Judged]:
    field = _field(name, algorithm, release)
    value, theirs = mine.get(field), golden.get(field)
    if value is None:
        return []
    if value == 0:
        return [Judged(name, value, 0.0, PASS)]
    beside = "" if theirs is None else f" (golden's {theirs:.4g})"
    return [Judged(name, value, 0.0, ERROR, f"{NAMES[name]} is {value:.4g}{beside} and must be 0")]


def _dual_1000(
    release: Release, golden: Values, mine: Values, api: str, dtype: str
) -> tuple[list[Judged], list[Judged]]:
    value = mine["dual_1000"]
    good = value is not None and value > DUAL
    theirs = golden.get("dual_1000")
    beside = "" if theirs is None else f" (golden's {theirs:.6g})"
    text = "" if good else f"dual-1000: {value:.6g}{beside} is not above {DUAL:g}"
    return [Judged("dual_1000", value, DUAL, PASS if good else ERROR, text)], []


def _accumulative(
    release: Release, golden: Values, mine: Values, api: str, dtype: str
) -> tuple[list[Judged], list[Judged]]:
    value = mine["error_balance"]
    limit = BALANCES.get(dtype, BALANCES[""])
    good = value is not None and value <= limit
    text = "" if good else f"error balance is {value:.4g}, limit {limit:.4g}"
    return [Judged("error_balance", value, limit, PASS if good else ERROR, text)], []


COSINE, LARGEST = 0.99, 1e-3
ZERO = 2.220446049250313e-16
"""A tensor with no larger value is taken for zero: it has no direction."""
COARSE = ("float16", "bfloat16", "float8")
"""Dtypes that are judged by dual-100 and dual-1000 instead of dual-1000 and dual-10000."""
COLUMNS = (
    "Cosine similarity", "Maximum absolute error", "Dual-100 metric", "Dual-1000 metric", "Dual-10000 metric",
    "Binary consistency error rate", "Status", "Message",
)  # fmt: skip
COLUMNS_V1 = (
    "余弦相似度", "最大绝对误差", "双百指标", "双千指标", "双万指标", "二进制一致错误率", "Status", "Message",
)  # fmt: skip
ALGORITHMS = {
    "absolute": ABSOLUTE, "benchmark": BENCHMARK, "binary": BINARY, "ulp": ULP,
    "dual-1000": DUAL_1000, "accumulative": ACCUMULATIVE,
}  # fmt: skip
"""By the names that --algorithm takes."""
_EXACT = ("bool", "int", "uint")


def pairs(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    """`output`, of a whole tensor, whose operator is not known."""
    m = n.measures
    found = output(m, "", n.dtype)
    word = SKIPPED if found.status == SKIP else found.status
    if n.dtype.startswith(_EXACT):
        numbers: tuple[Cell, ...] = (None, m.max_abs_err, None, None, None, m.binary_err_ratio)
    else:
        numbers = (m.cosine, m.max_abs_err, m.dual_100, m.dual_1000, m.dual_10000, None)
    return (*numbers, word, found.message), word, found.message


def output(m: Measures, op: str, dtype: str) -> RuleFinding:
    """Cosine, largest error, then the dual metrics by dtype; integers bit by bit."""
    if "dropout" in op.lower():
        return skip("dual", "dropout is random")
    if why := unmeasured(m):
        return skip("dual", why)
    if dtype.startswith(_EXACT):
        return _exact(m, op)
    if wrong := broken(m):
        return of("dual", [wrong])
    direction = _cosine(m)
    if direction is not None and direction.status == ERROR:
        return of("dual", [direction])
    judged = [] if direction is None else [direction]
    largest = m.max_abs_err or 0.0
    if largest < LARGEST:
        return of("dual", [*judged, Judged("max_abs_err", largest, LARGEST, PASS)])
    steps = (100, 1000) if dtype.startswith(COARSE) else (1000, 10000)
    for parts, word in zip(steps, (ERROR, WARNING), strict=True):
        name, limit = f"dual_{parts}", 1.0 - 1.0 / parts
        share: float | None = getattr(m, name)
        if share is None:
            return skip("dual", f"{name} was not measured")
        status = PASS if share > limit else word
        reason = "" if status == PASS else f"dual-{parts}: {share:.6g} is not above {limit:g}"
        judged.append(Judged(name, share, limit, status, reason))
        if status != PASS:
            break
    return of("dual", judged)


def _cosine(m: Measures) -> Judged | None:
    """None where there is no direction: of a single finite element, and of two zero tensors."""
    if m.elements - m.nonfinite < 2:
        return None
    sides = [x for x in (m.max_abs_reference, m.max_abs_mine) if x is not None] or [m.max_abs_err or 0.0]
    if max(sides) <= ZERO:
        return None
    if min(sides) <= ZERO or m.cosine is None:
        side = "one side" if m.max_abs_reference is None else "the reference" if sides[0] <= ZERO else "mine"
        return Judged("cosine", None, COSINE, ERROR, f"{side} is all zero")
    good = m.cosine > COSINE
    return Judged(
        "cosine", m.cosine, COSINE, PASS if good else ERROR, "" if good else f"cosine {m.cosine:.4g} is not above 0.99"
    )


def _exact(m: Measures, op: str) -> RuleFinding:
    if api_of(op) in QUANTISERS:
        largest = m.max_abs_err or 0.0
        bad = f"off by {largest:g}, a quantised value may be by 1" if largest > 1 else ""
        return of("quantised", [Judged("max_abs_err", largest, 1.0, ERROR if bad else PASS, bad)])
    rate = m.binary_err_ratio
    bad = "values differ and must be equal" if rate or (rate is None and m.max_abs_err) else ""
    if rate:
        bad = f"{round(rate * m.elements)} of {m.elements} {bad}"
    return of("binary consistency", [Judged("binary_err_ratio", rate, 0.0, ERROR if bad else PASS, bad)])


def machines(release: Release, golden: MachineSide, mine: MachineSide, api: str, algorithm: str | None) -> RuleFinding:
    """Mine's distance from the CPU against golden's; of two dtypes, what judges mine alone."""
    theirs = golden.values
    if golden.dtype != mine.dtype:
        algorithm = algorithm or algorithm_of(api, mine.dtype)
        if algorithm in (BENCHMARK, None):
            return dtypes_differ(golden, mine, algorithm or "")
        theirs = {**theirs, "ulp_share": 0.0}  # no share of golden's is a smaller one
    return judge(release, theirs, mine.values, api, mine.dtype, algorithm)


def _named(release: Release, columns: tuple[str, ...], level: Callable[[str], str]) -> NamedStandard:
    rule = MachineRule(partial(machines, release), ALGORITHMS, level)
    return NamedStandard(release.name, pairs=PairRule(columns, pairs), output=output, machines=rule)


STANDARDS = (_named(CURRENT, COLUMNS, level_of), _named(V1, COLUMNS_V1, lambda api: ""))
