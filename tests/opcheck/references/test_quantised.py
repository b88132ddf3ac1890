"""Small integers and 8-bit floats become numbers: against packing by hand, torch's dtypes, and 16-bit sums."""

import numpy as np
import pytest
import torch
from opcheck.samples.sample import Draw, made, wide
from reference_calls import evaluated, verdict

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.quantised import awq, gptq, scaled, weight_of
from vllm_accprobe.opcheck.registry import default_references

G = torch.Generator().manual_seed(11)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def pack(numbers: list[int]) -> int:
    """Eight 4-bit numbers, the first in the lowest bits, as a signed int32."""
    whole = sum(n << (4 * i) for i, n in enumerate(numbers))
    return whole - (1 << 32) if whole >= 1 << 31 else whole


def test_gptq_by_hand() -> None:
    """8 inputs, 8 outputs, two groups of four inputs; stored zeros are one less."""
    q = torch.randint(0, 16, (8, 8), generator=G)
    zeros, scales = torch.randint(1, 16, (2, 8), generator=G), draw(2, 8)
    qweight = torch.tensor([[pack(q[:, o].tolist()) for o in range(8)]], dtype=torch.int32)
    qzeros = torch.tensor([[pack((z - 1).tolist())] for z in zeros], dtype=torch.int32)
    expected = torch.tensor(
        [[(q[i, o] - zeros[i // 4, o]).item() * scales[i // 4, o].item() for i in range(8)] for o in range(8)],
        dtype=torch.float64,
    )
    assert torch.equal(gptq(qweight, qzeros, scales), expected)
    order = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1])  # desc_act: each input has its own group
    by_index = gptq(qweight, qzeros, scales, order)
    assert by_index[2, 0].item() == (q[0, 2] - zeros[1, 2]).item() * scales[1, 2].item()


def test_awq_by_hand() -> None:
    """4 inputs, 8 outputs; number i of an int32 is output 0 2 4 6 1 3 5 7."""
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    q = torch.randint(0, 16, (4, 8), generator=G)
    zeros, scales = torch.randint(0, 16, (1, 8), generator=G), draw(1, 8)
    qweight = torch.tensor([[pack([int(row[p]) for p in places])] for row in q], dtype=torch.int32)
    qzeros = torch.tensor([[pack([int(zeros[0, p]) for p in places])]], dtype=torch.int32)
    assert torch.equal(awq(qweight, qzeros, scales), ((q - zeros).double() * scales).T)


def test_scales_of_all_sizes() -> None:
    w = draw(5, 7)
    assert torch.equal(scaled(w, torch.tensor(2.0)), w * 2)
    by_row = draw(5)
    assert torch.equal(scaled(w, by_row[:, None]), w * by_row[:, None])
    blocks = draw(3, 2)  # blocks of 2 x 4, the last ones cut
    expected = torch.stack([torch.stack([w[i, j] * blocks[i // 2, j // 4] for j in range(7)]) for i in range(5)])
    assert torch.equal(scaled(w, blocks), expected)
    with pytest.raises(Declined, match="do not fit"):
        scaled(w, draw(4, 3, 2))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_quantised_product_is_within_what_it_says_of_itself(dtype: torch.dtype) -> None:
    """An honest W8A8 kernel, its activations quantised by row: its error has the size that the reference expects."""
    x, weight = draw(64, 96), draw(48, 96)
    top = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    step_w, step_x = weight.abs().amax(1, keepdim=True) / top, x.abs().amax(1, keepdim=True) / top

    def quantise(v: torch.Tensor) -> torch.Tensor:
        return v.round().to(dtype) if dtype == torch.int8 else v.float().to(dtype)

    qw, qx = quantise(weight / step_w), quantise(x / step_x)
    y = (qx.double() @ qw.double().T) * step_x * step_w.T
    call = Call("t", "ColumnParallelLinear", {"input_": x}, params={"weight": qw, "weight_scale": step_w},
                outputs={"output.0": y.bfloat16()})  # fmt: skip
    found = default_references().evaluate(call)
    assert not isinstance(found, Declined)
    torch.testing.assert_close(found["output.0"].value, x @ (qw.double() * step_w).T)
    ratio = (y - found["output.0"].value).pow(2).mean().sqrt() / found["output.0"].noise.pow(2).mean().sqrt()
    assert 0.6 < float(ratio) < 1.1


@pytest.mark.parametrize("eight", [False, True])
def test_four_bits_on_a_processor_that_makes_eight_bits_of_its_inputs(eight: bool) -> None:
    """AMX's kernel quantises each row to int8; where it does not, such an error is one."""
    codes = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, (8, 32))).int()
    params = {"qweight": codes, "qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32), "scales": draw(2, 32) / 9}
    x, weight = draw(64, 64), gptq(*params.values())
    step = x.abs().amax(1, keepdim=True) / 127.0
    y = ((x / step).round() * step) @ weight.T
    call = Call("t", "RowParallelLinear", {"input_": x}, params=params, attrs={"use_w4a8": eight},
                outputs={"output.0": y.bfloat16()})  # fmt: skip
    found = default_references().evaluate(call)
    assert not isinstance(found, Declined)
    off = (y - x @ weight.T).pow(2).mean().sqrt() / found["output.0"].noise.pow(2).mean().sqrt()
    assert 0.6 < float(off) < 1.1 if eight else float(off) > 100.0


def test_what_is_missing_is_named() -> None:
    call = Call("t", "Linear", params={"weight": torch.ones(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(Declined, match="the scale of its quantised weight"):
        weight_of(call)
    call = Call("t", "Linear", params={"qweight": torch.ones(1, 8, dtype=torch.int32)})
    with pytest.raises(Declined, match="qzeros"):
        weight_of(call)


def summed(a: np.ndarray, b: np.ndarray, cut: bool) -> np.ndarray:
    """a [m, k], b [k, n]: two products of (a + 128) b at a time, as a processor without VNNI adds them."""
    pairs = ((a + 128)[:, :, None] * b).reshape(len(a), -1, 2, b.shape[1]).sum(2)
    return (pairs.clip(-32768, 32767) if cut else pairs).sum(1) - 128 * b.sum(0)


@pytest.mark.parametrize("outputs", [9, 64])
@pytest.mark.parametrize("cut", [True, False])
def test_a_processor_that_cuts_sums_off_in_16_bits_is_named(cut: bool, outputs: int) -> None:
    """Another error is not named so."""
    d = Draw(5)
    a, b = d.ints(-127, 128, 6, 64, dtype=torch.int8), d.ints(-127, 128, 64, outputs, dtype=torch.int8)
    mine, right = (torch.from_numpy(summed(wide(a), wide(b), c) * 0.02 * 0.03).bfloat16() for c in (cut, False))
    mine = mine if cut else (mine.double() * 1.2).bfloat16()
    sums = b.double().sum(0, keepdim=True).float() * 0.03  # given to every call, and without a zero point not used
    params = {"weight": b.T.contiguous(), "weight_scale": torch.full((outputs, 1), 0.03)}
    args = (mine, a, torch.full((6, 1), 0.02), None, sums, None, 0)
    call = made("torch.ops._C.onednn_scaled_mm", *args, params=params, outputs={"inplace.input.0": mine}).call
    assert ("16 bits" in evaluated(call)["inplace.input.0"].note) == cut
    assert not verdict(call, "inplace.input.0", mine).passed
    assert verdict(call, "inplace.input.0", right).passed


@pytest.mark.parametrize("cls", ["ColumnParallelLinear", "RowParallelLinear"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cut", [True, False])
def test_a_module_has_the_note_of_its_operator(cut: bool, bias: bool, cls: str) -> None:
    """The module has x and not its codes. Positive weights, so that most sums end at 32,767; right ones pass."""
    d = Draw(7)
    x, extra = d.between(0.2, 1.0, 6, 64, dtype=d.dtype), d.rng.normal(size=9) * bias
    b = d.rng.integers(60, 128, (9, 64))
    step = np.abs(wide(x)).max(1) / 127
    y = summed(np.round(wide(x) / step[:, None]), b.T, cut) * step[:, None] * 0.03 + extra
    params = {"weight": torch.from_numpy(b).to(torch.int8), "weight_scale": torch.full((9, 1), 0.03)}
    params |= {"bias": torch.from_numpy(extra).float()} if bias else {}
    for factor in (1.0, 1.3):  # another error is not named so
        mine = torch.from_numpy(y * factor).bfloat16()
        call = Call("x", cls, {"input_": x}, params=params, outputs={"output.0": mine})
        assert ("16 bits" in evaluated(call)["output.0"].note) == (cut and factor == 1.0)
        assert factor != 1.0 or verdict(call, "output.0", mine).passed != cut
