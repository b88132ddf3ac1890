"""Files that were made to do harm: one clear line, exit code 2, nothing run, nothing outside touched, little spent."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.peer_dumps import RunsCode, unpack

from vllm_accprobe import user_cache

SECONDS, MEGABYTES = 2.0, 500.0
RUNNER = Path(__file__).with_name("hostile_runner.py")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = unpack("h_hostile", tmp_path_factory.mktemp("hostile"))
    _more(root / "more")
    return root


CASES = [
    (c["path"], c["expect"])
    for c in json.loads(
        subprocess.run(
            ["tar", "-xJOf", str(Path(__file__).parent / "data/h_hostile.tar.xz"), "h_hostile/manifest.json"],
            capture_output=True, check=True,
        ).stdout
    )["cases"]
]  # fmt: skip
MORE = {
    "ge_length": "GE file whose header would be larger than the file",
    "ge_shape": "GE file with a shape of 2**60 elements in a few bytes",
    "ge_deep": "GE file whose message holds itself a hundred thousand times",
    "atb_long_header": "a megabyte of header lines without an end", "atb_shape": "dims of 10**15 elements",
    "sglang_pickle": "a dump of SGLang's dumper whose pickle runs code",
    "msit_pickle": "msit's .pth whose pickle runs code", "link_out": "a tensor file that is a link to another file",
    "loop": "a directory that is a link to what encloses it", "fifo": "a tensor file that is a pipe nobody writes to",
    "deep": "directories nested a few hundred deep", "fx_object": "an FX array of objects",
}  # fmt: skip

NOTHING_LEFT = (
    "ge_length", "ge_shape", "atb_long_header", "atb_shape", "sglang_pickle", "msit_pickle", "fifo", "fx_object",
)  # fmt: skip
"""Dumps that are recognised, and whose one file cannot be read: exit code 3, of the others 2."""


def _more(root: Path) -> None:
    """What the archive does not have. Pickles of code are only written here, never loaded."""
    import pickle

    def file(case: str, name: str, data: bytes) -> None:
        path = root / case / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    ge = "0/Add.a.1.1.1795200000000000"
    file("ge_length", ge, struct.pack("<Q", 1 << 62) + bytes(100))
    shape = b"\x1a\x0c\x0a\x0a" + b"\x80" * 8 + b"\x10"  # the varint is cut short
    file("ge_shape", ge, struct.pack("<Q", 2 + len(shape)) + b"\x1a" + bytes([len(shape)]) + shape + bytes(64))
    inner = b""
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
        copy = home / "hostile_names_copy"
        return copy if copy.exists() else Path(shutil.copytree(case, copy))
    if case.is_dir():
        return home / "_ok_msprobe"
    return home / f"_ok/ok{case.suffix if case.suffix != '.pth' else '.pt'}"


@pytest.fixture(scope="module")
def results(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All cases, run as ``accprobe compare GOLDEN CASE``, one process each."""
    out, marker = tmp_path_factory.mktemp("out"), home / "MARKER"
    paths = [path for path, _ in CASES] + [f"more/{name}" for name in MORE]
    cases = [["compare", str(_golden(home, p)), str(home / p), "--out", str(out)] for p in paths]
    environment = {**os.environ, "ACCPROBE_MARKER": str(marker), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(RUNNER)], input=json.dumps(cases), capture_output=True, text=True,
                          env=environment, timeout=250, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert not marker.exists(), "code of a file was run"
    found = dict(zip(paths, json.loads(done.stdout), strict=True))
    for r in found.values():
        r["allowed"] = [str(p) for p in (home, out)]
    return found


def _check_harmless(result: dict[str, Any], path: str) -> None:
    assert result["cpu"] < SECONDS, (path, result["cpu"])
    assert result["mb"] < MEGABYTES, (path, result["mb"])
    assert "Traceback" not in result["out"] + result["err"], (path, result["err"])
    places = {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), Path(tempfile.gettempdir()).resolve()}
    places |= {cache} if (cache := user_cache.directory()) is not None else set()  # compiled loops
    roots = [*result["allowed"], *map(str, places), "/proc", "/sys", "/dev", "/usr"]
    outside = [p for p in result["opened"] if p.startswith("!") or
               (p.startswith("/") and not any(p == r or p.startswith(r + "/") for r in roots))]  # fmt: skip
    assert outside == [], path


def _check_refused(result: dict[str, Any], path: str, code: int = 2) -> None:
    assert result["code"] == code, (path, result["code"], result["err"][-500:])
    lines = result["err"].strip().splitlines()
    assert len(lines) == 1, (path, lines)
    assert lines[0].startswith("accprobe: "), lines
    assert len(lines[0]) < 1000, len(lines[0])


@pytest.mark.parametrize(("path", "expect"), CASES)
def test_hostile(results: dict[str, dict[str, Any]], path: str, expect: str) -> None:
    result = results[path]
    _check_harmless(result, path)
    if expect == "refuse":
        _check_refused(result, path)
    elif expect != "any_clean":
        assert result["code"] in (0, 1), (path, result["err"][-500:])
    if expect == "accept":
        assert "\x1b" not in result["out"].replace("\x1b[", ""), "a name's escape characters reach the terminal"


@pytest.mark.parametrize("case", MORE)
def test_more_that_is_hostile(results: dict[str, dict[str, Any]], case: str) -> None:
    result = results[f"more/{case}"]
    _check_harmless(result, case)
    _check_refused(result, case, 3 if case in NOTHING_LEFT else 2)


def test_what_is_skipped_is_named(results: dict[str, dict[str, Any]]) -> None:
    text = results["msprobe_traversal"]["out"]
    assert "leads out of the dump" in text
    assert "/etc/passwd" not in results["msprobe_traversal"]["opened"]


def test_the_good_files_of_the_set(home: Path) -> None:
    """What is refused above is refused for what is wrong with it."""
    from vllm_accprobe.formats import open_dump

    for path in sorted((home / "_ok").iterdir()):
        dump = open_dump(path)
        assert dump.records, path.name
        for record in dump.records:
            assert np.isfinite(dump.read(record).astype(np.float64)).all()


def test_nothing_small_becomes_large(tmp_path: Path) -> None:
    """256 kB that would be 256 MB: refused by name, with what to do where it is honest; less is read."""
    import h5py

    from vllm_accprobe.formats import DumpError, open_dump

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
