"""``accprobe send PROMPTS --url URL --out DIR``: the same prompts to a server, and a folder with the answers."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import typer

from vllm_accprobe.cli.common.declared import MAX_TOKENS, MODEL, READY, SCORE, TIMEOUT
from vllm_accprobe.cli.common.json_answer import answer, say_written
from vllm_accprobe.cli.common.options import CommandError, NothingThere, progress


def send(
    prompts: str = typer.Argument(
        "default", metavar="[PROMPTS]", help="A jsonl, a ShareGPT json, a text with a prompt on each line, or default."
    ),
    url: str = typer.Option("", "--url", metavar="URL", help="The server, for example http://localhost:8000."),
    engine: str = typer.Option("", "--engine", metavar="CMD", help="Or a command that serves: started, and ended."),
    out: Path = typer.Option(
        ..., "--out", "-o", metavar="DIR", help="Where the results go: a folder; one begun is gone on with."
    ),
    along: Path | None = typer.Option(
        None, "--along", metavar="GOLDEN", help="Golden's folder: its token ids are sent, and forced as answers."
    ),
    score: bool | None = SCORE,
    arrive: list[str] | None = typer.Option(
        None, "--arrive", metavar="HOW", help="one, all or poisson:RATE; a pass for each. Default: one, all; golden's."
    ),
    concurrency: int | None = typer.Option(
        None, "--concurrency", metavar="N", min=1, max=1024, help="Requests at a time. Default: 64; golden's."
    ),
    top: int | None = typer.Option(
        None, "--top", metavar="N", min=2, max=1000, help="Log-probabilities for each token. Default: 20; golden's."
    ),
    max_tokens: int = MAX_TOKENS,
    model: str = MODEL,
    timeout: float = TIMEOUT,
    score_tokens: int = typer.Option(
        1024, "--score-tokens", metavar="N", min=2, help="Longer ones are not scored: a server may lack the memory."
    ),
    ready: float = READY,
) -> None:
    """Send the same prompts to a server, greedily, and keep token ids and log-probabilities.

    Sends them once for each --arrive: one by one and then all at once, so that the folder knows what the server's own
    batching changes. Where the server can be forced, the second pass gets the tokens of the first one as answers; with
    --along, all passes get golden's. An interrupted run goes on with the same command. A key is taken from
    VLLM_API_KEY. Exit code 0: done, 2: bad usage, or the server does not answer, 3: no prompt was answered, or the
    server has another vocabulary than golden's.
    """
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.interrupts import kept
    from vllm_accprobe.gate.sending import along as forcing
    from vllm_accprobe.gate.sending import passes, replies
    from vllm_accprobe.gate.sending import prompts as prompts_file
    from vllm_accprobe.gate.sending.arrival import parse
    from vllm_accprobe.gate.sending.client import OtherIds, Sender, SendError
    from vllm_accprobe.report.text import count

    if bool(url) == bool(engine):
        raise CommandError("name a server with --url, or a command that serves with --engine, one of the two")
    if along is not None and prompts != prompts_file.DEFAULT:
        raise CommandError("--along: golden's prompts are sent; leave PROMPTS away")
    try:
        golden = None if along is None else forcing.golden_of(along)
        was = {"arrive": ["one", "all"], "concurrency": 64, "top": 20} | (
            golden.about.get("settings", {}) if golden else {}
        )
        arrivals = [parse(word) for word in arrive or was["arrive"] if word != forcing.SCORE]
    except ValueError as e:
        raise CommandError(f"--arrive: {e}") from None
    except (forcing.AlongError, replies.FolderError) as e:
        raise CommandError(f"--along: {e}") from None
    outputs.check(out, {})
    if (
        out.is_dir()
        and not replies.exists(out)
        and any(not p.name.startswith(("engine-", "steps-")) for p in out.iterdir())
    ):
        raise CommandError(f"--out {out} has other files: name a new directory, or one that a send began")
    kept.going_on("the answers are", out)
    key, how = os.environ.get("VLLM_API_KEY", ""), {"timeout": timeout, "max_tokens": max_tokens}
    how |= {"top": top or was["top"], "score_tokens": score_tokens}
    try:
        lines = prompts_file.read(prompts) if golden is None else forcing.forced_lines(golden)
        with ExitStack() as stack:
            if engine:
                from vllm_accprobe.gate.sending.serving import served

                out.mkdir(mode=0o700, parents=True, exist_ok=True)
                if sys.stderr.isatty():
                    typer.echo(f"starting the engine; its output goes to {out}/engine-N.log", err=True)
                url, key = stack.enter_context(served(engine, os.environ, out, ready))
            sender, server = Sender(url, key, model=model, **how).introduced()  # type: ignore[arg-type]
            if golden is not None:
                forcing.check_vocabulary(sender, golden)
            begun = replies.read_about(out) if replies.exists(out) else None
            digest = None if golden is None else forcing.digest(golden)
            plan = forcing.planned(sender, digest, len(arrivals), score, begun)
            total = len(lines) * (len(arrivals) + plan.score)
            tell = stack.enter_context(progress("send", total, steps=True))
            made = made_by(prompts if along is None else along.name)
            done = passes.send(
                sender, server, lines, arrivals, concurrency or was["concurrency"], out, made, tell, plan
            )
    except OtherIds as e:
        raise NothingThere(str(e)) from None
    except (SendError, prompts_file.PromptsError, replies.FolderError, forcing.AlongError) as e:
        raise CommandError(str(e)) from None
    if not done.answered:
        raise NothingThere(f"no prompt was answered: {_reasons(done.reasons)} ({out})")
    again = "" if done.sent == done.of else f", {done.of - done.sent:,} of them before"
    passed = count(len(arrivals) + plan.score, "pass", "passes")
    typer.echo(f"{done.answered:,} of {done.of:,} answered{again} in {passed}")
    answer(prompts=done.of, answered=done.answered, refused=done.refused, sent=done.sent, reasons=done.reasons)
    if golden is not None and plan.how is not None:
        typer.echo(f"forced along {along}: {forcing.told(plan, golden, len(lines))}")
    if done.refused:
        typer.echo(f"refused: {_reasons(done.reasons)}")
    say_written(out)


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {why}" for why, n in reasons.items())


def made_by(prompts: str) -> dict[str, str]:
    """What send.json says of the version, the source and the time; all commands that send begin so."""
    from datetime import datetime, timezone

    from vllm_accprobe import __version__

    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"accprobe": __version__, "source": Path(prompts).name, "started": now}
