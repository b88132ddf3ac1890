"""The setting of errcheck, and the command that starts, watches and reads."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dump.errcheck_reports import report

from vllm_accprobe.config import ConfigError, ProbeConfig
from vllm_accprobe.dump.findings import remove_clean, write


def test_the_setting() -> None:
    def kinds(text: str) -> tuple[str, ...]:
        return ProbeConfig.from_env({"VLLM_ACCPROBE_ERRCHECK": text}).errcheck

    assert kinds("overflow,nan") == ("overflow", "nan")
    assert kinds("1") == ("overflow", "nan")
    assert kinds("NaN, exit") == ("nan", "exit")
    assert kinds("0") == kinds("off") == kinds("") == ()
    for bad, why in (("nans", "did you mean nan"), ("exit", "name overflow, nan or both besides exit")):
        with pytest.raises(ConfigError, match=why):
            kinds(bad)


SCRIPT = """
import os, sys
from pathlib import Path
from dump.errcheck_reports import report
from vllm_accprobe.dump.findings import write
root = Path(os.environ["VLLM_ACCPROBE_DIR"])
assert os.environ["VLLM_ACCPROBE_ERRCHECK"] == sys.argv[3]
assert "VLLM_ACCPROBE" not in os.environ
root.mkdir(parents=True, exist_ok=True)
if sys.argv[1] != "nothing":
    write(root, report(0) if sys.argv[1] == "bad" else report(0, None))
if sys.argv[1] == "bad" and "exit" in sys.argv[3]:
    import time
    time.sleep(60)
sys.exit(int(sys.argv[2]))
"""


def under(tmp_path: Path, *script: str, begins: tuple[str, ...] = ("-m", "vllm_accprobe.cli")) -> Any:
    """Ends after a moment of grace where ``begins`` is a program that does so."""
    (tmp_path / "engine.py").write_text(SCRIPT)
    accprobe = [sys.executable, *begins, "errcheck", "--dir", str(tmp_path / "d")]
    exits = ["--exit", "--kinds", "nan"] if "exit" in script[-1] else []
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    return subprocess.run(
        [*accprobe, *exits, "--", sys.executable, str(tmp_path / "engine.py"), *script],
        env=env, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (("bad", "0"), 1, "errcheck: first: NaN in model.layers.3.mlp output.0 [MLP], step 7"),
        (("good", "0"), 0, "errcheck: nothing bad in 20 steps of 1 rank(s), 50 modules"),
        (("good", "7"), 7, "errcheck: nothing bad in 20 steps"),
        (("nothing", "0"), 3, "errcheck: nothing was watched"),
    ],
)
def test_the_command_and_its_exit_code(tmp_path: Path, script: tuple[str, str], code: int, said: str) -> None:
    done = under(tmp_path, *script, "overflow,nan")
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(said)
    left = ["errcheck-rank0000.json"] if script[0] == "bad" else []
    assert sorted(os.listdir(tmp_path / "d") if (tmp_path / "d").exists() else []) == left


@pytest.mark.parametrize(
    ("more", "stays"),
    [({}, False), ({"parameters": ("a.weight: 1 NaN",)}, True), ({"state": "watching"}, True),
     ({"first": report(1).first}, True)],
)  # fmt: skip
def test_only_closed_reports_of_nothing_are_removed(tmp_path: Path, more: dict[str, object], stays: bool) -> None:
    (tmp_path / "d").mkdir()
    write(tmp_path / "d", report(0, None))
    write(tmp_path / "d", dataclasses.replace(report(1, None), **more))  # type: ignore[arg-type]
    remove_clean(tmp_path / "d")
    assert (tmp_path / "d").exists() is stays
    assert len(list(tmp_path.rglob("*.json"))) == 2 * stays


def test_exit_ends_a_command_that_does_not_end_itself(tmp_path: Path) -> None:
    short = (
        "import sys\nfrom vllm_accprobe.cli import errcheck, main\nerrcheck._GRACE_S = 0.5\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = under(tmp_path, "bad", "0", "nan,exit", begins=("-c", short))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("errcheck: first: NaN")
