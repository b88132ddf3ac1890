"""Steps are read for each request and pass; the last engine that has a request counts."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_accprobe.gate.sending import replies


def write(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def test_rows_of_a_request(tmp_path: Path) -> None:
    first = {"step": 0, "requests": [["a", 0, 64], ["b", 0, 8]]}
    write(tmp_path / "steps-0/steps-rank0.jsonl", first, {"step": 1, "requests": [["a", 64, 6], ["a.pass1", 0, 1]]},
          "torn {", '{"step": 1}\n')  # fmt: skip
    read = replies.read_steps(tmp_path)
    assert read.rows(0, "a") == [(0, 0, 64, 2), (1, 64, 6, 2)]
    assert read.rows(1, "a") == [(1, 0, 1, 2)]
    assert read.rows(0, "b") == [(0, 0, 8, 2)]
    assert read.rows(1, "b") == []


def test_what_was_asked_again_counts_once(tmp_path: Path) -> None:
    for engine, start in ((2, 5), (10, 7), (9, 6)):
        write(tmp_path / f"steps-{engine}/steps-rank0.jsonl", {"step": start, "requests": [["a", start, 1]]})
    write(tmp_path / "steps-10/steps-rank2.jsonl", {"step": 0, "requests": [["b", 0, 3]]})
    write(tmp_path / "steps-x/steps-rank0.jsonl", {"step": 0, "requests": [["a", 0, 3]]})
    read = replies.read_steps(tmp_path)
    assert (read.rows(0, "a"), read.rows(0, "b")) == ([(7, 7, 1, 1)], [(0, 0, 3, 1)])


def test_a_folder_without_any(tmp_path: Path) -> None:
    assert replies.read_steps(tmp_path).rows(0, "a") == []
