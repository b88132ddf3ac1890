"""What stands before and behind a vision tower: pictures in, patches embedded, patches merged.

Formulas: x * weight[c] + bias[c] on the channels of raw pixels; a convolution over patches that do not overlap is a
product with the flattened kernel [Dosovitskiy et al., arXiv 2010.11929, section 3.1; Qwen2-VL, arXiv 2409.12191, for
frames in pairs]. Mergers consist of modules that have references of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, device_kernel, reference
from vllm_accprobe.opcheck.references.kernels_common import weight_here
from vllm_accprobe.opcheck.references.linear import biased, product
from vllm_accprobe.opcheck.references.parts import param_if


@reference("FusedMMInputNorm")
def input_norm(call: Call) -> Expected:
    x, weight, bias = call.wide("pixel_values", "0"), call.param("weight"), call.param("bias")
    if x.dim() != 2 or x.shape[1] % len(weight):
        raise Declined("its pixels have an unknown form")
    by_channel = x.reshape(len(x), len(weight), -1)
    y = by_channel * weight.reshape(1, -1, 1) + bias.reshape(1, -1, 1)
    noise = 2.0**-23 * ((by_channel * weight.reshape(1, -1, 1)).abs() + bias.abs().reshape(1, -1, 1))
    return Expected(y.reshape(x.shape), noise.reshape(x.shape))


@reference("Conv2dLayer", "Conv3dLayer", "Conv2d", "Conv3d")
def convolution(call: Call) -> Expected:
    """Of kernels as large as their stride: the output tells, because each input is used once."""
    x, weight = call.wide("x", "input", "0"), call.param("weight")
    out, dims = call.outputs["output.0"], weight.dim() - 2
    kernel, grid = list(weight.shape[2:]), list(out.shape[2:])
    if x.dim() != dims + 2 or list(x.shape[2:]) != [g * k for g, k in zip(grid, kernel, strict=True)]:
        raise Declined("a convolution whose stride is not its kernel")
    if weight.shape[1] != x.shape[1]:
        raise Declined("a convolution in groups")
    y = product(_patches(x, kernel), weight.flatten(1))
    y = biased(y, param_if(call, "bias"), call.unit)
    value, noise, bound = (_back(t, len(x), grid) for t in (y.value, y.noise, y.bound))
    return Expected(value, noise, bound=bound)


def _back(rows: Any, n: int, grid: list[int]) -> Any:
    return rows.reshape(n, *grid, -1).movedim(-1, 1)


def _patches(x: Any, kernel: list[int]) -> Any:
    """[n, c, g1 k1, ...] → [n * g1 ..., c * k1 ...]."""
    shape: list[int] = [x.shape[0], x.shape[1]]
    for size, k in zip(x.shape[2:], kernel, strict=True):
        shape += [size // k, k]
    dims = len(kernel)
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    width = x.shape[1]
    for k in kernel:
        width *= k
    return torch.reshape(x.reshape(shape).permute(order), (-1, width))


# --- on a device --------------------------------------------------------------------------------------------------


@device_kernel("Conv2dLayer", "Conv3dLayer", "Conv2d", "Conv3d")
def convolution_kernel(call: Call) -> Any:
    x, w = call.tensor("x", "input", "0"), weight_here(call)
    stride = list(call.attr("stride", default=list(w.shape[2:])))
    padding, groups = call.attrs.get("padding", 0), int(call.attr("groups", default=1))
    if isinstance(padding, str):
        raise Declined("a padding that is named")
    run = F.conv2d if w.dim() == 4 else F.conv3d
    return run(x, w, call.params.get("bias"), stride, padding, call.attrs.get("dilation", 1), groups)
