"""One rank's dump while it is written: where it lies, what its first lines say, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_accprobe.capture.core import recording as room
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, run_facts, unsplit
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import open_dump


def opened(root: Path, **how: Any) -> Recording:
    run = run_facts({}, model={"class": "M"}, parallel=unsplit(1), engine={"runner": "tests"})
    return Recording(
        ProbeConfig(), root, run, Layouts({}, 0, 1), lambda *_: None, rank=0, parallel=unsplit(1), **how
    )  # fmt: skip


def journal(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "rank0000" / "journal.jsonl").read_text().splitlines()]


def test_a_dump_says_what_it_is_before_anything_is_taken(tmp_path: Path) -> None:
    recording = opened(tmp_path / "d", device=torch.device("cpu"))
    recording.close("closed")
    run = json.loads((tmp_path / "d" / "run.json").read_text())
    assert list(run) == [
        "schema", "tool", "versions", "platform", "model", "parallel", "engine", "probe", "start_time",
    ]  # fmt: skip
    assert run["parallel"] == {"world_size": 1, "tp": [0, 1], "pp": [0, 1], "dp": [0, 1], "ep": [0, 1]}
    start, end = journal(tmp_path / "d")
    assert list(start) == [
        "event", "schema", "rank", "world_size", "tp", "pp", "dp", "ep", "pid", "host", "device", "time",
    ]  # fmt: skip
    assert start["device"] == "cpu"
    assert end["event"] == "end"
    assert open_dump(tmp_path / "d").problems == []


def test_a_directory_that_is_taken_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = []
    for _ in range(2):
        recording = opened(tmp_path / "d", contents="these tests go")
        recording.close("closed")
        places.append(recording.root)
    assert places == [tmp_path / "d", tmp_path / "d.2"]
    assert f"{tmp_path / 'd'} already holds rank 0; these tests go to {tmp_path / 'd.2'}" in caplog.text
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):  # in a user's words where a setting names it: ../test_probe.py
        opened(tmp_path / "file" / "d")


def test_what_cannot_be_written_is_said_and_ends_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(room, "say", lines.append)
    opened(tmp_path / "d").close("closed")
    opened(tmp_path / "d").close("closed")  # whose journal is there: it stops while it is made
    (line,) = lines
    assert line.startswith("capture stopped: ")
    assert "a dump is never written over" in line
    told: list[str] = []
    opened(tmp_path / "d", on_stop=told.append)
    assert len(told) == 1
    third = opened(tmp_path / "e")
    third.session.sink.writer._stop("the disk is full")
    assert third.session.dead == "the disk is full"
    third.close("closed")
    assert third.session.dead == "the disk is full"
