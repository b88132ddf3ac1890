"""Fused attention in every layout and sparse mode, against loops over queries and keys, and its gradient."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference_calls import TABLE, evaluated, verdict

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import attention, gradients

B, N, NK, SQ, SK, D, SCALE = 2, 4, 2, 7, 9, 8, 0.4
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "BNSD": lambda x: x, "BSND": lambda x: x.transpose(1, 2), "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}  # fmt: skip
"""[B, N, S, D] in each layout."""


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def defined(
    q: Any, k: Any, v: Any, hidden: Any = False, pse: Any = None, pse_first: bool = True, sink: Any = None
) -> tuple[Any, Any, Any]:  # fmt: skip
    """q [N, Sq, D], k, v [Nk, Skv, D] → output, largest scores, sums; hidden [Sq, Skv]. A query without a key: 0."""
    own = np.arange(len(q)) * len(k) // len(q)
    s = q @ k[own].swapaxes(1, 2)
    s = s * SCALE if pse is None else (s + pse) * SCALE if pse_first else s * SCALE + pse
    s = np.where(hidden, -np.inf, s)
    extra = np.full((len(q), 1), -np.inf) if sink is None else sink[:, None]
    top = np.maximum(s.max(-1), extra)
    top = np.where(np.isinf(top), 0.0, top)
    e = np.exp(s - top[..., None])
    total = e.sum(-1) + np.exp(extra - top)
    return e @ v[own] / np.where(total, total, 1.0)[..., None], top, total


def tensors(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return draw(seed, B, N, SQ, D, dtype=dtype), draw(seed + 1, B, NK, SK, D, dtype=dtype), draw(
        seed + 2, B, NK, SK, D, dtype=dtype)  # fmt: skip


def call_of(q: Any, k: Any, v: Any, layout: str = "BNSD", name: str = "npu_fusion_attention", **kwargs: Any) -> Call:
    args = (*(LAYOUTS[layout](t) for t in (q, k, v)), N, layout)
    return Call("tap", f"NPU.{name}", args=args, kwargs={"scale": SCALE, **kwargs})


SHIFT = SK - SQ
FULL = torch.rand(B, 1, SQ, SK, generator=torch.Generator().manual_seed(9)) < 0.3
FULL[..., 0] = False
QUERY, KEY = np.indices((SQ, SK))
COMPRESSED = torch.cat((TRIANGLE, torch.zeros(1024, 2048, dtype=torch.bool)))
MODES: dict[str, tuple[dict[str, Any], Any]] = {
    "no mask, whatever the mode": ({"sparse_mode": 3}, [QUERY < 0] * 2),
    "0, a mask": ({"atten_mask": FULL}, FULL[:, 0].numpy()),
    "0, of 0 and 1, one for all": ({"atten_mask": FULL[0, 0].to(torch.uint8)}, [FULL[0, 0].numpy()] * 2),
    "1, all": ({"atten_mask": FULL, "sparse_mode": 1, "pre_tockens": 0}, FULL[:, 0].numpy()),
    "2, causal from the upper left": ({"atten_mask": TRIANGLE, "sparse_mode": 2}, [KEY > QUERY] * 2),
    "3, causal from the lower right": ({"atten_mask": TRIANGLE, "sparse_mode": 3}, [KEY > QUERY + SHIFT] * 2),
    "4, a band": ({"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tockens": 3, "next_tockens": 1},
                  [(KEY > QUERY + SHIFT + 1) | (KEY < QUERY + SHIFT - 3)] * 2),
    "5, a prefix in the mask": ({"atten_mask": FULL, "sparse_mode": 5, "prefix": [4, 5]}, FULL[:, 0].numpy()),
    "6, a compressed prefix": ({"atten_mask": COMPRESSED, "sparse_mode": 6, "prefix": [4, 6]},
                               [(KEY > QUERY + SHIFT) & (KEY >= 4), (KEY > QUERY + SHIFT) & (KEY >= 6)]),
}  # fmt: skip
"""Arguments, and the keys that each sample's queries do not see."""


