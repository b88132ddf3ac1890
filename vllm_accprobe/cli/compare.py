"""``accprobe compare GOLDEN MINE``: which operator made the difference, and how large it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.compare_formats import FORMAT, Format, say, say_before, say_plan
from vllm_accprobe.cli.common.declared import JSON

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.token_text import TokenTexts, Vocabulary

DEFAULT = "accprobe-report"


def compare(
    golden: Path = typer.Argument(None, metavar="GOLDEN", help="The dump to trust."),
    mine: Path = typer.Argument(None, metavar="MINE", help="The dump to judge."),
    sheet: Path = typer.Argument(
        None, metavar="[RESULT.csv]", help="torch_xray's table of both, too, by its standard; see docs/migration.md."
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
        0, "-j", "--jobs", min=0, max=256, metavar="N", help="Measure with N processes; 0: with threads of this one."
    ),
    replay: bool = typer.Option(
        None,
        "--replay/--no-replay",
        help="Run both sides' operators again against references, which decides. Needs torch. By default all of a "
        "small pair, and of a large one that fails what is suspected.",
    ),
    rejudge: Path = typer.Option(
        None, "--rejudge", metavar="DIR", help="Judge a saved comparison (an --out) again, without dumps."
    ),
    tokenizer: Path = typer.Option(
        None,
        "--tokenizer",
        metavar="PATH",
        help="A model's folder or its tokenizer.json: compare.html's heat map shows tokens' text, which is then in it.",
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
    Exit code 0: pass, 1: differences beyond the limits, 2: unreadable input, 3: nothing could be compared.
    """
    import gc

    # Records, pairs and what hangs on them stay until the end, and looking through all of them now and then for what
    # has gone costs a tenth of the time that a pair of equal dumps takes.
    gc.set_threshold(100_000, 50, 50)
    from vllm_accprobe.cli.spelling import xray_table
    from vllm_accprobe.cli.spelling.told import quiet as quietly
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.comparison.result import FALSE_ALARM_RATE, PASS

    golden = _named(golden, golden_path, "GOLDEN", "-gp")
    mine = _named(mine, my_path, "MINE", "-mp")
    quiet = quietly(log_level) or quiet
    form = Format.json if as_json else form

    rate = FALSE_ALARM_RATE if rate is None else rate
    engine.check_rate(rate)
    _check_arguments(golden, mine, rejudge, bool(plan or taps or op_mapping_file or ray or jobs or replay))
    _check_dumps(golden, mine, floor)
    standard = xray_table.standard_for(sheet, standard, rejudge is not None or plan)
    xray_table.check(sheet, [d for d in (golden, mine) if d is not None])
    home = rejudge if rejudge is None or rejudge.is_dir() else rejudge.parent
    out = out or home or Path(DEFAULT)
    if not plan:
        _check_out(out, [d for d in (golden, mine, *floor) if d is not None], rejudge is None)
    rules = engine.find_mapping(op_mapping_file)
    vocabulary = _vocabulary(tokenizer)
    if plan:
        from vllm_accprobe.comparison.plan.units import make_plan

        say_plan(make_plan(*engine.open_both(golden, mine), taps=taps, mapping=rules).lines(), form)
        return
    import json
    from dataclasses import replace

    from vllm_accprobe.cli.common import kept
    from vllm_accprobe.cli.common.options import say_notes
    from vllm_accprobe.cli.replay import replaying
    from vllm_accprobe.comparison.store import resume, saved

    if rejudge is not None:
        assert home is not None
        result = engine.rejudge(saved.load(rejudge), standard=standard, floors=floor, rate=rate)
        result = replaying.remembered(result, home) if replay is not False else result
        say_notes([replaying.told(result, home, replay)])
    else:
        choices = {"standard": standard, "taps": taps, "mapping": rules, "resume": out, "ray": ray, "jobs": jobs,
                   "floors": floor, "rate": rate}  # fmt: skip
        asked = replaying.Asked(golden, mine, replay, taps, op_mapping_file, rate)
        kept.going_on("what was measured is", out / resume.NAME)
        with replaying.begun(asked) as begun:
            with _progress() as advance, _tidy(out):
                result = engine.compare(golden, mine, progress=advance, **choices)  # type: ignore[arg-type]
            result = replaying.replayed(result, asked, begun, out, say_before if form is Format.terminal else _nothing)
    result = replace(result, options=_again(op_mapping_file, taps, standard, floor, rate), out=str(home or out))

    from vllm_accprobe.report import html, table

    out.mkdir(parents=True, exist_ok=True)
    table.write_csv(result, out / "compare.csv")
    (out / "compare.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    html.write_html(result, out / "compare.html", tokens=_texts(vocabulary, result))
    if result.measured is not None and rejudge is None:
        saved.save(result.measured, out)
        resume.forget(out)
    written = [out / name for name in ("compare.csv", "compare.json", "compare.html")]
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


def _texts(vocabulary: Vocabulary | None, result: Comparison) -> TokenTexts | None:
    """Mine's tokens as text; a line on stderr where no ids were recorded."""
    if vocabulary is None:
        return None
    from vllm_accprobe.report.html.token_text import token_texts

    texts = token_texts(vocabulary, result.mine_path)
    if texts.missing:
        typer.echo(f"accprobe: {texts.missing}", err=True)
    return texts


def _named(place: Path, option: Path, word: str, flag: str) -> Path:
    """The one that was given, or None. Raises CompareError where both were."""
    from vllm_accprobe.comparison.result import CompareError

    if place is not None and option is not None:
        raise CompareError(f"{word} is given twice, as {place} and as {flag} {option}: give it once")
    return place or option


def _check_dumps(golden: Path | None, mine: Path | None, floors: list[Path]) -> None:
    from vllm_accprobe.cli.common.same import refuse_same

    if golden is None or mine is None:
        return
    refuse_same(("GOLDEN", golden), ("MINE", mine))
    for floor in floors:  # of what is judged, a floor would excuse all that is wrong with it
        refuse_same(("--floor", floor), ("GOLDEN", golden))
        refuse_same(("--floor", floor), ("MINE", mine))


def _check_out(out: Path, dumps: list[Path], measured: bool) -> None:
    """measured: what was measured is written, too."""
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.comparison.result import COLUMNS

    ours = {
        "compare.csv": outputs.csv_with(*COLUMNS[:7]),
        "compare.json": outputs.SCHEMA_AND_VERDICT,
        "compare.html": outputs.matching("<title>[^<]*accprobe"),
    }
    if measured:
        ours["measured.npz"] = lambda head: head[30:38] == b"meta.npy"
        ours["replay.json"] = outputs.matching(r"\A\{\"blamed\":")
    outputs.check(out, ours, dumps=dumps)


def _again(mapping: Path | None, taps: str | None, standard: str, floors: list[Path], rate: float) -> tuple[str, ...]:
    """What was given that another comparison of the same two dumps needs, too (Comparison.options)."""
    from vllm_accprobe.comparison.result import FALSE_ALARM_RATE

    out = ["--op-mapping-file", str(mapping)] if mapping is not None else []
    out += ["--taps", taps] if taps else []
    out += ["--standard", standard] if standard != "accprobe" else []
    out += [word for floor in floors for word in ("--floor", str(floor))]
    out += ["--false-alarm-rate", str(rate)] if rate != FALSE_ALARM_RATE else []
    return tuple(out)


def _check_arguments(golden: Path | None, mine: Path | None, rejudge: Path | None, other: bool) -> None:
    from vllm_accprobe.comparison.result import CompareError

    if rejudge is None and (golden is None or mine is None):
        raise CompareError("give two dumps, GOLDEN and MINE, or --rejudge DIR; accprobe compare --help says more")
    if rejudge is not None and (golden is not None or other):
        raise CompareError("--rejudge judges what was measured: it takes no dumps, no --taps and no --plan")


def _nothing(result: object) -> None:
    """What is read by programs holds the last verdict alone."""


@contextlib.contextmanager
def _tidy(out: Path) -> Iterator[None]:
    """Where there is nothing to compare, nothing stays behind."""
    from vllm_accprobe.comparison.result import NothingCompared
    from vllm_accprobe.comparison.store import resume

    there = out.exists()
    try:
        yield
    except NothingCompared:
        resume.forget(out)
        if not there:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal's stderr, nothing in a pipe."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("comparing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("comparing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))
