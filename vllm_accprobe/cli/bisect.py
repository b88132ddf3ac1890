"""``accprobe bisect -- vllm serve ...``: which settings of a command make its numbers wrong?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import report, show
from vllm_accprobe.refusals import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.gate.bisect.edits import ServeCommand, ServerSetting
    from vllm_accprobe.gate.bisect.search import Cause
    from vllm_accprobe.gate.bisect.trials import TrialPrompts, Trier
    from vllm_accprobe.gate.sending.replies import Sent

_SETTINGS = "SETTINGS"


def bisect(
    *,
    command: list[str] = argument("-- CMD...", "The server that is wrong: vllm serve MODEL ..."),
    golden: str = option("--golden", "", "A folder of send, a URL or a command; the plain command by default.",
                         metavar="SIDE"),
    out: Path = options.out("the runs", Path("accprobe-bisect")),
    prompts: str | None = options.prompts(""),
    only: list[str] = option("--only", [], "Vary only these.", metavar=_SETTINGS),
    hold: list[str] = option("--hold", [], "Keep these as in CMD.", metavar=_SETTINGS),
    plain: list[str] = option("--plain", [], "Another plain value, of attention. Can be repeated.",
                              metavar="SETTING=VALUE"),
    switches: Path | None = option("--switches", None, "A vendor's own switches, toml or json.", metavar="FILE"),
    floor: list[str] = options.floors(),
    no_floor: bool = options.no_floor(),
    narrow: bool = option("--narrow", False, "Also find the value from which a number that was found fails."),
    repeat: int = option("--repeat", 1, "Times that each is run: all must pass to count as pass.", metavar="N", min=1,
                         max=20),
    share: float | None = option("--share", None, "A run fails from this share of CMD's distance on. Default: 0.5.",
                                 metavar="S"),
    plan: bool = option("--plan", False, "Only print what would be done: settings, number of runs. Writes nothing."),
    as_json: bool = options.as_json(),
    serving: options.ServingOptions,
) -> None:  # fmt: skip
    """Find the smallest set of settings that makes a server's numbers wrong.

    Each run serves CMD with some settings made plain (no prefix caching, no chunks, native operators ...), sends the
    same prompts and compares with golden. The same command continues an interrupted bisection. Exit code 0: nothing
    differs, 1: it differs, 2: bad usage, or a server was lost, 3: nothing could be tried.
    """
    from vllm_accprobe import __version__
    from vllm_accprobe.gate.bisect import edits, trials
    from vllm_accprobe.gate.bisect.search import expected
    from vllm_accprobe.gate.sending import replies
    from vllm_accprobe.gate.sending.passes import made_by
    from vllm_accprobe.gate.served_run import checked
    from vllm_accprobe.report import servers

    share = trials.SHARE if share is None else share
    if not 0 <= share < 1:
        raise CommandError(f"--share: {share} is no number from 0 to below 1")
    output_paths.check(out, {})
    target = edits.command(command, os.environ)
    checked(target)
    floors = [trials.TrialFloor(path, replies.read(Path(path))) for path in floor]
    vendors = edits.read_vendor(switches, target) if switches else ()
    values = options.pairs(plain, "--plain {}: write SETTING=VALUE, for example attention=TRITON_ATTN", False)
    sent, folder = _prompts(golden, prompts or "", serving)
    _check_golden(golden, target)
    there = edits.options_offered(target)
    found = edits.axes(target, there, vendors, {name.strip(): value for name, value in values})
    axes = _chosen(found, only, hold)
    versions = {"vllm": there.version, "accprobe": __version__}
    variables = [name for a in found for name, _ in a.edit.environ]
    runs = trials.Trials(out, sent, versions, made_by(sent.prompts), variables)
    kept = sum(1 for p in (out / "trials").glob("*/sent/send.json"))
    usual, most = expected(axes, bool(golden))
    show(servers.plan_lines(axes, usual, most, kept), err=as_json)
    if plan or not axes:
        report(as_json, servers.plan_json(axes, usual, most, kept), ())
        raise typer.Exit(0)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    going_on("the runs are", out)
    against = folder or _golden(golden, sent, out, runs)
    rate = trials.rate_each(usual, len(sent.lines))
    trier = trials.Trier(target, axes, runs, against, rate, share, lambda line: typer.echo(line, err=True))
    trier.expected, trier.floors, trier.own_floor = usual, floors, not no_floor
    _go(trier, bool(golden), repeat - 1, narrow, as_json)


def _go(trier: Trier, golden: bool, again: int, narrow: bool, as_json: bool) -> None:
    """The search, and what is printed of it. Raises typer.Exit with the verdict's code."""
    from vllm_accprobe.gate.bisect.search import Search
    from vllm_accprobe.report import servers

    first = trier.first()
    if first.sent is not None and not first.kept:
        left = trier.left(trier.expected - 1) / 60
        trier.say(f"the first run took {first.seconds:.0f} s: about {left:.0f} min to go")
    search = Search(  # a command that does not start is tried first, and nothing else then
        trier.axes, trier.attempt, golden=golden or first.sent is None, again=again, narrow=narrow,
        equal=trier.equal, parts=trier.parts, lengths=lambda: trier.length, say=trier.say,
    )  # fmt: skip
    found = search.find()

    def line(cause: Cause, what: str) -> str:
        return trier.line(found, cause, what)

    results = found, trier.rows, trier.seconds, line
    fields = servers.bisect_json(*results)
    fields["floors"] = [{"name": name, "distance": size} for name, size in trier.floor_sizes]
    report(as_json, fields, servers.bisect_lines(*results))
    raise typer.Exit({None: 3, "same": 0}.get(found.verdict, 1))


