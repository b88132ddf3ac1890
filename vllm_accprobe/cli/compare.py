"""``accprobe compare GOLDEN MINE``: which operator made the difference, and how large it is.

What is compared is recognised: two dumps, one dump whose tensors a program labelled, two tables of operators; with
--calibrate runs of golden's side. Not here: two dumps (compare_pair.py), the others (compare_other.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_accprobe.cli import options
from vllm_accprobe.cli.aliases import is_quiet
from vllm_accprobe.cli.options import argument, hidden, option
from vllm_accprobe.cli.output import Format, answered
from vllm_accprobe.refusals import CommandError


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and where the results go."""

    golden: Path | None = argument("GOLDEN", "The dump, or table, to trust.", None)
    mine: Path | None = argument("MINE", "The dump, or table, to judge.", None)
    sheet: Path | None = argument("[RESULT.csv]", "torch_xray's table of both, by its standard; see docs/migration.md.",
                                  None)  # fmt: skip
    further: list[Path] = argument("[RUN]...", "Further runs, with --calibrate.", [])
    out: Path | None = options.out("compare.csv, .json, .html; accprobe-report, or DIR-rejudged", None)
    golden_path: Path | None = hidden("--golden-path", None, "As GOLDEN (ait, msit).", metavar="GOLDEN")
    my_path: Path | None = hidden("--my-path", None, "As MINE (ait, msit).", metavar="MINE")


@dataclass(frozen=True)
class InsteadOptions:
    """What is done in place of a comparison."""

    plan: bool = option("--plan", False, "Only print what would be done: what is compared with what. Writes nothing.")
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
    accept_failing: bool = option("--accept-failing", False, "With --calibrate: also take runs that fail; what differs "
                                  "in them is then never reported.")  # fmt: skip


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
class JudgeOptions:
    """By which limits, and of which tensors."""

    op_mapping_file: Path | None = option("--op-mapping-file", None, "YAML or JSON: which place of mine is which of "
                                          "golden, see docs/formats.md.", metavar="FILE")  # fmt: skip
    taps: str | None = option("--taps", None, "Only taps that match these globs; '!...' excludes.", metavar="GLOBS")
    standard: str | None = option("--standard", None, "The limits: {standards}; accprobe by default. Of two tables: "
                                  "{tables}; msprobe by default.", metavar="NAME")  # fmt: skip
    floor: list[str] = options.floors()
    rate: float | None = options.rate()
    weights: Path | None = options.weights()

    @property
    def floors(self) -> list[Path]:
        return [Path(f) for f in self.floor]


@dataclass(frozen=True)
class WorkOptions:
    """How it is computed."""

    ray: str | None = option("--ray", None, "Measure on the machines of the Ray cluster at this address.",
                             metavar="ADDRESS")  # fmt: skip
    jobs: int = options.jobs(0)
    replay: bool | None = option("--replay/--no-replay", None, "Run all of both sides' operators again against "
                                 "references, which decides, or none. Needs torch. By default as many as "
                                 "--replay-seconds allow.")  # fmt: skip
    replay_seconds: float = option("--replay-seconds", 60.0, "Time for running operators again: what is suspected and "
                                   "what failed first, then some of all. Default: 60; 0: none.", min=0.0,
                                   show_default=False, metavar="S")  # fmt: skip


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

    Prints the verdict and the culprit first; writes compare.csv (a row per pair), compare.html, compare.json, and
    measured.npz, from which --rejudge judges again. The same command continues an interrupted comparison.

    Also compares the pairs of one dump with labels (set_label); two tables of operators (opcheck.csv, a generated
    test's, msprobe's accuracy_checking_details); and reads one file of msprobe's or SGLang's results. With --calibrate:
    writes by what runs of golden's side differ, for --floor.

    Exit code 0: pass, 1: differences beyond the limits, 2: unreadable input, 3: nothing could be compared.
    """
    from vllm_accprobe.cli import compare_other
    from vllm_accprobe.comparison.result import CompareError
    from vllm_accprobe.dump.files import DumpError

    golden = _named(what.golden, what.golden_path, "GOLDEN", "-gp")
    mine = _named(what.mine, what.my_path, "MINE", "-mp")
    verbose, as_json = printed.verbosity > 1, printed.format is Format.json
    kind, opened = _kind(name, golden, mine, instead, calibrating, of_tables, of_labels)
    if kind == "pair":
        from vllm_accprobe.cli.compare_pair import compare_dumps

        options.refuse("two dumps", calibrating, of_tables, of_labels)
        if what.further:
            raise CommandError(f"{what.further[0]}: two dumps are compared; several runs go with --calibrate OUT")
        from vllm_accprobe.cli import compare_other

        try:
            compare_dumps(golden, mine, what, judging, work, instead, printed)
        except (DumpError, CompareError):
            for side in filter(None, map(compare_other.evaluation, (golden, mine))):
                words = f"`accprobe eval-diff {golden} {mine}`"
                raise CommandError(f"answers of {side.tool} are no dumps: {words}") from None
            raise
    from vllm_accprobe.cli import compare_other

    run: Any
    if kind == "calibrate":
        options.refuse("--calibrate", instead, of_tables, of_labels, work, judging, but=("--weights",))
        if calibrating.calibrate is None and name == "compare":
            raise CommandError("--profile and --accept-failing go with --calibrate OUT")
        others = [d for d in (mine, what.sheet, *what.further) if d is not None]
        out = calibrating.calibrate or what.out or Path("accprobe-floor")
        run = partial(compare_other.calibrate, golden, others, calibrating, judging.weights, out)
    elif kind == "labels":
        options.refuse("one labelled dump", instead, calibrating, of_tables, work, judging)
        if mine is not None:
            raise CompareError("labels are of one dump, and MINE is named as well")
        out = what.out or Path("accprobe-labels")
        run = partial(compare_other.compare_labelled, golden, opened, of_labels, out, verbose)
    elif kind == "results":
        options.refuse("one file of results", instead, calibrating, of_tables, of_labels, work, judging)
        run = partial(compare_other.show_results, golden, judge=True)
    else:
        options.refuse("two tables", instead, calibrating, of_labels, work, judging, but=("--standard",))
        if what.further:
            raise CompareError("two tables are compared: leave out what follows RESULT.csv")
        out, standard = what.out or Path("accprobe-opdiff"), judging.standard
        run = partial(compare_other.compare_tables, golden, mine, what.sheet, of_tables, standard, out, verbose)
    answered(name, as_json, run)


def _named(place: Path | None, option: Path | None, word: str, flag: str) -> Path | None:
    """The one that was named, or None. Raises CompareError where both were."""
    from vllm_accprobe.comparison.result import CompareError

    if place is not None and option is not None:
        raise CompareError(f"{word} is named twice, as {place} and as {flag} {option}: name it once")
    return place or option


def _kind(
    name: str, golden: Path | None, mine: Path | None, instead: InsteadOptions, calibrating: CalibrateOptions,
    of_tables: TableOptions, of_labels: LabelOptions,
) -> tuple[str, Any]:  # fmt: skip
    """(calibrate, labels, opdiff, results or pair; the dump where it was opened for that). name: of the command that
    was typed, which is the kind itself where it is an older one."""
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
        from vllm_accprobe.formats.common import result_tables

        if result_tables.kind_of(result_tables.header_of(golden)):
            return "results", None
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
