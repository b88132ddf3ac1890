"""``--json`` of every command: one object on stdout and nothing else, the same exit code, refusals as ever."""

import contextlib
import functools
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from cli_dumps import TAPS, dump_of_operators, make
from odd_server import completion, odd
from opcheck.layer_dumps import build as build_calls
from opcheck.opcheck_dumps import Maker
from opcheck.proof.test_replay_process import GAIN, dump

from vllm_accprobe import labels as label_calls, progress as progress_lines
from vllm_accprobe.cli import COMMANDS, build, main
from vllm_accprobe.cli.output import fold, plain, stacked, width_of

TAP = TAPS[0][0]
CONFIG = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
          "num_attention_heads": 2, "vocab_size": 32, "architectures": ["LlamaForCausalLM"]}  # fmt: skip
WORDS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "compare": (0, "compare D D2 --no-replay --out R", ("verdict", "coverage", "origins")),
    "compare --plan": (0, "compare D D2 --plan", ("plan",)),
    "opcheck": (1, "opcheck CALLS -j 0 --out O", ("verdict", "calls", "checked", "wrong", "statuses", "written")),
    "opcheck --repeat": (0, "opcheck CALLS -j 0 --out O --repeat 2", ("verdict", "mode", "written")),
    "gentest": (0, "gentest CALLS --ops * --out G", ("calls", "operators", "written")),
    "compare --tables": (0, "compare 1.csv 2.csv --out P", ("verdict", "judged", "operators", "written")),
    "compare --calibrate": (0, "compare D D2 --calibrate F", ("tensors", "runs", "written")),
    "compare --profile": (3, "compare D --profile --calibrate F", ()),
    "inspect": (0, "inspect D", ("tensors", "about", "skipped")),
    "inspect --tree": (0, "inspect D --tree", ("tree",)),
    "inspect --tap": (0, f"inspect D {TAP} --roles output.0 --steps 0 --rows 0-1", ("matches", "tensor", "values")),
    "convert": (0, "convert D x.h5", ("tensors", "written", "skipped")),
    "inspect --repair": (0, "inspect --repair D", ("ranks",)),
    "doctor": (1, "doctor --quick", ("findings", "ok")),
    "compare --labels": (0, "compare LABELS --out L", ("verdict", "pairs", "written")),
    "run": (3, "run --dir new -- sh -c 'echo mine'", ("captured", "dumps", "command_exit_code")),
    "errcheck": (3, "errcheck --dir new -- sh -c 'echo mine'", ("findings", "command_exit_code")),
    "inspect --formats": (0, "inspect --formats", ("formats",)),
    "inspect --formats PATH": (0, "inspect --formats D", ("format",)),
    "patches": (0, "patches list", ("patches",)),
    "patches check": (0, "patches check", ("patches",)),
    "send": (0, "send p.txt --url URL --out S --no-score", ("prompts", "answered", "written")),
    "gate": (2, "gate nothing nowhere", ()),
    "self-check": (2, "self-check --out C http://127.0.0.1:9", ()),
    "eval-diff": (0, "eval-diff g.jsonl g2.jsonl", ("verdict",)),
    "bisect": (2, "bisect -- sh serve nowhere", ()),
    "arm": (0, "arm new-place", ("armed", "file", "selection")),
    "inspect --size": (0, "inspect config.json --size", ("bytes",)),
    "online serve": (3, "online serve --port 0 --wait 0.2 --out N", ()),
    "online send": (2, "online send nowhere", ()),
}  # fmt: skip
"""What is typed (each name stands for itself or what `places` has), its exit code, what its object has."""


