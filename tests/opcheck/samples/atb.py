"""Samples of ATB's operators. A maker yields the variants of one operator: its parameters, inputs by number, outputs by
number and what it writes into its inputs; a fault is one wrong number in any output, or another parameter."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from opcheck.samples.definitions import (
    attend,
    fast_gelu,
    gelu,
    gelu_tanh,
    layer,
    lower,
    past,
    rms,
    sigmoid,
    silu,
    softmax,
    turned,
)
from opcheck.samples.dtypes import BRAIN, HALF, INT, INT8, LONG, SINGLE
from opcheck.samples.sample import ONE_OFF, Array, Draw, Made, declined, sample, wide

from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.atb.operands import NO_FIT

Variant = tuple[Any, ...]
"""(parameters, inputs, outputs, inplace by number = {}, bump = 1); an operator's name before them where a maker has
several. An array is stored in the dtype of the first input that has floats, else in float16; integers in int32."""


def atb_call(
    kind: str, param: Mapping[str, Any] | None, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] = (),
    inplace: Mapping[int, torch.Tensor] | None = None, **extra: Any,
) -> Call:  # fmt: skip
    """As calls/module_index.py makes it of a dump."""
    roles = {f"output.{k}": t for k, t in enumerate(outputs)} | {f"inplace.{k}": t for k, t in (inplace or {}).items()}
    return Call(f"0_{kind}", kind, {str(k): t for k, t in enumerate(inputs)},
                attrs={} if param is None else {"param": param}, outputs=roles, extra=extra)  # fmt: skip


def _made(kind: str, variant: Variant, **extra: Any) -> Made:
    param, inputs, outputs, inplace, bump = (*variant, {}, 1)[:5] if len(variant) < 5 else variant
    inplace = inplace if isinstance(inplace, Mapping) else {}
    dtype, exact = next((t.dtype for t in inputs if t.is_floating_point()), HALF), {}

    def stored(role: str, y: Any) -> torch.Tensor:
        if isinstance(y, torch.Tensor):
            return y
        y = np.ascontiguousarray(y)
        if y.dtype.kind == "f":
            exact[role] = y
        return torch.from_numpy(y).to(dtype if y.dtype.kind == "f" else INT)

    out = [stored(f"output.{k}", y) for k, y in enumerate(outputs)]
    held = {k: stored(f"inplace.{k}", y) for k, y in inplace.items()}
    return Made(atb_call(kind, param, inputs, out, held, **extra), exact, bump)


def atb(kind: str = "", *faults: str) -> Callable[[Callable[..., Iterator[Variant]]], Callable[..., list[Made]]]:
    def add(variants: Callable[..., Iterator[Variant]]) -> Callable[..., list[Made]]:
        @functools.wraps(variants)
        def make(d: Draw, fault: str = "") -> list[Made]:
            found = variants(d, fault) if faults else variants(d)
            return [_made(kind, v) if kind else _made(f"{v[0]}Operation", v[1:]) for v in found]

        return sample(ONE_OFF, *faults, dtypes=(HALF,))(make)

    return add


def codes(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.clip(np.round(x), -128, 127)).to(INT8)


def symmetric(y: Array) -> list[torch.Tensor]:
    """Codes and scales of rows."""
    scale = np.abs(y).max(-1) / 127
    return [codes(y / scale[:, None]), torch.from_numpy(scale).float()]


def skewed(y: Array) -> list[torch.Tensor]:
    """Codes, scales and offsets of rows."""
    scale = (y.max(-1) - y.min(-1)) / 255
    offset = -(y.max(-1) + y.min(-1)) / (2 * scale)
    return [codes(y / scale[:, None] + offset[:, None]), *(torch.from_numpy(t).float() for t in (scale, offset))]


def single(y: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(y)).float()


def integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT)


# --- elementwise ----------------------------------------------------------------------------------------------------


@atb("ElewiseOperation")
def elementwise(d: Draw) -> Iterator[Variant]:
    x, b, row, f32 = d(7, 20), d(7, 20), d(1, 20), d(7, 20, dtype=SINGLE)
    y = wide(x)
    for target, number, source in ((SINGLE, 0, x), (HALF, 1, f32), (BRAIN, 27, f32), (INT, 3, 50 * f32),
                                   (LONG, 9, d.ints(-9, 9, 5, 9))):  # fmt: skip
        z = torch.from_numpy(wide(source) if target.is_floating_point else np.trunc(wide(source))).to(target)
        yield {"elewiseType": 1, "outTensorType": number}, [source], [z], {}, 3
    yield {"elewiseType": 2, "mulsParam": {"varAttr": 0.125}}, [x], [y * 0.125]
    yield {"elewiseType": 2, "varAttr": 3.0}, [x], [y * 3.0]  # of ATB before 2.0
    yield {"elewiseType": 4}, [f32], [np.sin(wide(f32))]
    for number, one in ((3, np.cos), (5, np.negative), (20, np.tanh)):
        yield {"elewiseType": number}, [x], [one(y)]
    for number, two in ((8, np.add), (9, np.multiply), (10, np.divide), (15, np.subtract)):
        for right in (b, row):
            yield {"elewiseType": number}, [x, right], [two(y, wide(right))]
    low, whole, other = d(4, 9, dtype=BRAIN), d.ints(-9, 9, 5, 9), d.ints(-9, 9, 5, 9)
    yield {"elewiseType": 8}, [low, low], [2 * wide(low)]
    yield {"elewiseType": 8}, [whole, other], [whole + other]
    for number, two in ((11, np.logical_and), (12, np.logical_or), (13, np.less), (14, np.greater), (16, np.equal)):
        m, n = (d.ints(0, 2 if number in (11, 12) else 4, 5, 9, dtype=INT8) for _ in range(2))
        yield {"elewiseType": number}, [m, n], [torch.from_numpy(two(m.numpy(), n.numpy())).to(INT8)]
    mask = d.ints(0, 2, 5, 9).bool()
    yield {"elewiseType": 7}, [mask], [~mask]
    quant = {"inputScale": 32.0, "inputOffset": -4, "asymmetric": False}
    yield {"elewiseType": 6, "quantParam": quant}, [x], [codes(y * 32.0 - 4)], {}, 5
    scale, offset = d.between(0.02, 0.05, 20, dtype=HALF), d.ints(-5, 6, 20, dtype=INT8)
    yield {"elewiseType": 17}, [x, scale, offset], [codes(y / wide(scale) + wide(offset))], {}, 5
    yield {"elewiseType": 17}, [x, scale, torch.zeros(0, dtype=INT8)], [codes(y / wide(scale))], {}, 5
    q = d.ints(-127, 128, 7, 20, dtype=INT8)
    yield {"elewiseType": 18}, [q, scale, offset], [(wide(q) - wide(offset)) * wide(scale)]
    for asymmetric, coded in ((False, symmetric), (True, skewed)):
        quant = {"asymmetric": asymmetric, "inputScale": 1.0, "inputOffset": 0}
        yield {"elewiseType": 19, "quantParam": quant}, [x], coded(y), {}, 5


@atb()
def chosen_numbers(d: Draw) -> Iterator[Variant]:
    mask, a, b, x = d.ints(0, 2, 5, 9, dtype=INT8), d(5, 9), d(5, 9), d.ints(0, 6, 7)
    on = mask.numpy() == 1
    yield "Where", None, [mask, a, b], [np.where(on, wide(a), wide(b))]
    yield "Fill", {"withMask": True, "value": [-2.5], "outDim": []}, [a, mask], [np.where(on, -2.5, wide(a))]
    yield "Fill", {"withMask": False, "value": [1.5], "outDim": [3, 4]}, [], [np.full((3, 4), 1.5)]
    yield "Onehot", {"axis": -1, "depth": 6}, [x, integers(1), integers(0)], [np.eye(6, dtype=int)[x.numpy()]]


@declined
def elementwise_of_unknown_kinds() -> Iterator[tuple[Call, str]]:
    x = torch.ones(2, 3)
    for param, y, why in (({"elewiseType": 99}, x, "elewiseType 99 is none that is known here"),
                          ({"elewiseType": 3}, x.to(INT8), "elewiseType 3 gives floats, and int8 was captured"),
                          ({"elewiseType": "cos"}, x, "parameter elewiseType is 'cos'")):  # fmt: skip
        yield atb_call("ElewiseOperation", param, [x], [y]), why
    large = {"withMask": False, "value": [0.0], "outDim": [1 << 40, 1 << 20]}
    yield atb_call("FillOperation", large, [], [torch.zeros(3)]), "do not fit the output that was captured"


# --- activations ----------------------------------------------------------------------------------------------------


@atb("ActivationOperation", "GELU instead of SiLU")
def activation(d: Draw, fault: str) -> Iterator[Variant]:
    x, low, whole = d(5, 24), d(5, 24, dtype=BRAIN), d(4, 6, 8)
    y = wide(x)
    if fault:
        yield {"activationType": 4, "scale": 1.0}, [x], [gelu(y)]
        return
    for number, f, more in ((1, lambda v: np.maximum(v, 0), {}), (2, gelu_tanh, {"geluMode": 0}),
                            (2, gelu, {"geluMode": 1}),
                            (3, fast_gelu, {}), (4, lambda v: v * sigmoid(0.5 * v), {"scale": 0.5}), (8, sigmoid, {}),
                            (9, fast_gelu, {})):  # fmt: skip
        yield {"activationType": number, **more}, [x], [f(y)]
    yield {"activationType": 4, "scale": 1.0}, [low], [silu(wide(low))]
    yield {"activationType": 5}, [x.abs() + 0.1], [np.log(wide(x.abs() + 0.1))]
    for t, dim in ((whole, -1), (whole, 1), (low, -1)):
        a, b = np.split(wide(t), 2, dim)
        yield {"activationType": 6, "dim": dim}, [t], [silu(a) * b]
    up, (a, b), h = d(5, 12), np.split(y, 2, -1), 1e-5
    slope = (silu(a + h) - silu(a - h)) / (2 * h)
    dx = np.concatenate([wide(up) * b * slope, wide(up) * silu(a)], -1)
    yield {"activationType": 7, "dim": -1}, [up, x], [dx]


@atb("SwigluQuantOperation")
def swiglu_quant(d: Draw) -> Iterator[Variant]:
    x = d(5, 24)
    a, b = np.split(wide(x), 2, -1)
    yield {"quantType": 0}, [x], symmetric(silu(a) * b), {}, 5


# --- products -------------------------------------------------------------------------------------------------------


def _coded(d: Draw) -> tuple[list[torch.Tensor], torch.Tensor, Array]:
    """Codes of inputs, weight and bias, the weight's scales, and their product."""
    m, k, n = d.below(3, 9), d.below(3, 40), d.below(3, 40)
    x, w, b = d.ints(-127, 128, m, k, dtype=INT8), d.ints(-127, 128, n, k, dtype=INT8), d.ints(-127, 128, n)
    scale = d.between(1e-4, 1e-3, n)
    return [x, w, b], scale, (wide(x) @ wide(w).T + wide(b)) * wide(scale)