@pytest.mark.parametrize("mode", MODES)
def test_layouts_and_modes(mode: str) -> None:
    kwargs, hidden = MODES[mode]
    q, k, v = tensors()
    y, top, total = (np.stack(x) for x in zip(*(defined(*(t[b].numpy() for t in (q, k, v)), hidden[b])
                                               for b in range(B)), strict=True))  # fmt: skip
    shapes = {"output.1": torch.zeros(B, N, SQ, 8), "output.2": torch.zeros(B, N, SQ, 8)}
    for layout, laid_out in LAYOUTS.items():
        found = evaluated(replace(call_of(q, k, v, layout, **kwargs), outputs=shapes))
        torch.testing.assert_close(found["output.0"].value, laid_out(torch.from_numpy(y)), rtol=1e-10, atol=1e-12)
        for role, x in (("output.1", top), ("output.2", total)):
            np.testing.assert_allclose(found[role].value.numpy(), np.repeat(x[..., None], 8, -1), rtol=1e-10)


@pytest.mark.parametrize(("mode", "rule"), [
    (0, lambda s, i, j, shift: i < 0),
    (2, lambda s, i, j, shift: j > i),
    (3, lambda s, i, j, shift: j > i + shift),
    (7, lambda s, i, j, shift: (j > i + shift) | ((j < i + shift - 2) & (s == 2))),
    (8, lambda s, i, j, shift: (j > i + shift) | (j < i + shift - 2) if s == 0 else j > i),
])  # fmt: skip
def test_samples_one_after_another(mode: int, rule: Any) -> None:
    """TND: three samples, one that takes no part, and lengths that are added up."""
    queries, keys = [0, 3, 7, 12], [0, 5, 10, 16]
    q, k, v = draw(1, 12, N, D), draw(2, 16, NK, D), draw(3, 16, NK, D)
    kwargs = {"actual_seq_qlen": [*queries[1:], 0], "actual_seq_kvlen": [*keys[1:], 0], "sparse_mode": mode,
              "atten_mask": None if mode == 0 else TRIANGLE, "pre_tockens": 2, "next_tockens": 0,
              "softmax_layout": "TND", "scale": SCALE}  # fmt: skip
    shapes = {"output.1": torch.zeros(12, N, 8)}
    found = evaluated(Call("tap", "npu.npu_fusion_attention", args=(q, k, v, N, "TND"), kwargs=kwargs, outputs=shapes))
    for s in range(3):
        rows, cols = slice(*queries[s : s + 2]), slice(*keys[s : s + 2])
        one = [t.transpose(0, 1).numpy() for t in (q[rows], k[cols], v[cols])]
        i, j = np.indices((one[0].shape[1], one[1].shape[1]))
        y, top, _ = defined(*one, rule(s, i, j, one[1].shape[1] - one[0].shape[1]))
        np.testing.assert_allclose(found["output.0"].value[rows].numpy(), y.transpose(1, 0, 2), rtol=1e-10)
        np.testing.assert_allclose(found["output.1"].value[rows, :, 3].numpy(), top.T, rtol=1e-10)


def test_positions_sinks_and_further_channels() -> None:
    q, k, v = tensors()
    pse, sink = draw(5, B, N, SQ, SK), draw(6, N)
    for name, more, first in (("npu_fusion_attention", {}, True), ("npu_fusion_attention_v2", {"pse_type": 0}, False)):
        for bias in (pse, pse[:, :, :1], pse[:1]):
            got = evaluated(call_of(q, k, v, "BNSD", name, pse=bias, sink=sink, **more))["output.0"].value
            for b in range(B):
                one = (t[b].numpy() for t in (q, k, v))
                y = defined(*one, False, bias[b % len(bias)].numpy(), first, sink.numpy())[0]
                np.testing.assert_allclose(got[b].numpy(), y, rtol=1e-10, atol=1e-12)
    rope = {"query_rope": draw(7, B, N, SQ, 4), "key_rope": draw(8, B, NK, SK, 4)}
    whole = torch.cat((q, rope["query_rope"]), -1), torch.cat((k, rope["key_rope"]), -1)
    apart = evaluated(call_of(q, k, v, "BNSD", "npu_fusion_attention_v2", **rope))["output.0"].value
    torch.testing.assert_close(apart, evaluated(call_of(*whole, v))["output.0"].value)


