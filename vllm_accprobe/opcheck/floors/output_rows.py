"""One output and its reference as matrices [rows, width], for the verdict and for the measures.

The problem: outputs have any shape and dtype, rows along any dimension, and a reference for some of them only; a replay
and a generated test must cut them alike. The idea: matrices [rows, width] of exact numbers, without the rows that have
no reference. With torch alone: copied with the tests that gentest writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    return _matrices(tensor[None], row_dim)[0]


def _matrices(tensor: Any, row_dim: int) -> Any:
    """`matrix` of each of several: [outputs, rows, everything else]."""
    n, shape = len(tensor), tensor.shape[1:]
    if not shape:
        return tensor.reshape(n, 1, 1)
    dim = row_dim if row_dim < len(shape) else 0
    if not tensor.numel():
        return tensor.reshape(n, 0, 1)
    return (tensor.movedim(dim + 1, 1) if dim else tensor).reshape(n, shape[dim], -1)


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
        return cls.of_each([expected], [mine], row_dim).one(0)

    @classmethod
    def of_each(cls, expected: Sequence[Expected], mine: Sequence[Any], row_dim: int) -> OutputRows:
        """Outputs that are `alike` as one: tensors [outputs, rows, width], the rest of the first."""
        first, shape, no_errors = expected[0], mine[0].shape, mine[0].is_complex()

        def made(name: str, change: Callable[[Any], Any]) -> Any:
            each = [getattr(e, name) for e in expected]
            return None if each[0] is None else several([x if x.shape == shape else change(x) for x in each])

        def several(tensors: Sequence[Any]) -> Any:
            one = tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))
            return _matrices(numbers(one), row_dim)

        noise, bound = (None if no_errors else made(name, lambda x: x.expand(shape)) for name in ("noise", "bound"))
        ours = several(mine)
        found = made("value", lambda x: x), ours, noise, bound, made("exact", lambda x: x.reshape(shape))
        if first.rows is None:
            return cls(first, torch.arange(ours.shape[1]), *found)
        at = first.rows.nonzero().flatten()
        return cls(first, at, *(None if x is None else x[:, at] for x in found))

    def one(self, k: int) -> OutputRows:
        """Of the outputs of `of_each`."""
        return OutputRows(self.expected, self.at, *(None if x is None else x[k] for x in self._tensors()))

    def judge(self, dtype: str, **more: Any) -> Verdict:
        """more: further arguments of rounding.judge_each."""
        tensors = (None if x is None else x[None] for x in self._tensors())
        return OutputRows(self.expected, self.at, *tensors).judge_each(dtype, **more)[0]

    def judge_each(self, dtype: str, **more: Any) -> list[Verdict]:
        """Of the outputs of `of_each`."""
        e = self.expected
        return judge_each(self.reference, self.mine, dtype, noise=self.noise, bound=self.bound, last=e.unit,
                          common=e.common, groups=e.groups, shared=e.shared, exact=self.exact, **more)  # fmt: skip

    def _tensors(self) -> tuple[Any, ...]:
        return self.reference, self.mine, self.noise, self.bound, self.exact


def alike(e: Expected, mine: Any) -> tuple[Any, ...]:
    """What must be equal of outputs that are judged together."""
    rows = None if e.rows is None else tuple(e.rows.tolist())
    tensors = (e.value, mine, e.noise, e.bound, e.exact)
    return e.unit, e.common, e.groups, e.shared, rows, *(
        None if t is None else (t.dtype, t.device, t.shape) for t in tensors)  # fmt: skip
