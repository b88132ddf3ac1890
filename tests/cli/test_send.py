"""``accprobe send`` as typed; what is wrong is in test_mistakes.py, the rest in gate/sending."""

import os
from pathlib import Path
from typing import Any

import pytest
from odd_server import completion, odd

from vllm_accprobe.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a secret prompt\nanother\n")
    Path("bin").mkdir()
    Path("bin/vllm").write_text("#!/bin/sh\necho something broke\nexit 3\n")
    Path("bin/vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_a_server_that_does_not_start_is_one_line(here: Path, capsys: Any) -> None:
    assert main(["send", "p.txt", "--engine", "vllm serve M", "--out", "out"]) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1), said
    assert "exit code 3 before it served: something broke; read out/engine-0.log" in said.err
    assert "secret" not in said.err
    assert not Path("out/send.json").exists()


@pytest.mark.parametrize("progress", [False, True])
def test_the_pace_of_lines_in_a_pipe(here, monkeypatch, capsys, progress):
    monkeypatch.setattr("vllm_accprobe.progress.TERMINAL_S", 0.3)
    Path("bin/vllm").write_text("#!/bin/sh\nsleep 1\nexit 3\n")
    words = ["send", "p.txt", "--engine", "vllm serve M", "--out", "out", *["--progress"] * progress]
    assert main(words) == 2
    assert ("accprobe: the server is starting (0 s)" in capsys.readouterr().err) == progress


def test_an_answer_to_none_is_exit_code_3(here: Path, capsys: Any) -> None:
    with odd(lambda path, body: (400, b"")) as (url, _):
        assert main(["send", "p.txt", "--url", url, "--out", "out"]) == 3
    assert "no prompt was answered: 4 requests: HTTP 400 (out)" in capsys.readouterr().err


def test_done(here: Path, capsys: Any) -> None:
    with odd(lambda path, body: (200, completion(body))) as (url, seen):
        words = ["send", "p.txt", "--url", f"{url}/v1/", "--out", "out", "--arrive", "poisson:100"]
        assert main(words) == 0
        assert capsys.readouterr().out == "2 of 2 answered in 1 pass\nwrote out\n"
        assert main(words) == 0
        assert capsys.readouterr().out == "2 of 2 answered, 2 of them before in 1 pass\nwrote out\n"
    assert seen == [("/v1/completions", "p0000"), ("/v1/completions", "p0001")]
