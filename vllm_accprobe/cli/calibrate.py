"""``accprobe calibrate GOLDEN OTHER...``: what honest runs of golden's own side differ by, as a small file."""

from __future__ import annotations

from pathlib import Path

import typer


def calibrate(
    golden: Path = typer.Argument(..., metavar="GOLDEN", help="The dump to trust."),
    others: list[Path] = typer.Argument(
        ..., metavar="OTHER", help="Further runs of the same model and requests on golden's side."
    ),
    out: Path = typer.Option(Path("accprobe-floor"), "--out", "-o", metavar="DIR", help="Where calibration.json goes."),
) -> None:
    """Measure the floor: run golden's side again with another batching, chunking, dtype or number of ranks.

    The file has a few numbers per tap. Carry it to the other machine and give it to `accprobe compare --floor`.
    Exit code 0: done, 2: unreadable input, or runs that do not belong together, 3: nothing of them could be compared.
    """
    from vllm_accprobe.cli import outputs
    from vllm_accprobe.cli.same import refuse_same
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.judge.calibration import KIND, NAME

    for i, other in enumerate(others):
        for name, earlier in (("GOLDEN", golden), *(("OTHER", o) for o in others[:i])):
            refuse_same((name, earlier), ("OTHER", other))
    outputs.check(out, {NAME: outputs.matching(f'\\A\\{{"kind":\\s*"{KIND}"')}, dumps=[golden, *others])
    found = engine.calibrate(golden, others)
    path = found.save(out)
    typer.echo(f"{len(found.floors)} tensors from {len(found.runs)} run{'s' * (len(found.runs) != 1)} ({found.source})")
    for tap, worst in sorted(found.origins.items(), key=lambda o: -o[1])[:10]:
        typer.echo(f"golden's own runs differ at {tap}: {worst:.3g}; as much of it is no origin")
    typer.echo(f"wrote {path}")
