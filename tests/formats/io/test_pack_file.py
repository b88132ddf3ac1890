"""Packs of strangers: each is one line, nothing is written outside, and nothing is inflated beyond what a pack has."""

import errno
import hashlib
import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pack_dumps import packed
from safetensors.numpy import load, save

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.io import pack_file
from vllm_accprobe.formats.io.pack_file import INDEX, MANIFEST, SKETCHES, PackAltered, unpack, verify
from vllm_accprobe.golden.pack_sketches import open_pack

JOURNAL = "rank0000/journal.jsonl"
Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Members:
    path = packed(tmp_path_factory.mktemp("packs"), max_bytes=40_000, together=False)
    with zipfile.ZipFile(path) as archive:
        return [(n, archive.read(n)) for n in archive.namelist()]


def put(members: Members, name: str, data: bytes) -> Members:
    return [(n, data if n == name else d) for n, d in members]


def signed(members: Members, **more: object) -> Members:
    """With a manifest that fits: what a stranger can always make."""
    manifest = json.loads(dict(members)[MANIFEST])
    manifest["members"] = {
        n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in members if n != MANIFEST
    }
    return put(members, MANIFEST, json.dumps({**manifest, **more}).encode())


def index(members: Members, change: Callable[[dict], object]) -> Members:
    found = json.loads(dict(members)[INDEX])
    change(found)
    return signed(put(members, INDEX, json.dumps(found).encode()))


def written(path: Path, members: Members) -> Path:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")
        for name, data in members:
            archive.writestr(name, data)
    return path


def header(data: bytes, **change: object) -> bytes:
    n = int.from_bytes(data[:8], "little")
    text = json.dumps({**json.loads(data[8 : 8 + n]), **change}).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + n :]


def noise(n: int) -> bytes:
    return np.random.default_rng(0).bytes(n)


def sketched(
    members: Members, name: str, *, shape: list[int] | None = None, columns: int = 1, sign: int = 1
) -> Members:
    """With the sketches' tensor ``name`` in another form."""
    tensors = load(dict(members)[SKETCHES])
    found = tensors[name] * np.array(sign, tensors[name].dtype)
    if columns > 1:
        found = np.stack([found] * columns, axis=1)
    tensors[name] = found if shape is None else np.ones(shape, found.dtype)
    return signed(put(members, SKETCHES, save(tensors)))


ALTERED: dict[str, tuple[Callable[[Members], Members], str]] = {
    "another hash": (lambda m: put(m, JOURNAL, dict(m)[JOURNAL][:-2] + b" \n"), "another hash"),
    "another size": (lambda m: put(m, JOURNAL, dict(m)[JOURNAL] + b"\n"), "and its manifest says"),
    "a member less": (lambda m: [x for x in m if x[0] != JOURNAL], "is missing"),
    "a member more": (lambda m: [*m, ("rank0001/journal.jsonl", b"")], "is not in its manifest"),
}
REFUSED: dict[str, tuple[Callable[[Members], Members], str]] = {
    "a path out of it": (lambda m: signed([*m, ("../evil", b"x")]), "which no pack has"),
    "an absolute path": (lambda m: signed([*m, ("/tmp/evil", b"x")]), "which no pack has"),
    "a path by a rank": (lambda m: signed([*m, ("rank0000/../../evil", b"x")]), "which no pack has"),
    "code": (lambda m: signed([*m, ("rank0000/run.py", b"x")]), "which no pack has"),
    "a member twice": (lambda m: [*m, (JOURNAL, b"")], "twice"),
    "a bomb": (lambda m: signed(put(m, JOURNAL, bytes(300 << 20))), "has 314,572,800 bytes"),
    "a large run.json": (lambda m: signed(put(m, "run.json", bytes(5 << 20))), "run.json has 5,242,880 bytes"),
    "a large index": (lambda m: signed(put(m, INDEX, noise(9 << 20))), f"{INDEX} has 9,437,184 bytes"),
    "a large directory": (lambda m: [*m, *((f"x{i}" + "x" * 60_000, b"") for i in range(20))], "directory is damaged"),
    "no manifest": (lambda m: m[1:], "it has no manifest.json"),
    "a manifest of another kind": (lambda m: signed(m, kind="x"), "not the manifest of a golden pack"),
    "a later schema": (lambda m: signed(m, schema=99), "upgrade it"),
    "a seed that is no number": (lambda m: signed(m, seed=float("nan")), "it has no seed"),
    "no JSON": (lambda m: put(m, MANIFEST, b"{"), "cannot be used"),
    "deep JSON": (lambda m: put(m, MANIFEST, b"[" * 100_000), "nested too deep"),
    "no list of members": (lambda m: put(m, MANIFEST, b'{"kind":"accprobe golden pack","schema":1}'), "members"),
    "no index": (lambda m: signed([x for x in m if x[0] != INDEX]), f"has no {INDEX}"),
}
SKETCHED: dict[str, tuple[Callable[[Members], Members], str]] = {
    "an index that is no JSON": (lambda m: signed(put(m, INDEX, b"[")), "cannot be used"),
    "a place behind the end": (lambda m: index(m, lambda i: i["places"].update(x=["x", 32, 1 << 40, 0])), "not there"),
    "a list that is not there": (lambda m: index(m, lambda i: i["places"].update(x=["x", 32, 0, 99])), "not there"),
    "a list behind the end": (lambda m: index(m, lambda i: i.update(lists=[[1 << 40, 1]] * 9)), "not there"),
    "a wide row": (lambda m: index(m, lambda i: i["places"].update(x=["x", 1 << 50, 0, 0])), "rows of"),
    "a negative number": (lambda m: index(m, lambda i: i["places"].update(x=["x", 32, -1, 0])), "has the place"),
    "an image of no request": (lambda m: index(m, lambda i: i.update(images=[[0, -1, 0]])), "images"),
    "another request": (lambda m: index(m, lambda i: i.update(requests=[])), "a request that is not there"),
    "another tensor": (lambda m: signed(put(m, SKETCHES, header(dict(m)[SKETCHES], other={
        "dtype": "I16", "shape": [0], "data_offsets": [0, 0]}))), "has not the tensors"),
    "a lying header": (lambda m: signed(put(m, SKETCHES, header(dict(m)[SKETCHES], numbers={
        "dtype": "I16", "shape": [1 << 40, 16], "data_offsets": [0, 1 << 45]}))), "cannot be used"),
    "a norm without rows": (lambda m: sketched(m, "norm", shape=[]), "other shapes"),
    "norms in two columns": (lambda m: sketched(m, "norm", columns=2), "other shapes"),
    "a negative norm": (lambda m: sketched(m, "norm", sign=-1), "a negative norm"),
    "other sketches": (lambda m: signed(m, sketch={"numbers": 8}), "of another kind"),
}  # fmt: skip


