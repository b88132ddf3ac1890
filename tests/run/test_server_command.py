"""What a command's own words say: a server or a program, and where it listens."""

from __future__ import annotations

import re
import socket

import pytest

from vllm_accprobe.run.launcher import ServerCommandError, understood


@pytest.mark.parametrize(
    "words",
    [["python", "my_generate.py"], ["vllm", "bench", "serve"], ["bash", "-c", "vllm bench"], ["./serve", "vllm"]],
)
def test_a_program_stays_as_it_is(words: list[str]) -> None:
    command = understood(words, {})
    assert (list(command.words), command.url) == (words, "")


@pytest.mark.parametrize(
    "words", [["/opt/bin/vllm", "serve", "m"], ["python", "-m", "vllm.entrypoints.openai.api_server"]]
)
def test_a_server_without_a_port_gets_a_free_one(words: list[str]) -> None:
    command = understood(words, {"VLLM_API_KEY": "secret"})
    port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)", command.url)
    assert port
    assert list(command.words) == [*words, f"--port={port[1]}"]
    assert command.key == "secret"
    assert "secret" not in repr(command)


@pytest.mark.parametrize(("words", "port", "url"), [
    (["vllm", "serve", "m", "--port", "41999"], None, "http://127.0.0.1:41999"),
    (["vllm", "serve", "m", "--host=0.0.0.0", "--port=41999"], 41999, "http://127.0.0.1:41999"),
    (["vllm", "serve", "m", "--host", "::1", "--port=41999"], None, "http://[::1]:41999"),
    (["cd x && vllm serve m --port 41999"], None, "http://127.0.0.1:41999"),
    (["./start.sh"], 41999, "http://127.0.0.1:41999"),
])  # fmt: skip
def test_a_port_that_is_named_is_kept(words: list[str], port: int | None, url: str) -> None:
    command = understood(words, {}, port)
    assert (list(command.words), command.url) == (words, url)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ServerCommandError, match="--port=1, and the command says --port 2"):
        understood(["vllm", "serve", "m", "--port", "2"], {}, 1)
    with pytest.raises(ServerCommandError, match="--ssl-keyfile"):
        understood(["vllm", "serve", "m", "--ssl-keyfile=x"], {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerCommandError, match="something listens on port"):
            understood(["vllm", "serve", "m", f"--port={taken.getsockname()[1]}"], {})
