"""TLS, and servers that take a connection and say nothing: one line each."""

import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from odd_server import completion, odd
from online.online_certificates import Authority

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import client, replies
from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.passes import parse


@contextmanager
def with_tls(folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Iterator[str]:
    """The URL of a good server that speaks TLS, with a certificate made on the spot; its authority is in ``folder``."""
    Authority().folder(folder, "server", **how)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    bind = ThreadingHTTPServer.server_bind

    def bound(self: Any) -> None:
        bind(self)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadingHTTPServer, "server_bind", bound)
        with odd(lambda path, body: (200, completion(body))) as (url, _):
            patch.undo()
            yield url.replace("http://", "https://")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    Path("p.txt").write_text("a secret prompt\nanother\n")
    return tmp_path


def send(url: str, *words: str) -> int:
    return main(["send", "p.txt", "--url", url, "--out", "out", "--timeout", "5", "--arrive", "one", *words])


def test_https_with_an_authority_of_ones_own(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with with_tls(here / "a", monkeypatch) as url:
        assert send(url) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"accprobe: {url}: its certificate is not trusted (")
        assert "SSL_CERT_FILE" in said
        assert len(said.splitlines()) == 1
        monkeypatch.setenv("SSL_CERT_FILE", str(here / "a/ca.crt"))
        assert send(url) == 0
        assert "2 of 2 answered in 1 pass" in capsys.readouterr().out
        assert send(url.replace("127.0.0.1", "localhost")) == 0


@pytest.mark.parametrize(("how", "says"), [({"expired": True}, "expired"), ({"names": ("elsewhere",)}, "mismatch")])
def test_a_bad_certificate_is_one_line(how, says, here, monkeypatch, capsys):
    monkeypatch.setenv("SSL_CERT_FILE", str(here / "a/ca.crt"))
    with with_tls(here / "a", monkeypatch, **how) as url:
        assert send(url) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert says in err.lower()
    assert "secret" not in err


def test_http_where_tls_is_and_the_other_way_round(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with odd(lambda path, body: (200, completion(body))) as (url, _):
        assert send(url.replace("http://", "https://")) == 2
    assert "no TLS is spoken there: write http://" in capsys.readouterr().err
    with with_tls(here / "a", monkeypatch) as url:
        assert send(url.replace("https://", "http://")) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "internal error" not in err


@pytest.mark.parametrize("takes", [True, False])
def test_a_server_that_says_nothing_is_one_line(takes, here, monkeypatch, capsys):
    """One that takes connections and reads, and one whose queue of connections nobody empties. It is not waited for as
    long as for an answer."""
    monkeypatch.setattr(client, "INTRODUCTION_S", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as hung:
        kept: list[socket.socket] = []
        if takes:
            threading.Thread(target=lambda: kept.append(hung.accept()[0]), daemon=True).start()
        began = time.monotonic()
        assert main(["send", "p.txt", "--url", f"http://127.0.0.1:{hung.getsockname()[1]}", "--out", "out"]) == 2
        assert time.monotonic() - began < 10
        for one in kept:
            one.close()
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert "did not answer within 0.5 s" in err[0]
    assert not Path("out/send.json").exists()


# --- answers of vLLM's three shapes become the same numbers; what is none is refused ---


EMPTY = Reply("p", 0.0, 0.0)


def test_a_forced_token_outside_of_the_best_stands_last() -> None:
    place = {"token_id": 9, "logprob": -7.5, "rank": 80}
    best = [{"token_id": 9, "logprob": -7.5}, {"token_id": 4, "logprob": -0.5}, {"token_id": 3, "logprob": -1.5}]
    reply = client.read(EMPTY, {
        "choices": [
            {"token_ids": [9], "finish_reason": "length", "logprobs": {"content": [place | {"top_logprobs": best}]}}
        ],
        "prompt_token_ids": [1, 2], "usage": {"prompt_tokens_details": {"cached_tokens": 16}},
    }, client.TRACE)  # fmt: skip
    assert (reply.prompt_token_ids, reply.token_ids, reply.logprobs, reply.cached) == ([1, 2], [9], [-7.5], 16)
    assert (reply.top, reply.margins) == ([([4, 3, 9], [-0.5, -1.5, -7.5])], [1.0])
    same = client.read(EMPTY, {"choices": [{
        "token_ids": [9], "prompt_token_ids": [1, 2], "finish_reason": "length", "logprobs": {"token_logprobs": [-7.5],
        "top_logprobs": [{"token_id:9": -7.5, "token_id:4": -0.5, "token_id:3": -1.5}]},
    }], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}})  # fmt: skip
    assert same == reply


def test_a_prompt_that_was_scored() -> None:
    places = [None, {"5": {"logprob": -2.0, "rank": 3}, "8": {"logprob": -0.25}}, {"6": {"logprob": -0.125}}]
    answer = {"choices": [{"prompt_logprobs": places, "prompt_token_ids": [4, 5, 6]}]}
    reply = client.read(EMPTY, answer, client.SCORED, 1)
    assert (reply.prompt_token_ids, reply.token_ids, reply.logprobs) == ([4], [5, 6], [-2.0, -0.125])
    assert (reply.top, reply.margins) == ([([8, 5], [-0.25, -2.0]), ([6], [-0.125])], [1.75, None])
    assert client.read(EMPTY, answer, client.SCORED, 2).token_ids == [6]


@pytest.mark.parametrize("answer", [None, [], {}, {"choices": []}, {"choices": [{}]}, {"choices": [{"logprobs": None}]},
                                    {"choices": [{"prompt_logprobs": None}]}, math.nan])  # fmt: skip
def test_what_is_no_answer_is_refused(answer: Any) -> None:
    for read in (client.read(EMPTY, answer, way, 1) for way in (None, client.TRACE, client.SCORED)):
        assert read.refused is not None
        assert read.token_ids is None


# --- steps are read for each request and pass; the last engine that has a request counts ---


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


# --- the moments at which requests are sent ---


def test_words() -> None:
    assert parse("one").alone
    assert parse("all").moments(3) == [0, 0, 0]
    moments = parse("poisson:20").moments(2000)
    assert moments == parse("poisson:20").moments(2000)
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("word", ["", "two", "poisson", "poisson:0", "poisson:-1", "poisson:1e9", "poisson:nan"])
def test_what_is_no_arrival(word: str) -> None:
    with pytest.raises(ValueError, match="poisson:RATE"):
        parse(word)
