"""One output and its reference as matrices [rows, width], for the verdict and for the measures.

The problem: outputs have any shape and dtype, rows along any dimension, and a reference for some of them only; a replay
and a generated test must cut them alike. The idea: matrices [rows, width] of exact numbers, without the rows that have
no reference. With torch alone: copied with the tests that gentest writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.floors.rounding import judge_each
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Expected


def numbers(tensor: Any) -> Any:
    """A tensor's exact values on the CPU: float64, or int64 for integers and bool; complex ones as pairs."""
    if tensor.requires_grad or tensor.device.type != "cpu":
        tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128))
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def matrix(tensor: Any, row_dim: int) -> Any:
    """[rows, everything else]; a tensor without rows is one row."""
    if not tensor.dim():
        return tensor.reshape(1, 1)
    dim = row_dim if row_dim < tensor.dim() else 0
    if not tensor.numel():
        return tensor.reshape(0, 1)
    return (tensor.movedim(dim, 0) if dim else tensor).reshape(tensor.shape[dim], -1)


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
        """more: further arguments of rounding.judge_each."""
        return stacked([self]).judge_each(dtype, **more)[0]

    def judge_each(self, dtype: str, **more: Any) -> list[Verdict]:
        """Of `stacked` outputs."""
        e = self.expected
        return judge_each(self.reference, self.mine, dtype, noise=self.noise, bound=self.bound, last=e.unit,
                          common=e.common, groups=e.groups, shared=e.shared, exact=self.exact, **more)  # fmt: skip

    def alike(self) -> tuple[Any, ...]:
        """What must be equal of outputs that are stacked."""
        e = self.expected
        return e.unit, e.common, e.groups, e.shared, *(t if t is None else (t.dtype, t.shape) for t in self._tensors())

    def _tensors(self) -> tuple[Any, ...]:
        return self.reference, self.mine, self.noise, self.bound, self.exact


def stacked(outputs: Sequence[OutputRows]) -> OutputRows:
    """Outputs that are `alike` as one: tensors [outputs, rows, width], the rest of the first."""
    sides = zip(*(o._tensors() for o in outputs), strict=True)
    tensors = (None if side[0] is None else side[0][None] if len(side) == 1 else torch.stack(side) for side in sides)
    return OutputRows(outputs[0].expected, outputs[0].at, *tensors)
