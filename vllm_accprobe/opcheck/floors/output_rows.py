"""One output and its reference as matrices [rows, width], for the verdict and for the measures.

The problem: outputs have any shape and dtype, rows along any dimension, and a reference for some of them only; a replay
and a generated test must cut them alike. The idea: matrices [rows, width] of exact numbers, without the rows that have
no reference. With torch alone: copied with the tests that gentest writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.floors.rounding import judge
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Expected


def numbers(tensor: Any) -> Any:
    """A tensor's exact values on the CPU: float64, or int64 for integers and bool; complex ones as pairs."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128))
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def matrix(tensor: Any, row_dim: int) -> Any:
    """[rows, everything else]; a tensor without rows is one row."""
    if not tensor.dim():
        return tensor.reshape(1, 1)
    dim = row_dim if row_dim < tensor.dim() else 0
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1) if tensor.numel() else tensor.reshape(0, 1)


@dataclass(frozen=True)
class OutputRows:
    """expected: what was expected of the whole output; at: int64, which rows of the tensor these are; reference, mine:
    [rows, width] as `numbers` gives them; noise, bound, exact: float64 of the same shape, or None."""

    expected: Expected
    at: Any
    reference: Any
    mine: Any
    noise: Any | None
    bound: Any | None
    exact: Any | None

    @classmethod
    def of(cls, expected: Expected, mine: Any, row_dim: int) -> OutputRows:
        """mine: a tensor of the shape of ``expected.value``. Without rows where none has a reference."""
        shape, e = tuple(mine.shape), expected
        noise, bound = (None if x is None or mine.is_complex() else matrix(numbers(x).expand(shape), row_dim)
                        for x in (e.noise, e.bound))  # fmt: skip
        exact = None if e.exact is None else matrix(numbers(e.exact).reshape(shape), row_dim)
        found = matrix(numbers(e.value), row_dim), matrix(numbers(mine), row_dim), noise, bound, exact
        if e.rows is None:
            return cls(e, torch.arange(len(found[1])), *found)
        at = e.rows.nonzero().flatten()
        return cls(e, at, *(None if x is None else x[at] for x in found))

    def judge(self, dtype: str, **more: Any) -> Verdict:
        """more: further arguments of rounding.judge."""
        e = self.expected
        return judge(self.reference, self.mine, dtype, noise=self.noise, bound=self.bound, last=e.unit, common=e.common,
                     groups=e.groups, shared=e.shared, exact=self.exact, **more)  # fmt: skip
