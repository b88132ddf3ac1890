"""Samples of operators on 8 and 4 bit codes: products, and the codes and scales themselves."""

from collections.abc import Iterator

import numpy as np
import torch
from opcheck.samples.dtypes import BRAIN, BYTE, DOUBLE, E4M3, INT, INT8, SINGLE
from opcheck.samples.sample import Array, Draw, Made, declined, made, sample, wide

from vllm_accprobe.opcheck.reference import Call


@sample("scale of the neighbour", "zero point left out", "no bias", seeds=2,
        variants=[{"azp": a, "channel": c} for a in ("none", "token", "tensor") for c in (True, False)])  # fmt: skip
def scaled_product(d: Draw, fault: str, azp: str, channel: bool) -> Made | None:
    """azp: whose zero points there are."""
    if fault == "zero point left out" and azp == "none":
        return None
    m, k, n = d.below(3, 9), d.below(20, 70), d.below(3, 14)
    a, b = d.ints(-127, 128, m, k, dtype=INT8), d.ints(-127, 128, k, n, dtype=INT8)
    sa, sb = d.between(0.01, 0.02, m, 1), d.between(0.01, 0.02, 1, n if channel else 1)
    zero = {"none": torch.zeros(m), "token": d.ints(-20, 20, m), "tensor": torch.full((m,), 13)}[azp].int()
    bias, used = d(n), 0 * wide(zero) if fault == "zero point left out" else wide(zero)
    rows = np.roll(wide(sa), 1) if fault == "scale of the neighbour" else wide(sa)
    y = rows * wide(sb) * ((wide(a) - used[:, None]) @ wide(b)) + (0 if fault == "no bias" else wide(bias))
    columns = b.sum(0, dtype=INT)
    more = {"none": (), "token": (columns, zero), "tensor": (columns * 13, None)}[azp]
    name = "cutlass_scaled_mm" + ("_azp" if more else "")
    return made(f"torch.ops._C.{name}", torch.zeros(m, n, dtype=BRAIN), a, b, sa, sb, *more, bias.double(),
                outputs={"inplace.input.0": y})  # fmt: skip


@sample("truncated", "scale of the neighbour", seeds=2,
        variants=[{"kind": k} for k in ("int8", "int8 azp", "fp8 token", "fp8 tensor")])  # fmt: skip
def codes_by_row(d: Draw, fault: str, kind: str) -> Made | None:
    if fault == "scale of the neighbour" and kind == "fp8 tensor":
        return None
    m, k = d.below(3, 9), d.below(20, 70)
    x = (d(m, k, dtype=DOUBLE) * torch.arange(1, m + 1)[:, None]).bfloat16()
    y, zero = wide(x), np.zeros((m, 1))
    scale = np.abs(y).max(1, keepdims=True) / (127 if kind == "int8" else 448)
    if kind == "int8 azp":
        scale = (y.max(1, keepdims=True) - y.min(1, keepdims=True)) / 255
        zero = np.round(-128 - y.min(1, keepdims=True) / scale)
    elif kind == "fp8 tensor":
        scale = np.full((1, 1), np.abs(y).max() / 448)
    exact = y / (np.roll(scale, 1, 0) if fault == "scale of the neighbour" else scale) + zero
    if "int8" in kind:
        whole = np.trunc(exact) if fault == "truncated" else np.round(exact)
        codes = torch.from_numpy(whole.clip(-128, 127)).to(INT8)
    else:
        codes = torch.from_numpy(exact.clip(-448, 448)).float().to(E4M3)
        if fault == "truncated":
            codes = (codes.view(BYTE) - (codes.double().abs() > torch.from_numpy(exact).abs()).byte()).view(E4M3)
    outputs = {"inplace.input.0": codes, "inplace.input.2": torch.from_numpy(scale).float()}
    azp = torch.from_numpy(zero).int() if kind == "int8 azp" else None
    outputs |= {} if azp is None else {"inplace.input.3": azp}
    name = {"fp8 token": "dynamic_per_token_scaled_fp8_quant", "fp8 tensor": "dynamic_scaled_fp8_quant"}
    return made(f"torch.ops._C.{name.get(kind, 'dynamic_scaled_int8_quant')}", torch.zeros_like(codes), x,
                torch.zeros(scale.shape), azp, outputs=outputs)  # fmt: skip


