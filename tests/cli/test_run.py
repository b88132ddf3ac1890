"""``accprobe run`` on commands that are no server: what it sets, says and returns."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from cli.conftest import Typed, environ
from support.interrupts import in_the_foreground

from vllm_accprobe.dump.reader import open_dump

ACCPROBE = Path(sys.executable).parent / "accprobe"
SCRIPT = """
import sys, time, torch
from capture.toy import Toy
from vllm_accprobe import Probe
model = Toy()
with Probe(model):
    model(torch.tensor([[3, 1, 4, 1]]))
    print("captured", flush=True)
    try:
        end = time.monotonic() + float(sys.argv[1])
        while time.monotonic() < end:
            time.sleep(0.05)
    except KeyboardInterrupt:
        sys.exit(9)
"""

QUICK = """
import sys, time
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.writer import RankWriter, write_run_json
config = ProbeConfig.from_env()
write_run_json(config.dir, {})
writer = RankWriter(config.dir, 0, {}, budget_bytes=1 << 20)
for step in range(int(sys.argv[2])):
    writer.line({"event": "step", "step": step})
    writer.line({"event": "tensor", "step": step, "tap": "a", "role": "output.0", "dtype": "float32", "shape": [1]})
try:
    print("captured", flush=True)
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:  # a signal that comes just before a sleep begins does not shorten it
        time.sleep(0.05)
except KeyboardInterrupt:
    time.sleep(0.5)
    writer.close("interrupted", {})
    sys.exit(9)
writer.close("closed", {})
"""
"""Writes a dump as capture does, and starts in a fraction of the time that torch takes."""


def test_a_script_with_a_probe(tmp_path: Path, typed: Typed) -> None:
    words = ("run", "-d", "out", "--modules", "norm", "--parts", "output", "--", sys.executable, "-c", SCRIPT, "0")
    done = typed(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "captured\n"  # stdout is the command's
    said = done.stderr.splitlines()
    assert len(said) == 2
    assert said[0].startswith("accprobe: 1 step, 1 tensor, 1 rank, ")
    assert said[0].endswith("; closed")
    assert said[1] == f"accprobe: dump: {tmp_path / 'out'}"
    assert {r.name for r in open_dump(tmp_path / "out").records if r.step is not None} == {"norm/output.0"}
    again = typed("run", "-d", "out", "--", "true")
    assert again.returncode == 2
    assert again.stderr == (
        f"accprobe: --dir={tmp_path / 'out'} already holds a dump; name another directory, or remove it\n"
    )


def test_a_script_that_names_its_own_directory(tmp_path: Path, typed: Typed) -> None:
    elsewhere = (
        "import os\nfrom vllm_accprobe.capture.core.recording import announce\n"
        "os.environ['VLLM_ACCPROBE_DIR'] = os.path.abspath('own')\n"
        "announce(os.path.abspath('own'))\n"
    )
    done = typed("run", "--", sys.executable, "-c", elsewhere + QUICK, "0", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"accprobe: dump: {tmp_path / 'own'}"
    assert "accprobe: 2 steps, 2 tensors, 1 rank, " in done.stderr


def test_ctrl_c_is_the_commands_and_the_dump_is_closed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [ACCPROBE, "run", "-d", "out", "--", sys.executable, "-c", QUICK, "30", "3"],
        cwd=tmp_path, env=environ({}), text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=in_the_foreground,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "captured\n"
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 9, said
    assert time.monotonic() - begin < 10
    assert "accprobe: 3 steps, 3 tensors, 1 rank, " in said
    assert "; closed" in said
    assert open_dump(tmp_path / "out").problems == []


def test_nothing_captured_is_an_error_only_where_the_command_had_none(typed: Typed) -> None:
    failed = "the command failed before a probe could begin (exit code 7)"
    killed = "exit code 137, SIGKILL: killed, most often for lack of memory"
    for command, code, why in (
        ("true", 3, "no process of it loaded"),
        ("exit 7", 7, failed),
        ("kill -9 $$", 137, killed),
    ):
        done = typed("run", "-d", "out", "--", command)
        assert done.returncode == code
        (said,) = [line for line in done.stderr.splitlines() if "NOTHING was captured" in line]
        assert why in said
        assert ("loaded vLLM's plugin" in said) == (code == 3)
    silent = typed("run", "-d", "out", "--steps", "5", "--", sys.executable, "-c", QUICK, "0", "0")
    assert silent.returncode == 3
    assert "NOTHING was captured: no step was computed, or none was selected" in silent.stderr


def test_what_the_command_gets(tmp_path: Path, typed: Typed) -> None:
    show = "env | grep -E 'VLLM_(ACCPROBE|PLUGINS)' | sort"
    options = ["--tokens", "0-4", "--task", "stats", "--max-gb", "3", "--ops", "--eager", "--requests", "a,b"]
    options += ["--set", "ops_mode=trace", "--set", "SEED=3"]
    done = typed("run", "-d", "out", *options, "--", show, VLLM_ACCPROBE_STEPS="0-1", VLLM_PLUGINS="other")
    assert done.stdout.splitlines() == [
        "VLLM_ACCPROBE=1",
        f"VLLM_ACCPROBE_DIR={tmp_path / 'out'}",
        "VLLM_ACCPROBE_GRAPHS=0",
        "VLLM_ACCPROBE_MAX_GB=3",
        "VLLM_ACCPROBE_OPS=1",
        "VLLM_ACCPROBE_OPS_MODE=trace",
        "VLLM_ACCPROBE_REQUESTS=a,b",
        "VLLM_ACCPROBE_SEED=3",
        "VLLM_ACCPROBE_STEPS=0-1",
        "VLLM_ACCPROBE_TASK=stats",
        "VLLM_ACCPROBE_TOKENS=0-4",
        "VLLM_PLUGINS=other,accprobe",
    ]
    assert "VLLM_PLUGINS did not contain accprobe" in done.stderr


def test_options_after_the_commands_first_word_are_its_own(typed: Typed) -> None:
    """Also without ``--``, and also those that we have, too."""
    code = "import sys; print(sys.argv[1:])"
    for words in (["run", "-d", "out"], ["run", "-d", "out", "--"], ["errcheck", "-d", "out"]):
        done = typed(*words, sys.executable, "-c", code, "--quiet", "--", "-x")
        assert done.stdout.startswith("['--quiet', '--', '-x']\n"), done.stderr
        assert done.returncode == 3, done.stderr


def test_atb_writes_into_the_dump(tmp_path: Path, typed: Typed) -> None:
    """The command stands in for ATB: it writes where the variable says."""
    command = 'mkdir -p "$ATB_OUTPUT_DIR/tensors/0_1/0" && printf x > "$ATB_OUTPUT_DIR/tensors/0_1/0/a.bin"'
    done = typed("run", "-d", "out", "--atb", "--", command)
    assert done.returncode == 0, done.stderr
    assert "no CANN is installed here" in done.stderr
    assert f"ATB wrote 1 files, 1 B, in {tmp_path / 'out' / 'atb'}" in done.stderr
