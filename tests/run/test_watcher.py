"""What the progress says is what the journals say, while they grow and afterwards."""

import json
from pathlib import Path

import pytest
import torch
from capture.toy import Toy

from vllm_accprobe import Probe
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.run.watcher import RankProgress, Watcher

IDS = torch.tensor([[3, 1, 4, 1]])


def test_it_follows_a_capture(tmp_path: Path) -> None:
    model, watcher = Toy(), Watcher(tmp_path / "d")
    assert watcher.poll().ranks == 0
    probe = Probe(model, dir=str(tmp_path / "d"))
    assert probe.session is not None
    for expected in (1, 2):
        model(IDS)
        probe.session.sink.writer.flush()
        assert watcher.poll().steps == expected
    assert watcher.writing()
    probe.close()
    assert not watcher.writing()
    found, dump = watcher.poll(), open_dump(tmp_path / "d")
    assert found.tensors == sum(r.step is not None for r in dump.records)
    assert (found.steps, found.ranks, found.ended, found.errors, found.stops) == (2, 1, 1, 0, ())
    files = sum(f.stat().st_size for f in (tmp_path / "d" / "rank0000").iterdir())
    assert 0 < found.nbytes <= files


def test_a_dump_that_is_announced_by_another_spelling_is_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    register = tmp_path / "register"
    register.write_text(f"{tmp_path / 'link/d'}\n{tmp_path / 'd'}\n{tmp_path / 'link/e'}\n")
    watcher = Watcher(tmp_path / "d", register)
    for name in ("d", "e"):
        (tmp_path / name / "rank0000").mkdir(parents=True)
        (tmp_path / name / "rank0000/journal.jsonl").write_text("")
    assert watcher.dumps() == [tmp_path / "d", tmp_path / "link/e"]
    assert watcher.poll().ranks == 2


def test_every_way_of_cutting_the_journal_counts_the_same(tmp_path: Path) -> None:
    evil = '{"event":"tensor"} {"event":"end"'
    lines = [
        {"event": "start", "rank": 0},
        {"event": "step", "step": 0},
        {"event": "step", "step": 0, "graph": {"mode": "FULL", "size": 8}},
        {"event": "tensor", "tap": evil},
        {"event": "param", "tap": "w"},
        {"event": "tensor", "tap": "b\n"},
        {"event": "label", "path": evil},
        {"event": "stop", "reason": "budget of 3 bytes spent"},
        {"event": "error", "where": evil},
    ]
    data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    for cut in range(1, 40):
        one = RankProgress(tmp_path / "no")
        for at in range(0, len(data), cut):
            one._count(data[at : at + cut])
        assert (one.steps, one.tensors, one.errors, one.ended) == (1, 3, 1, False)
        assert one.stop == "budget of 3 bytes spent"


def test_a_second_engines_dump_is_seen_and_an_older_one_is_not(tmp_path: Path) -> None:
    Probe(Toy(), dir=str(tmp_path / "d.2")).close()  # so that a second engine's is d.3
    watcher = Watcher(tmp_path / "d")
    for name in ("d", "d.3"):
        model = Toy()
        with Probe(model, dir=str(tmp_path / name)):
            model(IDS)
    assert watcher.dumps() == [tmp_path / "d", tmp_path / "d.3"]
    assert watcher.poll().ranks == 2


@pytest.mark.parametrize("reason", [b"[" * 100_000, b'"x', b"1}"], ids=("deep", "torn", "a number"))
def test_the_reason_of_a_hostile_journal_is_unknown(tmp_path: Path, reason: bytes) -> None:
    one = RankProgress(tmp_path / "journal.jsonl")
    one.path.write_bytes(b'{"event":"stop","reason":' + reason + b"\n")
    one.poll()
    assert one.stop == ("1" if reason == b"1}" else "unknown")


@pytest.mark.parametrize("content", [b"", b"\x00\xff\n", b"{" * 100, b'{"event":"stop"\n'])
def test_odd_journals(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d" / "rank0000").mkdir(parents=True)
    (tmp_path / "d" / "rank0000" / "journal.jsonl").write_bytes(content)
    found = Watcher(tmp_path / "d").poll()
    assert (found.ranks, found.steps, found.tensors, found.ended) == (1, 0, 0, 0)
