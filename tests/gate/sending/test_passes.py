"""Passes over a server that refuses, fails, hangs and dies: what is kept, what is said, what is asked again."""

import itertools
import json
import re
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from odd_server import completion, odd

from vllm_accprobe.gate.sending import passes, replies
from vllm_accprobe.gate.sending.client import Reply, Sender, SendError, ServerLost
from vllm_accprobe.gate.sending.passes import parse
from vllm_accprobe.gate.sending.prompts import PromptLine

SECRET = "a prompt that nobody may see"
LINES = [PromptLine(f"p{i}", text=f"{SECRET} {i}") for i in range(6)]


def go(url: str, out: Path, *words: str, lines: list[PromptLine] = LINES, timeout: float = 20) -> passes.Done:
    sender, server = Sender(url, timeout=timeout, top=2, max_tokens=1).introduced()
    return passes.send(sender, server, lines, [parse(w) for w in words or ("one", "all")], 4, out, {"accprobe": "t"})


def test_a_reply_is_kept_as_numbers(tmp_path: Path) -> None:
    with odd(lambda path, body: (200, completion(body))) as (url, seen):
        done = go(url, tmp_path / "out", "one", "poisson:500")
    assert (done.of, done.answered, done.refused, done.sent) == (12, 12, 0, 12)
    sent = replies.read(tmp_path / "out")
    assert (sent.about["complete"], sent.about["prompts"]["count"]) == (True, 6)
    reply = sent.passes[1]["p3"]
    assert (reply.prompt_token_ids, reply.token_ids, reply.logprobs) == ([1, 2], [7], [-0.25])
    assert (reply.top, reply.margins, reply.finish, reply.cached) == ([([7, 9], [-0.25, -1.5])], [1.25], "length", 1)
    assert [name for _, name in seen[:6]] == [line.name for line in LINES]
    assert {name for _, name in seen[6:]} == {f"{line.name}.pass1" for line in LINES}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o600}


def test_all_means_at_once_and_one_means_alone(tmp_path: Path) -> None:
    now, most, lock = 0, [0, 0], threading.Lock()
    turns = itertools.count()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal now
        if path != "/v1/completions":
            return 404, b""
        with lock:
            index, now = next(turns) // len(LINES), now + 1
            most[index] = max(most[index], now)
        time.sleep(0.05)
        with lock:
            now -= 1
        return 200, completion(body)

    with odd(answer) as (url, _):
        go(url, tmp_path / "out")
    assert most == [1, 4]


