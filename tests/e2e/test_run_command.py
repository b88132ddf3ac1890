"""``accprobe run -- vllm serve``: a real server, a real request, Ctrl-C; the dump is closed and complete.

The ways of signals without a terminal are tested with smaller commands (tests/run).
"""

import json
import os
import pty
import select
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from support.captures import Engines
from support.interrupts import in_the_foreground
from vllm_server import ENV, SMALL, _free_port

from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine
BIN = Path(sys.executable).parent
READY_S, END_S = 240, 90


def command(engines: Engines, port: int, dump: Path) -> list[str]:
    return [
        str(BIN / "accprobe"), "run", "--dir", str(dump), "--tokens", "0-2", "--modules", "attention,mlp", "--",
        str(BIN / "vllm"), "serve", str(engines.model("qwen2")), "--host=127.0.0.1", f"--port={port}", *SMALL,
    ]  # fmt: skip


def environ() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | ENV | {
        "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }  # fmt: skip


def wait_until_ready(port: int, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert alive(), "the command ended before the server answered"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise AssertionError("the server did not answer")


def ask(port: int, name: str) -> None:
    """With log-probabilities, for which vLLM compiles in its first step, which is captured: preloaded ones have done so
    before."""
    body = {"model": "tiny", "prompt": "Tell me about labels " * 6, "max_tokens": 5, "temperature": 0, "logprobs": 1}
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["choices"][0]["text"]


def check(dump: Path, said: str) -> None:
    found = open_dump(dump)
    assert found.problems == [], said
    assert 0 in found.ends
    assert [r.id for r in found.requests.values()] == ["wanted"]
    taps = {r.tap for r in found.records if r.step is not None}
    assert "model.layers.3.mlp" in taps
    assert "lm_head" not in taps
    assert {s.phase for space in found.rows.values() for s in space.segments} == {"prefill", "decode"}
    stored = [r for r in found.records if r.payload is not None]
    for record in stored:
        assert xxhash.xxh3_128_hexdigest(found.read(record).tobytes()) == record.hash
    assert len(stored) > 50
    assert f"accprobe: dump: {dump}" in said
    assert "; closed" in said
    assert "NOTHING" not in said


def test_ctrl_c_on_a_terminal(engines: Engines, tmp_path: Path) -> None:
    """Everybody at the terminal gets the interrupt; the progress line is there; the exit code is the server's."""
    dump, port = tmp_path / "dump", _free_port()
    words = command(engines, port, dump)
    pid, master = pty.fork()
    if pid == 0:
        in_the_foreground()
        os.execve(words[0], words, environ())
    said = bytearray()
    status: list[int] = []

    def alive() -> bool:
        while select.select([master], [], [], 0)[0]:
            try:
                said.extend(os.read(master, 1 << 16))
            except OSError:  # the other side is closed
                break
        if not status:
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                status.append(os.waitstatus_to_exitcode(code))
        return not status

    try:
        wait_until_ready(port, alive)
        ask(port, "wanted")
        deadline = time.monotonic() + 20
        while b" of 20 GB" not in said and time.monotonic() < deadline:
            alive()
            time.sleep(0.1)
        os.write(master, b"\x03")
        deadline = time.monotonic() + END_S
        while alive():
            assert time.monotonic() < deadline, said[-2000:].decode(errors="replace")
            time.sleep(0.1)
    finally:
        if not status:
            os.kill(pid, signal.SIGKILL)
        os.close(master)
    text = said.decode(errors="replace")
    assert status == [0], text[-3000:]
    assert " of 20 GB" in text
    check(dump, text)