def calls(root: Path) -> None:
    """Two calls, the second of them wrong."""
    maker = Maker(root)
    for tap in ("act", "bad"):
        maker.module(tap, "SiluAndMul")
    maker.request(0, 3)
    maker.step(0, [(0, 0, 3)])
    x = torch.linspace(-2, 2, 24).reshape(3, 8)
    good = torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
    maker.call("act", "SiluAndMul", {"0": x}, good)
    maker.call("bad", "SiluAndMul", {"0": x}, good * 1.5)
    maker.close()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("json")
    for name in ("D", "D2"):
        make(home / name)
    calls(home / "CALLS")
    main(["opcheck", str(home / "CALLS"), "-j", "0", "--out", str(home / "GPU")])
    for name in ("1.csv", "2.csv"):
        (home / name).write_bytes((home / "GPU/opcheck.csv").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ACCPROBE_DIR", str(home / "LABELS"))
        label_calls.set_task_id()
        for side in ("pta", "acl"):
            label_calls.set_label(side, "a", torch.ones(2, 3))
        label_calls.close()
    (home / "p.txt").write_text("a prompt\n")
    (home / "config.json").write_text(json.dumps(CONFIG))
    (home / "new-place").mkdir()
    from made_evaluations import right, write_samples

    for name in ("g.jsonl", "g2.jsonl"):
        write_samples(home / name, right(5, range(5)))
    return home


def typed(words: str, url: str = "") -> list[str]:
    import shlex

    return [url if word == "URL" else word for word in shlex.split(words)]


def asked(capfd: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main(words)
    said = capfd.readouterr()
    return code, said.out, said.err


def put(words: list[str], *more: str) -> list[str]:
    """``more`` before another command's words."""
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], *more, *words[at:]]


def test_every_command_is_here() -> None:
    group = typer.main.get_command(build())
    known = {*COMMANDS, *(f"online {name}" for name in group.commands["online"].commands)}  # type: ignore[attr-defined]
    assert {key.partition(" -")[0].removesuffix(" PATH").removesuffix(" check") for key in WORDS} == known


@pytest.mark.parametrize("command", WORDS)
def test_one_object_and_the_same_exit_code(command, places, tmp_path, monkeypatch, capfd):
    code, words, fields = WORDS[command]
    for file in places.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    with odd(lambda path, body: (200, completion(body))) as (url, _):
        got, out, err = asked(capfd, put(typed(words, url), "--json"))
    assert got == code or (command in ("doctor", "patches check") and got in (0, 1, 3)), err
    if not fields or (command == "patches check" and got == 3):
        assert out == ""
        said = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert len([line for line in said if line.startswith("accprobe: ")]) == 1, err
        assert "Traceback" not in err
        return
    said = json.loads(out)  # one object, and nothing after it
    assert isinstance(said, dict)
    assert set(fields) <= set(said)
    assert not command.startswith("run") or "mine" in err
    if command == "opcheck":
        assert [(w["tap"], w["call"], w["outputs"]) for w in said["wrong"]] == [("bad", 0, 1)]
    if "written" in fields:
        assert said["written"]
        assert all(Path(path).exists() for path in said["written"])
        assert (said["schema"], said["command"], said["exit_code"]) == (1, words.split()[0], code)


