"""Penalties and filters against their definitions in numpy, token by token, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drawn_sizes import drawn_sizes
from family_verdict import verdict

from vllm_accprobe.opcheck.reference import Call

ROWS, VOCAB = 4, 17
sizes = drawn_sizes(__name__, VOCAB=(11, 90))


def logits(seed: int = 0) -> np.ndarray:
    return 2 * np.random.default_rng(seed).normal(size=(ROWS, VOCAB))


def penalised(z: Any, prompt: Any, output: Any, presence: Any, frequency: Any, repetition: Any, fault: str) -> Any:
    out = z.copy()
    for r in range(ROWS):
        for token in range(VOCAB):
            times = sum(1 for t in output[r] if t == token)
            in_prompt = token in prompt[r] and fault != "penalty on prompt tokens missing"
            if in_prompt or times:
                good = out[r, token] > 0
                if fault == "divides below 0":
                    good = True
                out[r, token] = out[r, token] / repetition[r] if good else out[r, token] * repetition[r]
            out[r, token] -= frequency[r] * (min(times, 1) if fault == "frequency counts once" else times)
            out[r, token] -= presence[r] * (times > 0)
    return out


PENALTIES = ["", "penalty on prompt tokens missing", "divides below 0", "frequency counts once"]


@pytest.mark.parametrize("fault", PENALTIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties(fault: str, dtype: torch.dtype) -> None:
    r = np.random.default_rng(1)
    z = torch.from_numpy(logits()).to(dtype)
    prompt, output = r.integers(0, VOCAB + 1, (ROWS, 6)), r.integers(0, 9, (ROWS, 7))
    presence, frequency, repetition = r.random(ROWS), r.random(ROWS), 1 + r.random(ROWS)
    y = penalised(z.double().numpy(), prompt, output, presence, frequency, repetition, fault)
    mine = torch.from_numpy(y).to(dtype)
    args = (z, *(torch.from_numpy(a) for a in (prompt, output, presence, frequency, repetition)))
    call = Call("x", "torch.ops.vendor.apply_penalties", args=args, outputs={"inplace.input.0": mine})
    assert verdict(call, "inplace.input.0", mine).passed == (not fault)
    if fault == "frequency counts once":
        return
    none = np.zeros(ROWS)
    once = torch.from_numpy(penalised(z.double().numpy(), prompt, output, none, none, repetition, fault)).to(dtype)
    masks = [torch.tensor([[t in row for t in range(VOCAB)] for row in side.tolist()]) for side in (prompt, output)]
    call = Call("x", "torch.ops._C.apply_repetition_penalties_", args=(z, *masks, args[-1]),
                outputs={"inplace.input.0": once})  # fmt: skip
    assert verdict(call, "inplace.input.0", once).passed == (not fault)


def filtered(z: np.ndarray, k: list[int], p: list[float], fault: str = "") -> np.ndarray:
    out = np.full_like(z, -np.inf)
    for r in range(ROWS):
        order = sorted(range(VOCAB), key=lambda t: -z[r, t])
        order = order[: k[r] + (1 if fault == "top-k off by one" else 0)]
        weights = np.exp(z[r, order] - z[r, order].max())
        weights /= weights.sum()
        total = 0.0
        for n, token in enumerate(order):
            before = total + weights[n] if fault == "top-p leaves out the last" and n else total
            if n and before >= p[r]:
                break
            out[r, token] = z[r, token]
            total += weights[n]
    return out


@pytest.mark.parametrize("fault", ["", "top-k off by one", "top-p leaves out the last"])
@pytest.mark.parametrize("name", ["apply_top_k_top_p", "npu_top_k_top_p"])
def test_filters(fault: str, name: str) -> None:
    z = torch.from_numpy(logits(3)).float()
    k, p = [3, VOCAB, 8, 2], [1.0, 0.6, 0.85, 0.9]
    mine = torch.from_numpy(filtered(z.double().numpy(), k, p, fault)).float()
    both = [torch.tensor(k), torch.tensor(p, dtype=torch.float64)]
    args = (z, *both) if name.startswith("apply") else (z, *reversed(both))
    call = Call("x", f"torch.ops.vendor.{name}", args=args, outputs={"output.0": mine})
    assert verdict(call, "output.0", mine).passed == (not fault)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_min_p(factor: float) -> None:
    z, least = logits(4).astype(np.float32), [0.1, 0.02, 0.3, 0.5]
    out = np.full_like(z, -np.inf)
    for r in range(ROWS):
        p = np.exp(z[r].astype(float)) / np.exp(z[r].astype(float)).sum()
        for t in range(VOCAB):
            if p[t] >= factor * least[r] * p.max():
                out[r, t] = z[r, t]
    mine = torch.from_numpy(out)
    call = Call("x", "torch.ops.vendor.apply_min_p", args=(torch.from_numpy(z), torch.tensor(least).double()),
                outputs={"output.0": mine})  # fmt: skip
    assert verdict(call, "output.0", mine).passed == (factor == 1.0)


def test_a_token_that_was_filtered_out_is_wrong_and_any_other_is_right() -> None:
    z = torch.from_numpy(logits(5)).float()
    k, order = torch.tensor([3] * ROWS), torch.from_numpy(logits(5)).argsort(1, descending=True)
    for place, right in ((0, True), (2, True), (3, False)):
        token = order[:, place].clone()
        call = Call("s", "TopKTopPSampler", {"logits": z, "k": k}, outputs={"output.0": token})
        assert verdict(call, "output.0", token).passed == right


def test_a_draw_by_given_noise() -> None:
    r = np.random.default_rng(6)
    probs, noise = r.dirichlet(np.ones(VOCAB), ROWS), r.exponential(size=(ROWS, VOCAB))
    best = torch.tensor([max(range(VOCAB), key=lambda t: probs[n, t] / noise[n, t]) for n in range(ROWS)])
    args = (torch.from_numpy(probs), torch.from_numpy(noise))
    call = Call("x", "torch.ops.vendor.random_sample", args=args, outputs={"output.0": best})
    assert verdict(call, "output.0", best).passed
    assert not verdict(call, "output.0", torch.from_numpy(probs).argmax(1)).passed
