"""``accprobe compare`` with a replay: when operators are run again, and the process that does it.

The problem: a replay decides who is wrong, but it needs torch, takes seconds for a small dump and hours for a large
one. The idea: unless told otherwise a small pair is replayed whole; of a large one, what the comparison suspects, if
it fails; and never where torch or the values are missing. It runs in a process of its own: `compare` imports no torch,
and a replay that dies leaves the comparison as it was, with a note. What it proved is kept beside the comparison, for
`--rejudge`. Not here: the replay (prove.py), what it means (opcheck/decide.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.cli.options import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

SMALL = 256 << 20
"""Bytes of both dumps' tensors up to which everything is replayed without being asked."""
SUSPECTS = 8


def replayed(
    result: Comparison,
    golden: Path,
    mine: Path,
    out: Path,
    *,
    asked: bool | None,
    taps: str | None,
    mapping: Path | None,
) -> Comparison:
    """``result`` of comparing these dumps, with what a replay proves, which is written to ``out``/replay.json.

    asked: True replays everything, False nothing, None as the module says. taps: only these, the globs of `--taps`.
    Raises CommandError where it was asked for and there is no torch or it fails."""
    ops = _chosen(result, golden, mine, asked, taps)
    if ops is None:
        return result
    if not _torch():
        if asked:
            raise CommandError("--replay needs torch: install it beside accprobe (the CPU build will do)")
        return result
    from vllm_accprobe.opcheck.decide import NAME, Proof, decide

    out.mkdir(parents=True, exist_ok=True)
    path = out / NAME
    path.unlink(missing_ok=True)
    said = _run([str(golden), str(mine), "--out", str(path)], ops, mapping)
    try:
        proof = Proof.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        why = said or "it ended without a result"
        if asked:
            raise CommandError(f"--replay: {why}") from None
        return replace(result, notes=[*result.notes, f"replay: failed and decides nothing: {why}"])
    return decide(result, proof)


def remembered(result: Comparison, directory: Path) -> Comparison:
    """``result`` with what was proved when the comparison in ``directory`` was made, if anything was."""
    from vllm_accprobe.opcheck.decide import NAME, Proof, decide

    path = directory / NAME
    if not path.is_file():
        return result
    try:
        return decide(result, Proof.from_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {path}: {error}; delete it to judge without the replay") from None


def _torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def _chosen(
    result: Comparison, golden: Path, mine: Path, asked: bool | None, taps: str | None
) -> list[str] | None:  # fmt: skip
    """Globs over taps to replay, empty for all; None for no replay."""
    limited = [glob.strip() for glob in taps.split(",")] if taps else []
    if asked is not None:
        return limited if asked else None
    if not all(_captured(run) for run in (result.golden_run, result.mine_run)):
        return None
    if stored(golden) + stored(mine) <= SMALL:
        return limited
    suspects = [str(o["module"]) for o in result.origins[:SUSPECTS]]
    globs = [g for tap in suspects for g in (_literal(tap), _literal(tap) + ".*")]
    return globs or None


def _captured(run: dict[str, Any]) -> bool:
    """Whether a model was captured, by our probe, with its values."""
    probe = run.get("probe")
    return run.get("tool") == "accprobe" and isinstance(probe, dict) and probe.get("task") == "tensor"


def stored(dump: Path) -> int:
    """Bytes of a dump's segments."""
    total = 0
    try:
        for rank in dump.glob("rank*"):
            with os.scandir(rank) as entries:
                total += sum(e.stat().st_size for e in entries if e.name.startswith("seg-"))
    except OSError:
        pass
    return total


def _literal(tap: str) -> str:
    return tap.replace("[", "[[]")


def _run(arguments: list[str], ops: Sequence[str], mapping: Path | None) -> str:
    """What the process said last on stderr if it failed, else ""."""
    import subprocess

    from vllm_accprobe.children import ONE_THREAD, Child

    more = [x for glob in ops for x in ("--ops", glob)]
    more += ["--op-mapping-file", str(mapping)] if mapping is not None else []
    shown = None if sys.stderr.isatty() else subprocess.PIPE  # a bar on a terminal
    process = Child(
        "vllm_accprobe.cli.prove", *more, *arguments, env={**os.environ, **ONE_THREAD}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=shown,
    )  # fmt: skip
    with process:
        try:
            _, said = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return ""
    lines = [line for line in (said or "").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"its process ended with {process.returncode}"
