"""Which of msprobe's algorithms and monitoring levels an operator falls under.

The problem: msprobe's documents choose the algorithm by the name of a PyTorch API, and the level by another list;
captured calls are called `aten.mm.default`, `QKVParallelLinear` or `torch.ops.npu.npu_rms_norm`. The idea: a call's
name is brought to the API's name (`api_of`), an operation in place is its twin's, and the lists are data. The
documents say which algorithms there are, that dual-1000 is for conv1d and conv2d only, that integers and booleans are
compared bit by bit, and the levels; the other lists are the release's api_precision_standard.yaml. msprobe 26.2's code
judges every float output by the benchmark ratio whatever the lists say: the documents are followed here.
Not here: the algorithms (msprobe_ratios.py).
"""

from __future__ import annotations

ABSOLUTE, BENCHMARK, BINARY, ULP, DUAL_1000, ACCUMULATIVE = (
    "absolute threshold", "benchmark ratio", "binary consistency", "ULP", "dual-1000", "accumulative error",
)  # fmt: skip
ALGORITHMS = (ABSOLUTE, BENCHMARK, BINARY, ULP, DUAL_1000, ACCUMULATIVE)
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
