"""Causes of attention over a cache, from attention that was made wrong by torch itself, rounded or cut off."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opcheck.cause_calls import explained
from support.truncated import truncated

from vllm_accprobe.dump.schema import RowSpace, Segment
from vllm_accprobe.opcheck.calls.neighbours import Past
from vllm_accprobe.opcheck.reference import Call

HEADS, KV, HEAD, SCALE = 4, 2, 32, 0.2
LONG, SHORT = 300, 40
NEVER = " (written elsewhere, or not at all)"


def kernel(
    q: Any, k: Any, v: Any, first: int, window: int | None, scale: float = SCALE, late: int = 0
) -> Any:  # fmt: skip
    """torch's attention of rows at positions from ``first`` on, [n, heads, d]. late: keys that each row lacks."""
    at, keys = torch.arange(first - late, first - late + len(q))[:, None], torch.arange(len(k))[None]
    mask = (keys <= at) & (at - keys < (window or 1 << 20))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1)


def wrong(
    rows: int = 20, window: int | None = None, used: int | str | None = "same", scale: float = SCALE,
    gone: tuple[int, int] = (0, 0), late: int = 0, own: bool = False, extra: float = 0.0,
    rounded: Any = torch.Tensor.bfloat16,
) -> Call:  # fmt: skip
    """The last rows of a request of 300 positions beside a short, right one. used: the window that the kernel took;
    gone: positions whose key and value it found to be 0; late: keys that each row lacks; own: it read keys of this
    step alone; extra: what it added to one head; rounded: how it gave
    its result, from float64."""
    g = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(LONG, n, HEAD, generator=g).bfloat16().double() for n in (HEADS, KV, KV))
    k2, v2 = k.clone(), v.clone()
    k2[gone[0] : gone[1]], v2[gone[0] : gone[1]] = 0, 0
    first = LONG - rows
    took = window if used == "same" else used
    start = first if own else 0
    out = kernel(q[first:], k2[start:], v2[start:], first - start, took, scale, late)  # type: ignore[arg-type]
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
    found = explained(call)
    return "" if found is None else " or ".join(dict.fromkeys(f.clause for f in found.found))


@pytest.mark.parametrize("rounded", [torch.Tensor.bfloat16, truncated])
@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize(
    ("how", "clause"),
    [
        ({"scale": SCALE * 1.02}, "with the softmax scale 0.204"),
        ({"scale": SCALE * 0.7}, "with the softmax scale 0.14"),
        ({"window": 24, "used": 23}, "with a sliding window of 23"),
        ({"window": 24, "used": 25}, "with a sliding window of 25"),
        ({"window": 24, "used": None}, "without its sliding window of 24"),
        ({"used": 77}, "with a sliding window of 77"),
        ({"gone": (53, 54)}, "if keys and values of position 53 were 0 in the cache" + NEVER),
        ({"gone": (64, 96)}, "if keys and values of positions 64 to 95 were 0 in the cache" + NEVER),
        ({"gone": (0, 128)}, "if keys and values of positions 0 to 127 were 0 in the cache" + NEVER),
        ({"late": 1}, "if each row read the keys before its own position only"),
        ({"own": True}, "if only the keys of this step were read, and none of earlier steps"),
        ({"extra": 0.3}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_what_fits_is_said(rows: int, how: dict[str, Any], clause: str, rounded: Any) -> None:
    """Whether the kernel rounds to nearest or cuts off, which is nearly a scale 0.2 % too small."""
    found = said(wrong(rows, **how, rounded=rounded))
    if "scale" in how:
        assert abs(float(found.split()[-1]) / how["scale"] - 1.0) < (0.01 if rows == 1 else 0.002)
    elif rows == 1 and "late" in how:  # a key of 0 and none are the same within rounding where the softmax is wide
        assert found == "if keys and values of position 299 were 0 in the cache" + NEVER
    else:
        assert found == clause


@pytest.mark.parametrize("lost", ["nan", "extra", "attrs", "inputs"])
def test_a_cause_never_costs_the_verdict(lost: str) -> None:
    call = wrong(scale=1.0)
    nan = call.outputs["output.0"].clone()
    nan[3] = float("nan")
    change = {"outputs": {"output.0": nan}} if lost == "nan" else {lost: {}}
    assert said(replace(call, **change)) == ""  # type: ignore[arg-type]
