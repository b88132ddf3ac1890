"""``accprobe eval-diff A B``: two runs of an evaluation, or a trainer's log-probabilities and a server's.

Of an evaluation (lm-evaluation-harness, evalscope, OpenCompass, AISBench): for each metric whether the difference is
more than chance, and which questions flipped. Of a trainer's jsonl, with tokens and log-probabilities: what a server
says of the same tokens. Which it is, the files say. Not here: the tests (gate/evaluations, gate/trainer).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import report, say_written
from vllm_accprobe.refusals import CODES, CommandError, NothingThere

if TYPE_CHECKING:
    from vllm_accprobe.gate.sides import SendSettings


@dataclass(frozen=True)
class EvaluationOptions:
    """Which questions, and what is written of them."""

    tasks: list[str] = option("--tasks", [], "Only these tasks.", metavar="GLOBS")
    metrics: list[str] = option("--metrics", [], "Only these metrics.", metavar="GLOBS")
    filters: list[str] = option("--filters", [], "Only these filters.", metavar="GLOBS")
    prompts_out: Path | None = option("--prompts-out", None, "Write the questions that flipped, as prompts for "
                                      "accprobe send.", metavar="FILE")  # fmt: skip
    csv: Path | None = option("--csv", None, "Write a csv there: a row for each metric.", metavar="FILE")


def eval_diff(
    *,
    golden: Path = argument("A", "Of the machine that is trusted: a file or folder of answers, a trainer's jsonl."),
    mine: str = argument("B", "Of the other one; of a trainer also a folder of accprobe send, a URL, a command."),
    out: Path | None = options.out("the answers, where B is a server", None),
    rate: float | None = options.rate(),
    as_json: bool = options.as_json(),
    verbose: bool = options.verbose(),
    evaluation: EvaluationOptions,
    scoring: options.ScoringOptions,
) -> None:
    """Compare two runs of an evaluation, or a trainer's log-probabilities with a server's.

    Reads lm-evaluation-harness, evalscope, OpenCompass and AISBench: for each metric whether the difference is more
    than chance, and which questions flipped. Of predictions without scores: which texts differ. A may be a trainer's
    jsonl.
    Exit code 0: no difference beyond chance, 1: one beyond, 2: unreadable input, 3: nothing could be paired, or texts
    without scores differ.
    """
    from vllm_accprobe.gate import trainer

    options.check_rate(rate)
    if golden.is_file():
        try:
            trainer.read(golden)
        except trainer.TrainerError:
            pass
        else:
            if wrong := list(options.used(evaluation)):
                raise CommandError(f"{wrong[0]} goes with two runs of an evaluation, and {golden} is a trainer's")
            compare_trainer(golden, mine, scoring.settings("default"), out, as_json)
    if out is not None:
        raise CommandError("--out goes with a trainer's jsonl and a server")
    compare_samples(golden, Path(mine), evaluation, rate, as_json, verbose)


def compare_samples(
    golden: Path, mine: Path, how: EvaluationOptions, rate: float | None, as_json: bool, verbose: bool
) -> NoReturn:  # fmt: skip
    """Raises typer.Exit."""
    from vllm_accprobe.gate import evaluations
    from vllm_accprobe.report import servers
    from vllm_accprobe.report.text import safe
    from vllm_accprobe.whole_file import write_private

    rate = evaluations.RATE if rate is None else rate
    for path, name in ((how.prompts_out, "--prompts-out"), (how.csv, "--csv")):
        if path is not None:
            _check_file(path, name, (golden, mine))
    left, right = evaluations.open_side(golden), evaluations.open_side(mine)
    output_paths.refuse_same(("GOLDEN", golden), ("MINE", mine), "file")
    if left.tool != right.tool:
        raise CommandError(f"{golden} is of {left.tool}, {mine} of {right.tool}: their questions have no common name")
    for side in (left, right):
        evaluations.select(side, how.tasks, how.filters, how.metrics)
    result = evaluations.evaluate(evaluations.match(left, right), rate)
    if not result.contrasts and not result.texts:
        raise NothingThere(servers.nothing_compared(result, left, right))
    if how.csv is not None:
        if result.texts:
            raise CommandError(f"--csv has a row for each metric, and {golden} or {mine} has no scores")
        output_paths.check_place(how.csv, option="--csv")
    lines = servers.evaluation_lines(result, len(result.contrasts) if verbose else servers.MAX_CONTRASTS)
    fields = evaluations.to_json(result) | {"read": servers.read_json(left, right)}
    for one in (left, right):
        lines += [f"left out of {safe(one.path)}: {n:,} {what}" for what, n in one.left_out.items()]
    report(as_json, fields, lines)
    if how.csv is not None:
        servers.write_csv(result, how.csv)
    if how.prompts_out is not None:
        prompts, without = evaluations.prompts(result.flips)
        # Whole and only for its owner: these are an evaluation's questions, which others may not publish.
        write_private(how.prompts_out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in prompts))
        more = f"; {without:,} have none in the files" if without else ""
        say_written(how.prompts_out, about=f"{len(prompts):,} prompts of the questions that flipped{more}", err=as_json)
    raise typer.Exit(CODES[result.verdict])


def _check_file(path: Path, option: str, inputs: tuple[Path, ...]) -> None:
    if path.is_dir():
        raise CommandError(f"{option} {path} is a directory: name a file")
    if any(output_paths.is_same(path, other) for other in inputs):
        raise CommandError(f"{option} {path} is what is read: name another file")
    output_paths.writable(path.parent, option)


def compare_trainer(golden: Path, mine: str, settings: SendSettings, out: Path | None, as_json: bool) -> NoReturn:
    """mine: a folder of send, a jsonl (the same one where it has both), a URL, or a command."""
    from vllm_accprobe.gate import trainer
    from vllm_accprobe.gate.sending.client import NotServed, SendError
    from vllm_accprobe.gate.sending.passes import made_by
    from vllm_accprobe.report import servers

    url = mine.startswith(("http://", "https://"))
    asks = url or not Path(mine).exists()
    if asks and not url and " " not in mine:
        raise CommandError(f"{mine} does not exist: MINE is a folder of accprobe send, a jsonl, a URL or a command")
    if asks and out is None:
        raise CommandError("MINE is a server: name a folder for its answers with --out DIR")
    try:
        left = trainer.read(golden)
        if not asks:
            right = trainer.of_folder(Path(mine)) if Path(mine).is_dir() else trainer.of_file(Path(mine))
        else:
            assert out is not None
            output_paths.check(out, {})
            going_on("the answers are", out)
            made = made_by(str(golden))
            if url:
                right = trainer.of_server(left, mine, os.environ.get("VLLM_API_KEY", ""), out, made, settings)
            else:
                right = trainer.of_command(left, mine, os.environ, out, made, settings)
        found = trainer.compare(left, right.answers, right.how, right.left_out)
    except trainer.TrainerError as e:
        raise CommandError(f"{e}; answers of an evaluation are compared by `accprobe eval-diff A B`") from None
    except NotServed as e:
        raise CommandError(f"MINE: {e}") from None
    except SendError as e:
        raise CommandError(str(e).replace("--url:", "MINE:")) from None
    except trainer.RatioError as e:
        raise NothingThere(f"{e} ({golden}, {mine if not asks else 'the server'})") from None
    report(as_json, servers.ratio_json(found), servers.ratio_lines(found))
    raise typer.Exit(CODES[found.verdict])
