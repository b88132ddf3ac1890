"""``accprobe bisect`` from end to end, with servers that only seem to be vLLM."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from odd_server import started_here
from settings_server import answers, install
from support.interrupts import in_the_foreground

from vllm_accprobe.cli import main

SERVE = ["vllm", "serve", "M", "--max-num-batched-tokens", "64", "--block-size", "32", "--async-scheduling"]
PREFIX = "!--no-enable-prefix-caching"
CHUNKS, BLOCK = "--max-num-batched-tokens 64", "--block-size 32"
"""Parts of settings_server's sets: prefix caching is on unless it is switched off."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "bin")
    lines = [{"id": f"p{i}", "token_ids": [i + 1, i + 2, 9], "max_tokens": 4} for i in range(12)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_STARTS", str(tmp_path / "starts"))
    monkeypatch.chdir(tmp_path)
    # An environment in which no vllm is found takes every option to be there; this one's is found or not.
    monkeypatch.setattr("vllm_accprobe.gate.bisect.edits.interpreter", lambda words, environ: None)
    monkeypatch.setattr("vllm_accprobe.gate.bisect.trials.served", started_here(answers))
    return tmp_path


def words(place: Path, *options: str, serve: list[str] = SERVE) -> list[str]:
    held = ["--hold", "compilation", "--hold", "custom operators"]
    return ["bisect", "--out", "out", "--prompts", "p.jsonl", *held, *options, "--", *serve]


def starts(place: Path) -> int:
    file = place / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def found(capsys: Any) -> Any:
    return json.loads(capsys.readouterr().out)


def fault(monkeypatch: pytest.MonkeyPatch, *sets: list[str], name: str = "FAKE_FAULT") -> None:
    monkeypatch.setenv(name, json.dumps(list(sets)))


def test_one_setting(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fault(monkeypatch, [PREFIX])
    assert main(words(place)) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "4 settings of the command can be made plain:"
    assert "found: prefix caching (0.5 nats from golden)" in lines
    assert "  this set alone, everything else plain: fail (0.5 nats)" in lines
    assert "  the command without it: pass (0 nats)" in lines
    at = lines.index("  fails:")
    assert (
        lines[at + 1].startswith("    vllm serve M --no-async-scheduling") or "--no-async-scheduling" in lines[at + 1]
    )
    assert "--no-enable-prefix-caching" not in lines[at + 1]
    assert "--no-enable-prefix-caching" in lines[at + 3]
    assert lines[-4].strip().startswith("accprobe gate 'vllm serve M") or any("--localize" in line for line in lines)
    started, runs = starts(place), starts(place) - 1  # the floor is no run
    assert f"{runs} runs, of 16 combinations" in said.out
    assert runs <= 9
    # Everything is kept: the same command starts nothing.
    assert main(words(place)) == 1
    assert starts(place) == started
    assert f"{runs} runs, {runs} of them kept from before, of 16 combinations" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "serve", "code", "note"), [
    ((), SERVE, 0, "floor: everything plain in float16"),
    (("--no-floor",), SERVE, 1, ""),
    ((), [*SERVE, "--dtype", "float32"], 1, "note: the plain configuration makes no floor: rounding may be taken"),
], ids=["floor", "no floor", "float32"])  # fmt: skip
def test_what_only_rounds_otherwise_is_no_cause(place, monkeypatch, capsys, options, serve, code, note):
    """A healthy engine whose asynchronous steps round as differently as another dtype does."""
    fault(monkeypatch, ["!--no-async-scheduling"], ["--dtype=float16"], name="FAKE_ROUNDING")
    assert main(words(place, *options, serve=serve)) == code
    said = capsys.readouterr()
    assert note in said.err
    assert ("batching and rounding explain what the command differs by (" in said.out) == (not code)
    fault(monkeypatch, [PREFIX])  # beyond it
    assert main(words(place, *options, "--out", "faulty", serve=serve)) == 1
    assert "found: prefix caching" in capsys.readouterr().out


