"""What would make a wrong attention right, from attention that was made wrong by torch itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.truncated import truncated

from vllm_accprobe.dump.schema import RowSpace, Segment
from vllm_accprobe.opcheck.calls.neighbours import Past
from vllm_accprobe.opcheck.floors.attention_causes import cause
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.registry import default_references

HEADS, KV, HEAD, SCALE = 4, 2, 32, 0.2
LONG, SHORT = 300, 40
NEVER = " (written elsewhere, or not at all)"


def kernel(q: Any, k: Any, v: Any, first: int, window: int | None, scale: float = SCALE) -> Any:
    """torch's attention of rows at positions from ``first`` on, [n, heads, d]."""
    at, keys = torch.arange(first, first + len(q))[:, None], torch.arange(len(k))[None]
    mask = (keys <= at) & (at - keys < (window or 1 << 20))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1)


def wrong(
    rows: int = 20, window: int | None = None, used: int | str | None = "same", scale: float = SCALE,
    gone: tuple[int, int] = (0, 0), extra: float = 0.0, rounded: Any = torch.Tensor.bfloat16,
) -> Call:  # fmt: skip
    """The last rows of a request of 300 positions beside a short, right one. used: the window that the kernel took;
    gone: positions whose key and value it found to be 0; extra: what it added to one head; rounded: how it gave
    its result, from float64."""
    g = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(LONG, n, HEAD, generator=g).bfloat16().double() for n in (HEADS, KV, KV))
    k2, v2 = k.clone(), v.clone()
    k2[gone[0] : gone[1]], v2[gone[0] : gone[1]] = 0, 0
    first = LONG - rows
    took = window if used == "same" else used
    out = kernel(q[first:], k2, v2, first, took, scale)  # type: ignore[arg-type]
    out[:, 1] += extra
    other = kernel(q[:SHORT], k[:SHORT], v[:SHORT], 0, window)
    past = Past(("key", "value"))
    flat = {"query": q, "key": k, "value": v}
    before = RowSpace(0, "tokens", 0, (Segment(0, 0, first, 0),))
    past.write(before, {n: flat[n][:first].flatten(1).bfloat16() for n in ("key", "value")})
    here = RowSpace(1, "tokens", 0, (Segment(1, 0, SHORT, 0), Segment(0, first, rows, 0)))
    inputs = {n: torch.cat((t[:SHORT], t[first:])).flatten(1).bfloat16() for n, t in flat.items()}
    past.write(here, inputs)
    attrs = {"num_heads": HEADS, "num_kv_heads": KV, "head_size": HEAD} | ({"sliding_window": window} if window else {})
    return Call("a", "Attention", inputs, attrs=attrs, parent={"scaling": SCALE},
                outputs={"output.0": rounded(torch.cat((other, out)).flatten(1))},
                extra={"cache": past.view(here)})  # fmt: skip


def said(call: Call) -> str:
    found = default_references().evaluate(call)
    assert not isinstance(found, Declined)
    return cause(call, found["output.0"])


@pytest.mark.parametrize("rounded", [torch.Tensor.bfloat16, truncated])
@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"scale": SCALE * 1.02}, "as with a softmax scale 1.02 times as large"),
        ({"scale": SCALE * 0.7}, "as with a softmax scale 0.7 times as large"),
        ({"window": 24, "used": 23}, "as with a sliding window of 23 instead of 24"),
        ({"window": 24, "used": 25}, "as with a sliding window of 25 instead of 24"),
        ({"window": 24, "used": None}, "as with no sliding window"),
        ({"used": 77}, "as with a sliding window of 77"),
        ({"gone": (53, 54)}, "as if key and value of position 53 were 0 in the cache" + NEVER),
        ({"gone": (64, 96)}, "as if keys and values of positions 64 to 95 were 0 in the cache"),
        ({"gone": (0, 128)}, "as if keys and values of positions 0 to 127 were 0 in the cache"),
        ({"extra": 0.3}, ""),
        ({}, ""),
    ],
)
def test_what_fits_is_said(rows: int, how: dict[str, Any], sentence: str, rounded: Any) -> None:
    """Whether the kernel rounds to nearest or cuts off, which looks like a scale 0.2 % too small."""
    found = said(wrong(rows, **how, rounded=rounded))
    factor = how.get("scale", 0.0) / SCALE
    if factor and rows == 1:  # one row tells the scale less exactly
        assert abs(float(found.split()[5]) - factor) < 0.01
    else:
        assert found == sentence


def test_a_guess_never_costs_the_verdict() -> None:
    call = wrong(scale=1.0)
    nan = call.outputs["output.0"].clone()
    nan[3] = float("nan")
    value = Expected(torch.zeros(nan.shape, dtype=torch.float64))
    for odd in (
        replace(call, outputs={"output.0": nan}), replace(call, extra={}), replace(call, attrs={}),
        replace(call, inputs={}), replace(call, params={"sinks": torch.zeros(HEADS)}),
    ):  # fmt: skip
        assert cause(odd, value) == ""
