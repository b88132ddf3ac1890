"""measures.py against definitions that share nothing with it, and of numpy's arrays as of torch's tensors."""

import json
import math
import subprocess
import sys
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from opcheck.opdiff_files import bfloat16

from vllm_accprobe.kernels import float_formats, formulas
from vllm_accprobe.opcheck import measures
from vllm_accprobe.opcheck.floors.output_rows import numbers
from vllm_accprobe.opcheck.measures import Measures, measure
from vllm_accprobe.standards import dtype_limits, measures as names
from vllm_accprobe.standards.dtype_limits import ACCUMULATIVE, CURRENT, EPS, V1

NAN, INF = math.nan, math.inf


ROUND = {"float16": lambda x: x.astype(np.float16), "bfloat16": bfloat16, "float32": lambda x: x.astype(np.float32)}


def plain(g, m, dtype):
    """The documented formulas over finite values, element by element."""
    pairs = [(float(a), float(b)) for a, b in zip(np.ravel(g), np.ravel(m), strict=True)]
    n = len(pairs)
    diffs = [abs(b - a) for a, b in pairs]
    gg, mm = math.fsum(a * a for a, _ in pairs), math.fsum(b * b for _, b in pairs)
    rel = [d / abs(a) for d, (a, _) in zip(diffs, pairs, strict=True) if a]
    eps = EPS[dtype]
    with_eps = [d / (abs(a) + eps) for d, (a, _) in zip(diffs, pairs, strict=True)]
    out = {
        "elements": n,
        "cosine": math.fsum(a * b for a, b in pairs) / math.sqrt(gg * mm),
        "max_abs_reference": max(abs(a) for a, _ in pairs),
        "max_abs_mine": max(abs(b) for _, b in pairs),
        "max_abs_err": max(diffs),
        "mean_abs_err": math.fsum(diffs) / n,
        "rmse": math.sqrt(math.fsum(d * d for d in diffs) / n),
        "rel_l2": math.sqrt(math.fsum(d * d for d in diffs) / gg),
        "max_rel_err": max(rel),
        "mean_rel_err": math.fsum(rel) / len(rel),
        "binary_err_ratio": sum(a != b for a, b in pairs) / n,
    }
    for part in (100, 1000, 10000):
        out[f"dual_{part}"] = sum(r < 1 / part for r in with_eps) / n
    for k in range(1, 7):
        out[f"above_1e_{k}"] = sum(d > 10.0**-k for d in diffs)
    for prefix, domain in (("", CURRENT), ("v1_", V1), ("acc_", ACCUMULATIVE)):
        small, atol, rtol = domain.of(dtype)
        smalls = [d for d, (a, _) in zip(diffs, pairs, strict=True) if abs(a) <= small]
        normal = [(r, d) for r, d, (a, _) in zip(with_eps, diffs, pairs, strict=True) if abs(a) > small]
        wrong = sum(d > atol for d in smalls) / len(smalls) if smalls else 0.0
        mean_square = math.fsum(d * d for _, d in normal) / n
        found = {
            "small_value_err_ratio": wrong, "abs_err_ratio": wrong, "inf_nan_err_ratio": 0.0,
            "normal_max_rel_err": max((r for r, _ in normal), default=0.0),
            "normal_mean_rel_err": math.fsum(r for r, _ in normal) / len(normal) if normal else 0.0,
            "normal_rmse": math.sqrt(mean_square * (n / (len(normal) + 0.0001) + 0.0001)),
            "rel_err_ratio": sum(r > rtol for r, _ in normal) / len(normal) if normal else 0.0,
        }  # fmt: skip
        out |= {prefix + k: v for k, v in found.items() if prefix + k in Measures.FIELDS}
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("seed", range(6))
def test_every_measure_is_its_formula(dtype, seed):
    r = np.random.default_rng(seed)
    g = r.standard_normal((7, 23)) * 10.0 ** r.uniform(-5, 2, (7, 23))
    g[0, :3] = 0.0
    m = ROUND[dtype](g * (1 + r.standard_normal(g.shape) * 10.0 ** -r.uniform(1, 5)))
    found = asdict(measure(g, m, dtype))
    expected = plain(g, m, dtype)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-300), name
    counted = {
        "nonfinite",
        "nonfinite_mismatch",
        "error_balance",
        "ulp_max",
        "ulp_mean",
        "ulp_share",
        "ait_share",
        "kl",
    }
    assert set(found) - set(expected) == counted  # the rest is tested below


