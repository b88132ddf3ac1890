"""Arming with real engines: two ranks agree on every step, however the file changes; and a dig with two commands ends
with the module that was planted."""

import json
import os
import random
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.captures import Engines
from support.engine import ROOT, Ask
from support.prompts import prompts
from vllm_server import ENV, SMALL

from vllm_accprobe import arm_file
from vllm_accprobe.arm_file import ArmSelection
from vllm_accprobe.cli import gate_run
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.gate.measure.gating import WorstToken
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.replies import Reply
from vllm_accprobe.gate.sides import COMMAND, SendSettings, ServerSide

pytestmark = pytest.mark.engine
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PLANTED = "model.layers.2.mlp.down_proj"
FAULT = json.dumps({"kind": "scale", "module": PLANTED, "factor": 1.06, "rows": "decode"})


@contextmanager
def changing(dump: Path) -> Iterator[list[ArmSelection]]:
    """The control file is written anew all the time, while the engine serves."""
    chosen = [ArmSelection(False), ArmSelection(), ArmSelection(tokens=((1, 40),)), ArmSelection(requests=("ask-1",))]
    written: list[ArmSelection] = []
    end = threading.Event()

    def work() -> None:
        i = 0
        while not end.wait(0.02):
            written.append(chosen[i % len(chosen)])
            arm_file.write(dump, written[-1])
            i += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield written
    finally:
        end.set()
        thread.join()


def test_two_ranks_agree_on_every_step(engines: Engines, tmp_path: Path) -> None:
    out = tmp_path / "dump"
    out.mkdir(mode=0o700)
    asks = [Ask(ids, 120) for ids in prompts(40, 23, 31)]
    with changing(out) as written:
        run = engines.host("tp2").capture(
            engines.model("qwen2"), asks, out=out, env={"VLLM_ACCPROBE_ARMED": "0", "VLLM_ACCPROBE_MODULES": "norm"},
            **TWO,
        )  # fmt: skip
    assert run.dump is not None
    dump = open_dump(run.dump)
    assert dump.problems == []
    assert dump.errors == []
    windows = [[(w.step, w.selection) for rank, w in dump.armed if rank == r] for r in (0, 1)]
    steps = [sorted(step for rank, step in dump.steps if rank == r) for r in (0, 1)]
    assert windows[0] == windows[1]
    assert steps[0] == steps[1]
    rows = [{(s, name): v.segments for (rank, s, name), v in dump.rows.items() if rank == r} for r in (0, 1)]
    assert rows[0] == rows[1]
    assert len(written) > 4
    said = [str(selection) for _, selection in windows[0]]
    assert len(set(said)) > 2, said  # it really changed while the engine served
    assert 0 < len(steps[0]) < run.metrics["steps"]
    of_one = {dump.requests[0, s.req].id for (_, step, _), v in dump.rows.items() for s in v.segments
              if _held(windows[0], step).get("requests") == ["ask-1"]}  # fmt: skip
    assert of_one <= {"ask-1"}


def _held(windows: list[tuple[int, Any]], step: int) -> dict[str, Any]:
    return next((selection for first, selection in reversed(windows) if first <= step), {})


def made_golden(path: Path) -> replies.Sent:
    """What a gate would have had of golden: prompts as token ids, and the answers that both sides are forced along."""
    draw = random.Random(5)
    names = [f"p{i}" for i in range(4)]
    ids = {name: [draw.randrange(8, 500) for _ in range(20 + 9 * i)] for i, name in enumerate(names)}
    passes = [{"arrive": word, "answered": 4, "refused": 0, "resumed": 0} for word in ("one", "all")]
    about = {"schema": replies.SCHEMA, "passes": passes, "complete": True, "settings": {"top": 5, "concurrency": 4}}
    lines = [json.dumps({"id": name, "token_ids": ids[name]}) + "\n" for name in names]
    replies.begin(path, "".join(lines), about)
    for index in (0, 1):
        writer = replies.ReplyWriter(path / replies.pass_name(index))
        for name in names:
            answer = [draw.randrange(8, 500) for _ in range(4)] if index == 0 else [9, 9, 9, 9]
            top: Any = [([token], [-1.0]) for token in answer]
            writer.add(Reply(name, 0, 0, ids[name], answer, [-1.0] * 4, top, [None] * 4, "length", 0))
        writer.close()
    return replies.read(path)


def test_two_commands_to_the_module(engines, preloaded_vllm, tmp_path, monkeypatch):
    """A gate's result by hand: token 3 of p2 in the second pass. Mine's fault is in rows that decode."""
    monkeypatch.setenv("PATH", f"{preloaded_vllm}{os.pathsep}{os.environ['PATH']}")
    for name, value in (ENV | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    for name in [n for n in os.environ if n.startswith("VLLM_ACCPROBE")]:
        monkeypatch.delenv(name)
    golden = made_golden(tmp_path / "golden")
    worst = (WorstToken("p2", 3, 40, 0.01, 0.0, 1),)
    command = f"vllm serve {engines.model('qwen2')} {' '.join(SMALL)} --enforce-eager"
    mine = f"PYTHONPATH={ROOT / 'lab' / 'planted'} ACCPROBE_FAULT={shlex.quote(FAULT)} {command}"
    said: list[str] = []

    def dig() -> Any:
        failed = gate_run.FailedGate(golden, golden, worst, (ServerSide(COMMAND, command), ServerSide(COMMAND, mine)))
        return gate_run.localize(failed, tmp_path / "out", SendSettings(), 1.0, said.append)

    found = dig()
    assert found.origin is not None, said
    assert found.origin["module"] == PLANTED, said
    assert found.token[0] == "p2"
    assert found.token[2] >= 1
    assert (found.gap, found.shows) == (pytest.approx(found.gap), True)
    assert f"culprit: {PLANTED} (RowParallelLinear), layer 2, token" in "\n".join(said)
    for side in ("golden", "mine"):
        dump = open_dump(tmp_path / "out" / "dig" / side)
        assert dump.problems == []
        asked = {r.id for r in dump.requests.values()} - {"accprobe-dig"}
        assert asked == {"p2.pass1"}  # golden was told that nothing came from the cache
        rows = {(s.pos, s.n) for (_, _, name), v in dump.rows.items() if name == "tokens" for s in v.segments}
        assert {(38, 1), (39, 1), (40, 1)} <= rows
    assert (tmp_path / "out" / "dig" / "compare" / "compare.html").exists()
    before = [p.stat().st_ino for p in sorted((tmp_path / "out" / "dig").glob("*/run.json"))]
    assert dig().origin["module"] == PLANTED  # gone on with: no engine is started
    assert [p.stat().st_ino for p in sorted((tmp_path / "out" / "dig").glob("*/run.json"))] == before
