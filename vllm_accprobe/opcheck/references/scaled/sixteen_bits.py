"""Products of 8-bit integers on a processor without VNNI: told from other errors.

The problem: oneDNN adds two products (a + 128) b there in 16 bits, which end at 32767 [oneDNN documentation, Nuances of
int8 Computations]: wrong, and none of the model's doing. The idea: the numbers that are furthest
off are computed like that; where that explains them, a sentence says so. Not here: the products (eight_bits.py of
operators, linear.py of modules, which turn x into codes themselves).
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = Any  # a torch.Tensor
_LOOKED_AT = 32
"""Chosen: numbers, those furthest off, that say why a product is wrong."""
_EXPLAINED = 0.05
"""Chosen: what may be left of their squares where a cause explains them; a row alone has few that are cut off."""


def cut_off(a: Tensor, b: Tensor, left: Tensor, right: Tensor, exact: Tensor, mine: Tensor) -> str:
    """What to say of codes a int8 [m, k] and b int8 [k, n] with scales left [m] and right [n], float64, whose product
    (and a bias) is exact [m, n], and mine [m, n] in a kernel's dtype. Empty where this is not why mine is off."""
    if a.dtype != torch.int8 or b.dtype != torch.int8 or a.shape[1] % 2 or not mine.numel():
        return ""
    numbers = mine.double()
    off = (numbers - exact).abs()
    at = off.reshape(-1).topk(min(_LOOKED_AT, off.numel())).indices
    rows, columns = at // off.shape[1], at % off.shape[1]
    terms = (a[rows].long() + 128) * b.T[columns].long()
    whole = (terms[:, 0::2] + terms[:, 1::2]).clamp(-32768, 32767).sum(1) - 128 * b.T[columns].long().sum(1)
    plain = (a[rows].long() * b.T[columns].long()).sum(1)
    cut = exact[rows, columns] + (whole - plain) * left[rows] * right[columns]
    far, near = ((numbers[rows, columns] - v).abs() for v in (exact[rows, columns], cut))
    told = bool((whole != plain).any()) and float((near**2).sum()) < _EXPLAINED * float((far**2).sum())
    return "as if pairs of its products were added in 16 bits and cut off there: oneDNN without VNNI" if told else ""