def _chosen(found: list[ServerSetting], only: list[str], hold: list[str]) -> list[ServerSetting]:
    names = [a.name for a in found]
    for name in [*only, *hold]:
        if name not in names:
            known = ", ".join(names) or "there are none"
            raise CommandError(f"{name!r} is no setting that can be varied here: {known}")
    return [a for a in found if (not only or a.name in only) and a.name not in hold]


def _prompts(golden: str, prompts: str, serving: options.ServingOptions) -> tuple[TrialPrompts, Sent | None]:
    """What each run is sent, and golden where it is a folder."""
    from vllm_accprobe.gate.bisect.trials import TrialPrompts, golden_folder, sent_as
    from vllm_accprobe.gate.sending import prompts as prompts_file, replies
    from vllm_accprobe.gate.sending.passes import parse

    how: dict[str, Any] = {"arrive": ["one", "all"], "concurrency": serving.concurrency or 64, "top": 20,
                           "max_tokens": serving.max_tokens}  # fmt: skip
    folder = golden_folder(golden) if golden else None
    sent = None
    if folder is not None:
        if prompts:
            raise CommandError("--prompts: golden is a folder, whose own prompts are sent")
        sent, prompts = replies.read(folder), str(folder / replies.PROMPTS)
        how |= sent_as(sent.about)
        if len(how["arrive"]) < 2:
            raise CommandError(f"{folder} has one pass: send golden's with --arrive one --arrive all")
    lines = prompts_file.read(prompts or "default")
    arrive = tuple(parse(word).word for word in how.pop("arrive"))
    how |= {"timeout": serving.timeout, "ready_s": serving.ready, "say": serving.say()}
    return TrialPrompts(Path(prompts or "default").name, arrive, lines=tuple(lines), **how), sent


def _check_golden(golden: str, target: ServeCommand) -> None:
    """Raises NotServed, CommandError, for a command that could not serve golden's answers."""
    from vllm_accprobe.gate import preflight
    from vllm_accprobe.gate.bisect.trials import golden_folder
    from vllm_accprobe.gate.served_run import checked

    if not golden or golden.startswith(("http://", "https://")) or golden_folder(golden) is not None:
        return
    line = preflight.command_of(golden, os.environ)
    checked(line)
    if other := preflight.other_model(line, target):
        raise CommandError(f"--golden: {other}")


def _golden(golden: str, prompts: TrialPrompts, out: Path, trials: Any) -> Sent | None:
    """Golden's answers, where it is a URL or a command; None where the plain configuration is golden."""
    from vllm_accprobe.gate.bisect import edits
    from vllm_accprobe.gate.sending import replies
    from vllm_accprobe.gate.sending.passes import made_by

    if not golden:
        return None
    if golden.startswith(("http://", "https://")):
        prompts.send(golden, os.environ.get("VLLM_API_KEY", ""), out / "golden", made_by(prompts.prompts))
        return replies.read(out / "golden")
    tried = trials.run(edits.command([golden], os.environ))
    if tried.sent is None:
        raise CommandError(f"--golden: {tried.why}")
    return replies.read(tried.sent)