@atb("LinearOperation")
def linear(d: Draw) -> Iterator[Variant]:
    m, k, n = d.below(3, 9), d.below(17, 40), 32
    x, w, bias, before = d(m, k), d(n, k), d(n), d(m, n, dtype=SINGLE)
    low, low_w = d(m, k, dtype=BRAIN), d(n, k, dtype=BRAIN)
    y = wide(x) @ wide(w).T
    param = {"transposeA": False, "transposeB": True, "outDataType": -1, "enAccum": False}
    yield param | {"hasBias": True}, [x, w, bias], [y + wide(bias)]
    yield param | {"hasBias": False}, [low, low_w], [wide(low) @ wide(low_w).T]
    yield {"transposeA": True, "transposeB": False, "hasBias": False}, [x.T.contiguous(), w.T.contiguous()], [y]
    yield {"hasBias": False, "enAccum": True}, [x, w, before], [single(y + wide(before))]
    a, b, c = d(3, m, k), d(3, k, n), d(3, n)
    yield {"hasBias": True, "transposeB": False}, [a, b, c], [wide(a) @ wide(b) + wide(c)[:, None]]
    a, b = d(m, 4, k), d(4, n, k)
    yield {"hasBias": False, "matmulType": 1}, [a, b], [np.einsum("mbk,bnk->mbn", wide(a), wide(b))]
    nz = np.pad(wide(w), ((0, 0), (0, -k % 16))).reshape(n, -1, 16).transpose(1, 0, 2)[None]  # FRACTAL_NZ
    yield {"hasBias": False}, [x, torch.from_numpy(nz.copy()).to(HALF)], [y]
    parts, scale, y = _coded(d)
    bits = torch.from_numpy(scale.numpy().view(np.uint32).astype(np.int64))  # in the lower half of an int64
    yield {"hasBias": True, "outDataType": 1, "quantMode": 1}, [*parts, bits], [torch.from_numpy(y).to(HALF)]
    token = d.between(0.5, 2, len(parts[0]))
    y = wide(parts[0]) @ wide(parts[1]).T * wide(scale) * wide(token)[:, None]
    inputs = [*parts[:2], scale, token]
    yield {"hasBias": False, "outDataType": 27, "quantMode": 2}, inputs, [torch.from_numpy(y).to(BRAIN)]


@atb()
def other_products(d: Draw) -> Iterator[Variant]:
    parts, scale, y = _coded(d)
    out, cut = (torch.from_numpy(t).to(HALF) for t in (y, np.maximum(y, 0)))
    yield "LinearQuant", {"transposeA": False, "transposeB": True, "hasBias": True}, [*parts, scale], [out]
    yield "LinearSparse", {"tilingK": 8, "tilingN": 8}, [*parts, scale], [out]
    yield "LinearActivationQuant", {"hasBias": True, "activationFuncType": 1}, [*parts, scale], [cut]
    x, w, b = d(5, 20), d(20, 9), d(9)
    y = wide(x) @ wide(w)
    yield "Matmul", {"transposeA": False, "transposeB": False}, [x, w], [y]
    y = y + wide(b)
    yield "LinearActivation", {"hasBias": True, "activationFuncType": 4}, [x, w.T.contiguous(), b], [silu(y)]
    w, scale = d.ints(-127, 128, 20, 9, dtype=INT8), d.between(0.01, 0.02, 1, 9, dtype=HALF)
    offset = d.ints(-3, 4, 1, 9, dtype=HALF)
    y = wide(x) @ ((wide(w) + wide(offset)) * wide(scale))
    yield "W8A16", {"transposeB": False, "hasBias": False}, [x, w, scale, offset], [y]


