"""Both commands as processes: whatever breaks on the way, the table is the offline one."""

import math
import signal
from pathlib import Path

import pytest
from online.online_certificates import Authority
from online.online_runs import Cut, Run, ended, free_port, many, sent, serve
from opcheck.layer_dumps import build
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.cli import main

FILES = ("opcheck.csv", "result.csv", "profile.json")


@pytest.fixture(scope="session")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many(tmp_path_factory.mktemp("online") / "dump", 400)


@pytest.fixture(scope="session")
def offline(calls: Path) -> Path:
    out = calls.parent / "offline"
    assert main(["opcheck", str(calls), "-j", "0", "--out", str(out)]) == 1
    return out


def same(out: Path, offline: Path) -> None:
    for name in FILES:
        assert (out / name).read_bytes() == (offline / name).read_bytes(), name


def test_400_calls_with_the_line_cut_and_the_receiver_killed(tmp_path, calls, offline):
    authority, port, out = Authority(), free_port(), tmp_path / "out"
    tls = [str(authority.folder(tmp_path / side, side)) for side in ("server", "client")]
    line = Cut(port)
    first = serve(out, port, "--tls", tls[0], anew=True)
    send = Run("send", str(calls), "--port", str(line.port), "--tls", tls[1], anew=True)
    with ended(first, send):
        journal = out / "received/rank0000/journal.jsonl"
        for _ in range(3):
            line.wait_until(100_000)  # of some 600,000 in all
            line.cut()
        line.wait_until(20_000)  # on after the third cut, too: the kill is a fourth break
        while not journal.stat().st_size:
            line.wait_until(20_000)
        assert send.process.poll() is None  # else nothing was cut or killed in the middle
        line.until = math.inf
        first.kill()
        had = journal.stat().st_size
        second = serve(out, port, "--tls", tls[0], anew=True)
        with ended(second):
            assert send.code() == 0, send.said
            assert second.code() == 1, second.said
    line.close()
    assert f"on from byte {had:,} of its journal" in second.said
    assert send.said.count("connected again") >= 4
    assert "400 calls were checked as they came" in second.said
    assert journal.read_bytes() == (calls / "rank0000/journal.jsonl").read_bytes()
    same(out, offline)


def test_a_dump_that_is_followed_through_a_folder(tmp_path: Path) -> None:
    """The capture goes on while it is sent and checked; what fails is said before it ends."""
    source, shared, out = tmp_path / "dump", tmp_path / "shared", tmp_path / "out"
    whole = many(tmp_path / "whole", 30)
    assert main(["opcheck", str(whole), "-j", "0", "--out", str(tmp_path / "offline")]) == 1
    journal = (whole / "rank0000/journal.jsonl").read_bytes().splitlines(keepends=True)
    (source / "rank0000").mkdir(parents=True)
    (source / "run.json").write_bytes((whole / "run.json").read_bytes())
    segment = "seg-00000.safetensors"
    (source / "rank0000" / segment).write_bytes((whole / "rank0000" / segment).read_bytes())
    growing = (source / "rank0000/journal.jsonl").open("ab")
    half = len(journal) // 2
    growing.write(b"".join(journal[:half]) + journal[half][:20])  # a line that is half written
    growing.flush()
    receive = Run("serve", "--shared", str(shared), "--out", str(out), "--wait", "60")
    send = Run("send", str(source), "--shared", str(shared), "--follow")
    with ended(receive, send), growing:
        receive.until("layers.0.norm  RMSNorm  output.0: ")
        assert send.process.poll() is None
        growing.write(journal[half][20:] + b"".join(journal[half + 1 :]))
        growing.flush()
        assert send.code() == 0, send.said
        assert receive.code() == 1, receive.said
    assert "how many outputs there are was not known before the end: opcheck goes over all of it" in receive.said
    assert list(shared.rglob("*.batch")) == []
    same(out, tmp_path / "offline")


def test_two_ranks_and_a_sender_each(tmp_path: Path) -> None:
    """A rank's share of a sum is checked with the other's, which comes from another machine."""
    dump, out, port = build(tmp_path / "dump"), tmp_path / "out", free_port()
    second = Maker(dump, 1)
    second.module("<root>", "TinyForCausalLM")
    second.step(0, [(0, 0, 4)])
    second.close()
    receive = serve(out, port, "--ranks", "0-1")
    sends = [Run("send", str(dump), "--port", str(port), "--ranks", str(r)) for r in (1, 0)]
    with ended(receive, *sends):
        assert [s.code() for s in sends] == [0, 0]
        assert receive.code() == 0, receive.said
    assert main(["opcheck", str(dump), "-j", "0", "--out", str(tmp_path / "off")]) == 0
    assert (out / "opcheck.csv").read_bytes() == (tmp_path / "off/opcheck.csv").read_bytes()


def test_interrupted_it_checks_what_is_here(tmp_path: Path) -> None:
    out, port = tmp_path / "out", free_port()
    receive = serve(out, port, "--ranks", "0-1", anew=True)
    with ended(receive):
        assert sent(str(build(tmp_path / "dump", "layers.0.norm")), "--port", str(port))[0] == 0
        receive.until("all is here")
        receive.process.send_signal(signal.SIGINT)
        assert receive.code() == 1, receive.said
    assert "rank 1: nothing of it came" in receive.said
    assert "12 of 15 calls checked" in receive.said


def test_killed_while_it_checks_it_needs_no_sender_any_more(tmp_path: Path) -> None:
    """All had arrived: started again, it checks and ends, with each call checked once."""
    out, port = tmp_path / "out", free_port()
    dump = build(tmp_path / "dump", "layers.0.norm")
    receive = serve(out, port, "--ranks", "0")
    with ended(receive):
        assert sent(str(dump), "--port", str(port))[0] == 0
        receive.kill()
    assert not (out / "opcheck.csv").exists()
    again = serve(out, port)
    with ended(again):
        assert again.code() == 1, again.said
    assert "15 calls were checked as they came" in again.said


def test_nothing_came(tmp_path: Path) -> None:
    receive = serve(tmp_path / "out", free_port(), "--wait", "0.3")
    assert receive.code() == 3
    assert receive.lines[-1].endswith("no rank sent anything that was taken")


def test_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    """What one run has sent stays, and another run's rank 0 is refused."""
    out, port = tmp_path / "out", free_port()
    one, two = build(tmp_path / "one"), build(tmp_path / "two", "layers.0.norm")
    receive = serve(out, port, "--ranks", "0-1")
    with ended(receive):
        assert sent(str(one), "--port", str(port))[0] == 0
        code, lines = sent(str(two), "--port", str(port))
        assert code == 2
        assert "holds rank 0 of another run: give it another --out" in "\n".join(lines)
        assert sent(str(one), "--port", str(port), "--ranks", "5")[0] == 2
    assert (out / "received/rank0000/journal.jsonl").read_bytes() == (one / "rank0000/journal.jsonl").read_bytes()
