"""Adapters in linear layers: against a definition in numpy, and kernels that take a wrong slot, scale or part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import family_verdict
import numpy as np
import pytest
import torch
from reference_calls import evaluated

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.lora import ANEW, NOT_HERE, UNTOLD, RowAdapters

Weights = Mapping[str, Mapping[str, Mapping[str, torch.Tensor]]]
WIDTH, RANK = 96, 8
SIZES = {"qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32}, "gate_up_proj": {"gate_proj": 48, "up_proj": 48},
         "down_proj": {"": 80}}  # fmt: skip


def made(last: str, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Call, Weights]:
    """A layer with rows of two adapters, of one that has nothing for it, and of none. The second adapter leaves the
    first part alone."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    parts = SIZES[last]
    weights: dict[str, dict[str, dict[str, torch.Tensor]]] = {"a": {}, "b": {}, "elsewhere": {}}
    for name, scaling in (("a", 2.0), ("b", 0.3)):
        for k, (part, size) in enumerate(parts.items()):
            if name == "a" or k or len(parts) == 1:
                weights[name][part] = {"lora_a": draw(RANK, WIDTH) * 0.1, "lora_b": draw(size, RANK) * 0.3,
                                       "scaling": torch.tensor(scaling)}  # fmt: skip
    names = tuple(np.random.default_rng(seed).choice(["a", "b", "", "elsewhere"], 24).tolist())
    out = sum(parts.values())
    call = Call(
        f"model.layers.0.{last}", "MergedQKVParallelLinearWithLoRA", {"input_": draw(24, WIDTH)},
        params={"weight": draw(out, WIDTH) * 0.1, "bias": draw(out)}, attrs={"tp_size": 1},
        extra={"adapters": RowAdapters(names, weights)},
    )  # fmt: skip
    return call, weights


def by_hand(call: Call, weights: Weights) -> np.ndarray:
    """[rows, outputs]: Hu et al.'s formula, one row after the other."""
    rows: RowAdapters = call.extra["adapters"]
    x, w, b = (t.double().numpy() for t in (call.inputs["input_"], call.params["weight"], call.params["bias"]))
    found = np.zeros((len(x), len(w)))
    for i, name in enumerate(rows.of_row):
        found[i] = w @ x[i] + b
        begin = 0
        for part, size in SIZES[call.name.rpartition(".")[2]].items():
            if name and part in weights[name]:
                a, up, s = (weights[name][part][k].double().numpy() for k in ("lora_a", "lora_b", "scaling"))
                found[i, begin : begin + size] += s * (up @ (a @ x[i]))
            begin += size
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("last", SIZES)
def test_by_the_definition(last: str, seed: int) -> None:
    call, weights = made(last, seed)
    found = evaluated(call)["output.0"].value.numpy()
    np.testing.assert_allclose(found, by_hand(call, weights), rtol=1e-12, atol=1e-12)


def kernel(call: Call, weights: Weights, of_row: tuple[str | None, ...]) -> torch.Tensor:
    """What vLLM's kernels do in bfloat16: the base rounded, x Aᵀ in float32 cast down, s B rounded."""
    x, w, b = call.inputs["input_"], call.params["weight"], call.params["bias"]
    y = (x.float() @ w.float().T + b.float()).bfloat16()
    for i, name in enumerate(of_row):
        begin = 0
        for part, size in SIZES[call.name.rpartition(".")[2]].items():
            if name and part in weights[name]:
                f = weights[name][part]
                up = (f["lora_b"].float() * f["scaling"].float()).bfloat16()
                inner = (x[i].float() @ f["lora_a"].float().T).bfloat16()
                y[i, begin : begin + size] += (up.float() @ inner.float()).bfloat16()
            begin += size
    return y


def spoilt(weights: Weights, name: str, part: str, change: Any) -> Weights:
    inner = {**weights[name], part: {**weights[name][part], **change(weights[name][part])}}
    return {**weights, name: inner}


@pytest.mark.parametrize("last", SIZES)
@pytest.mark.parametrize("fault", ["", "one row takes the other slot", "scaled twice", "a part left out", "no adapter"])
def test_an_honest_kernel_passes_and_wrong_ones_fail(last: str, fault: str) -> None:
    call, weights = made(last, 7, torch.bfloat16)
    of_row = call.extra["adapters"].of_row
    at, part = of_row.index("a"), list(SIZES[last])[-1]
    used = weights
    if fault == "one row takes the other slot":
        of_row = tuple("b" if i == at else name for i, name in enumerate(of_row))
    elif fault == "scaled twice":
        used = spoilt(weights, "a", part, lambda f: {"scaling": f["scaling"] * 2})
    elif fault == "a part left out":
        used = {**weights, "a": {p: f for p, f in weights["a"].items() if p != part}}
    elif fault:
        of_row = tuple("" if i == at else name for i, name in enumerate(of_row))
    mine = kernel(call, used, of_row)
    found = family_verdict.verdict(replace(call, outputs={"output.0": mine}), "output.0", mine)
    assert found.passed is (fault == ""), found


def test_rows_that_cannot_be_told_are_left_out_and_the_others_judged() -> None:
    call, weights = made("down_proj", 3)
    names: tuple[str | None, ...] = ("a", None, "never seen", "", *("b",) * 20)
    for rows, why in ((RowAdapters(names, weights), UNTOLD),
                      (RowAdapters(("a",) * 24, weights, frozenset({"a"})), ANEW),
                      (RowAdapters(("never seen",) * 24, weights), NOT_HERE)):  # fmt: skip
        one = replace(call, extra={"adapters": rows})
        if rows.of_row is names:
            found = evaluated(one)["output.0"]
            assert found.rows is not None
            assert found.rows.tolist() == [True, False, False, True] + [True] * 20
            assert found.reason == why
        else:
            with pytest.raises(Declined, match=why):
                evaluated(one)
    with pytest.raises(Declined, match=UNTOLD):
        evaluated(replace(call, extra={}))
    with pytest.raises(Declined, match="cut over ranks"):
        evaluated(replace(call, attrs={"tp_size": 2}))


def test_weights_that_do_not_fit_are_declined() -> None:
    call, weights = made("gate_up_proj", 1)
    for part, change in (("up_proj", {"lora_b": torch.ones(200, RANK)}), ("up_proj", {"lora_a": torch.ones(RANK, 5)})):
        rows = RowAdapters(("a",) * 24, spoilt(weights, "a", part, lambda _, change=change: change))
        with pytest.raises(Declined, match="fit"):
            evaluated(replace(call, extra={"adapters": rows}))
    unknown = {"a": {"some_proj": weights["a"]["up_proj"]}}
    with pytest.raises(Declined, match="some_proj"):
        evaluated(replace(call, extra={"adapters": RowAdapters(("a",) * 24, unknown)}))
