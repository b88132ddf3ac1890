"""``accprobe compare GOLDEN MINE``: which operator made the difference, and how large it is.

What is compared is recognised: two dumps, one dump whose tensors a program labelled (dump_pair.py), two tables of
operators (dump_pair.py); with --calibrate runs of golden's side (calibrate.py). Not here: the comparison of a pair and
its files (dump_pair.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_accprobe.cli import dump_pair, options
from vllm_accprobe.cli.aliases import is_quiet
from vllm_accprobe.cli.dump_pair import JudgeOptions, WorkOptions
from vllm_accprobe.cli.endings import CommandError
from vllm_accprobe.cli.options import argument, hidden, option
from vllm_accprobe.cli.output import Format, answered, say_written

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.data import Vocabulary

DEFAULT = "accprobe-report"


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and where the results go."""

    golden: Path | None = argument("GOLDEN", "The dump, or table, to trust.", None)
    mine: Path | None = argument("MINE", "The dump, or table, to judge.", None)
    sheet: Path | None = argument("[RESULT.csv]", "torch_xray's table of both, by its standard; see docs/migration.md.",
                                  None)  # fmt: skip
    further: list[Path] = argument("[RUN]...", "Further runs, with --calibrate.", [])
    out: Path | None = options.out("compare.csv, .json, .html; accprobe-report, or where --rejudge reads", None)
    golden_path: Path | None = hidden("--golden-path", None, "As GOLDEN (ait, msit).", metavar="GOLDEN")
    my_path: Path | None = hidden("--my-path", None, "As MINE (ait, msit).", metavar="MINE")


@dataclass(frozen=True)
class InsteadOptions:
    """What is done in place of a comparison."""

    plan: bool = option("--plan", False, "Only say what would be done, and write nothing: what is compared with what.")
    rejudge: Path | None = option("--rejudge", None, "Judge a saved comparison (an --out) again, without dumps.",
                                  metavar="DIR")  # fmt: skip
    tokenizer: Path | None = options.tokenizer()


@dataclass(frozen=True)
class CalibrateOptions:
    """Of several runs of golden's side, or of one dump with --profile."""

    calibrate: Path | None = option("--calibrate", None, "All dumps are runs of golden's side: write there what they "
                                    "differ by, for --floor.", metavar="OUT")  # fmt: skip
    profile: bool = option("--profile", False, "With --calibrate: how the machine of one dump computes, read from its "
                           "replay. Needs torch.")  # fmt: skip
    accept_failing: bool = option("--accept-failing", False, "With --calibrate: take runs that fail, too; what they "
                                  "show is never found again.")  # fmt: skip


@dataclass(frozen=True)
class TableOptions:
    """Of two tables of operators."""

    algorithm: list[str] = option("--algorithm", [], "Of two tables: judge these operators by absolute, benchmark, "
                                  "binary, ulp, dual-1000 or accumulative. Can be repeated.",
                                  metavar="GLOB=NAME")  # fmt: skip
    by: str = option("--by", "call", "Of two tables: call, output by output; tap, operator: what a module or an "
                     "operator did over all its calls.", metavar="WHAT")  # fmt: skip
    gpu: Path | None = hidden("-gpu", None, "GOLDEN.csv as msprobe says it.", metavar="FILE")
    npu: Path | None = hidden("-npu", None, "MINE.csv as msprobe says it.", metavar="FILE")


@dataclass(frozen=True)
class LabelOptions:
    """Of one dump with labels."""

    acl: list[Path] = option("--acl", [], "Of one labelled dump: where the accelerator's library wrote the files that "
                             "labels name. Can be repeated.", metavar="DIR")  # fmt: skip
    tolerance: float | None = option("--tolerance", None, "Of one labelled dump: allowed relative L2 error of a row; "
                                     "by default by the coarser dtype.", metavar="REL")  # fmt: skip
    exec: str | None = hidden("--exec", None, "A command as one line, run first, with labels on.", metavar="LINE")
    dir: str | None = hidden("--dir -d", None, "Where the command's dump goes.", metavar="DIR")
    types: str | None = hidden("--type", None, "With --exec: what Ascend's ATB writes.", metavar="TYPES")