F32, F16, TOP = np.float32, np.float16, 65504.0
BY_HAND = {
    # bfloat16 has 7 bits: at 3.0 a step is 2**(1-7), at the reference 0 that of 1.0, 2**-7.
    "ulps of bfloat16": ([3.0, 0.0], F32([3.0 + 3 * 2.0**-6, 2.0**-8]), "bfloat16",
                         {"ulp_max": 3.0, "ulp_mean": 1.75, "ulp_share": 0.5}),
    # float8_e4m3fn has 3 bits and no smaller exponent than -6, float8_e5m2 2 bits and -14.
    "ulps of e4m3": ([1.0], [1.25], "float8_e4m3fn", {"ulp_max": 2.0}),
    "subnormal ulps of e4m3": ([2.0**-8], [2.0**-7], "float8_e4m3fn", {"ulp_max": 2.0}),
    "ulps of e5m2": ([1.0], [1.5], "float8_e5m2", {"ulp_max": 2.0}),
    "ulps of float64": ([1.0], [1.0 + 2.0**-50], "float64", {"ulp_max": 4.0}),
    "no ulps of integers": (np.array([1, 2]), np.array([1, 3]), "int32", {"ulp_max": None}),
    # What only float64 can tell from mine is mine in float32; of three dtypes: standards/test_msprobe_parity.py
    "balance in mine's dtype": ([1 + 1e-12, 2.0, 3 + 1e-12], F32([1, 2, 3]), "float32", {"error_balance": 0.0}),
    # within, beyond, tiny, tiny, beyond
    "ait's share": ([1.0, 1.0, 1e-8, 0.0, -2.0], [1 + 2.0**-11, 1 + 2.0**-9, 5.0, 5.0, 2.0], "float16",
                    {"ait_share": 0.6}),
    "beyond the range": ([7e4, -1e6, 65503.0, 1.0], F16([INF, -INF, TOP, 1]), "float16", {"inf_nan_err_ratio": 0.0}),
    # Saturating instead of overflowing is no wrong infinity, staying at 1 is.
    "saturated": ([7e4, -1e6, 65503.0, 1.0], F16([TOP, -TOP, TOP, 1]), "float16", {"inf_nan_err_ratio": 0.0}),
    "stays at 1": ([7e4, -1e6, 65503.0, 1.0], F16([1, -TOP, TOP, 1]), "float16", {"inf_nan_err_ratio": 0.25}),
    "within bfloat16's range": ([7e4, -1e6, 65503.0, 1.0], F32([7e4, -1e6, 65503, 1]), "bfloat16", {"nonfinite": 0}),
    "pairs of complex numbers": (np.array([1 + 2j, 3 - 4j]), np.array([1 + 2j, 3 - 4.5j], np.complex64), "complex64",
                                 {"elements": 4, "max_abs_err": 0.5, "binary_err_ratio": 0.25}),
    "nothing finite": ([NAN, INF], [NAN, INF], "bfloat16",
                       {"cosine": None, "max_abs_err": None, "rel_l2": None, "ulp_max": None, "inf_nan_err_ratio": 0.0,
                        "dual_1000": 1.0, "nonfinite_mismatch": 0}),
    "zeros": (np.zeros(4), np.zeros(4), "float32",
              {"cosine": None, "rel_l2": 0.0, "max_rel_err": None, "max_abs_err": 0.0}),
    "zeros, not mine": (np.zeros(4), np.ones(4), "float32", {"cosine": None, "rel_l2": None, "max_abs_err": 1.0}),
    **{np.dtype(kind).name: (np.array([0, 1, top, top], kind), np.array([0, 1, top, 0], kind), np.dtype(kind).name,
                             {"binary_err_ratio": 0.25, "max_abs_err": float(top)})
       for kind in (np.int8, np.uint8, np.int32, np.int64, np.uint64, np.bool_)
       for top in (1 if kind is np.bool_ else np.iinfo(kind).max,)},
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    g, m, dtype, expected = BY_HAND[name]
    found = measure(np.array(g), np.array(m), dtype)
    assert {field: getattr(found, field) for field in expected} == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_positions_that_are_not_finite(dtype):
    g = np.array([1.0, NAN, INF, -INF, INF, 2.0, 3.0, NAN])
    m = np.array([1.0, NAN, INF, INF, 5.0, NAN, 3.5, 8.0], np.float32)
    found = measure(g, m, dtype)
    assert (found.elements, found.nonfinite, found.nonfinite_mismatch) == (8, 6, 4)
    assert (found.max_abs_err, found.mean_abs_err, found.max_abs_reference) == (0.5, 0.25, 3.0)
    assert found.inf_nan_err_ratio == 0.5
    assert found.dual_100 == 3 / 8  # 1.0, NaN and infinity agree; 3.5 does not
    assert (found.above_1e_1, found.above_1e_6) == (5, 5)
    assert found.ait_share == 3 / 8
    assert found.ulp_share == 5 / 8
    assert found.binary_err_ratio == 5 / 8


def test_one_reference_beyond_the_range_does_not_hide_the_others():
    found = measure(np.array([1e300, 3.0, 4.0]), np.array([INF, 3.0, 4.5]), "bfloat16")
    assert found.cosine == pytest.approx(27 / (5 * math.sqrt(29.25)))
    assert (found.rel_l2, found.nonfinite_mismatch) == (0.1, 0)


def test_int64_beyond_what_doubles_tell_apart():
    g = np.array([2**62, -(2**62), 5], np.int64)
    m = np.array([2**62 + 1, -(2**62) - 3, 5], np.int64)
    found = measure(g, m, "int64")
    assert (found.max_abs_err, found.mean_abs_err, found.binary_err_ratio) == (3.0, 4 / 3, 2 / 3)
    extremes = measure(np.array([-(2**63)], np.int64), np.array([2**63 - 1], np.int64), "int64")
    assert extremes.max_abs_err == 2.0**64


def test_an_empty_tensor_has_no_measure():
    found = asdict(measure(np.zeros((0, 5)), np.zeros((0, 5)), "float32"))
    assert {k for k, v in found.items() if v is not None} == {
        "elements", "nonfinite", "nonfinite_mismatch", *(f"above_1e_{n}" for n in range(1, 7))
    }  # fmt: skip
    assert not any(found.values())


@pytest.mark.parametrize("scale", [1e300, 1e-300, 1e200])
def test_the_largest_and_smallest_doubles(scale):
    g, m = np.array([1.0, 2.0, -3.0]) * scale, np.array([1.0, 2.5, -3.0]) * scale
    found = measure(g, m, "float64")
    assert found.cosine == pytest.approx(15.0 / math.sqrt(14 * 16.25))
    assert found.rel_l2 == pytest.approx(0.5 / math.sqrt(14))
    assert found.rmse == pytest.approx(0.5 * scale / math.sqrt(3))


def test_kl_of_softmaxes():
    r = np.random.default_rng(0)
    g, m = r.standard_normal(300) * 4 + 700, (r.standard_normal(300) * 4).astype(np.float32)
    p, q = np.exp(g - g.max()), np.exp(m.astype(float) - m.max())
    p, q = p / p.sum(), q / q.sum()
    expected = float((p * np.log(p / q)).sum())
    assert measure(g, m, "float32", kl=True).kl == pytest.approx(expected, rel=1e-9)
    assert measure(g, g.astype(np.float32), "float32").kl is None
    assert measure(np.array([NAN]), np.array([NAN]), "float32", kl=True).kl is None
    masked = measure(np.append(g, -INF), np.append(m, -INF), "float32", kl=True).kl
    assert masked == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(width=32)] * 2), min_size=1, max_size=60),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.integers(1, 9),
)
def test_blocks_do_not_show(pairs, dtype, block):
    g, m = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    whole = asdict(measure(g, m, dtype, kl=True))
    old = measures.BLOCK
    measures.BLOCK = block
    try:
        parts = asdict(measure(g, m, dtype, kl=True))
    finally:
        measures.BLOCK = old
    for name, value in whole.items():
        if value is None:
            assert parts[name] is None, name
        else:
            assert parts[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_a_large_tensor_takes_bounded_memory():
    g = np.ones(6_000_000, np.float32)
    m = g * np.float32(1.001)
    tracemalloc.start()
    found = measure(g, m, "float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.max_abs_err == pytest.approx(0.001, rel=1e-3)
    assert peak < 40e6  # the tensors have 48 MB, in float64 96


def test_two_shapes_are_refused():
    with pytest.raises(ValueError, match=r"reference has shape \[2, 3\], mine has \[6\]"):
        measure(np.zeros((2, 3)), np.zeros(6), "float32")
    with pytest.raises(ValueError, match="cannot be measured"):
        measure(np.array(["a"]), np.array(["a"]), "float32")


def test_the_files_work_alone(tmp_path):
    """They can be carried to a machine without accprobe."""
    places = {
        "names": names, "limits": dtype_limits, "formulas": formulas, "formats": float_formats,
        "carried": measures,
    }  # fmt: skip
    for name, module in places.items():
        text = Path(module.__file__).read_text()
        for other, imported in places.items():
            text = text.replace(imported.__name__, other)
        (tmp_path / f"{name}.py").write_text(text)
    code = (
        "import json, sys, numpy; from carried import measure, Measures;"
        "assert measure(numpy.ones(3), numpy.ones(3), 'float32').cosine == 1 and len(Measures.FIELDS) == 45;"
        "print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not {"vllm_accprobe", "torch", "vllm", "pandas"} & set(json.loads(out.stdout))


DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int8", "bool", "float8_e4m3fn", "complex64")


def tensors(dtype: str, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(7, 33, generator=g, dtype=torch.float64) * (100.0 if "int" in dtype else 10.0 ** (seed % 5 - 3))
    noise = 1 + 0.01 * torch.randn(7, 33, generator=g, dtype=torch.float64)
    if kind == "empty":
        y, noise = y[:0], noise[:0]
    if kind == "zeros":
        y[:, ::2] = 0
    mine = y * noise + (1e-3 if kind == "zeros" else 0)
    if kind == "nonfinite" and dtype[:3] != "int":
        y[0, 0] = mine[0, 0] = math.nan
        y[1, 1], mine[2, 2], y[3, 3], mine[3, 3] = math.inf, -math.inf, math.inf, math.inf
        y[4, 4] = 1e300
    real = getattr(torch, dtype)
    if dtype == "complex64":
        return torch.complex(y, mine), torch.complex(mine, y).to(real)
    if dtype in ("int64", "int8", "bool"):
        return (y.clamp(-99, 99)).to(real), mine.clamp(-99, 99).to(real)
    return y, mine.to(real)


@pytest.mark.parametrize("kind", ["plain", "zeros", "nonfinite", "empty"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_kinds_of_arrays_agree(dtype: str, kind: str) -> None:
    for seed in range(5):
        reference, mine = tensors(dtype, kind, seed)
        g, m = numbers(reference), numbers(mine)
        theirs = measures.measure(g.numpy(), m.numpy(), dtype, kl=True)
        ours = measures.measure(g, m, dtype, kl=True)
        for name in measures.Measures.FIELDS:
            a, b = getattr(theirs, name), getattr(ours, name)
            assert (a is None) == (b is None), name
            if a is not None:
                # kl is a small difference of sums that are of the order of 1
                assert b == pytest.approx(a, rel=1e-12, abs=1e-12 if name == "kl" else 1e-300), name
