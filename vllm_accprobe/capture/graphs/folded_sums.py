"""Products that a compiler adds up in the same kernel, so that a tap on the product would change the sum.

The problem: inductor makes one kernel, addmm, of a matrix product and an addition of its result, which then is never
rounded to the model's dtype; a tap that reads the product keeps it apart, and the sum changes in its last bits. Seen
with the shared expert of a tiny DeepSeek-V2 on a processor where vLLM multiplies with ``aten::linear``; where it calls
a kernel of its own, nothing can be folded into that. The idea: in the forward that is looked at, operators are seen in
the order of the graph; a product's memory is remembered, and an addition that reads it says so. The rule is torch's own
(``_inductor/fx_passes/post_grad.py``, ``is_valid_addmm_fusion``): two dimensions, no bias, equal dtypes, a summand that
expands to the product's shape. On GPUs it prefers not to (``should_prefer_unfused_addmm``).
Not here: which modules get taps (placement.py), the forward (sightings.py).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

_PRODUCTS = frozenset({"aten::mm", "aten::linear"})
_SUMS = frozenset({"aten::add", "aten::add_"})
_REMEMBERED = 64
"""Chosen: products whose memory is held at a time. The addition comes a few operators later; a mixture's shared expert
has its routed ones in between."""


class FoldedSums:
    """Which products were added to something. A product is known by a number of its own."""

    def __init__(self) -> None:
        self.folded: set[int] = set()
        self._held: OrderedDict[int, tuple[int, torch.Tensor]] = OrderedDict()  # by address
        self._count = 0

    def ran(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """An operator has run. name: with its namespace."""
        if name in _PRODUCTS:
            no_bias = len(args) < 3 or args[2] is None
            if no_bias and isinstance(result, torch.Tensor) and result.dim() == 2:
                self._count += 1
                self._held[result.data_ptr()] = (self._count, result)
                self._held.move_to_end(result.data_ptr())
                if len(self._held) > _REMEMBERED:
                    self._held.popitem(last=False)
        elif name in _SUMS and len(args) > 1:
            for one, other in ((args[0], args[1]), (args[1], args[0])):
                number = self.number(one)
                if number is not None and _expands(other, one):
                    self.folded.add(number)

    def number(self, value: Any) -> int | None:
        """Of the product that ``value`` is, None where it is none, or only a part or another view of one."""
        if not isinstance(value, torch.Tensor) or not self._held:
            return None
        number, product = self._held.get(value.data_ptr(), (None, value))
        return number if value.shape == product.shape else None


def _expands(other: Any, product: torch.Tensor) -> bool:
    if not isinstance(other, torch.Tensor) or other.dtype != product.dtype or other.dim() > product.dim():
        return False
    behind = product.shape[product.dim() - other.dim() :]
    return all(a in (1, b) for a, b in zip(other.shape, behind, strict=True))