@dataclass(frozen=True)
class PrintOptions:
    """How the result is printed."""

    form: Format = option("--format", Format.terminal, "What stdout gets: terminal, markdown, github (annotations for "
                          "GitHub Actions, and the markdown as the step's summary), or json, as --json.")  # fmt: skip
    as_json: bool = options.as_json()
    log_level: str | None = options.log_level()
    quiet: bool = options.quiet()
    verbose: bool = options.verbose()

    @property
    def format(self) -> Format:
        return Format.json if self.as_json else self.form

    @property
    def verbosity(self) -> int:
        """report.terminal's. Raises CommandError."""
        return 0 if is_quiet(self.log_level) or self.quiet else 2 if self.verbose else 1


def compare(
    what: CompareOptions,
    judging: JudgeOptions,
    work: WorkOptions,
    instead: InsteadOptions,
    calibrating: CalibrateOptions,
    of_tables: TableOptions,
    of_labels: LabelOptions,
    printed: PrintOptions,
    name: str = "compare",
) -> None:
    """Compare two dumps row by row and name the operator that introduced the error.

    Prints the verdict and the culprit first and writes compare.csv (a row per pair), compare.html and compare.json,
    and measured.npz, from which --rejudge judges again by another standard.
    Interrupted, it goes on where it stopped when the same command is typed again.

    One dump whose tensors a program labelled with set_label: its pairs are compared; writes labels.csv and labels.json.
    Two csv tables (opcheck.csv, a generated test's, msprobe's accuracy_checking_details): both machines are judged
    against the same reference; writes details.csv, result.csv and opdiff.md.
    With --calibrate: what runs of golden's side, with another batching, chunking, dtype or number of ranks, differ by,
    a few numbers per tap that --floor reads on any machine.

    Exit code 0: pass, 1: differences beyond the limits, 2: unreadable input, 3: nothing could be compared.
    """
    from vllm_accprobe.comparison.result import CompareError

    golden = _named(what.golden, what.golden_path, "GOLDEN", "-gp")
    mine = _named(what.mine, what.my_path, "MINE", "-mp")
    form, verbosity = printed.format, printed.verbosity
    kind, opened = _kind(name, golden, mine, what, instead, calibrating, of_tables, of_labels)
    if kind == "pair":
        _refuse(kind, calibrating, of_tables, of_labels)
        if what.further:
            raise CommandError(f"{what.further[0]}: two dumps are compared; several runs go with --calibrate OUT")
        _pairs(golden, mine, what.sheet, what.out, judging, work, instead, form, verbosity)
    as_json = form is Format.json
    if kind == "calibrate":
        from vllm_accprobe.cli.calibrate import calibrate

        _refuse(kind, instead, of_tables, of_labels, work, allowed=judging, but=("--weights",))
        out = calibrating.calibrate or what.out or Path("accprobe-floor")
        if calibrating.calibrate is None and name == "compare":
            raise CommandError("--profile and --accept-failing go with --calibrate OUT")
        others = [d for d in (mine, what.sheet, *what.further) if d is not None]
        answered(name, as_json, lambda: calibrate(golden, others, calibrating, judging.weights, out))
        return
    if kind == "labels":
        from vllm_accprobe.cli.dump_pair import compare_labelled

        _refuse(kind, instead, calibrating, of_tables, work, judging)
        if mine is not None:
            raise CompareError("labels are of one dump, and MINE is named as well")
        out = what.out or Path("accprobe-labels")
        answered(name, as_json, lambda: compare_labelled(golden, opened, of_labels, out, verbosity > 1))
    from vllm_accprobe.cli.dump_pair import compare_tables

    _refuse(kind, instead, calibrating, of_labels, work, allowed=judging, but=("--standard",))
    out, joined = what.out or Path("accprobe-opdiff"), what.sheet
    if what.further:
        raise CompareError("two tables are compared: leave out what follows RESULT.csv")
    answered(name, as_json,
             lambda: compare_tables(golden, mine, joined, of_tables, judging.standard, out, verbosity > 1))  # fmt: skip


