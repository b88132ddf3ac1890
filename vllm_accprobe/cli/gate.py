"""``accprobe gate GOLDEN MINE``: are two servers, or two runs of an evaluation, the same beyond chance?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import typer

from vllm_accprobe.cli.common.declared import CONCURRENCY, JSON, MAX_TOKENS, MODEL, READY, SCORE, TIMEOUT
from vllm_accprobe.cli.common.json_answer import say_written
from vllm_accprobe.cli.common.options import CommandError, NothingThere


def gate(
    golden: str = typer.Argument(
        "",
        metavar="GOLDEN",
        help="Of the machine that is trusted: a folder of accprobe send, a URL, a command; or an evaluation's answers.",
    ),
    mine: str = typer.Argument("", metavar="MINE", help="The same of the other."),
    itself: str = typer.Option("", "--self", metavar="COMMAND|URL", help="One server against itself, instead of two."),
    samples: bool = typer.Option(False, "--samples", help="GOLDEN and MINE are an evaluation's: files or folders."),
    prompts: str = typer.Option(
        "default", "--prompts", metavar="FILE", help="What a server is asked; as of accprobe send."
    ),
    out: Path = typer.Option(
        None,
        "--out",
        "-o",
        metavar="DIR",
        help="Where the results go: gate.json, folders of the servers; one begun is gone on with.",
    ),
    floors: list[str] = typer.Option(
        [], "--floor", metavar="RUN", help="Another run of golden's side, a folder, URL or command. Can be repeated."
    ),
    floor_dtype: str = typer.Option(
        "",
        "--floor-dtype",
        metavar="DTYPE",
        help="Of the floor that golden's command makes. Default: see docs/gate.md.",
    ),
    no_floor: bool = typer.Option(False, "--no-floor", help="Golden's command makes none."),
    dig: bool = typer.Option(
        False, "--dig", help="Where they differ: capture the worst tokens of both, compare, and name the operator."
    ),
    dig_gb: float = typer.Option(20, "--dig-gb", metavar="GB", min=0.001, help="Disk for it, for each side and rank."),
    score: bool = SCORE,
    max_tokens: int = MAX_TOKENS,
    concurrency: int = CONCURRENCY,
    model: str = MODEL,
    timeout: float = TIMEOUT,
    ready: float = READY,
    task: list[str] = typer.Option([], "--tasks", metavar="GLOBS", help="Only these tasks."),
    metric: list[str] = typer.Option([], "--metrics", metavar="GLOBS", help="Only these metrics."),
    filter: list[str] = typer.Option([], "--filters", metavar="GLOBS", help="Only these filters."),
    rate: float = typer.Option(
        None,
        "--false-alarm-rate",
        metavar="P",
        help="How probable a false alarm may be, in a whole comparison of equal servers; 0.05 where not given.",
    ),
    prompts_out: Path = typer.Option(
        None, "--prompts-out", metavar="FILE", help="Write the questions that flipped, as prompts for accprobe send."
    ),
    csv: Path = typer.Option(None, "--csv", metavar="FILE", help="Write a csv there: a row for each metric."),
    as_json: bool = JSON,
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more: every metric, not 20."),
) -> None:
    """Compare two servers by what they answer, or, with --samples, two runs of an evaluation.

    A server is a folder of accprobe send, a URL, or a command (what has a space), which is started and ended. Golden
    answers first, mine along its tokens; log-probabilities, flips and KL by phase, chunk, batch, prefix hit, length and
    position, against golden's own batches and against honest rounding. GOLDEN may be a trainer's jsonl with tokens and
    log-probabilities. With --samples (lm-evaluation-harness,
    OpenCompass): for each metric whether the difference is more than chance, and which questions flipped.
    Exit code 0: no difference beyond chance, 1: one beyond, 2: unreadable input, 3: nothing could be paired.
    """
    if rate is not None and not 0 < rate < 1:
        raise CommandError(f"--false-alarm-rate: {rate} is no probability between 0 and 1")
    if itself and (golden or samples):
        raise CommandError("--self is one server against itself: leave GOLDEN, MINE and --samples away")
    if not itself and not (golden and mine):
        raise CommandError("name GOLDEN and MINE, or one server with --self")
    if not samples:
        if task or metric or filter or prompts_out or csv:
            raise CommandError("--tasks, --metrics, --filters, --prompts-out and --csv are for --samples")
        from vllm_accprobe.cli import gate_servers
        from vllm_accprobe.gate.sides import Asking

        asking = Asking(
            prompts=prompts, max_tokens=max_tokens, concurrency=concurrency, model=model, timeout=timeout,
            ready_s=ready, score=score,
        )  # fmt: skip
        if itself:
            from vllm_accprobe.cli.gate_self import gate_self

            gate_self(itself, asking, out, rate, as_json)
        if Path(golden).is_file():
            from vllm_accprobe.cli.gate_trainer import gate_trainer

            gate_trainer(Path(golden), mine, asking, out, as_json)
        gate_servers.run(golden, mine, out, gate_servers.Floors(tuple(floors), floor_dtype, no_floor), asking, rate,
                         as_json, dig_gb if dig else None)  # fmt: skip
    if out or floors or floor_dtype or no_floor or dig:
        raise CommandError("--out, --floor, --floor-dtype, --no-floor and --dig are for servers, without --samples")
    _samples(Path(golden), Path(mine), task, metric, filter, rate, prompts_out, csv, as_json, verbose)


def _samples(
    golden: Path,
    mine: Path,
    task: list[str],
    metric: list[str],
    filter: list[str],
    rate: float | None,
    prompts_out: Path | None,
    csv: Path | None,
    as_json: bool,
    verbose: bool,
) -> NoReturn:
    """Of two runs of an evaluation."""
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.common.same import refuse_same
    from vllm_accprobe.gate.samples import contrast, sides
    from vllm_accprobe.gate.samples.answers import SamplesError
    from vllm_accprobe.gate.samples.match import match
    from vllm_accprobe.report import evaluation

    rate = contrast.RATE if rate is None else rate
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
        more = f"; {without:,} have none in the files" if without else ""
        say_written(prompts_out, about=f"{len(asked):,} prompts of the questions that flipped{more}", err=as_json)
    raise typer.Exit(1 if result.verdict == "fail" else 0)


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
    from vllm_accprobe.whole_file import write_private

    write_private(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in asked))
