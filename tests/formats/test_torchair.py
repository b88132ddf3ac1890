"""torchair's dumps: GE binaries and FX arrays, names through the graph, fused operators, tiled layouts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.peer_dumps import check_metrics, expected, unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump, torchair
from vllm_accprobe.formats.io import ge_dump, protobuf

CODES = {"float32": 1, "float16": 2, "int8": 3, "uint8": 4, "int32": 7, "int64": 8, "bool": 11}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("f_torchair", tmp_path_factory.mktemp("torchair"))


# --- the wire format ---


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def test_wire_format() -> None:
    data = number(1, 300) + message(2, b"abc") + b"\x1d" + struct.pack("<I", 7) + b"\x21" + struct.pack("<Q", 2**63)
    found = [(n, v if isinstance(v, int) else bytes(v)) for n, v in protobuf.fields(memoryview(data))]
    assert found == [(1, 300), (2, b"abc"), (3, 7), (4, 2**63)]
    assert protobuf.numbers(memoryview(varint(1) + varint(2**40))) == [1, 2**40]
    assert protobuf.numbers(5) == [5]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x08", "ends beyond"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "larger than 64 bits"),
        (b"\x08" + b"\xff" * 11, "longer than ten"),
        (b"\x12\x05ab", "ends beyond"),
        (b"\x12" + varint(2**60) + b"ab", "ends beyond"),
        (b"\x0b", "wire type 3"),
        (b"\x00\x01", "field number 0"),
        (b"\x0d\x01", "ends beyond"),
    ],
)
def test_wire_format_that_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(protobuf.fields(memoryview(data)))


# --- one file ---


def tensor(
    values: np.ndarray, *, output: bool, form: int = 2, original: Sequence[int] = (), packed: bool = True, code: int = 0
) -> bytes:
    dims = values.shape
    shape = message(1, b"".join(map(varint, dims))) if packed else b"".join(number(1, d) for d in dims)
    body = number(1, code or CODES[values.dtype.name]) + number(2, form) + message(3, shape)
    if original:
        body += message(7 if output else 6, message(1, b"".join(map(varint, original))))
    if output:
        body += message(4, message(1, b"origin") + number(2, 0))
    return body + number(6 if output else 5, values.nbytes)


def ge(path: Path, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], name: str = "", **how: object) -> Path:
    """A file as the graph engine writes it: the header lists outputs first, the payloads come inputs first."""
    head = message(1, b"2.0") + number(2, 1795200000000000)
    head += b"".join(message(3, tensor(v, output=True, **how)) for v in outputs)  # type: ignore[arg-type]
    head += b"".join(message(4, tensor(v, output=False)) for v in inputs)
    head += message(6, name.encode()) if name else b""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(v.tobytes() for v in (*inputs, *outputs)))
    return path


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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b[:-1],
        lambda b: b[:20],
        lambda b: b"\xff" * 8 + b[8:],
        lambda b: struct.pack("<Q", 0) + b[8:],
        lambda b: b"",
        lambda b: b[:8] + b"\xff" * (len(b) - 8),
    ],
)
def test_files_that_are_refused(tmp_path: Path, spoil: object) -> None:
    path = ge(tmp_path / "Add.a.1.1.1795200000000000", [np.ones(4, np.float32)], [np.ones(4, np.float32)])
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DumpError, match=r"graph engine dump|cut off"):
        open_dump(path)


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


# --- directories ---


def test_directories_of_a_graph_engine(tmp_path: Path) -> None:
    one = np.ones(2, np.float32)
    for rank in range(2):
        for token in (0, 1, 10):
            where = tmp_path / f"worldsize2_global_rank{rank}/dump_1/20261120101010/{rank + 4}/graph_1/1/{token}"
            ge(where / f"Add.net_add.1.2.17952000000000{token:02d}", [one * token], [one * (token + rank)])
    where = tmp_path / "worldsize2_global_rank0/dump_1/20261120101010/4/graph_1/1/0"
    ge(where / "4711", [], [one * 9])
    (where / "mapping.csv").write_text("4711,Mul." + "x" * 300 + ".3.2.1795200000000099\n")
    np.save(where / "Sub.s.4.2.1795200000000100.output.0.npy", one * 8)
    dump = open_dump(tmp_path)
    assert dump.ranks == (0, 1)
    assert {(r.rank, r.step) for r in dump.records} == {(r, t) for r in (0, 1) for t in (0, 1, 10)}
    long = next(r for r in dump.records if r.cls == "Mul")
    assert (long.tap, dump.read(long).tolist()) == ("x" * 300, [9.0, 9.0])
    converted = next(r for r in dump.records if r.cls == "Sub")
    assert (converted.role, dump.read(converted).tolist()) == ("output.0", [8.0, 8.0])
    assert not dump.skips


def test_tokens_of_fx_begin_with_one(tmp_path: Path) -> None:
    for token in (1, 2):
        where = tmp_path / f"data_dump/{token}/gm_20261120101010_dump"
        where.mkdir(parents=True)
        np.save(where / "mm-aten.mm.default.INPUT.1.20261120101010000000.npy", np.full(2, token))
        np.save(where / "add_1-aten.add.Tensor.OUTPUT.0.20261120101010000001.npy", np.full(2, token))
    dump = open_dump(tmp_path)
    places = [(r.step, r.tap, r.role, r.cls) for r in dump.records]
    assert places == [(t, *p) for t in (0, 1) for p in (("mm", "input.1", "aten.mm.default"),
                                                        ("add_1", "output.0", "aten.add.Tensor"))]  # fmt: skip


GRAPH = """graph {
  op {
    name: "Data_0"
    output_desc { name: "y" }
  }
  op {
    name: "Silu_1"
    type: "Swish"
    input: "Data_0:0"
    output_desc {
      name: "y"
      attr {
        key: "_fx_tensor_name"
        value { s: "wrong-one.OUTPUT.0" }
      }
      attr {
        key: "_fx_tensor_name"
        value {
          s: "silu-aten.silu.default.OUTPUT.0"
        }
      }
    }
  }
  op {
    name: "Split_2"
    input: "Silu_1:0"
    input: "Data_0:0"
    output_desc {
      attr {
        key: "_fx_tensor_name"
        value {
          s: "split-aten.split.Tensor.OUTPUT.0"
        }
      }
    }
    output_desc {
      attr {
        key: "_fx_tensor_name"
        value {
          s: "split-aten.split.Tensor.OUTPUT.1"
        }
      }
    }
  }
}
"""


def test_the_graph_beside_a_dump() -> None:
    fx, inputs = torchair.read_graph(GRAPH.splitlines())
    assert fx == {("Silu_1", 0): ("silu", 0), ("Split_2", 0): ("split", 0), ("Split_2", 1): ("split", 1)}
    assert inputs == {"Data_0": [], "Silu_1": ["Data_0:0"], "Split_2": ["Silu_1:0", "Data_0:0"]}
    assert torchair.fused_inputs(["Silu_1", "Split_2"], inputs) == [("Silu_1", 0)]  # Data_0 enters once


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Silu_9Mul_11", ["Silu_9", "Mul_11"]),
        ("Mul_1Mul_11", ["Mul_1", "Mul_11"]),
        ("Mul_11", []),  # one operator's own name
        ("Mul_111", []),
        ("Mul_1Add", []),
        ("layer/Mul_1Silu_9", []),
    ],
)
def test_names_of_fused_operators(name: str, parts: list[str]) -> None:
    assert torchair.split_fused(name, {"Silu_9", "Mul_1", "Mul_11"}) == parts


# --- the reference pair ---


def test_ge_against_fx(pair: Path) -> None:
    found = compare(pair / "fx_golden", pair / "ge_mine")
    assert check_metrics(expected("f_torchair"), found, "fx_golden", "ge_mine") == 20
    assert found.first_divergence is not None
    assert (found.first_divergence["module"], found.first_divergence["role"]) == ("Mm_10", "output.0")
    assert [o["module"] for o in found.origins] == ["Mm_10"]
    assert (found.coverage["taps_only_golden"], found.coverage["taps_only_mine"]) == ([], [])


@pytest.mark.parametrize(("golden", "mine"), [("ge_nofusion_golden", "ge_mine"), ("ge_mine", "ge_nofusion_golden")])
def test_fusion_off_against_fusion_on(pair: Path, golden: str, mine: str) -> None:
    found = compare(pair / golden, pair / mine)
    assert found.first_divergence is not None
    assert found.first_divergence["module"] == "Mm_10"
    fused = [p for p in found.pairs if "Silu_9Mul_11" in p.golden + p.mine]
    ends = {(p.golden.partition(":")[2], p.mine.partition(":")[2]) for p in fused}
    assert ends == {("input.0", "input.0"), ("input.1", "input.1"), ("output.0", "output.0")}


def test_fx_against_ge_without_its_graph(pair: Path, tmp_path: Path) -> None:
    """Nothing tells which node is which: nothing is guessed."""
    source = next((pair / "ge_mine").rglob("Mm_8*".replace("Mm_8*", "MatMulV2.Mm_8.*")))
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / source.name).write_bytes(source.read_bytes())
    from vllm_accprobe.comparison.result import NothingCompared

    with pytest.raises(NothingCompared):
        compare(pair / "fx_golden", tmp_path)