@atb("StridedBatchMatmulOperation")
def strided_matmul(d: Draw) -> Iterator[Variant]:
    """Two requests of two heads: heads interleaved in A and B, one after the other in C."""
    heads, k, lengths = 2, 8, [3, 5]
    sides = [d(n, heads, k) for n in lengths], [d(n, heads, k) for n in lengths]
    out = np.concatenate([(wide(a)[:, h] @ wide(b)[:, h].T).reshape(-1)
                          for a, b in zip(*sides, strict=True) for h in range(heads)])  # fmt: skip
    param = {"transA": False, "transB": True, "batch": 2, "headNum": heads, "m": lengths, "n": lengths, "k": [k, k],
             "lda": [heads * k] * 2, "ldb": [heads * k] * 2, "ldc": lengths, "strideA": [k, k], "strideB": [k, k],
             "strideC": [n * n for n in lengths]}  # fmt: skip
    yield param, [torch.cat([t.flatten() for t in side]) for side in sides], [out]


@declined
def products_with_missing_or_unknown_parameters() -> Iterator[tuple[Call, str]]:
    x, w, y = torch.ones(5, 8, dtype=HALF), torch.ones(4, 8, dtype=HALF), torch.full((5, 4), 8, dtype=HALF)
    for param, why in (
        (None, "its parameters are not in the dump"), ({}, "input 2 was not captured"),  # hasBias is true by default
        ({"isClamp": True}, "parameter isClamp is not known here"),  # of ATB before 2.0
        ({"later": {"wild": 3}}, "parameter wild is not known here"), ({"transposeB": "yes"}, "transposeB is 'yes'"),
        ({"outDataType": 99}, "outDataType 99 is none that is known here"),
    ):  # fmt: skip
        yield atb_call("LinearOperation", param and {"hasBias": False, **param} if param else param, [x, w], [y]), why
    yield atb_call("LinearOperation", {"hasBias": False}, [x, w, y], [y]), "3 inputs, where its parameters ask for 2"
    ones = [t.to(INT8) for t in (x, w)]
    yield atb_call("LinearOperation", {"hasBias": False, "linearType": 2}, ones, [y]), "codes without an outDataType"
    compressed = [ones[0], ones[1].reshape(-1)[:-3], y[0].int(), y[0], torch.zeros(8, dtype=INT8)]
    yield atb_call("LinearSparseOperation", {"tilingK": 8, "tilingN": 8}, compressed, [y]), "its weight was compressed"


@sample(dtypes=(HALF,))
def parameters_that_are_not_set(d: Draw, fault: str) -> list[Made]:
    x, w = d(5, 8), d(4, 8)
    unset: tuple[dict[str, Any], ...] = ({"isClamp": False}, {"comment": ""}, {"later": {"wild": 0}}, {"hcclComm": 7})
    return [_made("LinearOperation", ({"hasBias": False, **p}, [x, w], [wide(x) @ wide(w).T])) for p in unset]


# --- norms ----------------------------------------------------------------------------------------------------------


SCALE, OFFSET = torch.tensor([0.03125], dtype=HALF), torch.tensor([3], dtype=INT8)
PARTS = ("normParam", "preNormParam", "postNormParam")


@atb("RmsNormOperation", "another epsilon")
def rms_norm(d: Draw, fault: str) -> Iterator[Variant]:
    n, width = d.below(3, 12), d.below(16, 64)
    x, residual, w, beta = d(n, width), d(n, width), d(width), d(width)
    row, row_beta, bias = w[None], beta[None], d(1, width)
    y, gain, total = wide(x), wide(w), wide(x) + wide(residual)
    if fault:
        small = d(n, width, scale=0.01)
        yield {"layerType": 1, "normParam": {"epsilon": 1e-5}}, [small, w], [rms(wide(small), gain, 1e-6)]
        return
    yield {"layerType": 1, "normParam": {"epsilon": 1e-6}}, [x, w], [rms(y, gain, 1e-6)]
    yield {"layerType": 1, "normParam": {"modelType": 1}}, [x, w], [rms(y, gain + 1.0)]
    yield {"layerType": 1, "normParam": {"precisionMode": 1}}, [x, w], [rms(y, gain)]
    yield {"epsilon": 1e-3}, [x, w], [rms(y, gain, 1e-3)]  # of the first release
    low, low_w = d(n, width, dtype=BRAIN), d(width, dtype=BRAIN)
    yield {"layerType": 1, "normParam": {"epsilon": 1e-6}}, [low, low_w], [rms(wide(low), wide(low_w), 1e-6)]
    f, g = d(4, 3, 16, dtype=SINGLE), d(3, 16, dtype=SINGLE)
    rstd = 1 / np.sqrt((wide(f) ** 2).mean((-2, -1), keepdims=True) + 1e-5)
    yield {"layerType": 1, "normParam": {"rstd": True}}, [f, g], [wide(f) * rstd * wide(g), rstd]
    for kind in (2, 3):
        for more in ([], [bias]):
            z = total + sum(wide(t) for t in more)
            param = {"layerType": kind, PARTS[kind - 1]: {"hasBias": bool(more), "epsilon": 1e-5, "quantType": 0}}
            yield param, [x, *more, residual, w], [rms(z, gain), z][: 4 - kind]
    for kind, inputs, z, last in ((1, [x, row, row_beta], y, []), (2, [x, residual, row, row_beta], total, [total]),
                                  (3, [x, residual, row], total, [rms(total, gain)])):  # fmt: skip
        coded = codes((rms(z, gain) + (wide(beta) if kind < 3 else 0)) / 0.03125 + 3)
        yield {"layerType": kind, PARTS[kind - 1]: {"quantType": 2}}, [*inputs, SCALE, OFFSET], [coded, *last], {}, 5
    for kind, coded in ((1, symmetric), (2, skewed)):
        param = {"layerType": 1, "normParam": {"quantType": 2, "dynamicQuantType": kind}}
        yield param, [x, w, beta], coded(rms(y, gain) + wide(beta)), {}, 5


@atb("GatherPreRmsNormOperation")
def gathered_rms_norm(d: Draw) -> Iterator[Variant]:
    x, rows, w, at = d(6, 32), d(7, 32), d(1, 32), d.ints(0, 7, 6)
    total = wide(x) + wide(rows)[at.numpy()]
    yield {"epsilon": 1e-5}, [x, rows, at, w], [single(rms(total, wide(w))), total]


@atb("RmsNormBackwardOperation")
def rms_norm_backward(d: Draw) -> Iterator[Variant]:
    dy, x, w = d(6, 32, dtype=SINGLE), d(6, 32, dtype=SINGLE), d(32, dtype=SINGLE)
    rstd = single(1 / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-5))
    r, g = wide(rstd), wide(dy) * wide(w)
    dx = r * g - wide(x) * r**3 * (g * wide(x)).mean(-1, keepdims=True)
    yield {}, [dy, x, rstd, w], [dx, (wide(dy) * wide(x) * r).sum(0)]


@atb("LayerNormOperation")
def layer_norm(d: Draw) -> Iterator[Variant]:
    n, width = d.below(3, 12), d.below(16, 64)
    x, residual, w, b = d(n, width), d(n, width), d(1, width), d(1, width)
    y, total = wide(x), wide(x) + 0.5 * wide(residual)
    plain = {"beginNormAxis": 1, "epsilon": 1e-4, "quantType": 0}
    yield {"layerType": 1, "normParam": plain}, [x, w[0], b[0]], [layer(y, wide(w), wide(b), 1e-4)]
    z, zw, zb = d(5, 4, 8), d(4, 8), d(4, 8)
    of_two = layer(wide(z).reshape(5, 32), wide(zw).ravel(), wide(zb).ravel()).reshape(5, 4, 8)
    yield {"layerType": 1, "normParam": {"beginNormAxis": 1}}, [z, zw, zb], [of_two]
    for kind in (2, 3):
        param = {"layerType": kind, PARTS[kind - 1]: {"zoomScaleValue": 0.5, "epsilon": 1e-5, "quantType": 0}}
        yield param, [x, residual, w, b], [layer(total, wide(w), wide(b)), total][: 4 - kind]
    for scale in (0.0625, 16.0):  # some releases divide by it, others multiply
        inputs = [x, w, b, torch.tensor([scale], dtype=HALF), torch.tensor([-2], dtype=INT8)]
        coded = codes(layer(y, wide(w), wide(b)) * 16.0 - 2)
        yield {"layerType": 1, "normParam": {"quantType": 2, "epsilon": 1e-5}}, inputs, [coded], {}, 5


