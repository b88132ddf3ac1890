"""Data-parallel replicas: which global rank is which, as vLLM's releases and launchers tell it, and who misses one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace as Plain
from typing import Any

import pytest

pytest.importorskip("torch")

from vllm_accprobe.capture.vllm.runner import RunnerAdapter, observe
from vllm_accprobe.capture.vllm.step_observer import StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import parallel_of
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.writer import RankWriter, write_run_json


@pytest.fixture(autouse=True)
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM in which nobody has made process groups."""
    fake, distributed = ModuleType("vllm"), ModuleType("vllm.distributed")
    fake.distributed = distributed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)


def of(**parallel: Any) -> dict[str, Any]:
    return parallel_of(Plain(parallel_config=Plain(**({"rank": 0, "world_size": 1} | parallel))))


def test_replicas_of_a_dense_model_are_told_apart_by_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's reconfigure_for_independent_dp_rank leaves it (0.14.1 and later)."""
    monkeypatch.setenv("VLLM_ACCPROBE_REPLICAS", "3")
    reset = {"data_parallel_rank": 0, "data_parallel_size": 1}
    found = [of(data_parallel_index=i, world_size=2, rank=r, **reset) for i in range(3) for r in range(2)]
    assert [p["rank"] for p in found] == [0, 1, 2, 3, 4, 5]
    assert {p["world_size"] for p in found} == {6}
    assert [p["dp"] for p in found[::2]] == [[0, 3], [1, 3], [2, 3]]


def test_a_replica_that_nobody_counted_counts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ACCPROBE_REPLICAS", raising=False)
    found = of(data_parallel_index=1, data_parallel_rank=0, data_parallel_size=1)
    assert (found["rank"], found["world_size"], found["dp"]) == (1, 2, [1, 2])


def test_older_releases_and_experts_keep_rank_and_size() -> None:
    found = of(data_parallel_rank=3, data_parallel_size=4, world_size=2, rank=1)
    assert (found["rank"], found["world_size"]) == (7, 8)


def test_an_external_launcher_counts_all_ranks_itself() -> None:
    """Its rank is torchrun's, and its world_size holds the replicas already."""
    launcher = {"distributed_executor_backend": "external_launcher", "data_parallel_rank": 1, "data_parallel_size": 2}
    found = of(rank=3, world_size=4, data_parallel_index=1, **launcher)
    assert (found["rank"], found["world_size"]) == (3, 4)


@pytest.mark.parametrize(("chosen", "made"), [("1", [1]), ("0", [0]), ("0-1", [0, 1]), ("2", [])])
def test_chosen_ranks_count_replicas(monkeypatch: pytest.MonkeyPatch, chosen: str, made: list[int]) -> None:
    monkeypatch.setenv("VLLM_ACCPROBE_RANKS", chosen)
    got: list[int] = []

    class Counted(StepObserver):
        def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
            got.append(adapter.parallel["rank"])

    for index in range(2):
        parallel = Plain(rank=0, world_size=1, data_parallel_index=index, data_parallel_rank=0, data_parallel_size=1)
        worker = Plain(model_runner=Plain(vllm_config=Plain(parallel_config=parallel)))
        wrapper = Plain(worker=worker, vllm_config=worker.model_runner.vllm_config)
        observe(wrapper, Counted)
    assert got == made


def test_the_front_end_tells_how_many_there_are(tmp_path: Path) -> None:
    """Through the engine's arguments, also where the engine stays as configured."""
    code = """
import os, sys, types
for name in ("vllm", "vllm.engine", "vllm.engine.arg_utils"):
    sys.modules[name] = types.ModuleType(name)
class EngineArgs:
    def create_engine_config(self):
        return types.SimpleNamespace(parallel_config=types.SimpleNamespace(data_parallel_size=4))
sys.modules["vllm.engine.arg_utils"].EngineArgs = EngineArgs
from vllm_accprobe.plugin import register
register()
EngineArgs().create_engine_config()
print(os.environ["VLLM_ACCPROBE_REPLICAS"])
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    env = clean | {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(tmp_path / "d"), "VLLM_ACCPROBE_GRAPHS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4"]


def written(root: Path, *ranks: int, world: int, probe: dict[str, Any] | None = None) -> list[str]:
    write_run_json(root, {"probe": probe or {}})
    for rank in ranks:
        start = {"schema": 1, "rank": rank, "world_size": world}
        RankWriter(root, rank, start, budget_bytes=1 << 20).close("done", {})
    return open_dump(root).problems


def test_a_missing_rank_is_said(tmp_path: Path) -> None:
    assert written(tmp_path / "all", 0, 1, world=2) == []
    assert written(tmp_path / "one", 0, world=2) == [
        "rank 1 of 2 is missing (never started, or written elsewhere?): nothing of what was computed there is compared"
    ]
    assert written(tmp_path / "few", 1, 3, world=5, probe={"ranks": [[1, 1], [3, 3]]}) == [
        "ranks 0, 2, 4 of 5 are missing (others were chosen): nothing of what was computed there is compared"
    ]


def test_a_number_of_ranks_that_nobody_can_have_is_not_believed(tmp_path: Path) -> None:
    assert written(tmp_path / "d", 0, world=1 << 60) == []
    journal = tmp_path / "d" / "rank0000" / "journal.jsonl"
    first = json.loads(journal.read_text().splitlines()[0])
    assert first["world_size"] == 1 << 60
