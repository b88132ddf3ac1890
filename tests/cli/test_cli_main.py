"""The command line as a stranger meets it: help, errors, exit codes, what gets imported."""

import json
import os
import subprocess
import sys

import pytest
from cli_dumps import make

from vllm_accprobe import cli

HEAVY = ("numpy", "torch", "vllm", "numba", "h5py", "pandas", "polars", "pyarrow", "plotly", "safetensors", "xxhash")


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_accprobe.cli", *map(str, arguments)], capture_output=True, text=True, **options
    )


def loaded_after(*arguments: str) -> set[str]:
    """Which of HEAVY are in sys.modules of a fresh interpreter that ran the command."""
    code = (
        "import json, sys\nfrom vllm_accprobe.cli import main\nmain(sys.argv[1:])\n"
        "print(json.dumps([m.partition('.')[0] for m in sys.modules]), file=sys.stderr)"
    )
    out = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(json.loads(out.stderr.splitlines()[-1])) & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments):
    assert loaded_after(*arguments) == set()


def test_summary_loads_neither_torch_nor_vllm(tmp_path):
    make(tmp_path / "d")
    assert loaded_after("inspect", str(tmp_path / "d")) <= {"numpy"}


def test_help_lists_every_command(capsys):
    out = run("--help")
    assert out.returncode == 0
    listed = [line.split()[0] for line in out.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == [*cli.COMMANDS, *cli.GROUPS]
    assert run().stdout == out.stdout
    for command in cli.COMMANDS:
        assert cli.main([command, "--help"]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        assert f"accprobe {command}" in said.out


def test_an_error_leaves_the_process_with_its_code(tmp_path):
    out = run("inspect", "nowhere", cwd=tmp_path)
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr == "accprobe: nowhere does not exist: name a dump's directory or file\n"


def test_a_defect_is_one_line_too(capsys, monkeypatch):
    def broken(typed=None):
        raise RuntimeError("two\nlines \x1b[31m")

    monkeypatch.setattr(cli, "build", broken)
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "internal error, please report: RuntimeError: two lines \\x1b[31m (ACCPROBE_TRACEBACK=1 shows where)" in said


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "accprobe: interrupted; nothing was kept; begin again: accprobe\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "accprobe: /x: Permission denied\n"),
        (MemoryError(), 2, "accprobe: not enough memory; choose fewer tensors at a time\n"),
    ],
)
def test_other_endings(capsys, monkeypatch, raised, code, said):
    def broken(typed=None):
        raise raised

    monkeypatch.setattr(cli, "build", broken)
    assert cli.main([]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_leaves_early(tmp_path):
    make(tmp_path / "d")
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "vllm_accprobe.cli", "inspect", str(tmp_path / "d")],
        stdout=write, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert (process.returncode, process.stderr) == (0, "")
