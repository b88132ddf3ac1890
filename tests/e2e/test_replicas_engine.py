"""`vllm serve --data-parallel-size 2` of a dense model: two engines that know nothing of each other, one dump."""

import json
import shutil
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.captures import FIVE, Engines, explain
from vllm_server import Server

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine
SERVED_BY = (0, 1, 0, 1, 1)
"""The replica that each of the five requests is sent to."""


def ask(url: str, ids: Sequence[int], tokens: int, replica: int) -> None:
    body = {"model": "tiny", "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(replica)}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["usage"]["completion_tokens"] == tokens


@pytest.fixture(scope="module")
def served(engines: Engines, preloaded_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replicas")
    env = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(root / "dump"), "OMP_NUM_THREADS": "1"}
    two, vllm = ["--data-parallel-size=2"], preloaded_vllm / "vllm"
    with Server(engines.model("qwen2"), log=root / "log", env=env, args=two, vllm=vllm) as server:
        for request, replica in zip(FIVE, SERVED_BY, strict=True):
            ask(server.url, request.ids, request.max_tokens, replica)
    return root / "dump"


def test_all_requests_are_compared_whatever_replica_served_them(engines: Engines, served: Path) -> None:
    assert not served.with_name("dump.2").exists()
    dump = open_dump(served)
    assert dump.ranks == (0, 1)
    assert dump.problems == []
    lengths = [sorted(r.prompt_len for (rank, _), r in dump.requests.items() if rank == replica) for replica in (0, 1)]
    assert lengths == [
        sorted(len(a.ids) for a, by in zip(FIVE, SERVED_BY, strict=True) if by == replica) for replica in (0, 1)
    ]
    golden = engines.serial()
    assert golden.dump is not None
    result = compare(golden.dump, served)
    assert result.verdict == "pass", explain(result)
    assert (result.coverage["rows_only_golden"], result.coverage["rows_only_mine"]) == (0, 0), explain(result)
    assert result.coverage["rows_compared"] == sum(len(a.ids) + a.max_tokens - 1 for a in FIVE)
    assert result.tokens == {"compared": 5 * 8, "flipped": []}
    assert result.notes == []


def test_a_replica_that_is_not_there_is_said_first(engines: Engines, served: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(served, half)
    shutil.rmtree(half / "rank0001")
    golden = engines.serial()
    assert golden.dump is not None
    result = compare(golden.dump, half)
    assert any(note.startswith("mine: rank 1 of 2 is missing") for note in result.notes), result.notes
    assert "3 requests have no partner and were not compared: only in golden" in result.notes
