"""Operators that call themselves in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_calls import TABLE, drawer, same

from vllm_accprobe.opcheck.reference import Call, Declined, Expected

draw = drawer(5)


def test_aten_calls_itself_in_float64() -> None:
    def aten(name: str, *args: Any, **kwargs: Any) -> dict[str, Expected]:
        found = TABLE.evaluate(Call(name, name, args=args, kwargs=kwargs))
        if isinstance(found, Declined):
            raise found
        return found

    a, b = draw(3, 4).bfloat16(), draw(4, 2).bfloat16()
    same(aten("aten.mm", a, b)["output.0"].value, a.double() @ b.double())
    two = aten("torch.ops.aten.max.dim", a, 1)
    assert two["output.1"].value.tolist() == a.double().max(1).indices.tolist()
    low = aten("aten._to_copy.default", a, dtype=torch.float16)
    assert low["output.0"].value.dtype == torch.float64
    turned = aten("aten.mul.Tensor", torch.tensor([1j]), torch.tensor([1j]))
    assert turned["output.0"].value.tolist() == [-1 + 0j]
    for name, why in (("aten.rand_like", "random"), ("aten.empty_like", "no defined"), ("aten.nothing", "no operator"),
                      ("aten.mm.nope", "no operator"), ("aten.mm", "refuses")):  # fmt: skip
        with pytest.raises(Declined, match=why):
            aten(name, a)