def test_what_it_says_is_what_the_dump_holds(places: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(capfd, ["inspect", str(places / "D"), "--json"])
    rows = json.loads(out)["tensors"]
    assert len(rows) == 27
    assert rows[-1]["tap"] == TAPS[-1][0]
    _, out, _ = asked(capfd, ["inspect", str(places / "D"), "--json", "--limit", "2"])
    assert json.loads(out)["tensors"] == rows[:2]
    assert asked(capfd, ["inspect", str(places / "D"), "--format", "json", "--limit", "2"])[1] == out
    words = ["--roles", "output.0", "--steps", "0", "--rows", "1", "--json"]
    _, out, _ = asked(capfd, ["inspect", str(places / "D"), TAP, *words])
    said = json.loads(out)
    assert said["tensor"]["tap"] == TAP
    assert list(said["values"]) == ["1"]
    assert len(said["values"]["1"]) == said["tensor"]["shape"][-1]


def test_children_write_elsewhere(tmp_path: Path) -> None:
    """A real process: what the command that is run prints is on stderr, the object alone on stdout."""
    words = [sys.executable, "-m", "vllm_accprobe", "run", "--json", "--max-gb", "0.5", "--dir", str(tmp_path / "d")]
    words += ["--", "echo", "mine"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env={**os.environ})
    assert json.loads(done.stdout)["exit_code"] == done.returncode == 3
    assert done.stderr.startswith("mine\n")


def test_what_json_has_no_word_for() -> None:
    given: dict[Any, Any] = {"a": float("nan"), "b": (np.float32(1.5), np.int64(2)), 3: Path("x"), "c": {2, 1},
                             "d": np.array([np.inf])}  # fmt: skip
    assert plain(given) == {"a": "nan", "b": [1.5, 2], "3": "x", "c": [1, 2], "d": ["inf"]}


# --- a terminal of 80 or 40 columns: no line too long, no number broken, nothing lost; a pipe gets lines whole ---


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
DISK = re.compile(r"[\d,.]+[MGT]B(/s)?")
"""Doctor looks at the disk anew each time."""
LONG = "model.language_model.layers.17.self_attn.indexer_with_a_long_name.down_proj"


SHOWN = {
    "compare": "compare golden mine --no-replay --standard strict --out report -v",
    "summary": "inspect plain",
    "summary --ops": "inspect ops --ops",
    "show": "inspect plain model.layers.0.mlp.down_proj/output.0 --steps 0 --rows 0-1",
    "opcheck": "opcheck calls -j 0 --out checked",
    "doctor": "doctor --quick",
    "size": "inspect config.json --size --tokens 1000",
    "help": "compare --help",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("narrow")
    dump(home / "golden", noise=0)
    dump(home / "mine", GAIN)
    make(home / "plain")
    dump_of_operators(home / "ops")
    build_calls(home / "calls", "layers.0.norm")
    (home / "config.json").write_text(json.dumps(CONFIG))
    return home


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_by(words: str, columns: int, cwd: Path, stream: io.StringIO) -> list[str]:
    """The lines that ``stream``, of so many columns, is sent as stdout, without colours."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stream):
        patch.chdir(cwd)
        for name, value in (("COLUMNS", str(columns)), ("TERM", "xterm")):
            patch.setenv(name, value)
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        assert main(words.split()) in (0, 1, 3)
    return ESCAPES.sub("", stream.getvalue()).splitlines()


def on_a_terminal(words: str, columns: int, cwd: Path) -> list[str]:
    return shown_by(words, columns, cwd, Terminal())


@functools.cache
def in_a_pipe(words: str, cwd: Path, columns: int = 40) -> list[str]:
    return shown_by(words, columns, cwd, io.StringIO())


def test_a_real_terminal_is_sent_the_same(place: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_accprobe", *SHOWN["summary"].split()], stdin=subprocess.DEVNULL, stdout=theirs,
        stderr=subprocess.DEVNULL, cwd=place, env={**os.environ, "COLUMNS": "40", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):
        while got := os.read(ours, 65536):
            said += got
    os.close(ours)
    assert process.wait() == 0
    lines = ESCAPES.sub("", said.decode()).replace("\r", "").splitlines()
    assert lines == on_a_terminal(SHOWN["summary"], 40, place)


def squeezed(lines: list[str]) -> str:
    """All but blanks and the backslashes of folded commands."""
    return DISK.sub("", "".join("".join(line.removesuffix(" \\").split()) for line in lines))


def numbers(lines: list[str]) -> list[str]:
    return sorted(re.findall(r"(?<!\S)-?\d[\d.,e+x%-]*(?!\S)", "\n".join(lines)))


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("name", SHOWN)
def test_no_line_is_too_long_and_no_number_is_broken(name: str, columns: int, place: Path) -> None:
    words = SHOWN[name]
    shown, whole = on_a_terminal(words, columns, place), in_a_pipe(words, place)
    assert shown
    long = [line for line in shown if width_of(line) > columns]
    assert [line for line in long if len(line.split()) > 1 or "/" not in line] == []
    if name in ("summary", "summary --ops"):  # a row takes several lines there, each number beside its name
        assert set(numbers(whole)) <= set(numbers(shown))
    elif name != "help":  # which click lays out by itself
        assert squeezed(shown) == squeezed(whole)
        assert numbers(whole) == numbers(shown) or name == "doctor"  # which measures the disk anew


@pytest.mark.parametrize("name", ["compare", "summary", "opcheck"])
def test_a_pipe_gets_lines_whole_whatever_the_columns(name: str, place: Path) -> None:
    assert in_a_pipe(SHOWN[name], place) == in_a_pipe(SHOWN[name], place, 500)
    assert max(map(len, in_a_pipe(SHOWN[name], place))) > 80


def test_a_closed_output_is_no_internal_error(place: Path) -> None:
    words = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "vllm_accprobe", *SHOWN["summary"].split()]
    done = subprocess.run(words, cwd=place, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_is_not_folded(place: Path) -> None:
    assert json.loads("\n".join(on_a_terminal("inspect --formats --json", 40, place)))["formats"]


@pytest.mark.parametrize(
    ("line", "width", "parts"),
    [
        ("short", 20, ["short"]),
        ("  two words and 12345.678 more of them", 24, ["  two words and", "      12345.678 more of", "      them"]),
        (f"  {LONG}", 40, ["  model.language_model.layers.17.self_",
                           "      attn.indexer_with_a_long_name.", "      down_proj"]),
        ("wrote /a/very/long/path/that/nobody/breaks", 20, ["wrote", "    /a/very/long/path/that/nobody/breaks"]),
        ("    accprobe show d 'a b c' --steps 0 --ranks 1", 30, ["    accprobe show d 'a b c' \\",
                                                                 "        --steps 0 --ranks 1"]),
        ("  a module's weight [64, 32]", 24, ["  a module's weight", "      [64, 32]"]),
        ("\x1b[1mbold words that are long\x1b[0m", 20, ["\x1b[1mbold words that are", "    long\x1b[0m"]),
        ("中文 " * 8, 20, ["中文 中文 中文 中文", "    中文 中文 中文", "    中文"]),
    ],
)  # fmt: skip
def test_where_a_line_is_folded(line: str, width: int, parts: list[str]) -> None:
    assert [part.rstrip() for part in fold(line, width)] == parts
    assert all(width_of(part.rstrip()) <= width for part in fold(line, width)) or "/" in line


def test_a_row_that_has_no_room() -> None:
    columns, row = ("index", "step", "tap", "min"), ("3", "0", "a.b", "1.5")
    assert stacked(columns, row, ("tap",)) == ["3  a.b", "    step 0  min 1.5"]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(("total", "line"), [(8, "send: 3 of 8"), (1, "send")])
def test_a_line_while_something_waits(terminal, total, line, monkeypatch, capfd):
    """On stderr alone, at the pace of a terminal or of a pipe; where there are steps, a terminal has a bar instead."""
    assert (progress_lines.TERMINAL_S, progress_lines.PIPE_S) == (5.0, 30.0)  # docs/gate.md names them
    monkeypatch.setattr(progress_lines, "on_terminal", lambda: terminal)
    monkeypatch.setattr(progress_lines, "TERMINAL_S" if terminal else "PIPE_S", 0.1)
    for seconds, least in ((0.0, 0), (0.5, 2)):
        with progress_lines.progress("send", total, steps=True) as tell:
            tell(3)
            time.sleep(seconds)
        said = capfd.readouterr()
        assert said.out == ""
        if not (terminal and total > 1):
            assert len(said.err.splitlines()) >= least
            lines = said.err.splitlines()  # on a busy machine more than 0 s
            assert all(re.fullmatch(rf"accprobe: {line} \(\d+ s\)", one) for one in lines)
            assert bool(said.err) or not least