@sample("truncated", "zero point left out", variants=[{"kind": k} for k in ("int8", "int8 azp", "fp8")])
def codes_for_a_given_scale(d: Draw, fault: str, kind: str) -> Made | None:
    if fault == "zero point left out" and kind != "int8 azp":
        return None
    x, scale, zero = d(6, 40), torch.tensor([0.03]), torch.tensor([7], dtype=INT)
    exact = wide(x) / wide(scale) + (7 if kind == "int8 azp" and not fault.startswith("zero") else 0)
    if kind == "fp8":
        codes = torch.from_numpy(exact.clip(-448, 448)).float().to(E4M3)
        high = codes.double().abs() > torch.from_numpy(exact).abs()
        codes = (codes.view(BYTE) - high.byte()).view(E4M3) if fault else codes
    else:
        codes = torch.from_numpy((np.trunc if fault == "truncated" else np.round)(exact).clip(-128, 127)).to(INT8)
    more = {"int8": (None,), "int8 azp": (zero,), "fp8": ()}[kind]
    name = f"static_scaled_{kind.split()[0]}_quant"
    return made(f"torch.ops._C.{name}", torch.zeros_like(codes), x, scale, *more,
                outputs={"inplace.input.0": codes})  # fmt: skip


# --- four bits ------------------------------------------------------------------------------------------------------

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS = np.concatenate((VALUES, -VALUES))


def _four_bits(codes: torch.Tensor, scale: Array, size: int, fault: str = "") -> Array:
    """codes [rows, n / 2], scale [rows, blocks] as numbers; the first of two numbers is in a byte's lower half."""
    low, high = codes.numpy() & 15, codes.numpy() >> 4
    numbers = NUMBERS[np.stack((high, low) if fault == "halves exchanged" else (low, high), -1).reshape(len(codes), -1)]
    scale = scale.copy()
    if fault == "scale of the neighbour":
        scale[2:] = np.roll(scale[2:], -1, 1)
    return numbers * scale.repeat(size, 1)


@sample("halves exchanged", "scale of the neighbour", seeds=4)
def mxfp4(d: Draw, fault: str) -> Made:
    rows, blocks = d.below(3, 12), d.below(2, 7)
    codes, exponents = d.ints(0, 256, rows, 16 * blocks, dtype=BYTE), d.ints(120, 134, rows, blocks, dtype=BYTE)
    return made("torch.ops.vllm.dequant_mxfp4", codes, exponents, BRAIN,
                outputs={"output.0": _four_bits(codes, 2.0 ** (wide(exponents) - 127), 32, fault)})  # fmt: skip


