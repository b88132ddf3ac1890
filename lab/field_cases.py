"""Runs field cases against this checkout and says what each got: ``python -m lab.field_cases 03 05 11 12 19``.

The problem: a field case's ``make.sh`` sets PYTHONPATH to its plant alone, so that what is installed judges it, and a
second judgement needs the engines again. The idea: ``make.sh`` runs as it is, with a ``python`` first on PATH that adds
this checkout, and an ``accprobe`` that only notes its words; what was noted runs afterwards, in this checkout, as often
as one likes (``--judge-only``), and each `compare` in two settings: the default ones and ``--no-replay``. Exit codes: 0
where all cases ran, 1 where one did not, 2 for bad usage; whether a verdict is right stands in the case's README, whose
"Should be said" is printed.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab import ROOT

CASES = ROOT.parent / "shared" / "field-cases"
NOTES = "commands.txt"
"""In a case's working folder: a line for each call of accprobe, its words each ended by a unit separator."""
SETTINGS = {"default": (), "plain": ("--no-replay",)}
_VERDICTS = ("PASS", "FAIL")
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
        print(f"{case.name}\n  should: {should(case)}", flush=True)
        at = out.resolve() / case.name
        if make and not made(case, at, env):
            failed += 1
            continue
        for line in judged(at):
            print(f"  {line}", flush=True)
    return int(failed > 0)


def environment(bin_: Path) -> dict[str, str]:
    """This process's, with commands in ``bin_``: a python that puts this checkout behind whatever PYTHONPATH a case
    sets, and an accprobe that notes its words in the working folder."""
    bin_.mkdir(parents=True, exist_ok=True)
    checkout, python = shlex.quote(str(ROOT)), shlex.quote(sys.executable)
    commands = {
        "python": f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{checkout} exec {python} "$@"',
        "accprobe": f"printf '%s\\037' \"$@\" >>{NOTES}; echo >>{NOTES}",
    }
    for name, text in commands.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_ / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE") and k != "PYTHONPATH"}
    return env | {"PATH": f"{bin_}{os.pathsep}{env.get('PATH', os.defpath)}", "ACCPROBE_SRC": str(ROOT)}


def made(case: Path, at: Path, env: Mapping[str, str]) -> bool:
    """Runs the case's make.sh in ``at``, where nothing of an earlier run is left; whether it noted a command."""
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir(parents=True)
    log, began = at / "make.log", time.monotonic()
    with log.open("wb") as lines:
        code = subprocess.run(
            ["bash", str(case / "make.sh")], cwd=ROOT, env=dict(env) | {"OUT": str(at)}, stdin=subprocess.DEVNULL,
            stdout=lines, stderr=lines,
        ).returncode  # fmt: skip
    print(f"  made in {time.monotonic() - began:.0f} s, exit {code}: {log}", flush=True)
    return (at / NOTES).exists()


def judged(at: Path) -> Iterator[str]:
    """Lines of what the commands that the case noted come to, of `compare` in each of `SETTINGS`."""
    notes = (at / NOTES).read_text().splitlines() if (at / NOTES).exists() else []
    pairs = set()
    for words in [line.split("\037")[:-1] for line in notes]:
        if words[0] != "compare":
            yield from _command(at, words, at / "command.txt")
        elif tuple(words[1:3]) not in pairs:
            pairs.add(tuple(words[1:3]))
            for name, more in SETTINGS.items():
                out = at / f"{name}-{len(pairs)}"
                shutil.rmtree(out, ignore_errors=True)
                yield from _command(at, [*words[:3], "--out", out.name, *more], at / f"{out.name}.txt")
                yield from origins(out / "compare.json")


def _command(at: Path, words: Sequence[str], log: Path) -> Iterator[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command, began = [sys.executable, "-m", "vllm_accprobe", *words], time.monotonic()
    done = subprocess.run(command, cwd=at, env=env, capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr)
    printed = (done.stdout + done.stderr).splitlines()
    verdicts = [line for line in printed if line.startswith(_VERDICTS)] or (printed[-1:] if done.returncode > 1 else [])
    yield f"accprobe {' '.join(words)}: exit {done.returncode}, {time.monotonic() - began:.0f} s"
    yield from (f"    {line[:200]}" for line in verdicts[:1])


def origins(result: Path) -> list[str]:
    """The first origins of a comparison."""
    found = json.loads(result.read_text())["origins"] if result.exists() else []
    lines = []
    for origin in found[:2]:
        at = (f"{k} {origin[k]}" for k in ("role", "request", "position", "phase") if origin.get(k) is not None)
        cause = json.dumps(origin["cause"])[:200] if origin.get("cause") else ""
        lines.append(f"    origin {origin['module']} ({', '.join(at)}; {origin.get('evidence')}) {cause}".rstrip())
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
