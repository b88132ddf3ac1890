"""A dump may come from a stranger, with Python of his in it: no command that is given inside of it may run any."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from opcheck.proof.test_replay_process import GAIN, dump

MODULES = (
    "numpy", "torch", "json", "typing", "dataclasses", "pathlib", "typer", "click", "rich", "yaml", "numba", "llvmlite",
    "safetensors", "vllm", "ray", "sitecustomize", "usercustomize", "fcntl", "threading", "importlib", "contextlib",
)  # fmt: skip
PACKAGES = ("mindspore", "msprobe", "transformers")
MARK = "import os\nopen(os.environ['HOSTILE_MARK'], 'a').write(__name__ + ' ')\n"
COMMANDS = {
    "compare": "compare . ../mine --out ../report",
    "opcheck": "opcheck . --out ../checked",
    "opcheck-inside": "opcheck . --out ../checked -j 0",
    "summary": "inspect .",
    "gentest": "gentest . --tap second --out ../tests",
    "convert": "convert . ../npz --to npz",
    "doctor": "doctor --quick",
    "errcheck": "errcheck -- true",
    "run": "run -- true",
}  # fmt: skip
"""Those that start processes of their own, and of the others one of each that reads, writes or looks around."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with Python, beside another dump."""
    root = tmp_path_factory.mktemp("hostile")
    dump(root / "golden", noise=0)
    dump(root / "mine", GAIN)
    for name in MODULES:
        (root / "golden" / f"{name}.py").write_text(MARK)
    for name in PACKAGES:
        (root / "golden" / name).mkdir()
        (root / "golden" / name / "__init__.py").write_text(MARK)
    return root


def given(root: Path, *words: str) -> tuple[str, str]:
    """(names of the modules that were run, what the command said)."""
    mark = root / "mark"
    mark.unlink(missing_ok=True)
    for old in ("report", "checked", "tests", "npz", "golden/accprobe"):
        shutil.rmtree(root / old, ignore_errors=True)
    env = {**os.environ, "HOSTILE_MARK": str(mark)}
    done = subprocess.run(words, cwd=root / "golden", env=env, capture_output=True, text=True, timeout=120, check=False)
    return (mark.read_text() if mark.exists() else ""), done.stdout + done.stderr


WORKS = {"compare": "second", "opcheck": "PASS: 2 of 2 calls checked"}
"""What the replay, and opcheck, say there: they work, too."""


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_lies_in_the_current_directory(hostile, command):
    accprobe = str(Path(sys.executable).parent / "accprobe")
    ran, said = given(hostile, accprobe, *COMMANDS[command].split())
    assert (ran, "internal error" in said) == ("", False), said
    assert WORKS.get(command, "") in said


def test_nor_does_python_m(hostile):
    """What Python itself imports before it looks for the module is out of reach: here, the modules that it does not."""
    ran, said = given(hostile, sys.executable, "-m", "vllm_accprobe.cli", *COMMANDS["compare"].split())
    assert (ran, "internal error" in said) == ("", False), said
