"""``accprobe compare RUN RUN... --calibrate OUT``: what runs of golden's side differ by, as a small file.

The problem: two machines differ by rounding alone, and how much is known only from runs. The file has a few numbers per
tap, and is carried to the other machine. With --profile it has how one dump's machine computes, operator by operator:
how results are rounded, how wide sums are, which functions are approximated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli import places
from vllm_accprobe.cli.endings import CommandError, NothingThere
from vllm_accprobe.cli.output import answer, progress, say_written


def calibrate(golden: Path | None, others: list[Path], how: Any, weights: Path | None, out: Path) -> None:
    """how: compare.CalibrateOptions; out: a folder, for calibration.json or profile.json. Raises CommandError."""
    if golden is None:
        raise CommandError("name runs of golden's side: accprobe compare GOLDEN RUN... --calibrate OUT")
    if how.profile:
        if others or how.accept_failing:
            raise CommandError("--profile is of one dump: leave out the others, or --profile")
        _profile(golden, weights, out)
        return
    if not others:
        raise CommandError("name a further run of golden's side behind GOLDEN, or ask for --profile")
    if weights is not None:
        raise CommandError("--weights goes with --profile")
    _floor(golden, others, out, how.accept_failing)


def _floor(golden: Path, others: list[Path], out: Path, failing: bool) -> None:
    from vllm_accprobe.cli.places import refuse_same
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.judge.calibration import KIND, NAME

    for i, other in enumerate(others):
        for name, earlier in (("GOLDEN", golden), *(("OTHER", o) for o in others[:i])):
            refuse_same((name, earlier), ("OTHER", other))
    places.check(out, {NAME: places.matching(f'\\A\\{{"kind":\\s*"{KIND}"')}, dumps=[golden, *others])
    found = engine.calibrate(golden, others, failing=failing)
    path = found.save(out)
    typer.echo(f"{len(found.floors)} tensors from {len(found.runs)} run{'s' * (len(found.runs) != 1)} ({found.source})")
    for tap, worst in sorted(found.origins.items(), key=lambda o: -o[1])[:10]:
        typer.echo(f"golden's own runs differ at {tap}: {worst:.3g}; as much of it is no origin")
    say_written(path)
    answer(tensors=len(found.floors), runs=found.runs, source=found.source, origins=found.origins)


def _profile(dump: Path, model: Path | None, out: Path) -> None:
    from vllm_accprobe.cli.opcheck import opened_calls, require_torch
    from vllm_accprobe.judge.profile import NAME, OURS, Profile, host_of

    require_torch("compare --calibrate --profile")
    if not dump.exists():
        raise CommandError(f"{dump} does not exist: name a dump's directory or file")
    places.check(out, {NAME: places.matching(OURS)}, dumps=[dump])
    from vllm_accprobe.opcheck.habits import decided
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run import pair, table

    calls = opened_calls(dump, model)
    taps = len(calls.taps())
    with progress("replaying", taps, steps=True) as to:
        [side] = pair.check_both([calls], default_references(), [], lambda done, of: to(done))
    _, found = decided.settle(side.rows)
    if not found.habits:
        raise NothingThere(f"{dump}: nothing of how its machine computes could be measured")
    for line in table.computes(found):
        typer.echo(line)
    out.mkdir(parents=True, exist_ok=True)
    path = out / NAME
    path.write_text(Profile(found.habits, host_of(calls.dump.run), found.units).to_json(), encoding="utf-8")
    say_written(path)
    answer(habits=found.habits, units=found.units, unknown=found.unknown)
