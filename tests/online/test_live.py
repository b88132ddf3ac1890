"""Rounds over a dump that grows: each reads what is new, and in the end the rows are those of the whole."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from online.online_runs import many
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.dump import reader
from vllm_accprobe.dump.schema import JOURNAL
from vllm_accprobe.online.live import ArrivingJob
from vllm_accprobe.opcheck.run.job import Job
from vllm_accprobe.opcheck.run.open_job import OpenJob
from vllm_accprobe.opcheck.run.result_row import CheckResult
from vllm_accprobe.opcheck.run.table import cells

ROUNDS = 6


def test_rounds_read_each_line_once_and_give_the_rows_of_the_whole(tmp_path: Path, monkeypatch) -> None:
    lengths, read = [], reader.journal_lines
    monkeypatch.setattr(reader, "journal_lines", lambda *a: (lengths.append(one[2]) or one for one in read(*a)))
    whole = many(tmp_path / "whole", 110)
    lines = (whole / "rank0000" / JOURNAL).read_bytes().splitlines(keepends=True)
    shutil.copytree(whole, tmp_path / "d")
    journal = tmp_path / "d" / "rank0000" / JOURNAL
    part = -(-len(lines) // ROUNDS)
    journal.write_bytes(b"".join(lines[:part]))
    offline = OpenJob(Job(str(whole)))
    calls = offline.calls
    with TemporaryFile() as spool:
        job = ArrivingJob(Job(str(tmp_path / "d")), spool, (calls.budget().outputs, calls.budget().taps))
        lengths.clear()
        checked = []
        for at in range(0, len(lines), part):
            journal.write_bytes(b"".join(lines[: at + part]))
            checked.append(list(job.look([0], [0] if at + part >= len(lines) else []))[-1]["looked"])
        assert sum(lengths) == journal.stat().st_size
        assert checked == sorted(set(checked))
        assert checked[-1] == 110
        said: list[dict[str, Any]] = list(job.finish())
    rows = [cells(row) for tap in offline.taps() for row in offline.rows(tap, {}, lambda step, call: None)]
    assert [cells(CheckResult.of_plain(one["row"])) for one in said if "row" in one] == rows
    assert said[-1]["finished"] == 1  # layers.0.odd, which has no reference, is checked once more


def test_a_round_has_what_its_calls_read_of_earlier_ones(tmp_path: Path) -> None:
    """The tokens that a sampler chose, and which modules lie below another, whenever they ran."""
    made, x = Maker(tmp_path / "d"), torch.ones(1, 4)
    made.request(0, 1)
    for step in range(4):
        made.step(step, [(0, step, 1)])
        made.call("block", "NobodyKnows", {"x": x}, x)
        if not step:
            made.call("block.part", "NobodyKnows", {"x": x}, x)
        made._put({"event": "tensor", "step": step, "tap": "sampler", "class": "Sampler", "role": "output.token",
                   "seq": 3, "rows": "tokens", "row_dim": 0}, torch.tensor([step]))  # fmt: skip
    root = made.close()
    journal = root / "rank0000" / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    half = next(n for n, line in enumerate(lines) if b'"step"' in line and json.loads(line).get("step") == 3)
    journal.write_bytes(b"".join(lines[:half]))
    with TemporaryFile() as spool:
        job = ArrivingJob(Job(str(root)), spool, None)
        list(job.look([0], []))
        journal.write_bytes(b"".join(lines))
        list(job.look([0], [0]))
    assert min(step for step, _ in job.calls.by_tap[0, "block"]) > 1  # those of earlier steps are not checked again
    assert job.calls.children[0, "block"] == ["block.part"]
    tokens = [r.step for r in job.calls.dump.records if r.role == "output.token"]
    assert tokens == [0, 1, 2, 3]
