"""A terminal of 80 or 40 columns: no line too long, no number broken, nothing lost; a pipe gets lines whole."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cli.replay.test_replaying import GAIN, dump
from cli_dumps import make
from opcheck.layer_dumps import build

from vllm_accprobe.cli.common.folding import fold, stacked, width_of

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
DISK = re.compile(r"[\d,.]+[MGT]B(/s)?")
"""Doctor looks at the disk anew each time."""
LONG = "model.language_model.layers.17.self_attn.indexer_with_a_long_name.down_proj"
CONFIG = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
          "num_attention_heads": 2, "vocab_size": 32, "architectures": ["LlamaForCausalLM"]}  # fmt: skip
COMMANDS = {
    "compare": "compare golden mine --no-replay --standard strict --out report -v",
    "summary": "summary plain",
    "summary --ops": "summary ops --ops",
    "show": "show plain model.layers.0.mlp.down_proj/output.0 --steps 0 --rows 0-1",
    "opcheck": "opcheck calls -j 0 --out checked",
    "doctor": "doctor --quick",
    "size": "size config.json --tokens 1000",
    "help": "compare --help",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("narrow")
    dump(home / "golden", noise=0)
    dump(home / "mine", GAIN)
    make(home / "plain")
    from cli.common.test_operators import dump_of_operators

    dump_of_operators(home / "ops")
    build(home / "calls", "layers.0.norm")
    (home / "config.json").write_text(json.dumps(CONFIG))
    return home


def command(words: str) -> list[str]:
    return [sys.executable, "-m", "vllm_accprobe", *words.split()]


def environ(columns: int) -> dict[str, str]:
    kept: Mapping[str, str] = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return {**kept, "COLUMNS": str(columns), "TERM": "xterm", "OMP_NUM_THREADS": "1"}


def on_a_terminal(words: str, columns: int, cwd: Path) -> list[str]:
    """The lines that a terminal of so many columns is sent on stdout, without colours."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(words), stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL, cwd=cwd,
        env=environ(columns),
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):
        while got := os.read(ours, 65536):
            said += got
    os.close(ours)
    assert process.wait() in (0, 1, 3)
    return ESCAPES.sub("", said.decode()).replace("\r", "").splitlines()


def in_a_pipe(words: str, cwd: Path, columns: int = 40) -> list[str]:
    done = subprocess.run(command(words), capture_output=True, text=True, cwd=cwd, env=environ(columns))
    assert done.returncode in (0, 1, 3), done.stderr
    return done.stdout.splitlines()


def squeezed(lines: list[str]) -> str:
    """All but blanks and the backslashes of folded commands."""
    return DISK.sub("", "".join("".join(line.removesuffix(" \\").split()) for line in lines))


def numbers(lines: list[str]) -> list[str]:
    return sorted(re.findall(r"(?<!\S)-?\d[\d.,e+x%-]*(?!\S)", "\n".join(lines)))


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_too_long_and_no_number_is_broken(name: str, columns: int, place: Path) -> None:
    words = COMMANDS[name]
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
    assert in_a_pipe(COMMANDS[name], place, 20) == in_a_pipe(COMMANDS[name], place, 500)
    assert max(map(len, in_a_pipe(COMMANDS[name], place, 20))) > 80


def test_json_is_not_folded(place: Path) -> None:
    assert json.loads("\n".join(on_a_terminal("formats --json", 40, place)))["formats"]


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
