"""Short convolutions and their states against the definition in numpy, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drawn_sizes import drawn_sizes
from family_verdict import verdict
from reference_calls import evaluated

from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.recurrent.short_conv import in_order


def defined(x: np.ndarray, w: np.ndarray, bias: np.ndarray, state: np.ndarray, fault: str = "") -> tuple:
    """x [t, d], w [d, width], state [d, width - 1]: outputs and the last inputs, by plain loops."""
    t, d = x.shape
    width = w.shape[1]
    out, last = np.zeros((t, d)), state.copy()
    for i in range(t):
        for c in range(d):
            y = bias[c]
            for j in range(width):
                back = i - (width - 1) + j - (1 if fault == "one early" else 0)
                value = x[back, c] if back >= 0 else (state[c, back] if -back <= width - 1 else 0.0)
                y += w[c, j] * value
            out[i, c] = y / (1 + np.exp(-y))
    for c in range(d):
        whole = [*state[c], *x[:, c]]
        last[c] = whole[-width:-1] if fault == "state one early" else whole[len(whole) - width + 1 :]
    return out, last


D, WIDTH = 5, 4
sizes = drawn_sizes(__name__, D=(3, 12), WIDTH=(2, 6))


def batch(dtype: torch.dtype, fault: str = "") -> Call:
    """Three sequences: new, continued, one of one token; states with more room than they need."""
    r = np.random.default_rng(1)
    ends, places, begins = [0, 6, 8, 9], [2, 4, 1], [False, True, True]
    x, w, bias = (torch.from_numpy(r.normal(size=s)).to(dtype) for s in ((D, 9), (D, WIDTH), (D,)))
    states = torch.from_numpy(r.normal(size=(5, D, WIDTH - 1))).to(dtype)
    wide = [t.double().numpy() for t in (x.T, w, bias)]
    out, new = np.zeros((9, D)), states.double().numpy().copy()
    for n in range(3):
        at = places[(n + 1) % 3] if fault == "state of another slot" else places[n]
        first = states[at].double().numpy() if begins[n] or fault == "stale state" else np.zeros((D, WIDTH - 1))
        rows = slice(ends[n], ends[n + 1])
        out[rows], new[places[n]] = defined(wide[0][rows], wide[1], wide[2], first, fault)
    args = (x, w, bias, states, torch.tensor(ends), torch.tensor(places), torch.tensor(begins), "silu")
    outputs = {"output.0": torch.from_numpy(out.T.copy()).to(dtype), "inplace.input.3": torch.from_numpy(new).to(dtype)}
    return Call("x", "torch.ops.vllm.causal_conv1d_fn", args=args, outputs=outputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_batch_is_the_definition(dtype: torch.dtype) -> None:
    call = batch(dtype)
    found = evaluated(call)
    for role, mine in call.outputs.items():
        torch.testing.assert_close(
            found[role].value.to(dtype), mine, rtol=1e-9 if dtype == torch.float64 else 1e-2, atol=1e-9
        )
        assert verdict(call, role, mine).passed


@pytest.mark.parametrize("fault", ["one early", "state one early", "state of another slot", "stale state"])
def test_a_wrong_convolution_is_found(fault: str) -> None:
    right, wrong = batch(torch.bfloat16), batch(torch.bfloat16, fault)
    assert any(not verdict(right, role, wrong.outputs[role]).passed for role in right.outputs)


def test_one_token_of_each_sequence() -> None:
    r = np.random.default_rng(2)
    x, w, bias, states = (torch.from_numpy(r.normal(size=s)) for s in ((3, D), (D, WIDTH), (D,), (6, D, WIDTH - 1)))
    places = torch.tensor([[4], [0], [2]])
    out, new = np.zeros((3, D)), states.numpy().copy()
    for n in (0, 2):  # slot 0 is padding
        y, new[int(places[n])] = defined(x[n : n + 1].numpy(), w.numpy(), bias.numpy(), states[int(places[n])].numpy())
        out[n] = y[0]
    call = Call("x", "torch.ops._C.causal_conv1d_update_cpu_vec", args=(x, states, w, bias, "silu", places, None, 0),
                outputs={"output.0": torch.from_numpy(out), "inplace.input.1": torch.from_numpy(new)})  # fmt: skip
    found = evaluated(call)
    assert found["output.0"].rows.tolist() == [True, False, True]
    np.testing.assert_allclose(found["output.0"].value[[0, 2]], out[[0, 2]], rtol=1e-12)
    assert found["inplace.input.1"].value.equal(torch.from_numpy(new))


def conv_kernels() -> Any:
    """vLLM's CPU kernels."""
    pytest.importorskip("vllm")
    import vllm._custom_ops  # noqa: F401
    from vllm.platforms import current_platform  # noqa: F401

    if not hasattr(torch.ops._C, "causal_conv1d_weight_pack") or not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's kernels for packed weights are not here")
    return torch.ops._C


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_a_packed_weight_is_put_in_order(blocks: int) -> None:
    w = torch.from_numpy(np.random.default_rng(blocks).normal(size=(64 * blocks, 4))).bfloat16()
    packed = conv_kernels().causal_conv1d_weight_pack(w)
    assert not torch.equal(packed, w)
    assert torch.equal(in_order(packed), w)


@pytest.mark.parametrize("seed", range(3))
def test_vllms_own_kernels_with_a_packed_weight(seed: int) -> None:
    """Forward and update as they are, and with the weight as it was before it was packed, which is a wrong kernel's."""
    kernels, r = conv_kernels(), np.random.default_rng(seed)
    d, lengths = 64 * int(r.integers(1, 4)), r.integers(1, 9, 3)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    x, w, bias = (torch.from_numpy(r.normal(size=s)).bfloat16() for s in ((d, int(ends[-1])), (d, 4), (d,)))
    states = torch.from_numpy(r.normal(size=(6, 3, d))).bfloat16().transpose(1, 2)
    places, begun = torch.tensor([4, 1, 3], dtype=torch.int32), torch.tensor([True, False, True])
    packed = kernels.causal_conv1d_weight_pack(w)
    x = x.T.contiguous().T
    args = (x, packed, bias, states, ends, places, begun, True, -1, True)
    after = states.clone(memory_format=torch.preserve_format)
    mine = kernels.causal_conv1d_fwd_cpu(*args[:3], after, *args[4:])
    outputs = {"output.0": mine, "inplace.input.3": after}
    name = "torch.ops._C.causal_conv1d_fwd_cpu.default"
    right = Call("x", name, args=args, outputs=outputs)
    wrong = Call("x", name, args=(*args[:9], False), outputs=outputs)
    assert [verdict(right, role, y).passed for role, y in outputs.items()] == [True, True]
    assert not verdict(wrong, "output.0", mine).passed

    token = torch.from_numpy(r.normal(size=(3, d))).bfloat16()
    args = (token, states, packed, bias, True, None, places, -1, True)
    after = states.clone(memory_format=torch.preserve_format)
    mine = kernels.causal_conv1d_update_cpu(token.clone(), after, *args[2:])
    outputs = {"output.0": mine, "inplace.input.1": after}
    name = "torch.ops._C.causal_conv1d_update_cpu.default"
    right = Call("x", name, args=args, outputs=outputs)
    wrong = Call("x", name, args=(*args[:8], False), outputs=outputs)
    assert [verdict(right, role, y).passed for role, y in outputs.items()] == [True, True]
    assert not verdict(wrong, "output.0", mine).passed