def test_parts_that_fit_into_memory_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    kwargs, _ = MODES["3, causal from the lower right"]
    up = draw(4, B, N, SQ, D)

    def both() -> tuple[Any, Any]:
        call = call_of(q, k, v, **kwargs)
        found = gradients.exact_gradients(call, lambda c: gradients.differentiated(TABLE, c), {"output.0": up})
        return evaluated(call)["output.0"], found

    whole, of_whole = both()
    for most in (SQ * SK * 2, SK * 2):  # some heads at a time, some queries at a time
        monkeypatch.setattr(attention, "_SCORES", most)
        monkeypatch.setattr(attention, "_CHECKPOINTS", 1)
        parts, of_parts = both()
        torch.testing.assert_close(parts.value, whole.value)
        torch.testing.assert_close(parts.noise, whole.noise)
        for name, g in of_whole.items():
            torch.testing.assert_close(of_parts[name].value, g.value)


@pytest.mark.parametrize("mode", ["no mask, whatever the mode", "0, a mask", "3, causal from the lower right"])
def test_gradients_by_differences_and_as_an_operator(mode: str) -> None:
    kwargs, hidden = MODES[mode]
    pse = draw(5, B, N, SQ, SK)
    given = {**kwargs, "pse": pse}
    q, k, v = tensors()
    up = draw(4, B, N, SQ, D)
    call = call_of(q, k, v, **given)
    found = gradients.exact_gradients(call, lambda c: gradients.differentiated(TABLE, c), {"output.0": up})
    own = {("scale_value" if n == "scale" else n): x for n, x in call.kwargs.items()}
    as_operator = evaluated(
        Call("tap", "torch.ops.npu.npu_fusion_attention_grad", args=(q, k, v, up, N, "BNSD"), kwargs=own)
    )

    def total(parts: dict[str, Any]) -> float:
        return sum(
            float((defined(*(parts[n][b].numpy() for n in "qkv"), hidden[b], parts["p"][b].numpy())[0]
                   * up[b].numpy()).sum()) for b in range(B)
        )  # fmt: skip

    held = dict(zip("qkvp", (q, k, v, pse), strict=True))
    for n, role, output in (("q", "input.0", "output.0"), ("k", "input.1", "output.1"), ("v", "input.2", "output.2"),
                            ("p", "input.pse", "output.3")):  # fmt: skip
        along = draw(11, *held[n].shape)
        difference = (total({**held, n: held[n] + 1e-6 * along}) - total({**held, n: held[n] - 1e-6 * along})) / 2e-6
        assert float((found[role].value * along).sum()) == pytest.approx(difference, rel=1e-6, abs=1e-7)
        torch.testing.assert_close(as_operator[output].value, found[role].value)


CAUSAL, OWN = torch.from_numpy(KEY > QUERY + SHIFT), torch.arange(N) * NK // N


@pytest.mark.parametrize("wrong", [
    {}, {"mask": CAUSAL & False}, {"mask": torch.from_numpy(KEY > QUERY)}, {"scale": 1.0},
    {"heads": torch.arange(N) % NK}, {"mask": CAUSAL | torch.from_numpy(KEY == SK - 1)},
])  # fmt: skip
def test_a_kernel_whose_weights_are_rounded_passes_and_wrong_ones_fail(wrong: dict[str, Any]) -> None:
    """In bfloat16. heads: which heads of keys serve."""
    q, k, v = tensors(dtype=torch.bfloat16)
    how = {"mask": CAUSAL, "scale": SCALE, "heads": OWN, **wrong}
    key, value = (t[:, how["heads"]].float() for t in (k, v))
    scores = (q.float() @ key.transpose(-1, -2) * how["scale"]).masked_fill(how["mask"], -math.inf)
    mine = (torch.softmax(scores, -1).bfloat16().float() @ value).bfloat16()
    call = call_of(q, k, v, atten_mask=TRIANGLE, sparse_mode=3)
    passed = verdict(replace(call, outputs={"output.0": mine}), "output.0", mine).passed
    assert passed == (not wrong)


