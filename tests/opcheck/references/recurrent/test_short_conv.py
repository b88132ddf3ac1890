"""Short convolutions and their states against the definition in numpy, and against wrong kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from family_verdict import verdict
from reference_calls import evaluated

from vllm_accprobe.opcheck.reference import Call


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


def batch(dtype: torch.dtype, fault: str = "") -> Call:
    """Three sequences: new, continued, one of one token; d = 5, width 4, states with more room than they need."""
    r = np.random.default_rng(1)
    ends, places, begins = [0, 6, 8, 9], [2, 4, 1], [False, True, True]
    x, w, bias = (torch.from_numpy(r.normal(size=s)).to(dtype) for s in ((5, 9), (5, 4), (5,)))
    states = torch.from_numpy(r.normal(size=(5, 5, 3))).to(dtype)
    wide = [t.double().numpy() for t in (x.T, w, bias)]
    out, new = np.zeros((9, 5)), states.double().numpy().copy()
    for n in range(3):
        at = places[(n + 1) % 3] if fault == "state of another slot" else places[n]
        first = states[at].double().numpy() if begins[n] or fault == "stale state" else np.zeros((5, 3))
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
    x, w, bias, states = (torch.from_numpy(r.normal(size=s)) for s in ((3, 5), (5, 4), (5,), (6, 5, 3)))
    places = torch.tensor([[4], [0], [2]])
    out, new = np.zeros((3, 5)), states.numpy().copy()
    for n in (0, 2):  # slot 0 is padding
        y, new[int(places[n])] = defined(x[n : n + 1].numpy(), w.numpy(), bias.numpy(), states[int(places[n])].numpy())
        out[n] = y[0]
    call = Call("x", "torch.ops._C.causal_conv1d_update_cpu_vec", args=(x, states, w, bias, "silu", places, None, 0),
                outputs={"output.0": torch.from_numpy(out), "inplace.input.1": torch.from_numpy(new)})  # fmt: skip
    found = evaluated(call)
    assert found["output.0"].rows.tolist() == [True, False, True]
    np.testing.assert_allclose(found["output.0"].value[[0, 2]], out[[0, 2]], rtol=1e-12)
    assert found["inplace.input.1"].value.equal(torch.from_numpy(new))
