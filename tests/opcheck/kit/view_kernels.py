"""Operators in plain torch, right ones and ones that go wrong for strides, tails or layouts. Imports torch alone: the
file is for ``--kernel``, of gentest and of the folder that it writes."""

import torch
import torch.nn.functional as F

EPS, TILE = 1e-5, 64


def flat(x: torch.Tensor, begin: int) -> torch.Tensor:
    """As many elements as x has, from ``begin`` of its storage on, in x's shape: what lies behind the end is 0."""
    size = x.untyped_storage().nbytes() // x.element_size()
    n = max(0, min(x.numel(), size - begin))
    found = torch.zeros(x.numel(), dtype=x.dtype)
    found[:n] = torch.as_strided(x, (n,), (1,), begin)
    return found.reshape(x.shape)


def gapless(x: torch.Tensor) -> torch.Tensor:
    return flat(x, x.storage_offset())


def norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def norm_without_gaps(x, weight):
    return norm(gapless(x), weight)


def norm_without_offset(x, weight):
    return norm(torch.as_strided(x, x.shape, x.stride(), 0), weight)


def norm_of_whole_tiles(x, weight):
    y = norm(x, weight).clone()
    y[len(y) // TILE * TILE :] = 0
    return y


def norm_without_last_columns(x, weight):
    wide = x.double()
    some = wide[..., : x.shape[-1] // TILE * TILE]
    return (wide / (some.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight.double()).to(x.dtype)


def layer_norm(input, weight, bias):
    return F.layer_norm(input, input.shape[-1:], weight, bias, EPS)


def layer_norm_without_gaps(input, weight, bias):
    return layer_norm(gapless(input), weight, bias)


def linear(input_, weight):
    return F.linear(input_.double(), weight.double()).to(input_.dtype)


def linear_without_strides(input_, weight):
    return linear(gapless(input_), weight)


def linear_of_whole_tiles(input_, weight):
    y = linear(input_, weight)
    y[:, y.shape[1] // TILE * TILE :] = 0
    return y


def linear_without_last_terms(input_, weight):
    k = weight.shape[1] // TILE * TILE
    return linear(input_[:, :k], weight[:, :k])


def silu_and_mul(x):
    gate, up = x.double().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def silu_and_mul_without_gaps(x):
    return silu_and_mul(gapless(x))


def silu_and_mul_of_whole_tiles(x):
    y = silu_and_mul(x)
    y[:, y.shape[1] // TILE * TILE :] = 0
    return y
