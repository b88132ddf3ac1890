"""An operator's arguments in wider dtypes, and those moved by a rounding.

The problem: an operator is asked twice, with its arguments and with the same ones moved, and where one of them is a
weight, to make both of it takes longer than the decode step that is checked. The idea: what is made of a parameter that
the calls of an operator share is made once (`Params`), its moved form too, because the signs are the same for all calls
whose arguments have the same lengths. An operator that writes to an argument is given one of its own.
Not here: what is asked and what comes of it (aten.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Params

_MOVED = 2.0**-24
_TABLE = 8191


def raised(value: Any, real: Any, imaginary: Any) -> Any:
    """A tensor or dtype with floats in these dtypes, and everything on the CPU; other values as they are."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.is_complex():
            return value.to(imaginary, copy=True)
        return value.to(real, copy=True) if value.is_floating_point() else value.clone()
    if isinstance(value, torch.dtype):
        return real if value.is_floating_point else imaginary if value.is_complex else value
    return torch.device("cpu") if isinstance(value, torch.device) else value


@functools.lru_cache(maxsize=64)
def _signs(lengths: tuple[int, ...]) -> Any:
    """1 and -1 at random, float64, as many as the last of ``lengths``: what comes of drawing them one after the
    other."""
    generator = torch.Generator().manual_seed(0)
    for n in lengths:
        drawn = torch.randint(0, 2, (n,), generator=generator)
    return 2.0 * drawn.double() - 1.0


def _moved(value: Any, lengths: tuple[int, ...]) -> Any:
    """Floats times 1 ± 2**-24 (float32: its next number), at random: signs from a table whose length is a prime, so
    that no two rows share theirs; to draw one for each element would take longer than most operators. lengths: of the
    tables that were drawn before, and of its own."""
    if value.dim() == 2 and not value.is_contiguous() and value.t().is_contiguous():
        return _moved(value.t(), lengths).t()
    flat = value.reshape(-1)
    step = max(_MOVED, torch.finfo(value.dtype).eps)
    table = (1.0 + step * _signs(lengths)).to(value.dtype)
    whole = len(flat) // _TABLE * _TABLE
    moved = torch.empty_like(flat)
    if whole:
        torch.mul(flat[:whole].view(-1, _TABLE), table, out=moved[:whole].view(-1, _TABLE))
    torch.mul(flat[whole:], table[: len(flat) - whole], out=moved[whole:])
    return moved.view(value.shape)


class Widened:
    """A call's arguments in wider dtypes, and moved ones; parameters that its calls share once, where ``function``
    writes to none of its arguments."""

    def __init__(self, call: Call, function: Any, real: Any, imaginary: Any):
        self._dtypes = real, imaginary
        writes = not isinstance(function, torch._ops.OpOverload) or function._schema.is_mutable
        self._params = call.params if isinstance(call.params, Params) and not writes else None
        self._lengths: tuple[int, ...] = ()

    def wide(self, value: Any) -> Any:
        return self._once(value, self._dtypes, lambda: raised(value, *self._dtypes))

    def moved(self, value: Any) -> Any:
        """In the order of the arguments: each draws its own signs."""
        wide = self.wide(value)
        if not isinstance(wide, torch.Tensor) or not wide.is_floating_point():
            return wide
        self._lengths = lengths = (*self._lengths, min(_TABLE, wide.numel()))
        return self._once(value, (*self._dtypes, lengths), lambda: _moved(wide, lengths))

    def _once(self, value: Any, how: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if self._params is None or not self._params.shared or not isinstance(value, torch.Tensor):
            return make()
        name = self._params.name_of(value)
        return make() if name is None else self._params.once((name, *how), make)
