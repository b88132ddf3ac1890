"""``accprobe calibrate``: what honest runs of golden's side differ by, or how a machine computes, as a small file."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_accprobe.cli.common.json_answer import answer, say_written
from vllm_accprobe.cli.common.options import CommandError, NothingThere


def calibrate(
    golden: Path = typer.Argument(..., metavar="GOLDEN", help="The dump to trust; with --profile any dump."),
    others: list[Path] = typer.Argument(
        None, metavar="[OTHER]...", help="Further runs of the same model and requests on golden's side."
    ),
    profile: bool = typer.Option(
        False, "--profile", help="Write how the machine of this one dump computes, read from its replay. Needs torch."
    ),
    failing: bool = typer.Option(
        False, "--accept-failing", help="Take runs that fail against GOLDEN, too: what they show is never found again."
    ),
    model: Path = typer.Option(
        None, "--weights", metavar="DIR", help="The model's directory; with --profile, as for `accprobe opcheck`."
    ),
    out: Path = typer.Option(
        Path("accprobe-floor"),
        "--out",
        "-o",
        metavar="DIR",
        help="Where the results go: calibration.json or profile.json.",
    ),
) -> None:
    """Measure the floor: run golden's side again with another batching, chunking, dtype or number of ranks.

    The file has a few numbers per tap. Carry it to the other machine and give it to `accprobe compare --floor`. With
    --profile: how results are rounded, how wide sums are, which functions are approximated, operator by operator.
    Exit code 0: done, 2: unreadable input, runs that do not belong together, or one that fails against GOLDEN, 3:
    nothing of them could be compared.
    """
    if profile:
        if others or failing:
            raise CommandError("--profile is of one dump: leave out the others, or --profile")
        _profile(golden, model, out)
        return
    if not others:
        raise CommandError("name a further run of golden's side behind GOLDEN, or ask for --profile")
    if model is not None:
        raise CommandError("--weights belongs to --profile")
    _floor(golden, others, out, failing)


def _floor(golden: Path, others: list[Path], out: Path, failing: bool) -> None:
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.common.same import refuse_same
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.judge.calibration import KIND, NAME

    for i, other in enumerate(others):
        for name, earlier in (("GOLDEN", golden), *(("OTHER", o) for o in others[:i])):
            refuse_same((name, earlier), ("OTHER", other))
    outputs.check(out, {NAME: outputs.matching(f'\\A\\{{"kind":\\s*"{KIND}"')}, dumps=[golden, *others])
    found = engine.calibrate(golden, others, failing=failing)
    path = found.save(out)
    typer.echo(f"{len(found.floors)} tensors from {len(found.runs)} run{'s' * (len(found.runs) != 1)} ({found.source})")
    for tap, worst in sorted(found.origins.items(), key=lambda o: -o[1])[:10]:
        typer.echo(f"golden's own runs differ at {tap}: {worst:.3g}; as much of it is no origin")
    say_written(path)
    answer(tensors=len(found.floors), runs=found.runs, source=found.source, origins=found.origins)


def _profile(dump: Path, model: Path | None, out: Path) -> None:
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.common.options import progress
    from vllm_accprobe.cli.opcheck import opened_calls, require_torch
    from vllm_accprobe.judge.profile import NAME, OURS, Profile, host_of

    require_torch("calibrate --profile")
    if not dump.exists():
        raise CommandError(f"{dump} does not exist: name a dump's directory or file")
    outputs.check(out, {NAME: outputs.matching(OURS)}, dumps=[dump])
    from vllm_accprobe.opcheck.habits import decided
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run import pair, table

    calls = opened_calls(dump, model)
    taps = len(calls.taps())
    with progress("replaying", taps, steps=True) as to:
        [side] = pair.check_both([calls], default_references(), [], lambda done, of: to(done))
    _, found = decided.settle(side.rows)
    if not found.habits:
        raise NothingThere(f"{dump}: nothing of how its machine computes could be told")
    for line in table.computes(found):
        typer.echo(line)
    out.mkdir(parents=True, exist_ok=True)
    path = out / NAME
    path.write_text(Profile(found.habits, host_of(calls.dump.run), found.units).to_json(), encoding="utf-8")
    say_written(path)
    answer(habits=found.habits, units=found.units, unknown=found.unknown)
