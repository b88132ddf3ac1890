"""vLLM's own kernels of the indexer and of short convolutions with packed weights. Formulas: opcheck/samples/."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from opcheck.samples.paged import Indexed, Sparse, attention_over_pages, indexer_cache, scores_of_single_tokens
from opcheck.samples.sample import Draw, made
from reference_calls import evaluated, verdict

from vllm_accprobe.opcheck.references.recurrent import in_order


def test_a_row_beside_large_numbers_that_nobody_wrote_is_not_judged() -> None:
    x = Indexed(Draw(1))
    mine = x.scored("", 1)
    mine[0, -1] = 3e38
    call = scores_of_single_tokens(Draw(1), "").call
    rows = evaluated(replace(call, args=(*call.args[:6], x.longest + 1), outputs={"output.0": mine}))["output.0"].rows
    assert rows is not None
    assert rows.tolist() == [False] + [True] * (len(x.lengths) - 1)


def test_an_error_beside_a_large_number_does_not_pass() -> None:
    """A sparse query's row is judged where the memory behind its keys is small, and else counted as not judged."""
    x = Sparse(Draw(0))
    mine = x.scored()
    mine = torch.where(torch.isinf(mine), 0.0, mine)
    seen = mine[1, 2].clone()
    for beside, is_judged in ((0.0, True), (1e30, False)):
        mine[1, 2], mine[1, -1] = 30.0 * seen, beside
        call = x.made(mine).call
        rows = evaluated(call)["output.0"].rows
        assert (rows is None or bool(rows[1])) == is_judged
        assert not is_judged or not verdict(call, "output.0", mine).passed


@pytest.fixture(scope="module")
def kernels() -> Any:
    """vLLM's CPU kernels; they need AVX-512."""
    pytest.importorskip("vllm")
    import vllm._custom_ops  # noqa: F401
    from vllm.platforms import current_platform  # noqa: F401

    found = torch.ops._C
    if not hasattr(found, "fp8_paged_mqa_logits_cpu") or not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's kernels of the indexer are not here")
    return found


def test_vllms_own_scores_and_choice(kernels: Any) -> None:
    d = Draw(1, torch.float32)
    codes, _, cache = indexer_cache(d, 40, 64, 128)
    q, w = d(3, 64, 128).to(torch.float8_e4m3fn), d(3, 64)
    table = torch.from_numpy(d.rng.permutation(len(codes))[:33].reshape(3, 11)).int()
    lengths = torch.tensor([5, 600, 700], dtype=torch.int32)
    args = (q, cache, w, lengths, table, 64, 700)
    mine = kernels.fp8_paged_mqa_logits_cpu(*args)
    for row, stop in enumerate(lengths.tolist()):
        mine[row, stop:] = 0  # memory as it was found, which the kernel leaves behind a row's keys
    wrong = mine.clone()
    wrong[1, :64] = mine[2, :64]
    for y in (mine, wrong):
        call = made("torch.ops._C.fp8_paged_mqa_logits_cpu", *args, outputs={"output.0": y}).call
        assert verdict(call, "output.0", y).passed == (y is mine)
    slots, positions = (torch.zeros(3, 512, dtype=torch.int32) for _ in range(2))
    kernels.topk_transform_512_cpu(mine, lengths, table, slots, 64, positions)
    call = made("torch.ops._C.topk_transform_512_cpu", mine, lengths, table, torch.zeros_like(slots), 64,
                torch.zeros_like(positions),
                outputs={"inplace.input.3": slots, "inplace.input.5": positions}).call  # fmt: skip
    assert all(verdict(call, role, y).passed for role, y in call.outputs.items())


@pytest.mark.parametrize("seed", range(2))
def test_vllms_own_attention_over_pages(kernels: Any, seed: int) -> None:
    call = attention_over_pages(Draw(seed), "", large=True).call
    mine = torch.zeros_like(call.args[0])
    kernels.flash_mla_with_kvcache_cpu(mine, *call.args[1:])
    call = replace(call, outputs={"inplace.input.0": mine})
    assert verdict(call, "inplace.input.0", mine).passed
    wrong = mine.clone()
    wrong[0] = mine[1]
    assert not verdict(call, "inplace.input.0", wrong).passed


def test_vllms_own_attention_reads_subnormal_codes_as_normal_ones(kernels: Any) -> None:
    """A fault of vLLM 0.32 that nobody planted: code 0 is read as 2**-7, code m below 8 as (1 + m / 8) 2**-7."""
    data, heads = torch.zeros(1, 64 * 584, dtype=torch.uint8), 64
    data[0, :8], data[0, 64 * 576 : 64 * 576 + 7] = torch.arange(8, dtype=torch.uint8), 127
    nothing, one = torch.full((1, 1), -1), torch.zeros(1, 1, dtype=torch.int64)
    args = (torch.zeros(1, heads, 512).bfloat16(), torch.zeros(1, heads, 512).bfloat16(), data, one, 64, data, nothing,
            64, torch.full((heads,), -1e4), 1.0)  # fmt: skip
    mine = torch.zeros_like(args[0])  # one key with weight 1: the output is the key
    kernels.flash_mla_with_kvcache_cpu(mine, *args[1:])
    call = made("torch.ops._C.flash_mla_with_kvcache_cpu", *args, outputs={"inplace.input.0": mine}).call
    codes = np.arange(8)
    right = bool((mine[0, 0, :8].double().numpy() == codes * 2.0**-9).all())
    assert right or bool((mine[0, 0, :8].double().numpy() == (1 + codes / 8) * 2.0**-7).all())
    assert verdict(call, "inplace.input.0", mine).passed == right


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


@pytest.mark.parametrize("seed", range(2))
def test_vllms_own_kernels_with_a_packed_weight(seed: int) -> None:
    """Forward and update as they are, and with the weight as it was before it was packed, which is a wrong kernel's."""
    kernels, draw = conv_kernels(), Draw(seed)
    d, lengths = 64 * draw.below(1, 4), draw.rng.integers(1, 9, 3)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    x, w, bias, token = draw(int(ends[-1]), d).T, draw(d, 4), draw(d), draw(3, d)
    states, packed = draw(6, 3, d).transpose(1, 2), kernels.causal_conv1d_weight_pack(w)
    places, begun = torch.tensor([4, 1, 3], dtype=torch.int32), torch.tensor([True, False, True])
    after = states.clone(memory_format=torch.preserve_format)
    mine = kernels.causal_conv1d_fwd_cpu(x, packed, bias, after, ends, places, begun, True, -1, True)
    later = states.clone(memory_format=torch.preserve_format)
    update = kernels.causal_conv1d_update_cpu(token.clone(), later, packed, bias, True, None, places, -1, True)
    for name, args, outputs in (
        ("fwd", (x, packed, bias, states, ends, places, begun, True, -1), {"output.0": mine, "inplace.input.3": after}),
        ("update", (token, states, packed, bias, True, None, places, -1),
         {"output.0": update, "inplace.input.1": later}),
    ):  # fmt: skip
        op = f"torch.ops._C.causal_conv1d_{name}_cpu.default"
        right, wrong = (made(op, *args, is_packed, outputs=outputs).call for is_packed in (True, False))
        assert [verdict(right, role, y).passed for role, y in outputs.items()] == [True, True]
        assert not verdict(wrong, "output.0", outputs["output.0"]).passed
