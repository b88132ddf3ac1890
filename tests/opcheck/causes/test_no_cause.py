"""Faults of no family, and right outputs: nothing is said of these."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opcheck.cause_calls import TABLE, attention, drawn, explained, gated, layer_norm, linear, norm, with_output
from opcheck.planted_addresses import fused_qkv

from vllm_accprobe.opcheck.causes import addresses
from vllm_accprobe.opcheck.reference import Call, Declined

MAKERS: dict[str, Callable[[], Call]] = {
    "norm": lambda: norm(residual=False), "layer norm": layer_norm, "gate": gated, "linear": linear,
    "attention": attention, "views": lambda: fused_qkv("value"),
}  # fmt: skip


def noise(y: Any, size: float, seed: int = 3) -> Any:
    return drawn(seed, *y.shape, dtype=torch.float64) * size


def bit_flipped(y: Any) -> Any:
    bits = y.bfloat16().view(torch.int16).clone()
    bits[5, 7] ^= 1 << 9
    return bits.view(torch.bfloat16).double()


def half_of_a_row(y: Any) -> Any:
    out = y.clone()
    out[4, ::2] += noise(out, 0.3)[4, ::2]
    return out


def random_columns(y: Any) -> Any:
    return y * (1.0 + 0.2 * noise(y, 1.0)[0])


def mixed(y: Any) -> Any:
    out = y.clone()
    out[::2] *= 1.0 + 0.1 * noise(out, 1.0)[::2, :1]
    return out + 0.02 * noise(y, 1.0, 5).abs()


FAULTS: dict[str, Callable[[Any], Any]] = {
    "noise": lambda y: y * (1.0 + noise(y, 0.05)), "more noise": lambda y: y + noise(y, 0.3) * y.abs().mean(),
    "random columns": random_columns, "mixed": mixed, "bit flipped": bit_flipped, "half of a row": half_of_a_row,
    "sorted": lambda y: y.sort(-1).values, "clipped softly": lambda y: 2.0 * torch.tanh(y / 2.0) + noise(y, 0.03),
    "rows at random": lambda y: y[torch.tensor([(7 * k + 3) % len(y) for k in range(len(y))])],
}  # fmt: skip


def test_a_call_whose_input_was_no_view_is_as_it_is() -> None:
    """The calls of one tap need not all have views."""
    call = norm(residual=False)
    contiguous = replace(call, inputs={"x": next(iter(call.inputs.values()))})
    for strides, offset in ((True, False), (False, True), (True, True)):
        edit: Any = addresses.misread(strides, offset)
        assert edit(SimpleNamespace(call=contiguous), ("x", "[8, 4, 1]", 4)) is contiguous
        with pytest.raises(Declined, match="no such input"):
            edit(SimpleNamespace(call=replace(call, inputs={})), ("x", "[8, 4, 1]", 4))


@pytest.mark.parametrize("operator", MAKERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_no_family_has_no_cause(operator: str, fault: str) -> None:
    call = MAKERS[operator]()
    call = call if call.outputs else with_output(call, torch.zeros(_shape(call)))
    found = TABLE.evaluate(call)
    assert isinstance(found, dict)
    said = explained(with_output(call, FAULTS[fault](found["output.0"].value)))
    assert said is None, said.text


def _shape(call: Call) -> tuple[int, int]:
    x = next(iter(call.inputs.values()))
    width = {"ColumnParallelLinear": 48, "SiluAndMul": x.shape[1] // 2}.get(call.cls, x.shape[1])
    return x.shape[0], width