def test_a_wrong_gradient_fails() -> None:
    q, k, v = tensors(dtype=torch.bfloat16)
    up = draw(4, B, N, SQ, D, dtype=torch.bfloat16)
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    y = torch.softmax(leaves[0] @ leaves[1][:, OWN].transpose(-1, -2) * 0.4, -1) @ leaves[2][:, OWN]
    dq, dk, dv = (g.bfloat16() for g in torch.autograd.grad(y, leaves, up.float()))
    args, kwargs = (q, k, v, up, N, "BNSD"), {"scale_value": 0.4}

    def passes(role: str, mine: torch.Tensor) -> bool:
        call = Call("tap", "NPU.npu_fusion_attention_grad", args=args, kwargs=kwargs, outputs={role: mine})
        return verdict(call, role, mine).passed

    assert [passes(f"output.{n}", g) for n, g in enumerate((dq, dk, dv))] == [True] * 3
    half = dk.clone()
    half[:, 1] /= 2  # one head of queries of two
    assert not passes("output.0", (dq.float() / 0.4).bfloat16())
    assert not passes("output.1", half)
    assert not passes("output.2", dv.flip(-1))


def test_dropout_is_told_and_the_sums_are_judged() -> None:
    q, k, v = tensors(dtype=torch.bfloat16)
    exact = evaluated(call_of(q, k, v))
    top = torch.zeros(B, N, SQ, 8)
    found = evaluated(replace(call_of(q, k, v, keep_prob=0.9), outputs={"output.0": q, "output.1": top}))
    assert found["output.0"].only_measured == "an operator that draws random numbers: keep_prob 0.9"
    torch.testing.assert_close(found["output.1"].value, exact["output.1"].value)
    with pytest.raises(Declined, match="random"):
        evaluated(Call("t", "NPU.npu_fusion_attention_grad", args=(q, k, v, q, N, "BNSD"), kwargs={"keep_prob": 0.5}))


def test_a_query_that_sees_no_key_may_be_anything_that_is_published() -> None:
    q, k, v = tensors()
    mask = FULL.clone()
    mask[:, :, 2] = True
    call = call_of(q, k, v, atten_mask=mask)
    plain = evaluated(call_of(q, k, v))["output.0"].value
    for published in (torch.zeros(B, N, D), v[:, OWN].mean(2), plain[:, :, 2]):
        mine = evaluated(call)["output.0"].value.clone()
        mine[:, :, 2] = published
        torch.testing.assert_close(evaluated(replace(call, outputs={"output.0": mine}))["output.0"].value, mine)
    mine[:, :, 2] = 7.0
    assert not torch.equal(evaluated(replace(call, outputs={"output.0": mine}))["output.0"].value, mine)


@pytest.mark.parametrize(("layout", "kwargs", "why"), [
    ("BNSD", {"atten_mask": FULL, "pre_tockens": 1}, "lets through"),
    ("BNSD", {"atten_mask": torch.zeros(3, 3, dtype=torch.bool)}, "does not fit"),
    ("BNSD", {"atten_mask": ~TRIANGLE, "sparse_mode": 2}, "no upper triangle"),
    ("BNSD", {"sparse_mode": 7, "atten_mask": TRIANGLE}, "not defined for this layout"),
    ("BNSD", {"sparse_mode": 6, "atten_mask": FULL}, "needs a compressed"),
    ("BNSD", {"pse": torch.zeros(1, N, 1024, SK)}, "compressed"),
    ("BNSD", {"padding_mask": FULL}, "padding_mask"),
    ("NBSD", {}, "layout"),
    ("TND", {}, "TND call without|layout"),
    ("BNSD", {"unheard_of": 1}, "not in its schema"),
])  # fmt: skip
def test_what_no_document_defines_is_declined(layout: str, kwargs: dict[str, Any], why: str) -> None:
    q, k, v = tensors()
    call = replace(call_of(q, k, v, **kwargs), args=(q, k, v, N, layout))
    with pytest.raises(Declined, match=why):
        evaluated(call)
