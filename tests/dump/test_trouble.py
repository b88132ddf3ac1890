"""Killed processes, full disks, spent budgets, directories that refuse: what was journalled is read, nothing raises."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from dumps import bits, put, writer

from vllm_accprobe.dump import writer as writer_module
from vllm_accprobe.dump.reader import DumpError, open_dump
from vllm_accprobe.dump.repair import repair
from vllm_accprobe.dump.writer import RankWriter

HERE = Path(__file__).parent

_ENDLESS = textwrap.dedent(
    """
    import sys, itertools
    sys.path.insert(0, sys.argv[2])
    import numpy as np
    from dumps import put, writer
    w = writer(sys.argv[1], block_bytes=1 << 15, segment_bytes=1 << 20)
    print("ready", flush=True)
    for i in itertools.count():
        a = np.random.default_rng(i).integers(0, 256, 1 + i * 7919 % 30000, dtype=np.uint8)
        put(w, str(i), a, "uint8", step=i)
        w.line({"event": "skip", "tap": str(i), "reason": "test"})
    """
)


def expected(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, 1 + i * 7919 % 30000, dtype=np.uint8)


def kill_while_writing(root: Path, after: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, str(root), str(HERE)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()


def check_all(root: Path) -> int:
    dump = open_dump(root)
    for i, r in enumerate(dump.records):
        assert (r.tap, r.step) == (str(i), i)
        assert r.payload is not None
        assert dump.read(r).tobytes() == expected(i).tobytes()
    return len(dump.records)


@pytest.mark.parametrize("seed", range(2))
def test_kill_9_while_writing_then_repair(tmp_path, seed):
    from safetensors import safe_open

    root = tmp_path / "d"
    kill_while_writing(root, random.Random(seed).uniform(0.05, 0.6))
    n = check_all(root)
    assert any("not closed" in p and str(n) in p for p in open_dump(root).problems)
    rank = root / "rank0000"
    assert n == 0 or (rank / ".reserve").exists()

    (done,) = repair(root)
    assert done.needed
    assert done.tensors == n
    assert check_all(root) == n
    dump = open_dump(root)
    assert dump.problems == []
    assert dump.ends[0].reason == "repaired"
    assert dump.ends[0].tensors == n
    names = {p.name for p in rank.iterdir()}
    assert not any(name.endswith(".part") or name == ".reserve" for name in names)
    found = {}
    for file in rank.glob("*.safetensors"):
        with safe_open(file, "np") as f:
            found |= {k: f.get_tensor(k) for k in f.keys() if not k.startswith("__pad")}  # noqa: SIM118
    assert len(found) == n
    for i in range(n):
        assert found[f"{i}|{i}|output.0|0"].tobytes() == expected(i).tobytes()
    before = {p: p.read_bytes() for p in rank.iterdir()}
    assert not repair(root)[0].needed
    assert {p: p.read_bytes() for p in rank.iterdir()} == before


def test_what_was_put_is_on_the_disk_though_nothing_comes_behind_it(tmp_path):
    """So a kill between steps loses none: nobody closes, nobody flushes."""
    w = writer(tmp_path / "d")
    for i in range(7):
        put(w, str(i), expected(i), "uint8", step=i)
    end = time.monotonic() + 60
    while check_all(tmp_path / "d") < 7 and time.monotonic() < end:
        time.sleep(0.05)
    assert check_all(tmp_path / "d") == 7
    w.close("done", {})


def test_a_torn_last_line_is_named_and_cut_by_repair(tmp_path):
    root = tmp_path / "d"
    w = writer(root)
    a = bits(np.random.default_rng(0), 1000)
    put(w, "t", a, "uint8")
    w.close("done", {})
    journal = root / "rank0000/journal.jsonl"
    text = journal.read_bytes()
    whole = text[: text.rindex(b'{"event":"end"')]
    journal.write_bytes(whole + b'{"event":"tensor","step":0,"ta')
    dump = open_dump(root)
    assert [r.tap for r in dump.records] == ["t"]
    assert "rank 0: the journal's last line is torn (30 bytes ignored)" in dump.problems
    (done,) = repair(root)
    assert (done.cut, done.segments, done.tensors) == (30, 0, 1)
    assert open_dump(root).problems == []
    assert journal.read_bytes().startswith(whole + b'{"event":"end","reason":"repaired"')


def test_repair_keeps_away_from_a_running_capture(tmp_path):
    root = tmp_path / "d"
    w = writer(root)
    put(w, "t", np.zeros(9, np.uint8), "uint8")
    w.flush()
    with pytest.raises(DumpError, match="still being written"):
        repair(root)
    w.close("done", {})
    assert not repair(root)[0].needed


def test_budget(tmp_path):
    root, reasons = tmp_path / "d", []
    w = writer(root, budget_bytes=300_000, on_stop=reasons.append)
    a = bits(np.random.default_rng(0), 10_000)
    stored = sum(put(w, str(i), a, "uint8", step=i) is not None for i in range(100))
    assert reasons == [w.stopped] == ["budget of 300000 bytes spent"]
    w.close("served on", {"skipped": {"x": 1}})
    assert 25 <= stored < 30
    dump = open_dump(root)
    assert len(dump.records) == stored
    assert all(dump.read(r).tobytes() == a.tobytes() for r in dump.records)
    assert (dump.stops[0].reason, dump.stops[0].step) == (w.stopped, stored)
    assert dump.ends[0].reason == "served on"
    assert dump.problems == [f"rank 0: capture stopped early: {w.stopped}"]
    assert w.bytes_written <= 300_000


def test_headers_of_many_small_tensors_spend_the_budget_too(tmp_path):
    root = tmp_path / "d"
    w = writer(root, budget_bytes=4_000_000)
    for i in range(20_000):
        if put(w, f"{i}" * 8, np.full(100, i % 251, np.uint8), "uint8", step=i) is None:
            break
    w.close("done", {})
    assert "budget" in w.stopped
    assert len(list(root.glob("rank0000/seg-*"))) > 1
    assert 3_900_000 < sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) < 4_000_000 + (2 << 20)


def test_lines_spend_the_budget_too(tmp_path):
    root = tmp_path / "d"
    w = writer(root, budget_bytes=20_000)
    for i in range(1000):
        w.line({"event": "skip", "tap": f"{i}" * 20, "reason": "y"})
        if i % 10 == 0:
            w.flush()
    w.close("done", {})
    assert "budget" in w.stopped
    assert (root / "rank0000/journal.jsonl").stat().st_size <= 20_000
    assert 50 < len(open_dump(root).skips) < 200


_LIMITED = textwrap.dedent(
    """
    import resource, sys
    sys.path.insert(0, sys.argv[2])
    import numpy as np
    from dumps import put, writer
    told = []
    w = writer(sys.argv[1], block_bytes=1 << 16, on_stop=told.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
    a = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    n = sum(put(w, str(i), a, "uint8") is not None for i in range(500))
    w.close("served on", {})
    print(len(told), n, told[0])
    """
)


def test_a_file_that_may_not_grow_stops_the_capture_and_nothing_else(tmp_path):
    root = tmp_path / "d"
    out = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(root), str(HERE)], capture_output=True, text=True, timeout=60, check=True
    )
    times, accepted, reason = out.stdout.strip().split(" ", 2)
    assert out.stderr == ""
    assert times == "1"
    assert reason == "disk full at segment 0: File too large"
    dump = open_dump(root)
    a = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    # 3,000,000 bytes less 1 MiB of header hold 29 blocks of 64 KiB, and those 47 tensors of 40,000 bytes.
    assert len(dump.records) == 47
    assert all(dump.read(r).tobytes() == a.tobytes() for r in dump.records)
    assert dump.stops[0].reason == reason
    assert dump.ends[0].skipped == {"not written when capture stopped": int(accepted) - 47}
    from safetensors import safe_open

    with safe_open(root / "rank0000/seg-00000.safetensors", "np") as f:
        assert sum(not k.startswith("__pad") for k in f.keys()) == 47  # noqa: SIM118


@pytest.mark.skipif(not os.path.exists("/proc/self/mounts") or os.geteuid() != 0, reason="needs root and Linux")
def test_a_really_full_disk(tmp_path):
    """A tmpfs of 4 MB, without O_DIRECT: the room kept in reserve takes the stop and end lines.

    Which of the two files meets the last page is the threads' affair: the journal may need one just when a segment
    took it, or the other way round.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        reasons = []
        w = writer(disk / "d", on_stop=reasons.append)
        a = bits(np.random.default_rng(0), 100_000)
        for i in range(100):
            put(w, str(i), a, "uint8")
        w.close("served on", {})
        assert len(reasons) == 1
        assert reasons[0] in [f"disk full at {file}: No space left on device" for file in ("segment 0", "the journal")]
        dump = open_dump(disk / "d")
        assert 20 <= len(dump.records) <= 30
        assert all(dump.read(r).tobytes() == a.tobytes() for r in dump.records)
        assert dump.stops[0].reason == reasons[0]
        assert dump.ends[0].reason == "served on"
        assert [p for p in dump.problems if "stopped early" not in p] == []
        dump.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    reasons = []
    w = RankWriter(tmp_path / "file" / "d", 0, {}, budget_bytes=1 << 20, on_stop=reasons.append)
    assert put(w, "t", np.zeros(3, np.uint8), "uint8") is None
    w.line({"event": "skip"})
    w.close("done", {})
    assert reasons == [w.stopped]
    assert w.stopped == f"cannot create the dump in {tmp_path / 'file' / 'd' / 'rank0000'}: Not a directory"
    assert w.bytes_written == 0


def test_a_directory_that_vanishes(tmp_path):
    import shutil

    root, reasons = tmp_path / "d", []
    w = writer(root, segment_bytes=1 << 16, on_stop=reasons.append)
    a = bits(np.random.default_rng(0), 60_000)
    put(w, "0", a, "uint8")
    assert w.flush()
    shutil.rmtree(root)
    for i in range(20):
        put(w, str(i), a, "uint8")
    w.close("served on", {})
    assert len(reasons) == 1
    assert "No such file or directory" in reasons[0]


def test_an_error_of_ours_is_said_and_the_producer_is_not_held_up(tmp_path, monkeypatch):
    root, reasons = tmp_path / "d", []

    def broken(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(writer_module, "moments_within", broken)
    w = writer(root, block_bytes=4096, blocks=2, on_stop=reasons.append)
    for i in range(50):
        put(w, str(i), np.zeros(3000, np.uint8), "uint8")
    w.close("served on", {})
    assert reasons == ["error in the writer at segment 0: RuntimeError: a defect"]
    dump = open_dump(root)
    assert dump.stops[0].reason == reasons[0]
    assert dump.ends[0].reason == "served on"
    assert dump.records == []


@pytest.mark.parametrize("moves", [True, False])
def test_a_close_goes_on_while_bytes_are_written(tmp_path, monkeypatch, moves):
    """A starved machine: each batch takes half of the time that a close waits without progress, all of them more."""
    put(w := writer(tmp_path / "first"), "0", np.zeros(9, np.uint8), "uint8", step=0)
    w.close("done", {})  # the loops are loaded
    monkeypatch.setattr(writer_module, "_CLOSE_TIMEOUT", 0.6)
    closing, go_on, original = threading.Event(), threading.Event(), writer_module.WriterThread.lines

    def slow(self, batch):
        closing.wait(20.0)
        time.sleep(0.3) if moves else go_on.wait(20.0)
        original(self, batch)

    monkeypatch.setattr(writer_module.WriterThread, "lines", slow)
    w = writer(tmp_path / "d", block_bytes=4096, blocks=8)
    for i in range(6):
        put(w, str(i), np.full(4096, i, np.uint8), "uint8", step=i)
    begin = time.monotonic()
    closing.set()
    w.close("done", {})
    took = time.monotonic() - begin
    go_on.set()
    if moves:
        assert took > 1.2
        assert w.stopped is None
        dump = open_dump(tmp_path / "d")
        assert len(dump.records) == 6
        assert not dump.problems
    else:
        assert 0.6 <= took < 5.0
        assert "did not take the rest" in (w.stopped or "")


def test_a_signal_in_the_middle_of_a_copy(tmp_path):
    """A handler that raises, as vLLM's does on SIGTERM, while put waits for the disk: close still ends the dump."""
    root = tmp_path / "d"
    w = writer(root, block_bytes=4096, blocks=2)
    a = bits(np.random.default_rng(0), 2000)
    put(w, "whole", a, "uint8")
    assert w.flush()
    gate = threading.Event()
    real = w._output.write

    def slow(batch):
        gate.wait(10)
        real(batch)

    w._output.write = slow

    def handler(*_):
        w.close("signal", {})  # may not wait for the thread here: put holds the lock
        raise SystemExit(1)

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begin = time.monotonic()
        with pytest.raises(SystemExit):
            put(w, "torn", bits(np.random.default_rng(1), 100_000), "uint8")
        assert time.monotonic() - begin < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    gate.set()
    w.close("again", {})
    dump = open_dump(root)
    assert [r.tap for r in dump.records] == ["whole"]
    assert dump.read(dump.records[0]).tobytes() == a.tobytes()
    assert dump.ends[0].reason == "signal"
    assert dump.stops[0].reason == "interrupted while a tensor was copied (SystemExit)"
