"""Samplers against their definitions token by token, at random shapes, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from family_verdict import verdict
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined


def probabilities(seed: int, rows: int = 5, n: int = 23) -> torch.Tensor:
    z = 2 * np.random.default_rng(seed).normal(size=(rows, n))
    p = np.exp(z - z.max(-1, keepdims=True))
    return torch.from_numpy(p / p.sum(-1, keepdims=True)).float()


def allowed(row: np.ndarray, k: int | None, p: float | None, joint: bool, least: float = 0.0) -> list[int]:
    """Tokens that the filters keep, one after the other in falling order."""
    order = sorted(range(len(row)), key=lambda t: -row[t])
    by_k = order if k is None else order[:k]
    whole = 1.0 if joint else sum(row[t] for t in by_k)
    by_p: list[int] = []
    total = 0.0
    for t in order if joint else by_k:
        if p is not None and total / whole >= p:
            break
        by_p.append(t)
        total += row[t]
    return [t for t in by_k if t in by_p and row[t] >= least * max(row)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["top_k", "top_p"])
@pytest.mark.parametrize("fault", ["", "not made whole", "one token more"])
def test_renormalised(name: str, seed: int, fault: str) -> None:
    probs = probabilities(seed)
    limit: Any = torch.tensor([3, 9, 1, 5, 22]) if name == "top_k" else torch.tensor([0.5, 0.9, 0.2, 0.7, 0.99])
    y = np.zeros(probs.shape)
    for r, row in enumerate(probs.double().numpy()):
        k, p = (int(limit[r]), None) if name == "top_k" else (None, float(limit[r]))
        keep = allowed(row, k, p, False)
        if fault == "one token more":
            keep = sorted(range(len(row)), key=lambda t: -row[t])[: len(keep) + 1]
        total = 1.0 if fault == "not made whole" else sum(row[t] for t in keep)
        for t in keep:
            y[r, t] = row[t] / total
    mine = torch.from_numpy(y).float()
    call = Call("x", f"flashinfer.{name}_renorm_probs", args=(probs,), kwargs={name: limit},
                outputs={"output.0": mine})  # fmt: skip
    assert verdict(call, "output.0", mine).passed == (not fault)


@pytest.mark.parametrize("fault", [False, True])
def test_masked_logits(fault: bool) -> None:
    z = torch.from_numpy(np.random.default_rng(3).normal(size=(4, 17))).float()
    mine = torch.full_like(z, -torch.inf)
    for r in range(4):
        order = sorted(range(17), key=lambda t: -float(z[r, t]))
        for t in order[: 6 if fault else 5]:
            mine[r, t] = z[r, t]
    call = Call("x", "flashinfer.top_k_mask_logits", args=(z, 5), outputs={"output.0": mine})
    assert verdict(call, "output.0", mine).passed == (not fault)


CASES = {
    "top_p_sampling_from_probs": (None, 0.6, False, 0.0), "top_k_sampling_from_probs": (4, None, False, 0.0),
    "min_p_sampling_from_probs": (None, None, False, 0.3),
    "top_k_top_p_sampling_from_probs": (6, 0.7, False, 0.0), "top_k_top_p_sampling_from_logits": (6, 0.7, True, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("indices", [False, True])
def test_a_drawn_token_is_one_that_is_kept(name: str, indices: bool) -> None:
    """Every token that may be drawn passes, and every other one fails, in every row."""
    k, p, joint, least = CASES[name]
    probs = probabilities(7)
    given = probs.log() + 3.0 if "logits" in name else probs
    limits = [x for x in (k, p, least or None) if x is not None]
    kwargs: dict[str, Any] = {"filter_apply_order": "joint"} if joint else {}
    at = [4, 0, 0, 2] if indices else list(range(5))
    if indices:
        kwargs["indices"] = torch.tensor(at, dtype=torch.int32)
    keep = [allowed(probs[r].double().numpy(), k, p, joint, least) for r in at]
    best = [kept[0] for kept in keep]
    for row, kept in enumerate(keep):
        for token in range(23):
            mine = torch.tensor(best, dtype=torch.int32)
            mine[row] = token
            call = Call("x", f"flashinfer.{name}", args=(given, *limits), kwargs=kwargs, outputs={"output.0": mine})
            assert verdict(call, "output.0", mine).passed == (token in kept), (row, token)


def test_tokens_without_a_filter_and_rows_that_are_not_whole() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    for token, right in ((1, True), (2, False), (7, False)):
        mine = torch.tensor([token, 0], dtype=torch.int32)
        call = Call("x", "flashinfer.sampling_from_probs", args=(probs,), outputs={"output.0": mine})
        assert verdict(call, "output.0", mine).passed == right
    call = Call("x", "flashinfer.top_p_sampling_from_probs", args=(probs * 0.5, 0.4), outputs={"output.0": mine})
    found = TABLE.evaluate(call)
    assert not isinstance(found, Declined)
    assert not found["output.0"].rows.any()
    wrong = Call("x", "flashinfer.sampling_from_probs", args=(probs,), kwargs={"indices": torch.tensor([0, 9])},
                 outputs={"output.0": mine})  # fmt: skip
    assert isinstance(TABLE.evaluate(wrong), Declined)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("fault", ["", "a smaller one", "a place twice", "another place"])
def test_largest(ordered: bool, fault: str) -> None:
    x = torch.from_numpy(np.random.default_rng(9).normal(size=(3, 31))).bfloat16().float()
    places = np.array([sorted(range(31), key=lambda t: -float(row[t]))[:4] for row in x])
    if not ordered:
        places = places[:, ::-1].copy()
    values = np.take_along_axis(x.numpy(), places, 1)
    if fault == "a smaller one":
        places[1, 0] = int(x[1].argmin())
        values[1, 0] = float(x[1].min())
    elif fault == "a place twice":
        places[0, 1], values[0, 1] = places[0, 0], values[0, 0]
    elif fault == "another place":
        places[2, 3] = int(x[2].argmin())
    mine = torch.from_numpy(values), torch.from_numpy(places)
    call = Call("x", "flashinfer.top_k", args=(x, 4, ordered), outputs={"output.0": mine[0], "output.1": mine[1]})
    assert all(verdict(call, f"output.{n}", mine[n]).passed for n in range(2)) == (not fault)