def test_a_refused_prompt_is_counted_and_the_others_go_on(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        odd_ones = {
            "2": (400, json.dumps({"error": {"message": f"no logprobs\n for '{SECRET}', 12 > 4"}}).encode()),
            "3": (200, b"<html>"),
            "4": (200, b'{"choices": [{}]}'),
            "5": (500, b""),
        }
        return odd_ones.get(str(body.get("prompt"))[-1:], (200, completion(body)))

    with odd(answer) as (url, _):
        done = go(url, tmp_path / "out", "one")
        again = go(url, tmp_path / "out", "one")
    assert (done.answered, done.refused, again.sent) == (2, 4, 0)
    why = (
        "HTTP 400: no logprobs for '...', 12 > 4",
        "HTTP 500",
        "an answer that is none of a completion",
        "an answer without log-probabilities",
    )
    assert done.reasons == dict.fromkeys(why, 1)
    assert SECRET not in (tmp_path / "out/pass-0.jsonl").read_text()


@pytest.mark.parametrize("word", ["one", "all"])
def test_a_server_that_dies_in_the_middle_keeps_what_it_said(word: str, tmp_path: Path) -> None:
    turns, alive = itertools.count(), threading.Event()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/health":
            return (200, b"") if alive.is_set() else (503, b"")
        if path == "/version":
            return 404, b""
        return (200, completion(body)) if alive.is_set() or next(turns) < 3 else (0, b"")

    out = tmp_path / "out"
    with odd(answer) as (url, seen):
        with pytest.raises(ServerLost) as e:
            go(url, out, word)
        said = str(e.value)
        assert said.startswith("pass 0, request p")
        found = re.search(r"([0-3]) of 6 answers are kept in", said)
        assert found is not None, said
        kept = int(found[1])
        assert kept == 3 or word == "all"  # an answer on its way when another one failed may be cut off
        assert "\n" not in said
        assert SECRET not in said
        assert not replies.read_about(out)["complete"]
        with (out / "pass-0.jsonl").open("ab") as f:
            f.write(b'{"name": "p5", "token_ids": [1')  # a line that was torn
        alive.set()
        seen.clear()
        done = go(url, out, word)
        assert (done.answered, done.sent, len(seen)) == (6, 6 - kept, 6 - kept)
    about = replies.read_about(out)
    assert (about["complete"], about["passes"][0]["resumed"]) == (True, 1)


def test_a_server_that_hangs_is_one_line_and_ends_soon(tmp_path: Path) -> None:
    hold = threading.Event()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/v1/completions" and not str(body.get("prompt")).endswith("0"):
            hold.wait(30)
        return 200, completion(body)

    with odd(answer) as (url, _):
        began = time.monotonic()
        with pytest.raises(ServerLost, match=r"did not answer within 0\.6 s \(--timeout\); 1 of 6 answers are kept"):
            go(url, tmp_path / "out", "all", timeout=0.6)
        assert time.monotonic() - began < 8
        hold.set()


def test_another_send_is_not_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with odd(lambda path, body: (200, completion(body))) as (url, _):
        go(url, out, "one")
        for words, lines, says in ((("all",), LINES, "other settings"), (("one",), LINES[:3], "other prompts")):
            with pytest.raises(replies.FolderError, match=says):
                go(url, out, *words, lines=lines)
        about = json.loads((out / "send.json").read_text())
        about["server"]["model"] = "other"
        (out / "send.json").write_text(json.dumps(about))
        with pytest.raises(replies.FolderError, match="of the model other"):
            go(url, out, "one")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99, "passes": []}', '{"schema": 1}', "[" * 100_000])
def test_a_folder_that_is_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(replies.FolderError):
        replies.read(tmp_path)
    (tmp_path / "send.json").write_text(text)
    with pytest.raises(replies.FolderError):
        replies.read(tmp_path)


def test_a_key_is_asked_for_and_never_shown() -> None:
    with odd(lambda path, body: (401, b"")) as (url, _):
        sender = Sender(url, key="hunter2")
        with pytest.raises(SendError, match="VLLM_API_KEY") as e:
            sender.ask(LINES[0], "x", {}, 0.0)
    assert "hunter2" not in str(e.value) + repr(sender)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://me:secret@x", "http://x:notaport"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(SendError, match="--url") as e:
        Sender(url)
    assert "secret" not in str(e.value)


def test_what_was_answered_is_read_again_without_its_log_probabilities(tmp_path: Path) -> None:
    path = tmp_path / replies.pass_name(0)
    writer = replies.ReplyWriter(path)
    for i in range(100):
        top = [([7 * j + k for k in range(20)], [-0.001 * (i + j + k) for k in range(20)]) for j in range(32)]
        writer.add(Reply(f"p{i}", 0.0, 1.0, [1, 2], [7] * 32, [-0.25] * 32, top, refused="odd" if i == 3 else None))
    writer.close()
    tracemalloc.start()
    assert replies.answered(path) == {f"p{i}" for i in range(100)}
    assert [name for name, why in replies.refusals(tmp_path, 0).items() if why] == ["p3"]
    assert replies.read_pass(tmp_path, 0)["p4"] == Reply("p4", 0.0, 1.0, [1, 2], [7] * 32)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < path.stat().st_size / 2
