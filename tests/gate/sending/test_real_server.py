"""``accprobe send`` with a real `vllm serve`: ids, log-probabilities, a hang, and going on. A server that is killed:
tests/cli/test_gate_run.py."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_server import Server

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.gate.sending import replies

pytestmark = pytest.mark.engine
SECRET = "Nobody but the owner of these two servers may ever read this line."


def prompts(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_what_came_back(server: Server, tmp_path: Path, capsys: Any) -> None:
    asked = [
        {"id": "text", "prompt": SECRET, "max_tokens": 5},
        {"id": "ids", "token_ids": [40, 41, 42, 43, 44, 45], "max_tokens": 3},
        {"id": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        {"id": "long", "prompt": SECRET * 60},
    ]
    out = tmp_path / "out"
    words = ["send", prompts(tmp_path / "p.jsonl", asked), "--url", server.url, "--out", str(out), "--top", "4"]
    assert main(words) == 0
    said = capsys.readouterr()
    answered, refused, written = said.out.splitlines()
    assert (answered, written) == ("9 of 12 answered in 3 passes", f"wrote {out}")
    assert refused.startswith("refused: 2 requests: HTTP 400: This model's maximum context length is 512 tokens.")
    assert refused.endswith("; 1 request: no answer to go along")
    sent = replies.read(out)
    assert sent.about["server"] == {"version": "0.32.0", "model": "tiny", "max_model_len": 512}
    assert [p.get("forced") for p in sent.about["passes"]] == [None, "accprobe", "scored"]
    one, every, scored = sent.passes
    assert one["ids"].prompt_token_ids == every["ids"].prompt_token_ids == [40, 41, 42, 43, 44, 45]
    for name, n in (("text", 5), ("ids", 3), ("chat", 4)):
        for reply in (one[name], every[name]):
            assert reply.token_ids is not None
            assert reply.logprobs is not None
            assert reply.top is not None
            assert reply.margins is not None
            assert len(reply.token_ids) == len(reply.logprobs) == len(reply.top) == n
            assert reply.prompt_token_ids
            for token, logprob, (ids, values), margin in zip(
                reply.token_ids, reply.logprobs, reply.top, reply.margins, strict=True
            ):
                assert ids is not None
                assert values == sorted(values, reverse=True)
                # Greedy: the best, or one of several that are equally good.
                assert logprob == values[0] == values[ids.index(token)]
                assert margin == pytest.approx(values[0] - values[1], abs=1e-5)
        assert one[name].prompt_token_ids == every[name].prompt_token_ids
        assert one[name].token_ids == every[name].token_ids == (scored[name].token_ids or [])[-n:]
        assert one[name].logprobs == pytest.approx((scored[name].logprobs or [])[-n:], abs=1e-5)
    assert type(every["text"].cached) is int
    assert main(words) == 0
    assert "9 of 12 answered, 12 of them before" in capsys.readouterr().out
    assert SECRET not in said.out + said.err + server.log.read_text(errors="replace")
    names = {r.id for r in open_dump(server.model.parent / "dump").requests.values()}
    assert any("ids" in name for name in names)
    assert any("ids.pass1" in name for name in names)


def test_a_hang_is_one_line_and_the_same_command_goes_on(server: Server, tmp_path: Path, capsys: Any) -> None:
    """The whole server is stopped as by Ctrl-Z in the middle of a pass."""
    asked = [{"id": f"p{i}", "token_ids": [50 + i, 60, 70], "max_tokens": 2} for i in range(5)]
    out = tmp_path / "out"
    words = ["send", prompts(tmp_path / "p.jsonl", asked), "--url", server.url, "--out", str(out), "--arrive", "all"]
    port = int(server.url.rpartition(":")[2])
    group = os.getpgid(next(c.pid for c in psutil.net_connections() if c.laddr[1:] == (port,) and c.pid))
    os.killpg(group, signal.SIGSTOP)
    try:
        began = time.monotonic()
        code = main([*words, "--timeout", "1"])
        assert time.monotonic() - began < 20
    finally:
        os.killpg(group, signal.SIGCONT)
    err = capsys.readouterr().err.splitlines()
    assert (code, len(err)) == (2, 1)
    assert "did not answer within 1 s (--timeout)" in err[0]
    assert main(words) == 0
    assert len(replies.read(out).passes[0]) == 5