@atb("CohereLayerNormOperation")
def cohere_norm(d: Draw) -> Iterator[Variant]:
    x, w = d(5, 4, 16), d(4, 16)
    yield {"epsilon": 1e-5}, [x, w], [layer(wide(x)) * wide(w)]


# --- what moves numbers ---------------------------------------------------------------------------------------------


@atb()
def moved_numbers(d: Draw) -> Iterator[Variant]:
    x, y, z, w = d(5, 6, 7), d(3, 6, 4), d(4, 12), d(3, 4)
    for axis, shape in ((0, (8,)), (0, (2, 3)), (1, (4,))):
        at = d.ints(0, x.shape[axis], *shape, dtype=LONG)
        yield "Gather", {"axis": axis, "batchDims": 0}, [x, at], [np.take(wide(x), at.numpy(), axis)]
    at = d.ints(0, 6, 3, 5)
    yield "Gather", {"axis": 1, "batchDims": 1}, [y, at], [np.stack([wide(y)[i][at.numpy()[i]] for i in range(3)])]
    yield "Concat", {"concatDim": -1}, [z, z[:, :7]], [np.concatenate([wide(z), wide(z)[:, :7]], -1)]
    for sizes, cuts in (([], 3), ([2, 3, 7], [2, 5])):
        yield "Split", {"splitDim": 1, "splitNum": 3, "splitSizes": sizes}, [z], np.split(wide(z), cuts, 1)
    yield "Slice", {"offsets": [1, -4, 0], "size": [3, 2, -1]}, [x], [wide(x)[1:4, 2:4, :]]
    yield "Transpose", {"perm": [2, 0, 1]}, [x], [wide(x).transpose(2, 0, 1)]
    flat = d(30)
    strided = wide(flat)[2 + 7 * np.arange(3)[:, None] + 3 * np.arange(4)]
    yield "AsStrided", {"size": [3, 4], "stride": [7, 3], "offset": [2]}, [flat], [strided]
    yield "AsStrided", {"size": [3, 4], "stride": [7, 3], "offset": []}, [torch.cat((flat[2:], flat[:2]))], [strided]
    yield "Repeat", {"multiples": [2, 1, 3]}, [w], [np.tile(wide(w), (2, 1, 3))]
    after, part = wide(x).copy(), d(2, 3, 7)
    after[1:3, 2:5] = wide(part)
    yield "SetValue", {"starts": [1, 2, 0], "ends": [3, 5, 7], "strides": [1, 1, 1]}, [x, part], [], {0: after}
    for dtype, by in ((HALF, 16), (INT8, 32)):
        t = d.ints(-50, 50, 2, 18, 40, dtype=dtype)
        up = np.pad(wide(t), ((0, 0), (0, 14), (0, -40 % by))).reshape(2, 32, -1, by).transpose(0, 2, 1, 3)
        yield "Transdata", {"transdataType": 2, "outCrops": [0, 0]}, [t], [torch.from_numpy(up.copy()).to(dtype)]
    t = d(1, 3, 32, 16)
    back = np.concatenate([wide(t)[:, i] for i in range(3)], -1)[:, :20, :40]
    yield "Transdata", {"transdataType": 1, "outCrops": [20, 40]}, [t], [back]


@atb()
def rows_with_and_without_padding(d: Draw) -> Iterator[Variant]:
    batch, most = 3, 7
    lengths = d.rng.integers(1, most + 1, batch)
    ids = d.rng.integers(1, 100, (batch, most)) * (np.arange(most) < lengths[:, None])
    gaps = np.cumsum(most - lengths)
    before = np.array([0, *gaps[:-1]])
    tokens, offsets = np.zeros(batch * most, int), np.zeros(batch * most, int)
    tokens[: lengths.sum()] = np.concatenate([row[:n] for row, n in zip(ids, lengths, strict=True)])
    offsets[: lengths.sum()] = before.repeat(lengths)
    numbers = [torch.from_numpy(t) for t in (ids, gaps[:, None], np.array([[lengths.sum()]]), lengths[:, None])]
    inputs = [numbers[0], numbers[1].int(), numbers[2], numbers[3].int()]
    yield "Unpad", None, inputs, [torch.from_numpy(tokens[None]), before[:, None], offsets[None]]
    rows = d(int(lengths.sum()), 9)
    inputs = [rows, torch.zeros(1, len(rows), dtype=INT), integers(*lengths)[:, None], torch.zeros(3, 6, dtype=LONG)]
    yield "Pad", None, inputs, [wide(rows)[np.cumsum(lengths) - 1]]
    own, x = {"qSeqLen": [2, 6, 3], "maxSeqLen": 6}, d(3, 6, 4)
    parts = [x[i, :n] for i, n in enumerate((2, 6, 3))]
    yield "UnpadWithHiddenState", own, [x], [wide(torch.cat(parts))]
    padded = np.stack([np.pad(wide(p), ((0, 6 - len(p)), (0, 0))) for p in parts])
    yield "PadWithHiddenState", own, [torch.cat(parts)], [padded]
    m = d(2, 1, 6, 6)
    cut = [wide(m)[i, :, :n, :n].reshape(-1) for i, n in enumerate((3, 5)) for _ in range(2)]
    yield "GenAttentionMask", {"seqLen": [3, 5], "headNum": 2}, [m], [np.concatenate(cut)]


@atb()
def scattered_numbers(d: Draw) -> Iterator[Variant]:
    x, more = d(4, 6), d(4, 3)
    at = np.stack([d.rng.permutation(6)[:3] for _ in range(4)])
    for add in (0, 1):
        after = wide(x).copy()
        np.put_along_axis(after, at, wide(more) + add * np.take_along_axis(after, at, 1), 1)
        yield "ScatterElementsV2", {"axis": -1, "reduction": add}, [x, torch.from_numpy(at).int(), more], [after]
    x, more, at = d(6, 5), d(4, 5), d.rng.permutation(6)[:4]
    for kind, last, n, by in ((1, torch.tensor([0.5], dtype=HALF), 4, 0.5), (2, integers(2), 2, 1.0)):
        after = wide(x).copy()
        after[at[:n]] += by * wide(more)[:n]
        yield "IndexAdd", {"indexType": kind, "axis": 0}, [x, integers(*at), more, last], [after], {0: after}
    mask, places = d.ints(0, 2, 4, 5, dtype=LONG), torch.zeros(2, 20, dtype=LONG)
    count = int(mask.sum())
    places[:, :count] = mask.nonzero().T
    yield "Nonzero", None, [mask], [places, torch.tensor([count])]


