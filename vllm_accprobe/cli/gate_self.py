"""``accprobe gate --self COMMAND|URL``: one server against itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from vllm_accprobe.cli.common.options import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.gate.sides import Asking


def gate_self(side: str, asking: Asking, out: Path | None, rate: float | None, as_json: bool) -> NoReturn:
    """Asks the server in every way, and says which way is the odd one."""
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.interrupts import kept
    from vllm_accprobe.cli.send import made_by
    from vllm_accprobe.gate.self import asked_paths, odd_one
    from vllm_accprobe.gate.sending import prompts as prompts_file
    from vllm_accprobe.gate.sending import replies
    from vllm_accprobe.gate.sending.client import SendError
    from vllm_accprobe.report.servers import self_lines
    from vllm_accprobe.whole_file import whole

    if out is None:
        raise CommandError("--self: name a folder for the answers with --out DIR")
    outputs.check(out, {})
    begun = not out.is_dir() or (out / "alone").is_dir()
    if not begun and any(not p.name.startswith(("engine-", "steps-")) for p in out.iterdir()):
        raise CommandError(f"--out {out} has other files: name a new directory, or one that a gate --self began")
    told = (lambda said: typer.echo(f"asking: {said}", err=True)) if sys.stderr.isatty() else (lambda said: None)
    kept.going_on("the answers are", out)
    how = asked_paths.PathAsking(out, made_by(asking.prompts), asking, told)
    try:
        lines = prompts_file.read(asking.prompts)
        found = asked_paths.ask(side, os.environ.get("VLLM_API_KEY", ""), os.environ, lines, how)
    except (SendError, prompts_file.PromptsError, replies.FolderError) as e:
        raise CommandError(str(e).replace("--engine:", "--self:").replace("--url:", "--self:")) from None
    result = odd_one.judge(
        found.paths, found.answers, odd_one.RATE if rate is None else rate, found.missing, tuple(found.notes)
    )
    said = self_lines.to_json(result)
    with whole(out / "self.json") as part:
        part.write_text(json.dumps(said, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(said, indent=1))
    else:
        for line in self_lines.lines(result):
            typer.echo(line)
    raise typer.Exit({"pass": 0, "fail": 1, None: 3}[result.verdict])
