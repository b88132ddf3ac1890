"""``accprobe gate GOLDEN MINE``: are two servers, or two runs of an evaluation, the same beyond chance?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import typer

from vllm_accprobe.cli.common.options import CommandError, NothingThere


def gate(
    golden: Path = typer.Argument(
        None,
        metavar="GOLDEN",
        help="Of the machine that is trusted: a folder of accprobe send; or an evaluation's answers.",
    ),
    mine_side: str = typer.Argument(None, metavar="MINE", help="The same of the other."),
    itself: str = typer.Option("", "--self", metavar="COMMAND|URL", help="One server against itself, instead of two."),
    prompts: str = typer.Option("default", "--prompts", metavar="FILE", help="With --self or a server: what is sent."),
    out: Path = typer.Option(None, "--out", "-o", metavar="DIR", help="With --self or a server: where answers go."),
    samples: bool = typer.Option(False, "--samples", help="GOLDEN and MINE are an evaluation's: files or folders."),
    task: list[str] = typer.Option([], "--task", metavar="GLOB", help="Only these tasks. Can be repeated."),
    metric: list[str] = typer.Option([], "--metric", metavar="GLOB", help="Only these metrics. Can be repeated."),
    filter: list[str] = typer.Option([], "--filter", metavar="GLOB", help="Only these filters. Can be repeated."),
    rate: float = typer.Option(
        None, "--false-alarm-rate", metavar="P", help="Of a whole comparison of equal servers; 0.05 where not given."
    ),
    prompts_out: Path = typer.Option(
        None, "--prompts-out", metavar="FILE", help="Write the questions that flipped, as prompts for accprobe send."
    ),
    csv: Path = typer.Option(None, "--csv", metavar="FILE", help="Write a row for each metric."),
    as_json: bool = typer.Option(False, "--json", help="Print json, not lines."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show every metric, not 20."),
) -> None:
    """Compare two servers by what they sent back, or, with --samples, two runs of an evaluation.

    Of two folders of accprobe send: log-probabilities, flips and KL by phase, length and position, against how far each
    server is from itself in other batches. With --samples (lm-evaluation-harness, OpenCompass): for each metric whether
    the difference is more than chance, how many questions would show it, and which questions flipped.
    Exit code 0: no difference beyond chance, 1: one beyond, 2: unreadable input, 3: nothing could be paired.
    """
    if itself:
        from vllm_accprobe.cli.gate_self import gate_self

        if golden is not None or samples:
            raise CommandError("--self is one server against itself: leave GOLDEN, MINE and --samples away")
        gate_self(itself, prompts, out, rate, as_json)
    if golden is None or mine_side is None:
        raise CommandError("name GOLDEN and MINE, or one server with --self")
    if golden.is_file() and not samples:
        from vllm_accprobe.cli.gate_trainer import gate_trainer

        gate_trainer(golden, mine_side, out, as_json)
    mine = Path(mine_side)
    if not samples:
        if task or metric or filter or prompts_out or csv:
            raise CommandError("--task, --metric, --filter, --prompts-out and --csv are for --samples")
        _servers(golden, mine, rate, as_json)
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.common.same import refuse_same
    from vllm_accprobe.gate.samples import contrast, sides
    from vllm_accprobe.gate.samples.answers import SamplesError
    from vllm_accprobe.gate.samples.match import match
    from vllm_accprobe.report import evaluation

    rate = contrast.RATE if rate is None else rate
    if not 0 < rate < 1:
        raise CommandError(f"--false-alarm-rate: {rate} is no probability between 0 and 1")
    for path, option in ((prompts_out, "--prompts-out"), (csv, "--csv")):
        if path is not None:
            _check_file(path, option, (golden, mine))
    try:
        left, right = sides.open_side(golden), sides.open_side(mine)
        refuse_same(("GOLDEN", golden), ("MINE", mine), "file")
    except SamplesError as e:
        raise CommandError(str(e)) from None
    if left.tool != right.tool:
        raise CommandError(f"{golden} is of {left.tool}, {mine} of {right.tool}: their questions have no common name")
    for side in (left, right):
        sides.select(side, task, filter, metric)
    matched = match(left, right)
    result = contrast.evaluate(matched, rate)
    if not result.contrasts:
        raise NothingThere(evaluation.nothing(result, left, right))
    if csv is not None:
        outputs.check_place(csv, option="--csv")
        evaluation.write_csv(result, csv)
    if as_json:
        typer.echo(json.dumps(contrast.to_json(result) | {"read": evaluation.read_json(left, right)}, indent=1))
    else:
        for line in evaluation.lines(result, len(result.contrasts) if verbose else evaluation.MAX_CONTRASTS):
            typer.echo(line)
        for line in evaluation.read_lines(left, right):
            typer.echo(line)
    if prompts_out is not None:
        asked, without = contrast.prompts(result.flips, left.prompts)
        _write_prompts(prompts_out, asked)
        said = f"written: {prompts_out}, {len(asked):,} prompts of the questions that flipped"
        typer.echo(said + (f"; {without:,} have none in the files" if without else ""), err=as_json)
    raise typer.Exit(1 if result.verdict == "fail" else 0)


def _servers(golden: Path, mine: Path, rate: float | None, as_json: bool) -> NoReturn:
    """Of two folders of `send`."""
    from vllm_accprobe.cli.common.same import refuse_same
    from vllm_accprobe.gate.measure import floor
    from vllm_accprobe.gate.sending import replies
    from vllm_accprobe.report import gap_lines

    rate = floor.RATE if rate is None else rate
    if not 0 < rate < 1:
        raise CommandError(f"--false-alarm-rate: {rate} is no probability between 0 and 1")
    refuse_same(("GOLDEN", golden), ("MINE", mine), "folder")
    try:
        result = floor.compare(replies.read(golden), replies.read(mine), rate)
    except replies.FolderError as e:
        raise CommandError(f"{e}; with --samples GOLDEN and MINE are the answers of an evaluation") from None
    except floor.GateError as e:
        raise NothingThere(f"{e} ({golden}, {mine})") from None
    if as_json:
        typer.echo(json.dumps(gap_lines.to_json(result), indent=1))
    else:
        for line in gap_lines.lines(result):
            typer.echo(line)
    raise typer.Exit({"pass": 0, "fail": 1, None: 3}[result.verdict])


def _check_file(path: Path, option: str, inputs: tuple[Path, ...]) -> None:
    from vllm_accprobe.cli.common.options import writable
    from vllm_accprobe.cli.common.same import is_same

    if path.is_dir():
        raise CommandError(f"{option} {path} is a directory: name a file")
    if any(is_same(path, other) for other in inputs):
        raise CommandError(f"{option} {path} is what is read: name another file")
    writable(path.parent, option)


def _write_prompts(path: Path, asked: list[dict[str, object]]) -> None:
    """Whole and only for its owner: these are an evaluation's questions, which others may not publish."""
    import os

    from vllm_accprobe.whole_file import whole

    with whole(path) as part:
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as f:
            f.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in asked)