def test_a_floor_that_is_wrong_excuses_nothing(place, monkeypatch, capsys):
    """Plain in float16 is broken: the next dtype is the floor, and where all of them are, nothing is judged."""
    fault(monkeypatch, [PREFIX])
    fault(monkeypatch, ["--dtype=float16"], name="FAKE_BROKEN")
    assert main(words(place, "--json")) == 1
    result = found(capsys)
    assert [s["name"] for s in result["causes"][0]["settings"]] == ["prefix caching"]
    assert result["floors"] == [{"name": "everything plain in float32", "distance": 0.0}]
    fault(monkeypatch, ["--dtype=float16"], ["--dtype=float32"], name="FAKE_BROKEN")
    assert main(words(place, "--json", "--out", "all")) == 3
    result = found(capsys)
    assert result["verdict"] is None
    assert "golden and everything plain in float16 differ by 5 nats" in result["why"]
    assert [round(one["distance"]) for one in result["floors"]] == [5, 5]


def test_several_together(place, monkeypatch, capsys):
    names = {"prefix caching", "chunked prefill", "block size"}
    fault(monkeypatch, [PREFIX, CHUNKS, BLOCK])
    assert main(words(place, "--json")) == 1
    result = found(capsys)
    (cause,) = result["causes"]
    assert {s["name"] for s in cause["settings"]} == names
    assert cause["without"]["outcome"] == "pass"
    assert {o["outcome"] for o in cause["each"].values()} == {"pass"}  # any one of them is enough
    assert set(cause["each"]) == names


def test_configurations_that_do_not_start(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The half with the block size does not start: it is unresolved, told with its log, and the set is found around
    it."""
    fault(monkeypatch, [PREFIX, BLOCK])
    fault(monkeypatch, [BLOCK, "--no-enable-prefix-caching"], name="FAKE_DEAD")
    assert main(words(place)) == 1
    out = capsys.readouterr().out
    assert "found: prefix caching + block size" in out
    assert "could not be tried:" in out
    assert "exit code 3 before it served" in out
    assert "engine-0.log" in out


def test_a_command_that_never_starts_is_tried_once(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fault(monkeypatch, [], name="FAKE_DEAD")
    assert main(words(place)) == 3
    out = capsys.readouterr().out
    assert "nothing could be tried: the command itself: the command ended with exit code 3 before it served" in out
    assert starts(place) == 1
    monkeypatch.delenv("FAKE_DEAD")
    assert main(words(place)) == 0
    assert starts(place) == 3


def test_nothing_differs(place: Path, capsys: Any) -> None:
    assert main(words(place)) == 0
    assert "nothing differs" in capsys.readouterr().out
    assert starts(place) == 2


def test_a_plan_starts_nothing(place: Path, capsys: Any) -> None:
    assert main(words(place, "--plan")) == 0
    assert "combinations" in capsys.readouterr().out
    assert main(words(place, "--plan", "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] is None
    assert said["combinations"] == 2 ** len(said["axes"])
    assert starts(place) == 0
    assert not (place / "out").exists()


def test_a_server_that_is_lost_is_one_line_and_then_unresolved(place, monkeypatch, capsys):
    fault(monkeypatch, [PREFIX])
    fault(monkeypatch, ["--no-enable-prefix-caching"], name="FAKE_LOST")
    assert main(words(place)) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("accprobe: ")]
    assert "the same command goes on from there" in line
    kept = len(list((place / "out" / "trials").glob("*/sent/pass-0.jsonl")))
    monkeypatch.delenv("FAKE_LOST")
    assert kept == 2
    assert main(words(place)) == 1
    assert "found: prefix caching" in capsys.readouterr().out


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch, [PREFIX])
    program = "import faulthandler; faulthandler.dump_traceback_later(80); " \
              "from vllm_accprobe.gate.bisect import edits; edits.interpreter = lambda w, e: None; " \
              "import sys; from vllm_accprobe.cli import main; sys.exit(main())"  # fmt: skip
    line = [sys.executable, "-c", program, *words(place)]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=in_the_foreground
    ) as process:
        end = time.monotonic() + 60
        while starts(place) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:  # a server that ignores SIGTERM is killed after 60 s
            _, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()) from None  # where it waits
    assert process.returncode == 130
    assert [x for x in err.splitlines() if not x.startswith(("run ", "the first run"))] == [
        f"accprobe: interrupted; the runs are kept in out; go on: {shlex.join(['accprobe', *words(place)])}"
    ]
    begun = starts(place)
    assert main(words(place)) == 1
    assert starts(place) < begun + 9


def test_files_are_their_owners(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fault(monkeypatch, [PREFIX])
    main(words(place, serve=[*SERVE, "--api-key", "hush"]))
    assert "hush" not in capsys.readouterr().out
    trials = place / "out" / "trials"
    for path in trials.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.is_dir() or b"hush" not in path.read_bytes()
