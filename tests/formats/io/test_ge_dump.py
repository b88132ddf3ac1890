"""One file of Ascend's graph engine: payloads, tiled layouts. What is refused: test_hostile_formats.py."""

import struct
from pathlib import Path

import numpy as np
import pytest
from make_ge_files import ge, message, number, tensor, varint

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.io import ge_dump


@pytest.mark.parametrize("packed", [True, False])
def test_payloads_follow_in_their_order(tmp_path: Path, packed: bool) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7, 8], np.int64)
    c = np.array([[True, False]])
    path = ge(tmp_path / "Add.Add_1.3.6.1795200000000000", [a, b], [c], "Add_1", packed=packed)
    dump = open_dump(path)
    found = {(r.tap, r.role): dump.read(r) for r in dump.records}
    assert set(found) == {("Add_1", "input.0"), ("Add_1", "input.1"), ("Add_1", "output.0")}
    for role, values in (("input.0", a), ("input.1", b), ("output.0", c)):
        np.testing.assert_array_equal(found[("Add_1", role)], values)
    assert {r.cls for r in dump.records} == {"Add"}
    assert ge_dump.parse(path).tensors[2].ref == "origin"
    assert compare(path, path).verdict == "pass"


def test_bfloat16_and_scalars(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)  # 1.0 and -2.0
    path = ge(tmp_path / "Cast.c.1.1.1795200000000000", [], [bits], code=27)
    dump = open_dump(path)
    assert dump.records[0].dtype == "bfloat16"
    np.testing.assert_array_equal(dump.read(dump.records[0]), bits)


def test_fractal_nz_is_put_back(tmp_path: Path) -> None:
    """[m, n] = [20, 40] in tiles of 16 x 16, padded: element (i, j) lies in tile (j // 16, i // 16)."""
    whole = np.arange(20 * 40, dtype=np.float16).reshape(20, 40)
    tiles = np.zeros((3, 2, 16, 16), np.float16)
    for i in range(20):
        for j in range(40):
            tiles[j // 16, i // 16, i % 16, j % 16] = whole[i, j]
    path = ge(tmp_path / "MatMul.m.1.1.1795200000000000", [], [tiles], form=29, original=(20, 40))
    dump = open_dump(path)
    assert dump.records[0].shape == (20, 40)
    np.testing.assert_array_equal(dump.read(dump.records[0]), whole)


def test_nc1hwc0_is_put_back(tmp_path: Path) -> None:
    whole = np.arange(2 * 20 * 3 * 3, dtype=np.float32).reshape(2, 20, 3, 3)
    tiled = np.zeros((2, 2, 3, 3, 16), np.float32)
    for c in range(20):
        tiled[:, c // 16, :, :, c % 16] = whole[:, c]
    path = ge(tmp_path / "Conv.c.1.1.1795200000000000", [], [tiled], form=3, original=(2, 20, 3, 3))
    dump = open_dump(path)
    np.testing.assert_array_equal(dump.read(dump.records[0]), whole)


def test_a_layout_that_does_not_fit_stays_as_it_is(tmp_path: Path) -> None:
    tiles = np.zeros((3, 2, 16, 16), np.float16)
    path = ge(tmp_path / "MatMul.m.1.1.1795200000000000", [], [tiles], form=29, original=(99, 40))
    assert open_dump(path).records[0].shape == (3, 2, 16, 16)


def test_sizes_that_do_not_match_the_shape(tmp_path: Path) -> None:
    """The header gives a tensor fewer bytes than its shape needs: that one is skipped, the next is read."""
    short = message(1, b"\x08") + number(6, 4)
    good = np.array([5.0], np.float32)
    head = message(3, number(1, 1) + message(3, short[:3]) + number(6, 4)) + message(3, tensor(good, output=True))
    path = tmp_path / "dump/0/Add.a.1.1.1795200000000000"
    path.parent.mkdir(parents=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(4) + good.tobytes())
    dump = open_dump(tmp_path)
    assert [(r.role, dump.read(r).tolist()) for r in dump.records] == [("output.1", [5.0])]
    assert "needs 32 bytes, the header gives it 4" in dump.skips[0].reason


def test_wire_format() -> None:
    data = number(1, 300) + message(2, b"abc") + b"\x1d" + struct.pack("<I", 7) + b"\x21" + struct.pack("<Q", 2**63)
    found = [(n, v if isinstance(v, int) else bytes(v)) for n, v in ge_dump.fields(memoryview(data))]
    assert found == [(1, 300), (2, b"abc"), (3, 7), (4, 2**63)]
    assert ge_dump.numbers(memoryview(varint(1) + varint(2**40))) == [1, 2**40]
    assert ge_dump.numbers(5) == [5]
