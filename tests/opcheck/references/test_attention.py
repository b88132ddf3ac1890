"""Attention against torch's and by hand, over rows of several requests; torch's own operators within roundings."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, evaluated

from vllm_accprobe.dump.schema import RowSpace, Segment
from vllm_accprobe.opcheck.calls.neighbours import INCOMPLETE, Past
from vllm_accprobe.opcheck.floors.verdict import judge
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import attention
from vllm_accprobe.opcheck.references.attention import alibi_slopes, attend, attention_settings

draw = drawer(9)


def sdpa(q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    """torch's own, on [rows, heads, d]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **more).transpose(0, 1)


@pytest.mark.parametrize(("config", "attrs", "slopes", "scale"), [
    ({"model_type": "bloom"}, {"impl.scale": 0.5}, [2.0**-4, 2.0**-8], 0.5),
    ({"model_type": "falcon", "alibi": True}, {"impl.scale": 0.5}, [2.0**-5, 2.0**-9], 0.5),  # adds, then scales
    ({"model_type": "other"}, {"impl.alibi_slopes": [0.25, 0.125]}, [0.25, 0.125], 16**-0.5),
    ({"model_type": "gemma3n_text"}, {"impl.scale": 1.0}, None, 1.0),
    ({"model_type": "gemma3n_text"}, {"impl.scale": 1.0, "scale": 0.25}, None, 0.25),
])  # fmt: skip
def test_slopes_and_scale_of_a_module(config, attrs, slopes, scale):
    found = attention_settings(Call("a", "Attention", attrs=attrs, config=config), 2, 16)
    assert (None if found["slopes"] is None else found["slopes"].tolist(), found["scale"]) == (slopes, scale)


def test_slopes_by_hand() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]


def test_noise_is_what_rounded_probabilities_do() -> None:
    """200 draws of probabilities off by up to step, evenly, and divided by their own sum or by that of the exact ones:
    the larger spread is what attend says."""
    q, k, v = draw(2, 1, 8), draw(12, 1, 8), draw(12, 1, 4)
    exact, noise, _ = attend(q, k, v, 1.0, step=1e-3)
    p = torch.softmax((q[:, 0] @ k[:, 0].T), -1)
    errors: tuple[list[torch.Tensor], ...] = ([], [])
    for _ in range(200):
        w = p * (1 + 1e-3 * (2 * torch.rand(p.shape, dtype=torch.float64) - 1))
        errors[0].append((w / w.sum(-1, keepdim=True)) @ v[:, 0] - exact[:, 0])
        errors[1].append(w @ v[:, 0] - exact[:, 0])
    ratio = torch.maximum(*(torch.stack(e).std(0) for e in errors)) / noise[:, 0]
    assert 0.8 < float(ratio.min()) < float(ratio.max()) < 1.25


def space(*spans: tuple[int, int, int]) -> RowSpace:
    return RowSpace(0, "tokens", 0, tuple(Segment(r, p, n, 0) for r, p, n in spans))


def test_a_cache_is_put_together_and_gaps_are_said() -> None:
    past, x = Past(("key",)), torch.arange(12.0).reshape(12, 1)
    past.write(space((0, 0, 3), (1, 0, 2)), {"key": x[:5]})
    past.write(space((0, 3, 1), (1, 4, 1)), {"key": x[5:7]})
    view = past.view(space((0, 3, 1), (1, 4, 1)))
    found = list(view.requests())
    assert [(at.tolist(), pos.tolist(), held["key"].flatten().tolist()) for at, pos, held in found] == [
        ([0], [3], [0.0, 1.0, 2.0, 5.0])
    ]
    assert view.why == INCOMPLETE
    past.write(space((0, 2, 2)), {"key": x[8:10]})  # computed again
    (_, _, held), *_ = past.view(space((0, 3, 1))).requests()
    assert held["key"].flatten().tolist() == [0.0, 1.0, 8.0, 9.0]