@declined
def parameters_that_lead_out() -> Iterator[tuple[Call, str]]:
    four, square = torch.zeros(4), torch.zeros(2, 2)
    for kind, param, inputs, why in (
        ("Gather", {"axis": 0}, [square, torch.tensor([7])], "an index lies outside of what it is an index of"),
        ("AsStrided", {"size": [2, 2], "stride": [9, 1], "offset": [0]}, [four], "its strides lead out of its input"),
        ("Slice", {"offsets": [3], "size": [9]}, [four], NO_FIT),
        ("Slice", {"offsets": [-5], "size": [1]}, [four], NO_FIT),
        ("IndexAdd", {"indexType": 1, "axis": 0}, [square, integers(1), square, four], NO_FIT),
        ("Unpad", None, [integers(1, 2, 3, 4)[None], integers(1, 1), four, integers(1)], NO_FIT),
        ("Unpad", None, [integers(1)[None], integers(1), four, integers(1)], NO_FIT),  # its output has four numbers
        ("Repeat", {"multiples": [1 << 50]}, [four], "its parameters do not fit the output that was captured"),
        ("Transpose", {"perm": [0, 0]}, [square], NO_FIT),
        ("Transpose", {"perm": "10"}, [square], "parameter perm is '10'"),
        ("Split", {"splitSizes": [1, 9]}, [four], NO_FIT),
    ):
        yield atb_call(f"{kind}Operation", param, inputs, [square]), why
    none = torch.zeros(0)
    yield atb_call("OnehotOperation", {"depth": 1 << 50}, [none], [none]), "do not fit the output that was captured"


# --- reductions, routing --------------------------------------------------------------------------------------------


@atb()
def sums_and_softmaxes(d: Draw) -> Iterator[Variant]:
    for axes, dtype in (([2], HALF), ([-1], BRAIN), ([1, 2], HALF), ([0], HALF)):
        x = d(3, 5, 7, dtype=dtype)
        yield "Softmax", {"axes": axes}, [x], [softmax(wide(x), tuple(axes))]
    x, whole, rows = d(3, 5, 7, scale=20), d.ints(-40, 40, 3, 5, 7), d(4, 9)
    for kind, f in ((1, np.max), (2, np.min), (3, np.sum)):
        yield "Reduce", {"reduceType": kind, "axis": [0, 2]}, [x], [f(wide(x), (0, 2))]
    yield "Reduce", {"reduceType": 3, "axis": [0, 2]}, [whole], [whole.numpy().sum((0, 2))]
    yield "Cumsum", {"axes": [1], "exclusive": False, "reverse": False}, [rows], [np.cumsum(wide(rows), 1)]
    parts = [d(2, n, n, scale=2) for n in (3, 5)]
    y = np.concatenate([softmax(wide(p)).ravel() for p in parts])
    yield "FastSoftMax", {"headNum": 2, "qSeqLen": [3, 5]}, [torch.cat([p.flatten() for p in parts])], [y]
    p, dy = torch.from_numpy(softmax(wide(d(8, 4)))).to(HALF), d(8, 4)
    jacobian = [(np.diag(a) - np.outer(a, a)) @ b for a, b in zip(wide(p), wide(dy), strict=True)]
    yield "FastSoftMaxGrad", {"headNum": 2, "qSeqLen": [4]}, [p.flatten(), dy.flatten()], [np.concatenate(jacobian)]
    lse, parts = d(3, 6, dtype=SINGLE), d(3, 6, 8, dtype=SINGLE)
    y = (softmax(wide(lse), 0)[..., None] * wide(parts)).sum(0)
    yield "FaUpdate", {"faUpdateType": 0, "sp": 3}, [lse, parts], [y]


@atb("SortOperation", "a place twice", "another place")
def sort(d: Draw, fault: str) -> Iterator[Variant]:
    x = d(4, 9)
    at = np.argsort(-wide(x), -1, kind="stable")[:, :4]
    if not fault:
        yield {"num": [4]}, [x], [np.take_along_axis(wide(x), at, -1), at]
    ties, values = torch.tensor([[1.0, 2.0, 2.0, 0.0]], dtype=HALF), torch.tensor([[2.0, 2.0, 1.0]], dtype=HALF)
    right = ([[1, 2, 0]], [[2, 1, 0]])  # equal numbers may be sorted either way
    for places in {"a place twice": ([[1, 1, 0]],), "another place": ([[1, 3, 0]],)}.get(fault, right):
        yield {"num": [3]}, [ties], [values, torch.tensor(places, dtype=INT)]


@atb("GatingOperation")
def gating(d: Draw) -> Iterator[Variant]:
    each, count, tokens = 2, 6, 5
    chosen = np.concatenate([d.rng.permutation(count)[:each] for _ in range(tokens)])
    for own in ([], [1, 4]):
        places = [i for _, i in sorted((e, i) for i, e in enumerate(chosen) if not own or e in own)]
        padded, rows = np.zeros(len(chosen), int), np.zeros(len(chosen), int)
        padded[: len(places)], rows[: len(places)] = places, np.array(places) // each
        sums = np.cumsum([(chosen == e).sum() for e in (own or range(count))])
        out = [rows, sums, padded, *([np.array([len(places)])] if own else [])]
        inputs = [integers(*chosen), integers(*range(10))]
        yield {"topkExpertNum": each, "cumSumNum": count, "deviceExpert": own}, inputs, out


def _groups(x: Array, n: int) -> Array:
    """x with two of its four groups set to 0: those whose n best add up to least."""
    y = x.copy().reshape(len(x), 4, -1)
    score = np.sort(y, -1)[..., -n:].sum(-1)
    np.put_along_axis(y, np.argsort(score, -1)[:, :2, None], 0.0, 1)
    return y.reshape(x.shape)


@atb("GroupTopkOperation")
def group_topk(d: Draw) -> Iterator[Variant]:
    x = d.between(0.1, 1, 5, 16, dtype=HALF)
    for multi in (0, 1):
        param = {"groupNum": 4, "k": 2, "groupMultiFlag": multi, "n": 2}
        yield param, [x, integers(*range(16))], [], {0: _groups(wide(x), 1 + multi)}


@atb("FusedAddTopkDivOperation")
def fused_routing(d: Draw) -> Iterator[Variant]:
    x, bias = d(5, 16, dtype=SINGLE), d.between(0, 0.3, 16)
    s = sigmoid(wide(x))
    at = np.argsort(-_groups(s + wide(bias), 2), -1)[:, :3]
    y = np.take_along_axis(s, at, -1)
    y = y / y.sum(-1, keepdims=True) * 2.5
    copies, places = d.ints(1, 3, 16), d.ints(0, 30, 16, 2)
    mapped = np.array([[places[e, i % copies[e]] for e in row] for i, row in enumerate(at)])
    for more, experts in (([], at), ([copies, places], mapped)):
        param = {"groupNum": 4, "groupTopk": 2, "n": 2, "k": 3, "activationType": 8, "isNorm": True, "scale": 2.5,
                 "enableExpertMapping": bool(more)}  # fmt: skip
        yield param, [x, bias, *more], [y, experts]


# --- draws ----------------------------------------------------------------------------------------------------------


@sample("beyond top-k", "another probability", seeds=4, dtypes=(HALF,))
def a_draw_that_some_rand_gives(d: Draw, fault: str) -> Made:
    """The token whose sum is the first above rand times the last sum below top-p."""
    p, rand, token = torch.from_numpy(softmax(2 * wide(d(4, 20)))).to(HALF), d.rng.uniform(0, 1, 4), []
    for row, r in zip(wide(p), rand, strict=True):
        order = np.argsort(-row, kind="stable")[:8]
        sums = np.cumsum(row[order])
        token.append(order[(sums <= r * sums[max((sums < 0.8).sum() - 1, 0)]).sum()])
    own = wide(p)[np.arange(4), token] * (0.9 if fault == "another probability" else 1.0)
    token = wide(p).argmin(-1) if fault == "beyond top-k" else np.array(token)
    param = {"topkToppSamplingType": 0, "topk": 8, "randSeed": 3}
    return _made(
        "TopkToppSamplingOperation", (param, [p, torch.full((1, 1), 0.8, dtype=HALF)], [token[:, None], own[:, None]])
    )


