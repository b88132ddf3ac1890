"""Arrays of numpy, alone and in an archive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats import open_dump, single


def test_npy_and_npz_of_every_kind(tmp_path: Path) -> None:
    kinds = ("f8", ">f4", "f2", "i8", ">i2", "u1", "?", "c16", ">c8")
    arrays = {d: np.arange(24).reshape(2, 3, 4).astype(d) for d in kinds}
    arrays["fortran"] = np.asfortranarray(arrays["f8"])
    arrays["scalar"] = np.array(3.5)
    arrays["none"] = np.zeros((0, 3))
    for name, a in arrays.items():
        np.save(tmp_path / "x.npy", a)
        (item,) = single.items(tmp_path / "x.npy")
        assert np.array_equal(item.read(), a), name
        assert item.shape == a.shape
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **{f"k{i}": a for i, a in enumerate(arrays.values())})
        found = {i.key: i.read() for i in single.items(tmp_path / "x.npz")}
        assert list(found) == [f"k{i}" for i in range(len(arrays))]
        assert all(np.array_equal(f, a) for f, a in zip(found.values(), arrays.values(), strict=True))


@pytest.mark.parametrize(
    "array", [np.array([object()], dtype=object), np.array(["text"]), np.zeros(2, [("a", "f4")]), np.zeros(1, "M8[s]")]
)
def test_npy_that_holds_no_numbers(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(DumpError, match="not numbers"):
        open_dump(tmp_path / "x.npy")
