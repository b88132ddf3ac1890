"""``accprobe self-check -- CMD``: one server against itself: does a way of computing change its answers?"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.options import argument
from vllm_accprobe.cli.output import report
from vllm_accprobe.refusals import CODES, CommandError

if TYPE_CHECKING:
    from vllm_accprobe.gate.sides import SendSettings


def self_check(
    *,
    command: list[str] = argument("-- CMD...|URL", "vllm serve MODEL ..., or a running server."),
    prompts: str | None = options.prompts("default"),
    out: Path = options.out("a folder for the answers; one begun is continued", Path("accprobe-self")),
    rate: float | None = options.rate(),
    as_json: bool = options.as_json(),
    scoring: options.ScoringOptions,
) -> None:
    """Send one server the same prompts in several ways, and name the way whose answers differ.

    Alone, in a batch, with a prefix hit, in chunks, and what else its options allow.
    Exit code 0: no difference beyond chance, 1: one beyond, 2: bad usage, or the server does not answer, 3: nothing
    could be compared.
    """
    options.check_rate(rate)
    side = command[0] if len(command) == 1 else shlex.join(command)
    check_server(side, scoring.settings(prompts or "default"), out, rate, as_json)


def check_server(side: str, settings: SendSettings, out: Path | None, rate: float | None, as_json: bool) -> NoReturn:
    """side: a URL or a command. Raises typer.Exit."""
    from vllm_accprobe.gate import self_check as paths
    from vllm_accprobe.gate.sending import prompts as prompts_file
    from vllm_accprobe.gate.sending.client import NotServed, SendError
    from vllm_accprobe.gate.sending.passes import made_by
    from vllm_accprobe.report import servers
    from vllm_accprobe.whole_file import write_text

    if out is None:
        raise CommandError("self-check: name a folder for the answers with --out DIR")
    output_paths.check_begun(out, (out / "alone").is_dir(), "self-check")
    say = (lambda line: typer.echo(f"sending: {line}", err=True)) if sys.stderr.isatty() else (lambda line: None)
    going_on("the answers are", out)
    how = paths.PathSettings(out, made_by(settings.prompts) | {"side": paths.digest(side)}, settings, say)
    try:
        lines = prompts_file.read(settings.prompts)
        found = paths.ask(side, os.environ.get("VLLM_API_KEY", ""), os.environ, lines, how)
    except NotServed as e:
        raise CommandError(f"CMD: {e}") from None
    except SendError as e:
        raise CommandError(str(e).replace("--url:", "URL:")) from None
    rate = paths.RATE if rate is None else rate
    result = paths.judge(found.paths, found.answers, rate, found.missing, tuple(found.notes))
    fields = servers.self_check_json(result)
    report(as_json, fields, servers.self_check_lines(result))
    write_text(out / "self.json", json.dumps(fields, indent=1) + "\n")
    raise typer.Exit(CODES[result.verdict])