@atb("TopkToppSamplingOperation")
def a_draw_by_given_noise(d: Draw) -> Iterator[Variant]:
    p = torch.from_numpy(softmax(2 * wide(d(4, 20)))).to(HALF)
    noise = d.rng.exponential(1, (4, 20)).astype(np.float32) + 0.05
    order = np.argsort(-wide(p), -1, kind="stable")
    sums = np.cumsum(np.take_along_axis(wide(p), order, -1), -1)
    topp = torch.from_numpy(sums[:, 1:3].mean(-1, keepdims=True)).to(HALF)
    kept = (sums <= sums[:, 1:3].mean(-1, keepdims=True)) & (np.arange(20) <= 9)
    best = np.where(kept, np.take_along_axis(wide(p), order, -1) / noise, 0).argmax(-1)  # noise belongs to places
    token = order[np.arange(4), best]
    inputs = [p, torch.full((4, 1), 9), topp, torch.from_numpy(noise)]
    own = wide(p)[np.arange(4), token]
    yield {"topkToppSamplingType": 2, "topk": 100}, inputs, [token[:, None], own[:, None]]


@sample("probability zero", "no token", dtypes=(HALF,))
def multinomial(d: Draw, fault: str) -> Made:
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]], dtype=HALF)
    tokens = [[0, {"probability zero": 1, "no token": 7}.get(fault, 2)], [1, 1]]
    return _made("MultinomialOperation", ({"numSamples": 2, "randSeed": 1}, [p], [np.array(tokens)]))


# --- rotary embeddings ----------------------------------------------------------------------------------------------


@sample(ONE_OFF, "other pairs", seeds=2, dtypes=(HALF, BRAIN))
def rope(d: Draw, fault: str) -> list[Made]:
    found = []
    for parts, width, four in ((2, 16, False), (4, 16, False), (8, 8, False), (8, 8, True)):
        n, angle = d.below(3, 9), None
        q, k = (d(n, h, width) for h in (4, 2))
        angle = d.rng.uniform(0, 6, (n, width))
        cos, sin = (torch.from_numpy(f(angle)).to(d.dtype) for f in (np.cos, np.sin))
        used = parts if not fault else 2 if parts == 4 else 4
        out = [turned(wide(x), wide(cos)[:, None], wide(sin)[:, None], used) for x in (q, k)]
        inputs = [x[None] if four else x.flatten(1) for x in (q, k)]
        out = [y.reshape(x.shape) for x, y in zip(inputs, out, strict=True)]
        found.append(_made("RopeOperation", ({"rotaryCoeff": parts}, [*inputs, cos, sin, integers(n)], out)))
    return found


@declined
def rope_in_ways_that_are_not_public() -> Iterator[tuple[Call, str]]:
    for call in (m.call for m in rope(Draw(3, HALF), "")):
        for param in ({"rotaryCoeff": 3}, {"rotaryCoeff": 2, "cosFormat": 1}):
            yield atb_call(call.cls, param, list(call.inputs.values()), list(call.outputs.values())), ""


@atb("RopeQConcatOperation")
def rope_beside_another_part(d: Draw) -> Iterator[Variant]:
    q, other, angle = d(5, 3 * 8), d(5, 3, 4), d.rng.uniform(0, 6, (5, 8))
    cos, sin = (torch.from_numpy(f(angle)).to(HALF) for f in (np.cos, np.sin))
    y = turned(wide(q).reshape(5, 3, 8), wide(cos)[:, None], wide(sin)[:, None], 2)
    yield {}, [q, cos, sin, other], [np.concatenate([y, wide(other)], 2)]


# --- attention ------------------------------------------------------------------------------------------------------

HEADS, KV, WIDTH = 4, 2, 16
HEAD_PARAM = {"headNum": HEADS, "kvHeadNum": KV, "qkScale": 0.25}
SLOPES = 2.0 ** (-8.0 / HEADS * np.arange(1, HEADS + 1))


def _alibi(n: int) -> Array:
    at = np.arange(n)
    return SLOPES[:, None, None] * (at[None, :] - at[:, None])[None] + lower(n, n, -10000.0)[None]


def _mask(dtype: torch.dtype = HALF, far: float = -10000.0) -> torch.Tensor:
    return torch.from_numpy(lower(16, 16, far)).to(dtype)


ANOTHER = {"another scale": {"qkScale": 0.3}, "no mask": {"maskType": 0, "calcType": 3},
           "clamped": {"clampType": 1, "clampMin": -0.1, "clampMax": 0.1}}  # fmt: skip


def _encoder(
    d: Draw, mask: torch.Tensor | None, added: Callable[[int], Any], dtype: torch.dtype = HALF, **param: Any
) -> Variant:
    q, k, v = (d(14, h, WIDTH, dtype=dtype) for h in (HEADS, KV, KV))
    clamp = (param["clampMin"], param["clampMax"]) if "clampMin" in param else None
    out = [attend(wide(q)[r], wide(k)[r], wide(v)[r], 0.25, added(n), clamp)
           for r, n in ((slice(0, 5), 5), (slice(5, 14), 9))]  # fmt: skip
    inputs = [q, k, v, *([] if mask is None else [mask]), integers(5, 9)]
    return {**HEAD_PARAM, "calcType": 3, **param}, inputs, [np.concatenate(out)]


@atb("SelfAttentionOperation", *ANOTHER)
def encoders(d: Draw, fault: str) -> Iterator[Variant]:
    def causal(n: int) -> Array:
        return lower(n, n)

    if fault:
        param, inputs, out = _encoder(d, _mask(), causal, maskType=1)
        yield {**param, **ANOTHER[fault]}, [t for i, t in enumerate(inputs) if i != 3 or fault != "no mask"], out
        return
    yield _encoder(d, None, lambda n: 0.0, maskType=0)
    yield _encoder(d, None, lambda n: 0.0, maskType=0, clampType=1, clampMin=-0.4, clampMax=0.3)
    yield _encoder(d, _mask(BRAIN, 1.0), causal, BRAIN, maskType=1)
    yield _encoder(d, _mask()[:4, :4], causal, maskType=3)  # compressed
    yield _encoder(d, _mask(), lambda n: lower(n, n, window=3), maskType=7, windowSize=3)
    for more in ({}, {"kernelType": 1}):
        yield _encoder(d, _mask(), causal, maskType=1, **more)
    for mask in (_alibi(16), np.stack([_alibi(16)] * 2)):  # of heads, of requests and heads
        yield _encoder(d, torch.from_numpy(mask).to(HALF), _alibi, maskType=2)
    q, k, v = (d(7, h * WIDTH) for h in (HEADS, KV, KV))  # flat, without calcType and maskType: as the inputs show
    y = attend(*(wide(t).reshape(7, -1, WIDTH) for t in (q, k, v)), 0.25, causal(7))
    yield HEAD_PARAM, [q, k, v, _mask(), integers(7)], [y.reshape(7, -1)]
    q, k = d(6, HEADS, WIDTH), d(6, 1, WIDTH)  # latent: values are the first channels of keys
    y = attend(wide(q), wide(k), wide(k)[..., :8], 0.25)
    yield HEAD_PARAM | {"kvHeadNum": 1, "calcType": 3, "mlaVHeadSize": 8}, [q, k, integers(6)], [y]