def _tiled(scale: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] in tiles of 128 by 4, place by place."""
    high, across = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    r, c = np.indices(scale.shape)
    out = torch.zeros(high * across * 512, dtype=BYTE)
    place = ((r // 128) * across + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    out[torch.from_numpy(place.ravel())] = scale.view(BYTE).ravel()
    return out.reshape(high * 128, across * 4).view(scale.dtype)


@sample("scale of the neighbour", "halves exchanged", "no global scale", seeds=3,
        variants=[{"name": n, "nv": v} for n, v in (("cutlass", True), ("flashinfer", True), ("flashinfer", False))])
def four_bit_product(d: Draw, fault: str, name: str, nv: bool) -> Made:
    """vLLM's own, NVFP4, and FlashInfer's, MXFP4 as well."""
    size, blocks, sides, args = 16 if nv else 32, d.below(2, 9), [], []
    for rows in (d.below(3, 9), d.below(120, 140)):
        codes = d.ints(0, 256, rows, size // 2 * blocks, dtype=BYTE)
        scale = d.between(0.1, 4, rows, blocks).to(E4M3) if nv else d.ints(122, 130, rows, blocks, dtype=BYTE)
        numbers = wide(scale) if nv else 2.0 ** (wide(scale) - 127)
        sides.append(_four_bits(codes, numbers, size, "" if sides and fault.startswith("halves") else fault))
        args.append((codes, _tiled(scale)))
    y = (1.0 if fault == "no global scale" else float(np.float32(0.37))) * (sides[0] @ sides[1].T)
    (a, scale_a), (b, scale_b) = args
    if name == "cutlass":
        return made("torch.ops._C.cutlass_scaled_fp4_mm", torch.zeros(y.shape, dtype=BRAIN), a, b, scale_a, scale_b,
                    torch.tensor(0.37), outputs={"inplace.input.0": y})  # fmt: skip
    return made("torch.ops.vllm.flashinfer_mm_fp4.default", a, b.T, scale_a, scale_b.T, torch.tensor([0.37]), BRAIN,
                False, "cutlass", size, nv, outputs={"output.0": y})  # fmt: skip


@declined
def weights_that_a_backend_shuffles() -> Iterator[tuple[Call, str]]:
    x = torch.zeros(4, 32, dtype=BYTE)
    for tiles, backend in ((False, "trtllm"), (False, "cute-dsl"), (True, "cutlass")):
        yield made("torch.ops.vllm.flashinfer_mm_fp4", x, x.T, x, x.T, torch.ones(1), BRAIN, tiles, backend,
                   outputs={"output.0": np.zeros((4, 4))}).call, "in the order of this backend"  # fmt: skip


@sample("another scale", seeds=2)
def batched_fp8(d: Draw, fault: str) -> Made:
    a, b, scales = d(2, 5, 32).to(E4M3), d(2, 32, 9).to(E4M3), (torch.tensor(0.25), torch.tensor([0.013]))
    y = wide(a) @ wide(b) * (0.25 * float(scales[1]) * (1.05 if fault else 1.0))
    return made("torch.ops.vllm.bmm_fp8.default", a, b, *scales, BRAIN, "auto", outputs={"output.0": y})


@sample("scale of the neighbour", variants=[{"rows": r} for r in (5, 130)])
def mxfp8_product(d: Draw, fault: str, rows: int) -> Made:
    a, b = d(rows, 64).to(E4M3), d(3, 64).to(E4M3)
    scales = [d.ints(120, 132, n, 2, dtype=BYTE) for n in (rows, 3)]
    used = [np.roll(wide(e), bool(fault) and not n, 0) for n, e in enumerate(scales)]
    sides = [wide(x) * np.repeat(2.0 ** (e - 127), 32, 1) for x, e in zip((a, b), used, strict=True)]
    return made("torch.ops.vllm.mm_mxfp8.default", a, b.T, *(_tiled(e).flatten() for e in scales), BRAIN, "cutlass",
                outputs={"output.0": sides[0] @ sides[1].T})  # fmt: skip


@sample("scale of the neighbour", seeds=3, variants=[{"size": s} for s in (32, 16)])
def four_bit_weight_of_a_module(d: Draw, fault: str, size: int) -> Made:
    rows, n, width = d.below(2, 9), d.below(6, 40), 32 * d.below(2, 5)
    codes, x = d.ints(0, 256, n, width // 2, dtype=BYTE), d(rows, width)
    if size == 32:
        scale = d.ints(122, 130, n, width // 32, dtype=BYTE)
        numbers, more = 2.0 ** (wide(scale) - 127), {}
    else:
        scale = d.between(0.1, 2, n, width // 16).to(E4M3)
        numbers, more = wide(scale) * 0.5, {"weight_scale_2": torch.tensor(0.5)}
    y = wide(x) @ _four_bits(codes, numbers, size, fault).T
    return made("ReplicatedLinear", inputs={"x": x}, params={"weight": codes, "weight_scale": scale} | more,
                outputs={"output.0": torch.from_numpy(y).bfloat16()})  # fmt: skip


@sample("scales of the next block", "rounds down", "halves of a byte exchanged", seeds=3,
        variants=[{"tiles": t} for t in (True, False)])  # fmt: skip
def quantised_to_nvfp4(d: Draw, fault: str, tiles: bool) -> Made:
    """The nearest of the 16 codes for the e4m3 scale of 16 neighbours."""
    rows, blocks, whole = d.below(3, 9), d.below(2, 5), 37.5
    x = d(rows, 16 * blocks)
    y = x.float().unflatten(1, (-1, 16))
    scales = (y.abs().amax(-1) / 6 * whole).to(E4M3)
    scales = scales.view(BYTE).roll(-1, 1).view(E4M3) if fault == "scales of the next block" else scales
    v = np.abs(wide(y)) * whole / wide(scales)[..., None]
    code = np.abs(v[..., None] - VALUES).argmin(-1)
    code = (v[..., None] >= VALUES).sum(-1) - 1 if fault == "rounds down" else code
    code = (code + 8 * (wide(y) < 0)).astype(np.uint8).reshape(rows, -1, 2)
    low, high = (1, 0) if fault == "halves of a byte exchanged" else (0, 1)
    codes = {"output": torch.from_numpy(code[..., low] | code[..., high] << 4),
             "output_scale": _tiled(scales) if tiles else scales}  # fmt: skip
    return made("torch.ops._C.scaled_fp4_quant.out", x, torch.tensor([whole]), tiles, kwargs=codes,
                outputs={f"inplace.input.{k}": t for k, t in codes.items()})  # fmt: skip


@sample("one output channel has its neighbour's scale")
def weight_of_8_bit_floats(d: Draw, fault: str) -> Made:
    x, w = d(16, 64), d(24, 64, dtype=SINGLE)
    scale = w.abs().amax(1, keepdim=True) / 448
    q, used = (w / scale).to(E4M3), scale.clone()
    used[5] = scale[6 if fault else 5]
    return made("ReplicatedLinear", inputs={"x": x}, params={"weight": q, "weight_scale": scale},
                outputs={"output.0": torch.from_numpy(wide(x) @ (wide(q) * wide(used)).T).bfloat16()})  # fmt: skip
