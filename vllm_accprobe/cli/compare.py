"""``accprobe compare GOLDEN MINE``: which operator made the difference, and how large it is.

Several MINE are a series (cli/comparing/many_dumps.py); the comparison itself is cli/comparing/one_comparison.py's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.compare_formats import FORMAT, Format, say, say_before, say_plan
from vllm_accprobe.cli.common.declared import JSON
from vllm_accprobe.cli.common.options import require_directory

if TYPE_CHECKING:
    from vllm_accprobe.report.html.token_text import Vocabulary

DEFAULT = "accprobe-report"


def compare(
    golden: Path = typer.Argument(None, metavar="GOLDEN", help="The dump to trust."),
    mine: Path = typer.Argument(None, metavar="MINE", help="The dump to judge."),
    more: list[Path] = typer.Argument(
        None,
        metavar="[DUMP ...|RESULT.csv]",
        help="More dumps to judge: a series, which is one page over time, too. Or a .csv: torch_xray's table of both, "
        "by its standard; see docs/migration.md.",
    ),
    out: Path = typer.Option(
        None,
        "--out",
        "--output",
        "-o",
        metavar="DIR",
        help="Where the results go: compare.csv, .json, .html; accprobe-report, or where --rejudge reads.",
    ),
    op_mapping_file: Path = typer.Option(
        None,
        "--op-mapping-file",
        "-mf",
        metavar="FILE",
        help="YAML or JSON: which place of mine is which of golden, see docs/mapping.md.",
    ),
    taps: str = typer.Option(
        None, "--taps", metavar="GLOBS", help="Only taps that match these globs; '!...' excludes."
    ),
    standard: str = typer.Option(
        None,
        "--standard",
        metavar="NAME",
        help="The limits: {standards}; accprobe, which holds where none is named, and strict are ours.",
    ),
    floor: list[Path] = typer.Option(
        [],
        "--floor",
        metavar="RUN",
        help="Another run of golden's side, or what `accprobe calibrate` made. Can be repeated.",
    ),
    rate: float = typer.Option(
        None,
        "--false-alarm-rate",
        metavar="P",
        help="How probable a false alarm may be, in a whole comparison of honest machines; 0.001 where not given.",
    ),
    plan: bool = typer.Option(
        False, "--plan", help="Only say what would be done, and write nothing: what is compared with what."
    ),
    ray: str = typer.Option(
        None, "--ray", metavar="ADDRESS", help="Measure on the machines of the Ray cluster at this address."
    ),
    jobs: int = typer.Option(
        0, "-j", "--jobs", min=0, max=256, metavar="N", help="Processes that work; 0: none, threads of this one do."
    ),
    replay: bool = typer.Option(
        None,
        "--replay/--no-replay",
        help="Run all of both sides' operators again against references, which decides, or none. Needs torch. By "
        "default as many as --replay-seconds allow.",
    ),
    replay_seconds: float = typer.Option(
        60.0,
        "--replay-seconds",
        min=0.0,
        show_default=False,
        metavar="S",
        help="Time for running operators again: what is suspected and what failed first, then some of all. 60 where "
        "not given; 0: none.",
    ),
    weights: Path = typer.Option(
        None,
        "--weights",
        metavar="DIR",
        help="The model's directory, for parameters that a dump has as fingerprints alone; by default run.json's.",
    ),
    rejudge: Path = typer.Option(
        None, "--rejudge", metavar="DIR", help="Judge a saved comparison (an --out) again, without dumps."
    ),
    tokenizer: Path = typer.Option(
        None,
        "--tokenizer",
        metavar="PATH",
        help="A model's folder or its tokenizer.json; compare.html's heat map shows tokens' text, which is then in it.",
    ),
    form: Format = FORMAT,
    as_json: bool = JSON,
    golden_path: Path = typer.Option(None, "--golden-path", "-gp", metavar="GOLDEN", help="As GOLDEN (ait, msit)."),
    my_path: Path = typer.Option(None, "--my-path", "-mp", metavar="MINE", help="As MINE (ait, msit)."),
    log_level: str = typer.Option(None, "--log-level", "-l", metavar="LEVEL", help="warning and above: as --quiet."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Say less: the verdict and its notes."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more: leave nothing out."),
) -> None:
    """Compare two dumps row by row and name the operator that created the error.

    Prints the verdict and the culprit first and writes compare.csv (a row per pair), compare.html and compare.json,
    and measured.npz, from which --rejudge judges again by another standard.
    Interrupted, it goes on where it stopped when the same command is given again.
    Of several dumps each is compared with GOLDEN, into a folder of its name; series.html and series.json tell of all.
    Exit code 0: pass, 1: differences beyond the limits, 2: unreadable input, 3: nothing could be compared;
    of several dumps the worst: 2, 3, 1, 0.
    """
    import gc

    # Records, pairs and what hangs on them stay until the end, and looking through all of them now and then for what
    # has gone costs a tenth of the time that a pair of equal dumps takes.
    gc.set_threshold(100_000, 50, 50)
    from vllm_accprobe.cli.comparing import many_dumps, one_comparison
    from vllm_accprobe.cli.spelling import xray_table
    from vllm_accprobe.cli.spelling.told import quiet as quietly
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.comparison.result import FALSE_ALARM_RATE, PASS

    golden = _named(golden, golden_path, "GOLDEN", "-gp")
    mine = _named(mine, my_path, "MINE", "-mp")
    quiet = quietly(log_level) or quiet
    form = Format.json if as_json else form

    require_directory(weights, "--weights")
    rate = FALSE_ALARM_RATE if rate is None else rate
    engine.check_rate(rate)
    _check_arguments(golden, mine, rejudge, bool(plan or taps or op_mapping_file or ray or jobs or replay))
    sheet, others = many_dumps.told_apart(more or [])
    if others:
        many_dumps.refuse(plan, sheet)
    one_comparison.check_dumps(golden, mine, floor)
    standard = xray_table.standard_for(sheet, standard, rejudge is not None or plan)
    xray_table.check(sheet, [d for d in (golden, mine) if d is not None])
    home = rejudge if rejudge is None or rejudge.is_dir() else rejudge.parent
    out = out or home or Path(DEFAULT)
    if not plan and not others:
        one_comparison.check_out(out, [d for d in (golden, mine, *floor) if d is not None], rejudge is None)
    rules = engine.find_mapping(op_mapping_file)
    vocabulary = _vocabulary(tokenizer)
    again = _again(op_mapping_file, taps, standard, floor, rate, weights)
    given = one_comparison.AskedPair(
        golden, standard, taps, op_mapping_file, rules, ray, jobs, floor, rate, replay, again, vocabulary,
        replay_seconds, weights,
    )  # fmt: skip
    if others:
        raise typer.Exit(many_dumps.series(given, [mine, *others], out, form, quiet))
    if plan:
        from vllm_accprobe.comparison.plan.units import make_plan

        say_plan(make_plan(*engine.open_both(golden, mine), taps=taps, mapping=rules).lines(), form)
        return
    if rejudge is not None:
        from dataclasses import replace

        from vllm_accprobe.cli.common.options import say_notes
        from vllm_accprobe.cli.replay import replaying
        from vllm_accprobe.comparison.store import saved

        assert home is not None
        result = engine.rejudge(saved.load(rejudge), standard=standard, floors=floor, rate=rate)
        result = replaying.remembered(result, home) if replay is not False else result
        say_notes([replaying.told(result, home, replay)])
        result = replace(result, options=again, out=str(home))
    else:
        before = say_before if form is Format.terminal else one_comparison.nothing
        result = one_comparison.compared(given, mine, out, before)

    written = one_comparison.write(result, out, rejudge is None, vocabulary)
    if sheet is not None:
        written.append(xray_table.write(result, sheet))
        typer.echo(xray_table.order(golden, mine), err=True)
    say(result, form, 0 if quiet else 2 if verbose else 1, written)
    raise typer.Exit(0 if result.verdict == PASS else 1)


def _vocabulary(tokenizer: Path | None) -> Vocabulary | None:
    """Read before anything is compared: a wrong path is told at once."""
    if tokenizer is None:
        return None
    from vllm_accprobe.report.html.token_text import Vocabulary

    return Vocabulary(tokenizer)


def _named(place: Path, option: Path, word: str, flag: str) -> Path:
    """The one that was given, or None. Raises CompareError where both were."""
    from vllm_accprobe.comparison.result import CompareError

    if place is not None and option is not None:
        raise CompareError(f"{word} is given twice, as {place} and as {flag} {option}: give it once")
    return place or option


def _again(
    mapping: Path | None, taps: str | None, standard: str, floors: list[Path], rate: float, weights: Path | None = None
) -> tuple[str, ...]:  # fmt: skip
    """What was given that another comparison of the same two dumps needs, too (Comparison.options)."""
    from vllm_accprobe.comparison.result import FALSE_ALARM_RATE

    out = ["--op-mapping-file", str(mapping)] if mapping is not None else []
    out += ["--taps", taps] if taps else []
    out += ["--standard", standard] if standard != "accprobe" else []
    out += [word for floor in floors for word in ("--floor", str(floor))]
    out += ["--false-alarm-rate", str(rate)] if rate != FALSE_ALARM_RATE else []
    out += ["--weights", str(weights)] if weights is not None else []
    return tuple(out)


def _check_arguments(golden: Path | None, mine: Path | None, rejudge: Path | None, other: bool) -> None:
    from vllm_accprobe.comparison.result import CompareError

    if rejudge is None and (golden is None or mine is None):
        raise CompareError("give two dumps, GOLDEN and MINE, or --rejudge DIR; accprobe compare --help says more")
    if rejudge is not None and (golden is not None or other):
        raise CompareError("--rejudge judges what was measured: it takes no dumps, no --taps and no --plan")