@atb("SelfAttentionOperation")
def decoders(d: Draw) -> Iterator[Variant]:
    """Layer 1 of 2; caches [layers, requests, most, kv heads * d]."""
    for own, total, masked, bypass, status in (
        ([4, 3], [4, 3], True, False, []), ([2, 3], [7, 5], True, False, []), ([1, 1], [6, 9], False, False, []),
        ([1, 1], [6, 9], True, True, []), ([1, 1], [6, 9], False, False, [1, 0]),
    ):  # fmt: skip
        tokens, ends = sum(own), np.cumsum([0, *own])
        q, k, v = (d(tokens, h * WIDTH) for h in (HEADS, KV, KV))
        caches = [d(2, 2, 16, KV * WIDTH) for _ in range(2)]
        after, out = [wide(c).copy() for c in caches], np.zeros((tokens, HEADS * WIDTH))
        mask = torch.from_numpy(np.where(d.rng.integers(0, 2, (2, 16, 16)), 0.0, -10000.0)).to(HALF)
        mask[..., 0] = 0  # each query sees a key
        for r, (n, m) in enumerate(zip(own, total, strict=True)):
            rows = slice(ends[r], ends[r + 1])
            if status and not status[r]:
                continue
            for cache, new in zip(after, (k, v), strict=True):
                if not bypass:
                    cache[1, r, m - n : m] = wide(new)[rows]
            sides = (c[1, r, :m].reshape(m, KV, WIDTH) for c in after)
            y = attend(wide(q)[rows].reshape(n, HEADS, WIDTH), *sides, 0.25, wide(mask)[r, :n, :m] if masked else 0.0)
            out[rows] = y.reshape(n, -1)
        inputs = [q, *([] if bypass else [k, v]), *caches, *([mask] if masked else []), integers(*total),
                  integers(*own), integers(1), *([integers(*status)] if status else [])]  # fmt: skip
        param = {**HEAD_PARAM, "qScale": 0.5, "qkScale": 0.5, "calcType": 0, "maskType": int(masked),
                 "kvcacheCfg": int(bypass), "batchRunStatusEnable": bool(status)}  # fmt: skip
        yield param, inputs, [out], {} if bypass else {3: after[0], 4: after[1]}


@atb("SelfAttentionOperation")
def prefixes(d: Draw) -> Iterator[Variant]:
    """Blocks of 4 slots, in an order of their own."""
    own, total, table = [3, 2], [9, 6], torch.tensor([[5, 0, 3], [7, 2, -1]], dtype=INT)
    q, keys, values = d(5, HEADS, WIDTH), d(8, 4, KV, WIDTH), d(8, 4, KV, WIDTH)
    out = [attend(wide(q)[rows], *(past(wide(t), table[r].tolist(), m) for t in (keys, values)), 0.25, lower(n, m))
           for r, (n, m, rows) in enumerate(zip(own, total, (slice(0, 3), slice(3, 5)), strict=True))]  # fmt: skip
    inputs = [q, keys, values, table, integers(*own), integers(*total)]
    yield HEAD_PARAM | {"calcType": 4, "maskType": 9}, inputs, [np.concatenate(out)]


@declined
def attention_without_a_reference() -> Iterator[tuple[Call, str]]:
    param, inputs, _ = _encoder(Draw(4, HALF), _mask(), lambda n: lower(n, n), maskType=1)
    for change, why in (
        ({"scaleType": 1}, "a LogN scale has no reference"), ({"inputLayout": 1}, "the layout BNSD has no reference"),
        ({"quantType": 2}, "int8 queries, keys and values has no reference"),
        ({"maskType": 4}, "maskType 4 has no reference"), ({"headNum": 0}, "headNum 0, kvHeadNum 2"),
    ):  # fmt: skip
        yield atb_call("SelfAttentionOperation", {**param, **change}, inputs, [inputs[0]]), why


# --- caches ---------------------------------------------------------------------------------------------------------

PAST, SIZE = (6, 9, 1), 4


