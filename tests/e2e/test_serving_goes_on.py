"""When something breaks around the probe, serving goes on where it can, and what the journal promises is there.

Servers are forks here, so a signal to one reaches its engine through one process more (scripts/preloaded_vllm.py). A
signal to the command that users have: test_run_command.py."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from support.captures import FIVE, Engines
from support.engine import EngineHost, Run
from vllm_server import Server

from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.gate.sending.client import NotServed

pytestmark = pytest.mark.engine


def said(log: Path) -> list[str]:
    """What accprobe told the person who runs the server."""
    lines = log.read_text(errors="replace").splitlines()
    return [line[line.index("accprobe: ") + 10 :] for line in lines if "accprobe: " in line]


def read_back(dump: Dump) -> int:
    """Reads every payload that the journal promises, and checks each against its hash. How many there were."""
    promised = [r for r in dump.records if r.payload is not None]
    for record in promised:
        assert xxhash.xxh3_128_hexdigest(dump.read(record).tobytes()) == record.hash, record.name
    return len(promised)


def ask(url: str, name: str, tokens: int) -> str:
    body = {
        "model": "tiny", "prompt": f"Tell me about {name} " * 6, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.load(response)["choices"][0]["text"])


@pytest.fixture(scope="module")
def bare(engines: Engines) -> Run:
    """The same requests on an engine without the probe."""
    return engines.run("bare", host="bare")


def test_kill_9_in_mid_capture(engines: Engines, preloaded_vllm: Path, tmp_path: Path) -> None:
    dump, log = tmp_path / "dump", tmp_path / "log"
    env = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(dump)}
    journal = dump / "rank0000" / "journal.jsonl"
    with Server(engines.model("qwen2"), log=log, env=env, vllm=preloaded_vllm / "vllm") as server:
        clients = [
            threading.Thread(target=lambda n: _quietly(server.url, n), args=(f"r{n}",), daemon=True) for n in range(4)
        ]
        for client in clients:
            client.start()
        deadline = time.monotonic() + 60
        while not journal.exists() or journal.read_bytes().count(b'"tensor"') < 3000:
            assert time.monotonic() < deadline, server.tail()
            time.sleep(0.02)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    found = open_dump(dump)
    assert 0 not in found.ends
    assert any("not closed" in problem for problem in found.problems), found.problems
    assert read_back(found) > 1000
    subprocess.run([Path(sys.executable).parent / "accprobe", "repair", dump], check=True, capture_output=True)
    repaired = open_dump(dump)
    assert repaired.ends[0].reason == "repaired"
    assert read_back(repaired) == read_back(found)


def _quietly(url: str, name: str) -> None:
    try:
        ask(url, name, 300)
    except OSError:
        return  # the server is killed under it


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.extra("an interrupt: test_run_command.py")),
])  # fmt: skip
def test_a_signal_closes_the_dump(engines, preloaded_vllm, tmp_path, number):
    dump, log = tmp_path / "dump", tmp_path / "log"
    env = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(dump), "VLLM_ACCPROBE_REQUESTS": "wanted"}
    with Server(engines.model("qwen2"), log=log, env=env, vllm=preloaded_vllm / "vllm") as server:
        ask(server.url, "other", 3)
        ask(server.url, "wanted", 3)
        server.process.send_signal(number)
        server.stop()
    found = open_dump(dump)
    assert found.problems == []
    assert found.ends[0].reason
    assert [r.id for r in found.requests.values()] == ["wanted"]
    assert read_back(found) > 100
    assert "vllm_accprobe" not in log.read_text(errors="replace")  # no traceback leads through us


def test_a_spent_budget(engines: Engines, bare: Run) -> None:
    run = engines.run("budget", env={"VLLM_ACCPROBE_MAX_GB": "0.003"})
    assert run.tokens == bare.tokens
    assert run.dump is not None
    found = open_dump(run.dump)
    assert found.stops[0].reason == "budget of 3000000 bytes spent"
    assert 0 in found.ends
    read_back(found)
    size = sum(f.stat().st_size for f in run.dump.rglob("*") if f.is_file() and not f.name.startswith("seg-"))
    size += sum(f.stat().st_size for f in run.dump.rglob("seg-*")) - (1 << 20)  # less the segment's empty header
    assert size < 3_300_000
    lines = [line for line in said(engines.host().log) if line.startswith("capture stopped")]
    assert lines == ["capture stopped: budget of 3000000 bytes spent; serving goes on"]


@pytest.fixture
def small_files(engines: Engines, tmp_path: Path) -> Iterator[EngineHost]:
    host = engines.new_host(tmp_path / "log", {"ACCPROBE_TEST_FILE_MB": "2"})
    yield host
    host.close()


def test_a_full_disk(engines: Engines, bare: Run, small_files: EngineHost, tmp_path: Path) -> None:
    run = small_files.capture(engines.model("qwen2"), FIVE, out=tmp_path / "dump")
    assert run.tokens == bare.tokens
    assert run.dump is not None
    found = open_dump(run.dump)
    assert "disk full" in found.stops[0].reason
    read_back(found)
    lines = [line for line in said(small_files.log) if line.startswith("capture stopped")]
    assert len(lines) == 1
    assert lines[0].startswith("capture stopped: disk full")
    assert lines[0].endswith("serving goes on")


def test_a_tap_that_raises(engines: Engines, bare: Run) -> None:
    run = engines.run("sabotaged", sabotage=True)
    assert run.tokens == bare.tokens
    assert run.dump is not None
    found = open_dump(run.dump)
    assert "ZeroDivisionError: planted in the probe" in found.errors[0]["message"]
    assert 0 in found.stops
    assert read_back(found) > 10  # the parameters, which came before
    assert len([line for line in said(engines.host().log) if "planted in the probe" in line]) == 1


def test_an_unusable_directory_stops_the_server_with_one_line(engines, preloaded_vllm, tmp_path):
    (tmp_path / "file").write_text("in the way")
    env = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(tmp_path / "file" / "dump")}
    with (
        pytest.raises(NotServed, match="ended with exit code 2"),
        Server(engines.model("qwen2"), log=tmp_path / "log", env=env, vllm=preloaded_vllm / "vllm"),
    ):
        pass
    assert said(tmp_path / "log") == [
        f"VLLM_ACCPROBE_DIR={tmp_path}/file/dump: Not a directory; name a directory that can be written"
    ]
    assert "Traceback" not in (tmp_path / "log").read_text()