def _kind(
    name: str,
    golden: Path | None,
    mine: Path | None,
    what: CompareOptions,
    instead: InsteadOptions,
    calibrating: CalibrateOptions,
    of_tables: TableOptions,
    of_labels: LabelOptions,
) -> tuple[str, Any]:
    """(calibrate, labels, opdiff or pair; the dump where it was opened for that). name: of the command that was typed,
    of which some say it."""
    if name != "compare":
        return name, None
    if options.used(calibrating):
        return "calibrate", None
    if of_tables.gpu or of_tables.npu or (golden and mine and _is_table(golden) and _is_table(mine)):
        return "opdiff", None
    if of_labels.exec is not None:
        return "labels", None
    if golden is not None and mine is None and instead.rejudge is None and golden.exists():
        from vllm_accprobe.dump.files import DumpError
        from vllm_accprobe.dump.label_files import LABEL_TAP
        from vllm_accprobe.formats import open_dump

        try:
            opened = open_dump(golden)
        except (DumpError, OSError):
            return "pair", None
        if any(r.tap.startswith(LABEL_TAP) for r in opened.records):
            return "labels", opened
    return "pair", None


def _is_table(path: Path) -> bool:
    """A csv, or a folder of `opcheck` or of msprobe's check with one."""
    if path.is_file():
        return path.suffix == ".csv"
    patterns = ("opcheck.csv", "accuracy_checking_details*.csv")
    return path.is_dir() and not (path / "run.json").exists() and any(any(path.glob(p)) for p in patterns)


_OF = {"pair": "two dumps", "calibrate": "--calibrate", "labels": "one labelled dump", "opdiff": "two tables"}


def _refuse(kind: str, *groups: Any, allowed: Any = None, but: tuple[str, ...] = ()) -> None:
    """Raises CommandError for an option that means nothing here. but: those of ``allowed`` that do."""
    wrong = [o for o in options.used(*groups, *([allowed] if allowed else [])) if o not in but]
    if wrong:
        raise CommandError(f"{wrong[0]} does not go with {_OF[kind]}: leave it out")


def _pairs(
    golden: Any,
    mine: Any,
    sheet: Path | None,
    out: Path | None,
    judging: JudgeOptions,
    work: WorkOptions,
    instead: InsteadOptions,
    form: Format,
    verbosity: int,
) -> None:
    """Two dumps (paths or None), or a saved comparison. Raises typer.Exit."""
    import gc

    # Records, pairs and what hangs on them stay until the end, and looking through all of them now and then for what
    # has gone costs a tenth of the time that a pair of equal dumps takes.
    gc.set_threshold(100_000, 50, 50)
    from vllm_accprobe.cli.places import require_directory
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.comparison.result import FALSE_ALARM_RATE, PASS
    from vllm_accprobe.opcheck.compat import xray

    rejudge, floors = instead.rejudge, judging.floors
    require_directory(judging.weights, "--weights")
    rate = FALSE_ALARM_RATE if judging.rate is None else judging.rate
    engine.check_rate(rate)
    other = bool(instead.plan or judging.taps or judging.op_mapping_file or work.ray or work.jobs or work.replay)
    _check_arguments(golden, mine, rejudge, other)
    dump_pair.check_dumps(golden, mine, floors)
    standard = xray.standard_for(sheet, judging.standard, rejudge is not None or instead.plan)
    dumps = [d for d in (golden, mine) if d is not None]
    _check_sheet(sheet, dumps)
    home = rejudge if rejudge is None or rejudge.is_dir() else rejudge.parent
    out = out or home or Path(DEFAULT)
    if not instead.plan:
        dump_pair.check_out(out, [*dumps, *floors], rejudge is None)
    rules = engine.find_mapping(judging.op_mapping_file)
    vocabulary = _vocabulary(instead.tokenizer)
    again = _again(judging, standard, rate)
    pair = dump_pair.DumpPair(golden, judging, work, standard, rate, rules, again, vocabulary)
    if instead.plan:
        from vllm_accprobe.comparison.plan.units import make_plan

        plan = make_plan(*engine.open_both(golden, mine), taps=judging.taps, mapping=rules)
        _print_plan(plan.lines(), form)
        raise typer.Exit(0)
    if rejudge is not None:
        from dataclasses import replace

        from vllm_accprobe.cli import replay
        from vllm_accprobe.cli.output import say_notes
        from vllm_accprobe.comparison import store

        assert home is not None
        result = engine.rejudge(store.load(rejudge), standard=standard, floors=floors, rate=rate)
        result = replay.remembered(result, home) if work.replay is not False else result
        say_notes([replay.what_was_kept(result, home, work.replay)])
        result = replace(result, options=again, out=str(home))
    else:
        before = _print_before if form is Format.terminal else dump_pair.nothing
        result = dump_pair.compared(pair, mine, out, before)
    written = dump_pair.write(result, out, rejudge is None, vocabulary)
    if sheet is not None:
        from vllm_accprobe.report.table import write_csv_lines

        write_csv_lines(sheet, xray.TABLE_COLUMNS, xray.rows(result))
        written.append(sheet)
        typer.echo(xray.order(golden, mine), err=True)
    _print(result, form, verbosity, written)
    raise typer.Exit(0 if result.verdict == PASS else 1)