@pytest.mark.parametrize("causal", [True, False])
def test_heads_and_queries_in_blocks_give_the_same(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(n, h, 8, generator=g).double() for n, h in ((7, 6), (20, 3), (20, 3)))
    more = {
        "slopes": alibi_slopes(6), "sinks": torch.randn(6, generator=g).double(), "step": 2.0**-9, "window": 9,
        "score_noise": torch.rand(6, 7, 20, generator=g).double() * 1e-3,
    }  # fmt: skip
    seen = torch.arange(13, 20) if causal else None
    if not causal:
        more = {"hidden": torch.rand(7, 20, generator=g) < 0.3, "step": 2.0**-9}
    whole = attend(q, k, v, 0.3, seen, **more)
    monkeypatch.setattr(attention, "_KEYS", 2 * 20 * 8)
    monkeypatch.setattr(attention, "_SCORES", 2 * 20 * 3)
    for a, b in zip(attend(q, k, v, 0.3, seen, **more), whole, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def flash(seed: int, n: int = 300, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Call:
    """A call of torch's kernel, two thirds of whose rows lie beyond the first block of keys."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 4, n, 64, generator=g).to(dtype) for _ in range(3))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, **how)
    return Call("a", _FLASH, args=(q, k, v, 0.0, True), kwargs=how, outputs={"output.0": out, "output.1": lse})


def worst(call: Call) -> list[float]:
    """Of both outputs, the worst measure over what it may be."""
    found = evaluated(call)
    verdicts = []
    for role, width in (("output.0", 64), ("output.1", 300)):
        e, mine = found[role], call.outputs[role]
        assert e.noise is not None
        verdicts.append(judge(e.value.reshape(-1, width), mine.double().reshape(-1, width),
                              str(mine.dtype).removeprefix("torch."), noise=e.noise.reshape(-1, width)))  # fmt: skip
    return [v.value / v.limit for v in verdicts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_torchs_own_kernels_are_within_their_roundings(seed: int, dtype: torch.dtype) -> None:
    assert max(worst(flash(seed, dtype=dtype))) < 0.9


@pytest.mark.parametrize(("factor", "least"), [(1.02, 1.5), (0.98, 1.5), (1.1, 8.0)])
def test_a_scale_that_is_off_shows(factor: float, least: float) -> None:
    wrong = flash(1, scale=factor / 8)
    call = Call("a", _FLASH, args=wrong.args, outputs=wrong.outputs)
    assert min(worst(call)) > least


def test_masks_shared_heads_and_overloads_of_torchs_operators() -> None:
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 9, 8), draw(2, 2, 9, 6)
    seen = draw(2, 1, 5, 9) < 0.5
    seen[..., 0] = True
    added = torch.where(seen, 0.25, -math.inf).double()
    for mask in (seen, added, None):
        exact = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
        call = Call("a", "aten.scaled_dot_product_attention.default", args=(q, k, v, mask),
                    kwargs={"scale": 0.3, "enable_gqa": True}, outputs={"output.0": exact})  # fmt: skip
        torch.testing.assert_close(evaluated(call)["output.0"].value, exact, rtol=1e-12, atol=1e-12)
    dropped = Call("a", "aten.scaled_dot_product_attention", args=(q, k, v, None, 0.1), outputs={"output.0": exact})
    with pytest.raises(Declined, match="random"):
        evaluated(dropped)


@pytest.mark.parametrize("held", ["as a parameter", "by its kernel's object", "by the module above"])
@pytest.mark.parametrize(("cls", "window", "keys"), [("Attention", None, (0, 9)), ("Attention", 3, (4, 7)),
                                                     ("EncoderOnlyAttention", 3, (4, 9))])  # fmt: skip
def test_which_keys_a_row_sees_and_its_sinks(cls: str, window: int | None, keys: tuple[int, int], held: str) -> None:
    """The row at position 6 of 9; a window of an encoder reaches to both sides."""
    q, k, v = (torch.randn(9, 4, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    first, stop = keys if cls != "Attention" else (keys[0], 7)
    scores = torch.cat((k[first:stop].double() @ q[6].double(), torch.tensor([0.5]).double()))
    right = scores.softmax(0)[:-1] @ v[first:stop].double()
    past = Past(("key", "value"))
    here = space((0, 0, 9))
    past.write(here, {"key": k, "value": v})
    sinks: dict[str, Any] = {"params": {"sinks": torch.tensor([0.5])}}
    attrs = {"num_heads": 1, "num_kv_heads": 1, "head_size": 4, "sliding_window": window, "scale": 1.0}
    if held != "as a parameter":
        sinks, attrs = {}, attrs | {"impl.sinks": [0.5 if held == "by its kernel's object" else 9.0]}
    above = {"parent_sinks": torch.tensor([0.5]).double()} if held == "by the module above" else {}
    call = Call("a", cls, {"query": q, "key": k, "value": v}, attrs=attrs, outputs={"output.0": torch.zeros_like(q)},
                extra={"cache": past.view(here), **above}, **sinks)  # fmt: skip
    found = attention.paged_attention(call)
    assert torch.allclose(found.value[6], right)
