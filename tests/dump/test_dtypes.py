"""Bits and numbers of every dtype: each code of at most 16 bits against torch."""

import numpy as np
import pytest

from vllm_accprobe.dump.dtypes import DTYPES, byte_values, widen


def test_widen_keeps_what_is_wide_and_is_exact_for_integers():
    f = np.array([1.5, np.nan], "<f4")
    assert widen(f, "float32") is f
    assert widen(np.array([2**64 - 1], "<u8"), "uint64")[0] == 2**64 - 1
    assert widen(np.array([-128], "i1"), "int8").dtype == np.int64
    assert widen(np.array([-7], "<i4"), "int32", as_float=True).dtype == np.float64
    # A bool from a hostile file may have any bits; it is still 0 or 1.
    assert widen(np.array([0, 1, 2], np.uint8).view(np.bool_), "bool").tolist() == [0, 1, 1]
    assert widen(np.array([1 + 2j], "<c8"), "complex64").dtype == np.complex64


def test_eight_bit_tables_are_complete():
    for name, info in DTYPES.items():
        if info.itemsize == 1:
            table = byte_values(name)
            assert table.shape == (256,)
            if info.kind == "float":
                assert np.nanmin(table[table > 1]) - 1 == info.eps


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_against_torch(name):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    info = DTYPES[name]
    raw = np.arange(65536, dtype="<u2") if info.itemsize == 2 else np.random.default_rng(1).integers(
        0, 256, 256 * info.itemsize, dtype=np.uint8)  # fmt: skip
    if info.itemsize == 1:
        raw = np.arange(2 if name == "bool" else 256, dtype=np.uint8)
    raw = np.ascontiguousarray(raw).view(np.uint8)
    theirs = torch.from_numpy(raw.copy()).view(dtype)
    assert theirs.element_size() == info.itemsize
    ours = widen(raw.view(info.storage), name)
    finite = np.isfinite(ours)
    if info.kind == "float":
        if info.itemsize > 1:  # torch 2.13 gives half of it for float8_e5m2fnuz
            assert torch.finfo(dtype).eps == info.eps
        wide = theirs.to(torch.float64).numpy()
        assert ours.dtype == (np.float64 if name == "float64" else np.float32)
        np.testing.assert_array_equal(ours[finite].astype(np.float64), wide[finite])
        np.testing.assert_array_equal(np.signbit(ours[finite]), np.signbit(wide[finite]))
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(wide))
        np.testing.assert_array_equal(np.isposinf(ours), np.isposinf(wide))
    elif info.kind == "complex":
        assert ours.tobytes() == theirs.numpy().tobytes()
    else:
        assert ours.tolist() == [int(v) for v in theirs.tolist()]


def test_each_dtype_of_a_dump_is_captured() -> None:
    torch = pytest.importorskip("torch")
    from vllm_accprobe.capture.core.session import DTYPE_NAMES

    assert set(DTYPE_NAMES.values()) == {name for name in DTYPES if hasattr(torch, name)}