def _vocabulary(tokenizer: Path | None) -> Vocabulary | None:
    """Read before anything is compared: a wrong path is refused at once."""
    if tokenizer is None:
        return None
    from vllm_accprobe.report.html.data import Vocabulary

    return Vocabulary(tokenizer)


def _named(place: Path | None, option: Path | None, word: str, flag: str) -> Path | None:
    """The one that was named, or None. Raises CompareError where both were."""
    from vllm_accprobe.comparison.result import CompareError

    if place is not None and option is not None:
        raise CompareError(f"{word} is named twice, as {place} and as {flag} {option}: name it once")
    return place or option


def _again(judging: JudgeOptions, standard: str, rate: float) -> tuple[str, ...]:
    """The words that another comparison of the same two dumps needs, too (Comparison.options)."""
    from vllm_accprobe.comparison.result import FALSE_ALARM_RATE

    mapping, weights = judging.op_mapping_file, judging.weights
    out = ["--op-mapping-file", str(mapping)] if mapping is not None else []
    out += ["--taps", judging.taps] if judging.taps else []
    out += ["--standard", standard] if standard != "accprobe" else []
    out += [word for floor in judging.floor for word in ("--floor", str(floor))]
    out += ["--false-alarm-rate", str(rate)] if rate != FALSE_ALARM_RATE else []
    out += ["--weights", str(weights)] if weights is not None else []
    return tuple(out)


def _check_arguments(golden: Path | None, mine: Path | None, rejudge: Path | None, other: bool) -> None:
    from vllm_accprobe.comparison.result import CompareError

    if rejudge is None and (golden is None or mine is None):
        raise CompareError("give two dumps, GOLDEN and MINE, or --rejudge DIR; accprobe compare --help says more")
    if rejudge is not None and (golden is not None or other):
        raise CompareError("--rejudge judges what was measured: it takes no dumps, no --taps and no --plan")


def _check_sheet(sheet: Path | None, dumps: list[Path]) -> None:
    """Raises CommandError where torch_xray's table must not be written."""
    from vllm_accprobe.cli import places
    from vllm_accprobe.opcheck.compat.xray import TABLE_COLUMNS as COLUMNS

    if sheet is None:
        return
    places.check_place(sheet, dumps, "RESULT.csv")
    places.check_own(sheet, places.csv_with(*COLUMNS[:2]))
    places.writable(sheet.parent, "RESULT.csv")


# --- what is printed ---


def _print(comparison: Comparison, form: Format, verbosity: int, written: Iterable[Path]) -> None:
    """``verbosity`` is report.terminal's and concerns the terminal only."""
    if form is Format.terminal:
        from rich.console import Console

        from vllm_accprobe.report import terminal

        terminal.render(comparison, Console(highlight=False), verbosity=verbosity)
    elif form is Format.json:
        import json

        typer.echo(json.dumps(comparison.to_json(), indent=1))
    else:
        from vllm_accprobe.report import markdown

        lines = markdown.markdown_lines if form is Format.markdown else markdown.github_lines
        for line in lines(comparison):
            typer.echo(line)
        if form is Format.github:
            markdown.write_summary(comparison)
    if verbosity > 0:
        say_written(*written, err=form is not Format.terminal)


def _print_before(comparison: Comparison) -> None:
    """The verdict by comparison on stderr, while a replay that may change it goes on."""
    from vllm_accprobe.report import facts

    typer.echo(f"before replay: {facts.headline(comparison)}", err=True)


def _print_plan(lines: Iterable[str], form: Format) -> None:
    import json

    if form is Format.json:
        typer.echo(json.dumps({"schema": 1, "plan": list(lines)}, indent=1))
        return
    for line in lines:
        typer.echo(line)
