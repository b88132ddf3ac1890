"""``accprobe gate TRAINER.jsonl MINE``: a trainer's log-probabilities against what a server says of the same tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from vllm_accprobe.cli.common.options import CommandError, NothingThere

if TYPE_CHECKING:
    from vllm_accprobe.gate.sides import Asking


def gate_trainer(golden: Path, mine: str, asking: Asking, out: Path | None, as_json: bool) -> NoReturn:
    """mine: a folder of send, a jsonl (the same one where it has both), a URL, or a command."""
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.interrupts import kept
    from vllm_accprobe.cli.send import made_by
    from vllm_accprobe.gate.sending import replies
    from vllm_accprobe.gate.sending.client import SendError
    from vllm_accprobe.gate.trainer import ratios, rollout, trainer_lines
    from vllm_accprobe.report.servers import ratio_lines

    url = mine.startswith(("http://", "https://"))
    asks = url or not Path(mine).exists()
    if asks and not url and " " not in mine:
        raise CommandError(f"{mine} does not exist: MINE is a folder of accprobe send, a jsonl, a URL or a command")
    if asks and out is None:
        raise CommandError("MINE is a server: name a folder for its answers with --out DIR")
    try:
        left = trainer_lines.read(golden)
        if not asks:
            right = rollout.of_folder(Path(mine)) if Path(mine).is_dir() else rollout.of_file(Path(mine))
        else:
            assert out is not None
            outputs.check(out, {})
            kept.going_on("the answers are", out)
            if url:
                right = rollout.of_server(
                    left, mine, os.environ.get("VLLM_API_KEY", ""), out, made_by(str(golden)), asking
                )
            else:
                right = rollout.of_command(left, mine, os.environ, out, made_by(str(golden)), asking)
        found = ratios.compare(left, right.answers, right.how, right.left_out)
    except trainer_lines.TrainerError as e:
        raise CommandError(f"{e}; with --samples GOLDEN and MINE are the answers of an evaluation") from None
    except (SendError, replies.FolderError) as e:
        raise CommandError(str(e).replace("--engine:", "MINE:").replace("--url:", "MINE:")) from None
    except ratios.RatioError as e:
        raise NothingThere(f"{e} ({golden}, {mine if not asks else 'the server'})") from None
    if as_json:
        typer.echo(json.dumps(ratio_lines.to_json(found), indent=1))
    else:
        for line in ratio_lines.lines(found):
            typer.echo(line)
    raise typer.Exit({"pass": 0, "fail": 1}[found.verdict])
