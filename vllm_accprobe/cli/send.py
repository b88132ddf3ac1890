"""``accprobe send PROMPTS --url URL --out DIR``: the same prompts to a server, and a folder with the answers."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import answer, say_notes, say_written
from vllm_accprobe.progress import progress, waiting
from vllm_accprobe.refusals import CommandError, NothingThere


def send(
    *,
    out: Path = options.out("a folder; one begun is continued"),
    prompts: str = argument("[PROMPTS]", "A jsonl (with vLLM's parameters; an OpenAI batch too), a ShareGPT json, a "
                            "text with a prompt on each line, or default.", "default"),
    url: str = option("--url", "", "The server, for example http://localhost:8000.", metavar="URL"),
    engine: str = option("--engine", "", "Or a command that serves: started, and ended.", metavar="CMD"),
    along: Path | None = option("--teacher-force", None, "Golden's folder: its token ids are sent, and forced as "
                                "answers.", metavar="GOLDEN"),
    arrive: list[str] = option("--arrive", [], "one, all or poisson:RATE; a pass for each. Default: one, all; "
                               "golden's.", metavar="HOW"),
    top: int | None = option("--top", None, "Log-probabilities for each token. Default: 20; golden's.", metavar="N",
                             min=2, max=1000),
    score_tokens: int = option("--score-tokens", 1024, "Longer ones are not scored: a server may lack the memory.",
                               metavar="N", min=2),
    of: options.ScoringOptions,
) -> None:  # fmt: skip
    """Send the same prompts to a server, greedily by default, and keep token ids and log-probabilities.

    Sends them one by one and then all at once. Where the server can be forced, the second pass gets the tokens of the
    first one as answers; with --teacher-force, all passes get golden's. The same command continues an interrupted run.
    The key is VLLM_API_KEY. Exit code 0: done, 2: bad usage, or the server does not answer, 3: no prompt was answered,
    or the server has another vocabulary than golden's.
    """
    from vllm_accprobe.gate.sending import passes, prompts as prompts_file, rendering, replies
    from vllm_accprobe.gate.sending.client import NotServed, OtherIds, Sender
    from vllm_accprobe.report.text import count

    if bool(url) == bool(engine):
        raise CommandError("name a server with --url, or a command that serves with --engine, one of the two")
    if along is not None and prompts != prompts_file.DEFAULT:
        raise CommandError("--teacher-force: golden's prompts are sent; leave PROMPTS away")
    try:
        golden = None if along is None else passes.golden_of(along)
        was = {"arrive": ["one", "all"], "concurrency": 64, "top": 20} | (
            golden.about.get("settings", {}) if golden else {}
        )
        arrivals = [passes.parse(word) for word in arrive or was["arrive"] if word != passes.SCORE]
    except ValueError as e:
        raise CommandError(f"--arrive: {e}") from None
    except (passes.TeacherForcingError, replies.FolderError) as e:
        raise CommandError(f"--teacher-force: {e}") from None
    output_paths.check_begun(out, replies.exists(out), "send")
    going_on("the answers are", out)
    key, how = os.environ.get("VLLM_API_KEY", ""), {"timeout": of.timeout, "max_tokens": of.max_tokens}
    how |= {"top": top or was["top"], "score_tokens": score_tokens}
    try:
        noted = partial(prompts_file.read, note=lambda line: say_notes([line]))
        lines = noted(prompts) if golden is None else passes.forced_lines(golden)
        digest = None if golden is None else passes.digest(golden)
        concurrency = of.concurrency or was["concurrency"]
        words = [one.word for one in arrivals]
        settings = {"top": how["top"], "max_tokens": of.max_tokens, "arrive": words, "concurrency": concurrency}
        begun = passes.begun(out, lines, settings, digest)
        with ExitStack() as stack:
            if engine:
                from vllm_accprobe.gate.served_run import served

                out.mkdir(mode=0o700, parents=True, exist_ok=True)
                server = stack.enter_context(served("the server", engine, os.environ, out, of.ready, of.say())).command
                url, key = server.url, server.key
            with waiting(lambda: "send: asking what the server can", of.say()):
                sender, about = Sender(url, key, model=of.model, **how).introduced()  # type: ignore[arg-type]
                if golden is not None:
                    passes.check_vocabulary(sender, golden)
                plan = passes.planned(sender, digest, len(arrivals), of.score, begun)
            total = len(lines) * (len(arrivals) + plan.score)
            tell = stack.enter_context(progress("send", total, steps=True, pace=of.say()))
            made = passes.made_by(prompts if along is None else along.name)
            chats = rendering.chats(lines) if golden is None else rendering.sent_chats(golden.path)
            done = passes.send(sender, about, lines, arrivals, concurrency, out, made, tell, plan, chats=chats)
    except OtherIds as e:
        raise NothingThere(str(e)) from None
    except NotServed as e:
        raise CommandError(f"--engine: {e}") from None
    if not done.answered:
        raise NothingThere(f"no prompt was answered: {passes.refusals(done.reasons)} ({out})")
    again = "" if done.sent == done.of else f", {done.of - done.sent:,} of them before"
    passed = count(len(arrivals) + plan.score, "pass", "passes")
    typer.echo(f"{done.answered:,} of {done.of:,} answered{again} in {passed}")
    answer(prompts=done.of, answered=done.answered, refused=done.refused, sent=done.sent, reasons=done.reasons)
    if golden is not None and plan.how is not None:
        typer.echo(f"forced along {along}: {passes.describe(plan, golden, len(lines))}")
    if done.unrendered:
        typer.echo(f"note: {done.unrendered}: token ids of chats are those that were computed")
    if done.refused:
        typer.echo(f"refused: {passes.refusals(done.reasons)}")
    say_written(out)
