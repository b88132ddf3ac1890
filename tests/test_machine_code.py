"""Machine code on disk: made once, never run where it does not belong, and nothing left of what was killed."""

import json
import os
import subprocess
import sys

import pytest

from vllm_accprobe import machine_code, user_cache

pytest.importorskip("llvmlite")
MODULE, SOURCES = "vllm_accprobe.kernels.loops", ("kernels/loops.py",)


def test_it_is_made_once_and_what_a_killed_process_left_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = user_cache.directory()
    (place / "loops-x.bin.1.part").write_bytes(b"half")
    before = os.umask(0o002)  # many systems have it, and a file that a group may write is not read
    try:
        made = machine_code.loops(MODULE, SOURCES)
    finally:
        os.umask(before)
    names = [p.name for p in place.iterdir()]
    assert len(names) == 1
    assert names[0].endswith("-loops.bin")
    monkeypatch.setattr(machine_code, "_made", lambda *_: pytest.fail("compiled again"))
    assert set(machine_code.loops(MODULE, SOURCES).call) == set(made.call) == {"rows", "structure"}


def test_a_process_that_is_killed_while_it_compiles_leaves_nothing(tmp_path):
    code = (
        "import os, signal\nfrom vllm_accprobe import machine_code\n"
        "machine_code._compiled = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"machine_code.loops({MODULE!r}, {SOURCES!r})\n"
    )
    env = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == -9
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert set(machine_code.loops(MODULE, SOURCES).call) == {"rows", "structure"}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_code.os, "getpid", full)
    assert set(machine_code.loops(MODULE, SOURCES).call) == {"rows", "structure"}


def test_a_file_that_is_damaged_or_anothers_is_not_read(tmp_path):
    made = {"symbol": "vi"}, b"code"
    path = tmp_path / "x.bin"

    def write(body, **other):
        head = {"name": "x.bin", "hash": machine_code._digest(*made), "loops": made[0]} | other
        path.write_bytes(json.dumps(head).encode() + b"\n" + body)
        return machine_code._read(path, "x.bin")

    assert write(b"code") == made
    assert write(b"codf") is None
    assert write(b"cod") is None
    assert write(b"code", name="y.bin") is None
    assert write(b"code", loops={"symbol": "va"}) is None
    assert write(b"code", loops=["symbol"]) is None
    write(b"code")
    path.chmod(0o666)
    assert machine_code._read(path, "x.bin") is None
    path.chmod(0o600)
    assert machine_code._read(path, "x.bin") == made
    path.write_bytes(b"\xff\xfe no json")
    assert machine_code._read(path, "x.bin") is None
    assert machine_code._read(tmp_path / "missing", "missing") is None


def test_code_without_one_of_its_loops_is_unusable(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    made = machine_code._made
    monkeypatch.setattr(machine_code, "_made", lambda *args: ({"other": "v"}, made(*args)[1]))
    with pytest.raises(machine_code.Unusable, match="no other in"):
        machine_code.loops(MODULE, SOURCES)


def test_a_release_of_llvmlite_that_does_otherwise_is_unusable(monkeypatch):
    import llvmlite.binding as llvm

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delattr(llvm, "create_pass_builder")
    with pytest.raises(machine_code.Unusable, match="create_pass_builder"):
        machine_code.loops(MODULE, SOURCES)