@pytest.mark.parametrize("how", [*ALTERED, *REFUSED])
def test_what_is_refused_before_it_is_used(good: Members, tmp_path: Path, how: str) -> None:
    change, why = {**ALTERED, **REFUSED}[how]
    path = written(tmp_path / "x.golden", change(good))
    for use in (verify, lambda p: unpack(p, tmp_path / "into"), open_dump):
        with pytest.raises(DumpError) as error:
            use(path)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400
        if use is verify:
            assert why in str(error.value)
            assert str(path) in str(error.value)
            assert (type(error.value) is PackAltered) is (how in ALTERED)
    assert [p.name for p in tmp_path.rglob("evil")] == []
    assert list((tmp_path / "into").rglob("*")) == []


@pytest.mark.parametrize("how", SKETCHED)
def test_sketches_that_say_what_is_not_there(good: Members, tmp_path: Path, how: str) -> None:
    change, why = SKETCHED[how]
    pack = open_pack(written(tmp_path / "x.golden", change(good)), tmp_path)
    with pytest.raises(DumpError, match=why) as error:
        assert pack.sketches
    assert "\n" not in str(error.value)
    assert str(tmp_path / "x.golden") in str(error.value)


@pytest.mark.parametrize("cut", [0, 3, 40, 2_000, -30, -1])
def test_a_part_of_a_file(good: Members, tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "x.golden", good)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DumpError):
        verify(path)


def test_a_size_that_directory_and_manifest_lie_about(good: Members, tmp_path: Path) -> None:
    """Both say 10 bytes, and the stream inflates to 65,536: no byte more is taken."""
    long = signed(put(good, JOURNAL, bytes(1 << 16)))
    manifest = json.loads(dict(long)[MANIFEST])
    manifest["members"][JOURNAL] = {"bytes": 10, "sha256": hashlib.sha256(bytes(10)).hexdigest()}
    path = written(tmp_path / "x.golden", put(long, MANIFEST, json.dumps(manifest).encode()))
    data = bytearray(path.read_bytes())
    at = data.rfind(JOURNAL.encode()) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    data[at + 24 : at + 28] = struct.pack("<I", 10)
    path.write_bytes(data)
    assert (unpack(path, tmp_path)[1] / "dump" / JOURNAL).stat().st_size == 10


def test_a_header_beyond_any_file(good: Members, tmp_path: Path) -> None:
    """zip64's offset of a local header is 2**64 - 1."""
    path = written(tmp_path / "x.golden", good)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        directory, count = archive.start_dir, len(good)
    at = data.rfind(JOURNAL.encode()) - 46
    name = at + 46 + len(JOURNAL)
    extra = struct.pack("<HHQ", 1, 8, (1 << 64) - 1)
    entry = data[at : at + 30] + struct.pack("<H", len(extra)) + data[at + 32 : at + 42] + b"\xff" * 4
    lying = data[:at] + entry + data[at + 46 : name] + extra + data[name:-22]
    end = data[-22:-10] + struct.pack("<II", len(lying) - directory, directory) + b"\0\0"
    path.write_bytes(lying + end)
    assert count == int.from_bytes(end[10:12], "little")
    with pytest.raises(DumpError, match="is not where the archive's directory says"):
        verify(path)


def test_no_room_to_unpack(good: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Iterator[bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = written(tmp_path / "x.golden", good)
    monkeypatch.setattr(pack_file, "_pieces", full)
    with pytest.raises(DumpError, match=r"cannot unpack .*x.golden into .*: No space left"):
        unpack(path, tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_any_command_opens_the_full_rows(good: Members, tmp_path: Path) -> None:
    dump = open_dump(written(tmp_path / "x.golden", good))
    assert any(r.payload is not None and dump.read(r).size for r in dump.records)
    assert "not its sketches" in dump.problems[0]
    home = dump.path
    del dump
    assert not home.exists()
