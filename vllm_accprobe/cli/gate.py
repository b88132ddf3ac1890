"""``accprobe gate GOLDEN MINE``: do the answers of two servers differ beyond chance?

Not here: one server in several ways (self_check.py), two evaluations or a trainer's log-probabilities (eval_diff.py),
whose older spellings are hidden options; the gate itself (gate_run.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vllm_accprobe.cli import aliases, options
from vllm_accprobe.cli.eval_diff import EvaluationOptions
from vllm_accprobe.cli.options import argument, hidden, option
from vllm_accprobe.refusals import CommandError


@dataclass(frozen=True)
class GateOptions:
    """What is compared, and where the results go."""

    golden: str = argument("GOLDEN", "The machine that is trusted: a folder of accprobe send, a URL, or a command.", "")
    mine: str = argument("MINE", "The other one.", "")
    prompts: str | None = options.prompts("default")
    out: Path | None = options.out("gate.json, folders of the servers; one begun is continued. Default: "
                                   "accprobe-gate/<UTC time>, for servers", None)  # fmt: skip
    floor: list[str] = options.floors()
    floor_dtype: str = option("--floor-dtype", "", "Dtype of the floor that golden's command serves. Default: see "
                              "docs/gate.md.", metavar="DTYPE")  # fmt: skip
    no_floor: bool = options.no_floor()
    rate: float | None = options.rate()
    as_json: bool = options.as_json()
    verbose: bool = options.verbose()
    itself: str = hidden("--self", "", "See self-check.", metavar="COMMAND|URL")
    samples: bool = hidden("--samples", False, "See eval-diff.")


@dataclass(frozen=True)
class LocalizeOptions:
    """What follows a gate that fails."""

    localize: bool = option("--localize", False, "Where they differ: capture the worst tokens of both, compare, and "
                            "name the operator.")  # fmt: skip
    heal: bool = option("--heal", False, "With --localize: heal the operator in mine's server, and gate again.")
    localize_gb: float = option("--localize-gb", 20, "Disk for it, for each side and rank.", metavar="GB", min=0.001)


def gate(
    sides: GateOptions,
    localizing: LocalizeOptions,
    scoring: options.ScoringOptions,
    evaluation: Annotated[EvaluationOptions, options.HIDDEN],
) -> None:
    """Compare two servers by their answers.

    A server is a folder of accprobe send, a URL, or a command (with a space in it), which is started and ended. Mine is
    forced to golden's tokens. Log-probabilities, flips and KL are compared with golden's own batches and with rounding
    alone. Chats are rendered by both servers; other token ids fail.
    Exit code 0: no difference beyond chance, 1: one beyond, 2: unreadable input, 3: nothing could be paired.
    """
    golden, mine, out, rate = sides.golden, sides.mine, sides.out, sides.rate
    options.check_rate(rate)
    if sides.itself and (golden or sides.samples):
        raise CommandError("--self is one server in several ways: leave GOLDEN, MINE and --samples away")
    if not sides.itself and not (golden and mine):
        raise CommandError("name GOLDEN and MINE; one server in several ways is `accprobe self-check -- CMD`")
    if sides.samples:
        from vllm_accprobe.cli.eval_diff import compare_samples

        aliases.note("gate --samples", "eval-diff A B")
        if out or sides.floor or sides.floor_dtype or sides.no_floor or localizing.localize:
            raise CommandError("--out, --floor, --floor-dtype, --no-floor and --localize are for servers")
        compare_samples(Path(golden), Path(mine), evaluation, rate, sides.as_json, sides.verbose)
    if wrong := list(options.used(evaluation)):
        raise CommandError(f"{wrong[0]} is an option of `accprobe eval-diff A B`")
    settings = scoring.settings(sides.prompts or "default")
    if sides.itself:
        from vllm_accprobe.cli.self_check import check_server

        aliases.note("gate --self", "self-check -- CMD")
        check_server(sides.itself, settings, out, rate, sides.as_json)
    if Path(golden).is_file():
        from vllm_accprobe.cli.eval_diff import compare_trainer

        aliases.note("gate TRAINER.jsonl MINE", "eval-diff TRAINER.jsonl MINE")
        compare_trainer(Path(golden), mine, settings, out, sides.as_json)
    if localizing.heal and not localizing.localize:
        raise CommandError("--heal heals what --localize names: give both")
    from vllm_accprobe.cli import gate_run
    from vllm_accprobe.cli.gate_heal import heal

    if sides.prompts != "default" and Path(golden).is_dir():
        raise CommandError("--prompts: GOLDEN is a folder, and golden's own prompts are sent: leave --prompts away")
    gate_run.run(sides, localizing, settings, heal)
