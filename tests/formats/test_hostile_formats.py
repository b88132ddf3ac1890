"""Files that were made to do harm, in one table over the readers: one clear line, exit code 2, nothing run, nothing
outside touched, little spent."""

import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats.common.test_result_tables import HEAD, LINE, REPORT, xlsx
from make_ge_files import ge, varint
from support.peer_dumps import RunsCode, unpack

from vllm_accprobe import user_cache
from vllm_accprobe.cli import main
from vllm_accprobe.formats import DumpError, open_dump

# --- single files whose contents lie ---


def archive(pickled: bytes, data: bytes = b"\0" * 64) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as f:
        f.writestr("archive/data.pkl", pickled)
        f.writestr("archive/data/0", data)
    return out.getvalue()


def tensor_pickle(shape: str, stride: str, numel: int = 16, offset: int = 0) -> bytes:
    """A pickle as torch writes it, of a float32 tensor: protocol 0 for the numbers, which is easy to write by hand."""
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
    head += b"X\x01\0\0\x000X\x03\0\0\0cpu"
    return head + f"I{numel}\ntQI{offset}\n{shape}{stride}".encode() + b"\x89ccollections\nOrderedDict\n)RtR."


def nested(tuples: bool) -> bytes:
    """Twice a list of twice a list ... has 2**60 leaves; hashing such a tuple takes as long."""
    twice = [b"h" + bytes([i]) + b"h" + bytes([i]) for i in range(60)]
    if tuples:
        steps = (t + b"\x86q" + bytes([i + 1]) + b"0" for i, t in enumerate(twice))
        return b"\x80\x02})q\x000" + b"".join(steps) + b"h\x3cNs."
    return b"\x80\x02]q\x00" + b"".join(b"](" + t + b"eq" + bytes([i + 1]) for i, t in enumerate(twice)) + b"."


def headed(header: object) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


def saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def spoilt_ge(spoil: Callable[[bytes], bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as where:
        ones = np.ones(4, np.float32)
        return spoil(ge(Path(where) / "Add.a.1.1.1795200000000000", [ones], [ones]).read_bytes())


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GE = "Add.a.1.1.1795200000000000"
EARLY, NO_GE = "too early or is damaged", "graph engine dump|cut off"
NO_KIND, NO_XLSX = "no file of a kind", "is no xlsx that can be read|is no file of a kind"
ROWS = [HEAD.split(","), LINE.split(",")]
BOMB = '<!DOCTYPE a [<!ENTITY b "&c;&c;"><!ENTITY c SYSTEM "file:///etc/passwd">]>'
READERS: dict[str, tuple[str, Callable[[Any], bytes], list[tuple[Any, str]]]] = {
    "torch": ("x.pt", archive, [
        (pickle.dumps(RunsCode(), 2), "which is no plain tensor"),
        (pickle.dumps({"a": [RunsCode()]}, 4), "which is no plain tensor"),
        (tensor_pickle("(I2\nI3\nt", "(I8\nI9\nt"), "beyond its storage"),
        (tensor_pickle("(I1099511627776\nt", "(I1\nt"), "beyond its storage"),
        (tensor_pickle("(I2\nt", "(I1\nt", numel=1 << 40), "were announced"),
        (tensor_pickle("(I-2\nt", "(I1\nt"), "impossible shape"),
        (tensor_pickle("(I2\nt", "(I1\nI1\nt"), "impossible shape"),
        (tensor_pickle("(I2\nt", "(I1\nt")[:-3], EARLY), (b"\x80\x02X\xff\xff\xff\x7fab.", EARLY), (b"", EARLY),
        (b"\x80\x02(((.", "damaged"), (b"\x80\x02ctorch.jit\nload\n.", "torch.jit.load"),
        (b"\x80\x02i__builtin__\neval\n.", "opcode"), (nested(False), "more than"), (nested(True), "no plain value"),
    ]),
    "safetensors": ("x.safetensors", headed, [
        ("[1]", r"header: it is \[1\], not an object"), ("{", "header: it is not JSON"),
        ("[" * 9000, "header: it is nested too deep"), ({"a": 3}, "header: a is 3, not an object"),
        *(({"a": ENTRY | change}, f"header: {why}") for change, why in (
            ({"shape": [-2]}, r"a.shape\[0\] is -2"), ({"shape": [1] * 65}, "a.shape is"),
            ({"shape": [1 << 62]}, r"a.shape\[0\] is"), ({"data_offsets": [0]}, "a.data_offsets is"))),
        ({"a": {"dtype": "F32", "shape": [2]}}, "header: a has no data_offsets"),
        ({"\x1b[2J": ENTRY | {"shape": 1}}, r"header: '\\x1b\[2J'.shape is 1"),
        ({"__metadata__": {"accprobe.dtypes": 3}, "a": ENTRY}, "header: __metadata__.accprobe.dtypes is 3"),
        *(({"a": ENTRY | change}, "does not lie where its header says") for change in (
            {"data_offsets": [8, 0]}, {"data_offsets": [4, 12]}, {"shape": [1 << 61]}, {"data_offsets": [0, 1 << 60]})),
        ({"a": ENTRY, "b": ENTRY}, "does not lie where its header says"),
    ]),
    "npy": ("x.npy", saved, [(array, "not numbers") for array in (
        np.array([object], object), np.array(["text"]), np.zeros(2, [("a", "f4")]), np.zeros(1, "M8[s]"))]),
    "graph engine": (GE, spoilt_ge, [
        *((lambda b, n=n: b[:n], NO_GE) for n in (-1, 20, 0)), (lambda b: b"\xff" * 8 + b[8:], NO_GE),
        (lambda b: struct.pack("<Q", 0) + b[8:], NO_GE), (lambda b: b[:8] + b"\xff" * (len(b) - 8), NO_GE),
    ]),
    "protocol buffers": (GE, lambda head: struct.pack("<Q", len(head)) + head, [
        (b"\x08", "ends beyond"), (b"\x12\x05ab", "ends beyond"), (b"\x12" + varint(2**60) + b"ab", "ends beyond"),
        (b"\x0d\x01", "ends beyond"), (b"\x08" + b"\xff" * 9 + b"\x02", "larger than 64 bits"),
        (b"\x08" + b"\xff" * 11, "longer than ten"), (b"\x0b", "wire type 3"), (b"\x00\x01", "field number 0"),
    ]),
    "ATB": ("x.bin", lambda lines: "".join(f"{line}\n" for line in lines).encode(), [
        (("dtype=0", "dims=2"), "does not end"), (("dtype=0", "dims=-2", "$End=1"), "dims is '-2'"),
        (("dtype=0", "dims=2,x", "$End=1"), "dims is 'x'"), (("dtype=0", "dims=2,,2", "$End=1"), "dims is ''"),
        (("dtype=0", "$End=1"), "no dims"), (("dims=2", "$End=1"), "dtype is ''"),
        (("dtype=0", "dims=2", "nonsense", "$End=1"), "without '='"),
        (("dtype=0", "dims=" + ",".join(["1000000"] * 9), "$End=1"), "no tensor has these"),
        (("dtype=0", "dims=4", "$End=1"), "need 16 bytes, the file holds 0"),
        (("dtype=0", "dims=" + "9" * 40, "$End=1"), "not a number"),
    ]),
    "csv": ("x.csv", lambda text: text.encode() if isinstance(text, str) else text, [
        (f"{HEAD}\n{LINE}\n{LINE[:60]}", "line 3 has .*is it whole?"), (f"{HEAD}\n{LINE},1,2,3", "line 2 has 11 cells"),
        (f'{HEAD}\nx,"{"y" * 2_000_000}', "line 2 is no csv: field larger"), (HEAD.encode("utf-16"), NO_KIND),
        (f"{HEAD}\n{LINE}余弦相似度".encode("gbk"), "not UTF-8 text"), (b"", NO_KIND),
    ]),
    "jsonl": ("x.jsonl", lambda text: json.dumps(REPORT[0]).encode() + b"\n" + text, [
        (b'{"type": "compa', "line 2 is no json"), (b"[" * 100_000, "line 2 is no json"),
    ]),
    "xlsx": ("x.xlsx", lambda made: made if isinstance(made, bytes) else xlsx(ROWS, True, *made), [
        (b"PK\x03\x04torn", NO_KIND), (bytes(range(256)), NO_KIND), ((BOMB,), NO_XLSX),
        *((("", *change), NO_XLSX) for change in (
            ('r="A2"', 'r="ZZZZZZ2"'), ('r="A2" t="inlineStr"', 'r="A2" t="s"'), ("</sheetData>", ""),
            ("</row></sheetData>", "<c><v>1</v></c></row></sheetData>"), ("far", "x" * 1_100_000))),
    ]),
}  # fmt: skip
"""Reader → the file's name; what makes its bytes of a row; rows: what is wrong, and the message, as a pattern."""


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [pytest.param(name, made(wrong), message, id=f"{reader}-{i}-{message}")
     for reader, (name, made, rows) in READERS.items() for i, (wrong, message) in enumerate(rows)],
)  # fmt: skip
def test_a_file_that_lies_is_one_line(name, data, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCPROBE_MARKER", str(tmp_path / "code of the file was run"))
    path = tmp_path / name
    path.write_bytes(data)
    code = main(["inspect", str(path)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert name in err
    assert re.search(message, err), err
    assert "root:" not in err
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_hand_made_pickle_is_read(tmp_path: Path) -> None:
    """What is refused above is refused for what is wrong with it."""
    values = np.arange(16, dtype="f4").tobytes()
    (tmp_path / "x.pt").write_bytes(archive(tensor_pickle("(I2\nI3\nt", "(I8\nI1\nt", offset=1), values))
    dump = open_dump(tmp_path / "x.pt")
    assert dump.read(dump.records[0]).tolist() == [[1, 2, 3], [9, 10, 11]]


def test_nothing_small_becomes_large(tmp_path: Path) -> None:
    """256 kB that would be 256 MB: refused by name, with what to do where it is honest; less is read."""
    import h5py

    for megabytes, refused in ((32, False), (96, True)):
        array = np.zeros(megabytes << 18, np.float32)
        np.savez_compressed(tmp_path / "x.npz", array)
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.create_dataset("x", data=array, chunks=(1 << 18,), compression="gzip")
        for name, advice in (("x.npz", "numpy.savez"), ("x.h5", "h5repack")):
            if refused:
                with pytest.raises(DumpError, match=advice):
                    open_dump(tmp_path / name)
            else:
                assert len(open_dump(tmp_path / name).records) == 1
    (tmp_path / "x.pt").write_bytes(archive(tensor_pickle("(I1099511627776\nt", "(I0\nt")))  # one number without end
    dump = open_dump(tmp_path / "x.pt")
    with pytest.raises(DumpError, match="too often"):
        dump.read(dump.records[0])


# --- what is opened, spent and run, in a process of its own; what is printed of these: tests/freeze ---

SECONDS, MEGABYTES = 2.0, 500.0
RUNNER = Path(__file__).with_name("hostile_runner.py")
REPOSITORY = Path(__file__).parents[2]
MANIFEST = ["tar", "-xJOf", str(Path(__file__).parent / "data/h_hostile.tar.xz"), "h_hostile/manifest.json"]
CODES = {"refuse": (2,), "nothing left": (3,), "skip_entry": (0, 1), "accept": (0, 1), "any_clean": (0, 1, 2, 3)}
MORE = {
    "ge_length": "nothing left", "ge_shape": "nothing left", "ge_deep": "refuse", "atb_long_header": "nothing left",
    "atb_shape": "nothing left", "sglang_pickle": "nothing left", "msit_pickle": "nothing left", "link_out": "refuse",
    "loop": "refuse", "fifo": "nothing left", "deep": "refuse", "fx_object": "nothing left",
}  # fmt: skip
CASES = {c["path"]: c["expect"] for c in json.loads(subprocess.check_output(MANIFEST))["cases"]}
CASES |= {f"more/{name}": expect for name, expect in MORE.items()}


def _more(root: Path) -> None:
    """What the archive does not have. Pickles of code are only written here, never loaded."""

    def file(case: str, name: str, data: bytes) -> None:
        path = root / case / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    ge = "0/Add.a.1.1.1795200000000000"
    file("ge_length", ge, struct.pack("<Q", 1 << 62) + bytes(100))
    shape = b"\x1a\x0c\x0a\x0a" + b"\x80" * 8 + b"\x10"  # the varint is cut short
    file("ge_shape", ge, struct.pack("<Q", 2 + len(shape)) + b"\x1a" + bytes([len(shape)]) + shape + bytes(64))
    inner = b""  # a message that holds itself
    for _ in range(200):
        size = len(inner)
        inner = b"\x1a" + (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])) + inner
    file("ge_deep", ge, struct.pack("<Q", len(inner)) + inner)
    file("atb_long_header", "0_Op/after/outtensor0.bin", b"key=value\n" * 100_000)
    file("atb_shape", "0_Op/after/outtensor0.bin", b"dtype=0\ndims=1000000,1000000,1000\n$End=1\n")
    evil = pickle.dumps({"value": RunsCode(), "meta": {}})
    file("sglang_pickle", "step=0___rank=0___dump_index=1___name=x.pt", evil)
    file("msit_pickle", "torch_tensors/0_1/0/root.a/output.pth", evil)
    (root / "link_out/0_Op/after").mkdir(parents=True)
    (root / "link_out/0_Op/after/outtensor0.bin").symlink_to("/etc/passwd")
    (root / "loop/0_Op/after").mkdir(parents=True)
    (root / "loop/0_Op/after/again").symlink_to(root / "loop")
    (root / "fifo/0_Op/after").mkdir(parents=True)
    os.mkfifo(root / "fifo/0_Op/after/outtensor0.bin")
    deep = root / "deep"
    for _ in range(300):
        deep = deep / "0_a"
    deep.mkdir(parents=True)
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    array = b"\x93NUMPY\x01\x00\x76\x00" + header + evil
    file("fx_object", "1/mm-aten.mm.default.OUTPUT.0.20261120101010000000.npy", array)


def _golden(home: Path, path: str) -> Path:
    case = home / path
    if path == "hostile_names":  # against a copy of itself
        return Path(shutil.copytree(case, home / "hostile_names_copy"))
    if case.is_dir():
        return home / "_ok_msprobe"
    return home / f"_ok/ok{case.suffix if case.suffix != '.pth' else '.pt'}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All cases, run as ``accprobe compare GOLDEN CASE``, one process each."""
    home, out = unpack("h_hostile", tmp_path_factory.mktemp("hostile")), tmp_path_factory.mktemp("out")
    _more(home / "more")
    marker = home / "MARKER"
    cases = [["compare", str(_golden(home, p)), str(home / p), "--out", str(out)] for p in CASES]
    environment = {**os.environ, "ACCPROBE_MARKER": str(marker), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(RUNNER)], input=json.dumps(cases), capture_output=True, text=True,
                          env=environment, timeout=900, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert not marker.exists(), "code of a file was run"
    found = dict(zip(CASES, json.loads(done.stdout), strict=True))
    for r in found.values():
        r["allowed"] = [str(p) for p in (home, out)]
    return found


@pytest.mark.parametrize(("path", "expect"), CASES.items())
def test_hostile(results: dict[str, dict[str, Any]], path: str, expect: str) -> None:
    result = results[path]
    assert result["cpu"] < SECONDS, result["cpu"]
    assert result["mb"] < MEGABYTES, result["mb"]
    assert "Traceback" not in result["out"] + result["err"], result["err"]
    places = {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), Path(tempfile.gettempdir()).resolve()}
    places |= {cache} if (cache := user_cache.directory()) is not None else set()  # compiled loops
    roots = [*result["allowed"], *map(str, places), "/proc", "/sys", "/dev", "/usr"]
    outside = [p for p in result["opened"] if p.startswith("!") or
               (p.startswith("/") and not any(p == r or p.startswith(r + "/") for r in roots))]  # fmt: skip
    assert outside == []
    assert result["code"] in CODES[expect], result["err"][-500:]
    if result["code"] > 1:
        (line,) = result["err"].strip().splitlines()
        assert line.startswith("accprobe: ")
        assert len(line) < 1000
    if expect == "accept":
        assert "\x1b" not in result["out"].replace("\x1b[", ""), "a name's escape characters reach the terminal"
