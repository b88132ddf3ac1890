"""Completion by the shells' own means: what bash runs, what it is answered, and that nothing heavy is loaded."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest

ACCPROBE = Path(sys.executable).with_name("accprobe")
PATH = f"{ACCPROBE.parent}{os.pathsep}{os.environ['PATH']}"


def asked(script: str) -> str:
    """What a real bash prints after it took accprobe's completion and ran ``script``."""
    taken = 'eval "$(_ACCPROBE_COMPLETE=source_bash accprobe)"\n'
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", taken + script],
        env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def completed(words: str) -> list[str]:
    """The answers of the function that bash's ``complete`` names, for the last of ``words``."""
    return asked(
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "_accprobe_completion accprobe; printf '%s\\n' \"${COMPREPLY[@]}\""
    ).split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_and_options():
    assert "-F _accprobe_completion accprobe" in asked("complete -p accprobe")
    assert completed("accprobe opc") == ["opcheck"]
    assert set(completed("accprobe op")) == {"opcheck"}
    assert "--format" in completed("accprobe compare --fo")


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes_commands_and_options(tmp_path: Path):
    """fish answers what it would offer behind the words; ``complete -C`` is its own way to ask."""
    script = (
        "_ACCPROBE_COMPLETE=source_fish accprobe | source\n"
        "complete -C 'accprobe opc'; echo ==; complete -C 'accprobe compare --fo'"
    )
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env={**os.environ, "PATH": PATH, "HOME": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    commands, _, options = done.stdout.partition("==\n")
    assert [line.split("\t")[0] for line in commands.splitlines()] == ["opcheck"]
    assert "--format" in [line.split("\t")[0] for line in options.splitlines()]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_completes_options(tmp_path: Path):
    """zsh completes at a terminal only: a line is typed at one, with Tab, and a key shows what stands there then."""
    (tmp_path / ".zshrc").write_text(
        "PS1=; unsetopt prompt_cr prompt_sp; autoload -Uz compinit; compinit -u -D\n"
        'eval "$(_ACCPROBE_COMPLETE=source_zsh accprobe)"\n'
        f"said() {{ print -r -- $BUFFER > {tmp_path}/line; exit }}; zle -N said; bindkey '^X' said\n"
        f"ready() {{ : > {tmp_path}/ready }}; zle -N zle-line-init ready\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("zsh", ["zsh", "-i"], {**os.environ, "PATH": PATH, "ZDOTDIR": str(tmp_path), "TERM": "dumb"})
    with open(terminal, "r+b", buffering=0) as keyboard:
        until((tmp_path / "ready").exists, keyboard)
        keyboard.write(b"accprobe compare --fo\t\x18")  # Ctrl-X waits behind the Tab, which ends when all is there
        until((tmp_path / "line").exists, keyboard)
    os.waitpid(child, 0)
    assert (tmp_path / "line").read_text() == "accprobe compare --format \n"


def until(done: Callable[[], bool], terminal: FileIO, seconds: float = 60) -> None:
    """Reads what the shell prints, else it would wait for us, until ``done``."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "the shell does not answer"
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                terminal.read(4096)
            except OSError:  # it is gone
                return


def test_completing_loads_nothing_heavy():
    heavy = "{'torch', 'numpy', 'numba', 'pandas', 'plotly', 'rich', 'vllm'}"
    code = (
        "import sys\nfrom vllm_accprobe.cli import main\n"
        "try:\n    main([])\nexcept SystemExit:\n    pass\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "_ACCPROBE_COMPLETE": "complete_bash", "COMP_WORDS": "accprobe compare --fo", "COMP_CWORD": "2",
        },
        capture_output=True, text=True,
    )  # fmt: skip
    assert "--format" in done.stdout.split()
    assert done.stderr.strip() == "[]"