def _table(d: Draw) -> torch.Tensor:
    free = list(d.rng.permutation(12))
    own = [[free.pop() for _ in range(-(-n // SIZE))] for n in PAST]
    return torch.tensor([row + [-1] * (4 - len(row)) for row in own], dtype=INT)


@atb("PagedAttentionOperation")
def paged_attention(d: Draw) -> Iterator[Variant]:
    table, lengths = _table(d), integers(*PAST)
    distance = np.arange(12)[None] - np.array(PAST)[:, None] + 1
    hidden = np.where(np.arange(12) < np.array([2, 0, 0])[:, None], -10000.0, 0.0)[:, None]
    bias = SLOPES[None, :, None, None] * distance[:, None, None]
    for dtype, kind, mask, nz, status in ((HALF, 0, None, False, ()), (BRAIN, 0, None, False, ()),
                                          (HALF, 1, hidden, False, ()),
                                          (HALF, 2, bias, False, ()), (HALF, 0, None, True, ()),
                                          (HALF, 0, None, False, (1, 0, 1))):  # fmt: skip
        q, keys, values = d(3, HEADS, WIDTH, dtype=dtype), *(d(12, SIZE, KV, WIDTH, dtype=dtype) for _ in range(2))
        out = np.zeros((3, HEADS, WIDTH))
        for r, n in enumerate(PAST):
            if not status or status[r]:
                added = 0.0 if mask is None else mask[r][..., :n]
                sides = (past(wide(t), table[r].tolist(), n) for t in (keys, values))
                out[r] = attend(wide(q)[r : r + 1], *sides, 0.25, added)[0]
        caches = [t.reshape(12, SIZE, -1, 16).transpose(1, 2).contiguous() if nz else t for t in (keys, values)]
        more = [] if mask is None else [torch.from_numpy(mask).to(dtype)]
        more += [integers(*status)] if status else []
        inputs = [q, *caches, table, lengths, *more]
        yield HEAD_PARAM | {"maskType": kind, "batchRunStatusEnable": bool(status)}, inputs, [out]
    for offset in (False, True):
        q, caches = d(3, HEADS, WIDTH), [d.ints(-127, 128, 12, SIZE, KV, WIDTH, dtype=INT8) for _ in range(2)]
        scales = [d.between(0.005, 0.02, KV * WIDTH) for _ in range(2)]
        offsets = [d.ints(-9, 10, KV * WIDTH) for _ in range(2)]
        sides = [(wide(c) + offset * wide(o).reshape(KV, WIDTH)) * wide(s).reshape(KV, WIDTH)
                 for c, s, o in zip(caches, scales, offsets, strict=True)]  # fmt: skip
        out = [
            attend(wide(q)[r : r + 1], *(past(t, table[r].tolist(), n) for t in sides), 0.25)
            for r, n in enumerate(PAST)
        ]
        more = []
        for s, o in zip(scales, offsets, strict=True):
            more += [torch.from_numpy(s.numpy().view(np.uint32).astype(np.int64)), *([o] if offset else [])]
        inputs = [q, *caches, table, lengths, *more]
        yield HEAD_PARAM | {"quantType": 1, "hasQuantOffset": offset}, inputs, [np.concatenate(out)]
    own, ends = [2, 3, 1], [0, 2, 5, 6]  # several queries of each request, and a mask of them all
    q, keys, values = d(6, HEADS, WIDTH), *(d(12, SIZE, KV, WIDTH) for _ in range(2))
    mask, out = np.zeros((3, 4, 12)), []
    for r, (n, m) in enumerate(zip(own, PAST, strict=True)):
        mask[r, :n, :m] = lower(n, m, -10000.0) if n <= m else 0.0
        sides = (past(wide(t), table[r].tolist(), m) for t in (keys, values))
        out.append(attend(wide(q)[ends[r] : ends[r + 1]], *sides, 0.25, lower(n, m)))
    inputs = [q, keys, values, table, lengths, torch.from_numpy(mask).to(HALF), integers(*own)]
    yield HEAD_PARAM | {"maskType": 3, "calcType": 1}, inputs, [np.concatenate(out)]
    q, cache, out = d(3, HEADS, WIDTH), d(12, SIZE, 1, WIDTH), []
    for r, n in enumerate(PAST):
        k = past(wide(cache), table[r].tolist(), n)
        out.append(attend(wide(q)[r : r + 1], k, k[..., :8], 0.25))
    yield HEAD_PARAM | {"kvHeadNum": 1, "mlaVHeadSize": 8}, [q, cache, table, lengths], [np.concatenate(out)]


@atb("ReshapeAndCacheOperation")
def cache_writes(d: Draw) -> Iterator[Variant]:
    for nz, count in ((False, 2), (True, 2), (False, 1)):
        new = [d(5, KV, WIDTH) for _ in range(count)]
        caches = [d(6, *((KV * WIDTH // 16, SIZE, 16) if nz else (SIZE, KV, WIDTH))) for _ in new]
        slots, after = d.rng.permutation(24)[:5], [wide(c).copy() for c in caches]
        slots[2] = -1
        for cache, rows in zip(after, new, strict=True):
            for row, s in zip(wide(rows), slots, strict=True):
                if s >= 0 and nz:
                    cache[s // SIZE, :, s % SIZE] = row.reshape(-1, 16)
                elif s >= 0:
                    cache[s // SIZE, s % SIZE] = row
        written = {count + i: a for i, a in enumerate(after)}
        inputs = [*new, *caches, integers(*slots)]
        yield {"compressType": 0, "kvCacheCfg": 1 if count == 1 else 2 * nz}, inputs, after, written
    lengths, wins = [4, 3], np.array([[3, 1], [2, 3]])  # each head of a request keeps a window of its own
    new, caches = [d(7, 2, WIDTH) for _ in range(2)], [d(6, SIZE, 1, WIDTH) for _ in range(2)]
    slots, after = np.array([0, 5, 9, 14]), [wide(c).copy() for c in caches]
    for cache, rows in zip(after, new, strict=True):
        for (r, h), win in np.ndenumerate(wins):
            for j in range(win):
                s = slots[2 * r + h] + j
                cache[s // SIZE, s % SIZE, 0] = wide(rows)[sum(lengths[: r + 1]) - win + j, h]
    yield {"compressType": 1}, [*new, *caches, integers(*slots), integers(*wins.ravel()), integers(*lengths)], after


@declined
def a_slot_outside_of_the_cache() -> Iterator[tuple[Call, str]]:
    call = cache_writes(Draw(7, HALF))[0].call
    inputs = [*list(call.inputs.values())[:4], torch.full((5,), 1 << 30, dtype=INT)]
    yield atb_call(call.cls, call.attrs["param"], inputs, [call.outputs[f"output.{k}"] for k in range(2)]), ""


@atb("KvCacheOperation")
def kv_cache(d: Draw) -> Iterator[Variant]:
    new, cache = d(5, 8), d(2, 2, 7, 8)
    after = wide(cache).copy()
    after[1, 0, 4:6], after[1, 1, :3] = wide(new)[:2], wide(new)[2:]
    yield None, [new, integers(1), cache, integers(6, 3), integers(2, 3)], [], {2: after}


@atb("BlockCopyOperation")
def block_copy(d: Draw) -> Iterator[Variant]:
    caches = [d(8, SIZE, KV, WIDTH) for _ in range(2)]
    after = [wide(c)[[0, 1, 2, 3, 1, 1, 3, 7]] for c in caches]
    yield None, [*caches, integers(1, 3), integers(4, 5, 6), integers(2, 3)], [], dict(enumerate(after))


# --- over ranks -----------------------------------------------------------------------------------------------------


def _over(kind: str, param: dict[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Made]:
    """A call for each rank; each has the others' calls."""
    size = len(inputs)
    params = [{"rank": r, "rankSize": size, "rankRoot": 0, **param} for r in range(size)]
    calls = [
        atb_call(kind, params[r], inputs[r], [t for t in outputs[r] if isinstance(t, torch.Tensor)])
        for r in range(size)
    ]
    return [_made(kind, (params[r], inputs[r], outputs[r]), ranks=calls) for r in range(size)]


@sample(ONE_OFF, dtypes=(HALF,))
def collectives(d: Draw, fault: str) -> list[Made]:
    x, found = [d(4, 6) for _ in range(3)], []
    whole = np.stack([wide(t) for t in x])
    for kind, f in (("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)):
        found += _over("AllReduceOperation", {"allReduceType": kind}, [[t] for t in x], [[f(whole, 0)]] * 3)
    found += _over("AllGatherOperation", {}, [[t] for t in x], [[whole]] * 3)
    y = whole[0] + whole[1]
    found += _over("ReduceScatterOperation", {"reduceType": "sum"}, [[t] for t in x[:2]], [[y[:2]], [y[2:]]])
    return found + _over("BroadcastOperation", {}, [[t] for t in x[:2]], [[x[0]], [x[0]]])


@sample(ONE_OFF, dtypes=(HALF,))
def products_over_ranks(d: Draw, fault: str) -> list[Made]:
    found = []
    for kind, residual in ((0, False), (0, True), (1, False), (2, False), (3, False)):
        x, w, more = ([d(*s) for _ in range(2)] for s in ((4, 8), (6, 8), (4, 6)))
        products = [wide(a) @ wide(b).T for a, b in zip(x, w, strict=True)]
        both, total = np.concatenate([wide(t) for t in x]), products[0] + products[1]
        y = [{0: total, 1: total[2 * r : 2 * r + 2], 2: both @ wide(w[r]).T, 3: products[r]}[kind] for r in range(2)]
        y = [t + wide(m) if residual else t for t, m in zip(y, more, strict=True)]
        inputs = [[a, b, *([m] if residual else [])] for a, b, m in zip(x, w, more, strict=True)]
        param = {"type": kind, "hasResidual": residual, "quantType": -1, "keepIntermediate": kind == 2,
                 "backend": "lcoc"}  # fmt: skip
        found += _over("LinearParallelOperation", param, inputs, [[t, *([both] if kind == 2 else [])] for t in y])
    x, w = ([d.ints(-127, 128, *s, dtype=INT8) for _ in range(2)] for s in ((4, 8), (6, 8)))
    scale, none = d.between(1e-3, 1e-2, 6), torch.zeros(0, dtype=INT)
    y = torch.from_numpy(sum(wide(a) @ wide(b).T for a, b in zip(x, w, strict=True)) * wide(scale)).to(HALF)
    inputs = [[a, b, none, scale] for a, b in zip(x, w, strict=True)]
    param = {"type": 0, "quantType": 1, "outDataType": 1}
    return found + _over("LinearParallelOperation", param, inputs, [[y]] * 2)


@declined
def one_rank_of_many() -> Iterator[tuple[Call, str]]:
    one = products_over_ranks(Draw(0, HALF), "")[1].call
    param, (x, w) = one.attrs["param"], one.inputs.values()
    why = "works over 2 ranks, and the tensors of 0 are there"
    yield atb_call(one.cls, param, [x, w], [one.outputs["output.0"]]), why
