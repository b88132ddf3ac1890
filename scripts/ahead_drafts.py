"""Asynchronous scheduling with a draft model in a real engine: is every row that was captured the one it is called?

The problem: the runner takes rejected drafts back in its own copy of the scheduler's output, after they were made;
vLLM switches that off on a CPU. The idea: its switch is turned (tests/support/engine_ways.py), and rows are held
against the tokens that were sampled. Printed: what the engine drafted, rows, wrong rows. Not here: what a row must be
(mode_rows.py).

    python scripts/ahead_drafts.py FOLDER
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import mode_models
import tiny_model
from mode_rows import wrong_rows
from support import engine_ways, engine_worker
from support.engine import Ask
from support.prompts import repetitive

from vllm_accprobe.dump.reader import open_dump

_ENV = {"VLLM_PLUGINS": "accprobe", "VLLM_ACCPROBE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main(root: Path) -> int:
    os.environ.update(_ENV)
    model, small = tiny_model.make("qwen2", root / "qwen2"), mode_models.shorter(root / "draft", "qwen2", 3)
    engine_ways.schedule_ahead()
    drafts = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 2}
    asks = [Ask(repetitive(40, 7, i), 10) for i in range(2)]
    out = root / "dump"
    answer = engine_worker.serve({
        "model": str(model), "out": str(out), "env": {"VLLM_ACCPROBE": "1"}, "fault": None, "how": "together",
        "engine": {"speculative_config": drafts, "async_scheduling": True}, "asks": [asdict(a) for a in asks],
        "dummies": [], "during": {},
    })  # fmt: skip
    dump = open_dump(out)
    count, wrong = wrong_rows(dump, asks, answer["tokens"])
    told = {name: answer["metrics"][name] for name in ("ahead", "drafted", "accepted", "steps")}
    print(told, dump.problems, dump.errors, f"{count} rows, {len(wrong)} wrong", *wrong[:5], sep="\n")
    return 1 if wrong or dump.problems or dump.errors else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
