"""A dump of which some files cannot be read: they are left out, counted and named, and the rest is compared.

Each format's dump is damaged in every way at once, a way per file; then all of its files are. Real dumps of the tools
(tests/formats/data), real damage on the disk; what runs code must not run."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.cli_dumps import make
from support.peer_dumps import RunsCode, unpack
from support.permissions import permissions_count

from vllm_accprobe.cli import main
from vllm_accprobe.formats import open_dump

UNREADABLE = "file that cannot be read"


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(np.random.default_rng(5).bytes(path.stat().st_size))


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def runs_code(path: Path) -> None:
    path.write_bytes(pickle.dumps({"value": RunsCode(), "meta": {}}))


def promises(path: Path) -> None:
    """The whole header, and nothing of what it announces; of a format of which nothing is known, half a header."""
    data = path.read_bytes()
    if data[:6] == b"\x93NUMPY":
        path.write_bytes(data[: 10 + int.from_bytes(data[8:10], "little")])
    elif b"$End=" in data[:4096]:
        path.write_bytes(data[: data.index(b"\n", data.index(b"$End=")) + 1])
    elif path.suffix == ".safetensors":
        path.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    elif data[:4] == b"PK\x03\x04":  # the directory of the archive is whole, the archive has lost its middle
        path.write_bytes(data[:200] + data[data.index(b"PK\x01\x02") :])
    else:
        path.write_bytes(data[: max(len(data) // 8, 1)])


DAMAGES: tuple[Callable[[Path], None], ...] = (truncated, empty, garbage, directory, pipe, promises, runs_code)


@dataclass(frozen=True)
class Kind:
    """A format's dump. files: those that hold tensors, in the order of names. unit: how the names of what is left out
    are known in compare.csv."""

    root: Path
    files: tuple[Path, ...]


def _peers(archive: str, inside: str, ending: str) -> Callable[[Path], Kind]:
    def make(where: Path) -> Kind:
        root = unpack(archive, where) / inside
        return Kind(root, tuple(sorted(p for p in root.rglob(f"*{ending}") if p.is_file())))

    return make


def _ge(where: Path) -> Kind:
    root = unpack("f_torchair", where) / "ge_mine"
    return Kind(root, tuple(sorted(p for p in root.rglob("*") if p.is_file() and p.suffix[1:].isdecimal())))


def _xray(where: Path) -> Kind:
    one = next((unpack("d_xray_h5", where) / "golden").glob("*.h5"))
    root = where / "xray"
    root.mkdir()
    for rank in range(10):
        shutil.copy(one, root / f"globalrank-{rank}_localrank-{rank}.h5")
    return Kind(root, tuple(sorted(root.iterdir())))


def _files(ending: str) -> Callable[[Path], Kind]:
    def make(where: Path) -> Kind:
        import torch
        from safetensors.numpy import save_file

        root = where / "folder"
        root.mkdir()
        for i in range(10):
            value = np.random.default_rng(i).standard_normal((8, 16)).astype(np.float32)
            path = root / f"t{i}{ending}"
            if ending == ".npy":
                np.save(path, value)
            elif ending == ".npz":
                np.savez(path, x=value)
            elif ending == ".safetensors":
                save_file({"x": value}, path)
            else:
                torch.save(torch.from_numpy(value), path)
        return Kind(root, tuple(sorted(root.iterdir())))

    return make


KINDS: dict[str, Callable[[Path], Kind]] = {
    "msprobe": _peers("a_msprobe_tensor", "golden", ".pt"), "sglang": _peers("b_sglang_tp", "golden", ".pt"),
    "xray": _xray, "msit": _peers("c_msit_torch", "golden", ".pth"), "atb": _peers("e_atb", "golden", ".bin"),
    "torchair_ge": _ge, "torchair_fx": _peers("f_torchair", "fx_golden", ".npy"), "npy": _files(".npy"),
    "npz": _files(".npz"), "pt": _files(".pt"), "safetensors": _files(".safetensors"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = tmp_path / "MARKER"
    monkeypatch.setenv("ACCPROBE_MARKER", str(path))
    yield
    assert not path.exists(), "code of a file was run"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str
    json: dict[str, Any]


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def run(golden: Path, mine: Path, *more: str) -> Said:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        code = main(["compare", str(golden), str(mine), "--no-replay", "--out", str(out), *more])
        said = capsys.readouterr()
        found = json.loads((out / "compare.json").read_text()) if (out / "compare.json").exists() else {}
        return Said(code, said.out, said.err, found)

    return run


def _copy(root: Path, name: str) -> Path:
    shutil.copytree(root, root.parent / name)
    return root.parent / name


def _spoil(kind: Kind, mine: Path, every: bool) -> list[Path]:
    """Damages one file in each way, or all of them. Returns those that were."""
    chosen = kind.files if every else kind.files[:: max(len(kind.files) // len(DAMAGES), 1)][: len(DAMAGES)]
    spoilt = [mine / f.relative_to(kind.root) for f in chosen]
    for i, path in enumerate(spoilt):
        DAMAGES[i % len(DAMAGES)](path)
    return spoilt


@pytest.mark.parametrize("name", KINDS)
def test_what_cannot_be_read_is_left_out_and_the_rest_is_compared(name, tmp_path, compared, capsys):
    kind = KINDS[name](tmp_path)
    mine = _copy(kind.root, "spoilt")
    whole = compared(kind.root, mine)
    assert whole.code == 0, whole.err
    spoilt = _spoil(kind, mine, every=False)
    found = compared(kind.root, mine)
    assert found.code == 0, (found.err, found.out)
    skipped = found.json["coverage"]["skipped"]
    assert skipped[f"mine: {UNREADABLE}"] == len(spoilt), skipped
    assert 0 < found.json["coverage"]["pairs"] <= whole.json["coverage"]["pairs"]
    notes = " ".join(found.json["notes"])
    named = [p for p in spoilt if p.name in notes]
    assert len(named) >= 3, notes  # the first ones by name, the others by their number
    assert f"{len(spoilt) - 3} more" in notes
    assert main(["inspect", str(mine)]) == 0
    said = capsys.readouterr().out
    assert f"skipped: {len(spoilt)} x {UNREADABLE}" in said
    assert any(p.name in said for p in spoilt)
    # and where nothing can be read, nothing is compared
    mine = _copy(kind.root, "all-spoilt")
    _spoil(kind, mine, every=True)
    found = compared(kind.root, mine)
    assert found.code == 3, (found.err, found.out)
    (line,) = found.err.strip().splitlines()
    assert line.startswith("accprobe: nothing could be compared: ")
    assert str(mine) in line
    assert re.search(r"none of its \d+ files can be read, the first: ", line), line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [garbage, directory, pipe, promises], ids=lambda d: d.__name__)
@pytest.mark.parametrize("ending", [".npy", ".npz", ".pt", ".safetensors", ".h5"])
def test_a_single_file_that_cannot_be_read_is_refused(ending, damage, tmp_path, compared):
    """It is its own index. What else is refused: test_hostile_formats.py."""
    kind = (_xray if ending == ".h5" else _files(ending))(tmp_path)
    mine = tmp_path / f"mine{ending}"
    shutil.copy(kind.files[0], mine)
    damage(mine)
    found = compared(kind.files[0], mine)
    assert found.code == 2, (found.err, found.out)
    assert found.err.count("\n") == 1
    assert str(mine) in found.err


# --- what shows only when values are read ----------------------------------------------------------------------------


def test_what_breaks_while_it_is_read_is_a_skip_too(tmp_path: Path, compared: Callable[..., Said]) -> None:
    """Chunks and packed members that are damaged inside have a whole header: only reading them tells."""
    import h5py

    values = {f"layers.{i}.proj.Linear.0.forward_output.0": np.random.default_rng(i).standard_normal((64, 64))
              for i in range(4)}  # fmt: skip
    for side in ("golden", "mine"):
        with h5py.File(tmp_path / f"{side}.h5", "w", track_order=True) as file:
            group = file.create_group("1", track_order=True)
            for name, value in values.items():
                group.create_dataset(name, data=value, chunks=(64, 64), compression="gzip")
    with h5py.File(tmp_path / "mine.h5", "r") as file:
        (chunk,) = [file[f"1/{n}"].id.get_chunk_info(0) for n in values if "layers.2" in n]
    data = bytearray((tmp_path / "mine.h5").read_bytes())
    data[chunk.byte_offset : chunk.byte_offset + 64] = bytes(64)
    (tmp_path / "mine.h5").write_bytes(data)
    found = compared(tmp_path / "golden.h5", tmp_path / "mine.h5")
    assert found.code == 0, (found.err, found.out)
    assert found.json["coverage"]["skipped"] == {"payload that cannot be read": 1}
    assert found.json["coverage"]["pairs"] == 3
    assert "layers.2.proj" in " ".join(found.json["notes"])


def test_a_member_of_an_archive(tmp_path: Path, compared: Callable[..., Said]) -> None:
    """One of several is left out, packed or not; and of a state dict whose directory is whole."""
    values = {f"t{i}": np.random.default_rng(i).standard_normal((64, 64)).astype(np.float32) for i in range(4)}
    np.savez_compressed(tmp_path / "golden.npz", **values)
    values["t2"] = np.array([{"an": "object"}], dtype=object)  # type: ignore[assignment]
    np.savez_compressed(tmp_path / "mine.npz", **values)
    found = compared(tmp_path / "golden.npz", tmp_path / "mine.npz")
    assert found.code == 0, (found.err, found.out)
    assert found.json["coverage"]["skipped"][f"mine: {UNREADABLE}"] == 1
    assert found.json["coverage"]["pairs"] == 3
    assert "'t2.npy' holds |O" in " ".join(found.json["notes"])


# --- several indices -------------------------------------------------------------------------------------------------


def test_one_rank_of_msprobe_without_its_index(tmp_path: Path, compared: Callable[..., Said]) -> None:
    one = next((unpack("a_msprobe_tensor", tmp_path) / "golden/step0").iterdir())
    for side in ("golden", "mine"):
        for rank in (0, 1):
            shutil.copytree(one, tmp_path / side / f"step0/rank{rank}")
    (tmp_path / "mine/step0/rank1/dump.json").write_text('{"data": {"Module')
    found = compared(tmp_path / "golden", tmp_path / "mine")
    assert found.code == 0, (found.err, found.out)
    assert found.json["coverage"]["skipped"][f"mine: {UNREADABLE}"] == 1
    assert "step0/rank1/dump.json is damaged" in " ".join(found.json["notes"])
    (tmp_path / "mine/step0/rank0/dump.json").write_text("")
    found = compared(tmp_path / "golden", tmp_path / "mine")
    assert found.code == 2
    assert "dump.json is damaged" in found.err
    (tmp_path / "golden/step0/rank1/construct.json").write_text("[")
    shutil.rmtree(tmp_path / "mine")
    shutil.copytree(tmp_path / "golden", tmp_path / "mine")
    found = compared(tmp_path / "golden", tmp_path / "mine")
    assert found.code == 0, (found.err, found.out)
    assert "construct.json is damaged" in " ".join(found.json["notes"])


# --- our own ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_segment_of_our_own_that_is_damaged(damage, tmp_path, compared, capsys):
    """What it held is judged by statistics, with hashes and journal whole, and counted; of one rank and of all."""
    golden, mine = make(tmp_path / "golden", ranks=2), make(tmp_path / "mine", ranks=2)
    damage(mine / "rank0001/seg-00000.safetensors")
    n = sum(r.rank == 1 and r.payload is None for r in open_dump(mine).records)
    assert n > (0 if damage is garbage else 10) or damage is garbage
    found = compared(golden, mine)
    assert found.code == 0, (found.err, found.out)
    if n:
        assert found.json["coverage"]["skipped"]["mine: payload that is not in its file"] == n
        assert any(f"rank 1: {n} tensors lost the payload: seg-00000" in note for note in found.json["notes"])
        assert main(["inspect", str(mine)]) == 0
        assert f"skipped: {n} x payload that is not in its file" in capsys.readouterr().out
    damage(mine / "rank0000/seg-00000.safetensors")
    if all(r.payload is None for r in open_dump(mine).records):
        found = compared(golden, mine)
        assert found.code == 3
        assert "seg-00000.safetensors" in found.err


def test_a_call_of_which_a_payload_cannot_be_read_is_a_skip_of_opcheck(tmp_path: Path) -> None:
    """Cut off after the dump was opened: the calls in front are checked, those behind say why they are not."""
    from vllm_accprobe.opcheck.calls.records import UNREAD, Calls

    mine = make(tmp_path / "mine")
    dump = open_dump(mine)
    end = max(r.payload.off + r.payload.nbytes for r in dump.records if r.payload is not None)
    data = dump.data[0, 0]
    os.truncate(data.path, data.start + end - 4)
    calls = Calls(dump, None)
    said = [c.missing for rank, tap, _ in calls.taps() for c in calls.of(rank, tap)]
    assert "" in said
    assert any(m.startswith(UNREAD) and "has become shorter" in m for m in said), said


# --- somebody else's files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["msprobe", "sglang", "xray", "atb", "torchair_ge", "npy"])
def test_files_that_may_not_be_read(name, tmp_path, capsys):
    kind = KINDS[name](tmp_path)
    mine = _copy(kind.root, "closed")
    closed = mine / kind.files[1].relative_to(kind.root)
    closed.chmod(0)
    command = ["compare", str(kind.root), str(mine), "--no-replay", "--format", "json", "--out", str(tmp_path / "out")]
    with permissions_count():
        assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["coverage"]["skipped"][f"mine: {UNREADABLE}"] == 1
    assert any(closed.name in n and "Permission denied" in n for n in found["notes"]), found["notes"]
