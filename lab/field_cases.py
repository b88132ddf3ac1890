"""Runs field cases against this checkout and says what each got: ``python -m lab.field_cases 03 05 11 12 19``.

The problem: a field case's ``make.sh`` sets PYTHONPATH to its plant alone and compares once, so that what is installed
judges it, and a second judgement needs the engines again. The idea: ``make.sh`` runs as it is, with a ``python`` and an
``accprobe`` first on PATH that add this checkout; `accprobe compare` in it waits, and the pair that was left is judged
here, with default settings and with ``--no-replay``, again and again with ``--judge-only``. What else the case calls
(`accprobe opcheck`, `show`) runs in it, and goes to its log. Exit codes: 0 where all cases ran, 1 where one did not, 2
for bad usage; whether a verdict is right stands in the case's README, whose "Should be said" is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab import ROOT

CASES = ROOT.parent / "shared" / "field-cases"
SETTINGS = {"default": (), "plain": ("--no-replay",)}
_SHOULD = re.compile(r"\*\*Should be said\.\*\*\s*(.+)")


def main(words: Sequence[str] | None = None) -> int:
    args = _arguments(words)
    try:
        folders = [_folder(args.cases, number) for number in args.numbers]
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.judge_only is not None:
        return _all(folders, args.judge_only, make=False)
    if args.keep is not None:
        return _all(folders, args.keep, make=True)
    with tempfile.TemporaryDirectory(prefix="field-cases-") as folder:
        return _all(folders, Path(folder), make=True)


def _all(folders: Sequence[Path], out: Path, *, make: bool) -> int:
    env = environment(out.resolve() / "bin")
    failed = 0
    for case in folders:
        print(f"{case.name}\n  should   {should(case)}", flush=True)
        at = out.resolve() / case.name
        at.mkdir(parents=True, exist_ok=True)
        if make and not made(case, at, env):
            failed += 1
            continue
        for line in judged(at, env):
            print(f"  {line}", flush=True)
    return int(failed > 0)


def environment(bin_: Path) -> dict[str, str]:
    """This process's, with commands in ``bin_`` that put this checkout behind whatever PYTHONPATH a case sets."""
    bin_.mkdir(parents=True, exist_ok=True)
    python = shlex.quote(sys.executable)
    path = f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{shlex.quote(str(ROOT))} exec {python}'
    waits = 'if [ "$1" = compare ] && [ -z "$ACCPROBE_FIELD_JUDGES" ]; then echo "compared later"; exit 0; fi\n'
    for name, text in (("python", f'{path} "$@"\n'), ("accprobe", f'{waits}{path} -m vllm_accprobe "$@"\n')):
        command = bin_ / name
        command.write_text(f"#!/bin/sh\n{text}")
        command.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE") and k != "PYTHONPATH"}
    return env | {"PATH": f"{bin_}{os.pathsep}{env.get('PATH', os.defpath)}", "ACCPROBE_SRC": str(ROOT)}


def made(case: Path, at: Path, env: Mapping[str, str]) -> bool:
    """Runs the case's make.sh in ``at``, with a log there; what an earlier run left is removed first. Whether it ended
    well, or a pair is there."""
    log, began = at / "make.log", time.monotonic()
    for side in ("golden", "mine"):
        shutil.rmtree(at / side, ignore_errors=True)
    with log.open("wb") as lines:
        code = subprocess.run(
            ["bash", str(case / "make.sh")],
            cwd=ROOT,
            env=dict(env) | {"OUT": str(at)},
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
        ).returncode
    print(f"  made     in {time.monotonic() - began:.0f} s, exit {code}: {log}", flush=True)
    return code == 0 or _pair(at)


def _pair(at: Path) -> bool:
    return all((at / side / "run.json").exists() for side in ("golden", "mine"))


def judged(at: Path, env: Mapping[str, str]) -> list[str]:
    """A line for each of `SETTINGS`, where the case left a pair."""
    if not _pair(at):
        return ["no pair was left: what it printed is in make.log"]
    lines = []
    for name, more in SETTINGS.items():
        began, out = time.monotonic(), at / name
        command = ["accprobe", "compare", "golden", "mine", "--out", str(out), *more]
        shutil.rmtree(out, ignore_errors=True)
        done = subprocess.run(
            command, cwd=at, env=dict(env) | {"ACCPROBE_FIELD_JUDGES": "1"}, capture_output=True, text=True
        )
        (at / f"{name}.txt").write_text(done.stdout + done.stderr)
        lines += summary(name, done.returncode, out / "compare.json", time.monotonic() - began)
    return lines


def summary(name: str, code: int, result: Path, seconds: float) -> list[str]:
    """What one comparison came to: verdict, exit code, and the first origins."""
    if not result.exists():
        return [f"{name:8} no result, exit {code}"]
    found = json.loads(result.read_text())
    lines = [f"{name:8} {found['verdict'].upper()}, exit {code}, {seconds:.0f} s"]
    for origin in found["origins"][:2]:
        where = ", ".join(
            f"{k} {origin[k]}" for k in ("role", "request", "position", "phase") if origin.get(k) is not None
        )
        cause = json.dumps(origin["cause"])[:200] if origin.get("cause") else ""
        lines.append(f"{'':8} {origin['module']} ({where}; {origin.get('evidence')}) {cause}".rstrip())
    return lines


def should(case: Path) -> str:
    match = _SHOULD.search((case / "README.md").read_text())
    return match[1] if match else "(its README does not say)"


def _folder(cases: Path, number: str) -> Path:
    found = sorted(cases.glob(f"{number}-*")) if number.isalnum() else []
    if not found:
        raise FileNotFoundError(f"{cases} has no field case {number}")
    return found[0]


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.field_cases", description="Field cases against this checkout.")
    parser.add_argument("numbers", nargs="+", metavar="NN", help="numbers of cases, as 03 19")
    parser.add_argument("--cases", type=Path, default=CASES, metavar="DIR", help=f"where they are ({CASES})")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep dumps, reports and logs there")
    parser.add_argument("--judge-only", type=Path, metavar="DIR", help="judge what --keep left; starts no engine")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
