"""What `accprobe compare` does with what it recognises: two dumps, labelled tensors, two tables.

``accprobe compare DUMP`` of a dump with labels: the pairs that a program named with set_label, or run it first.

``accprobe compare GOLDEN.csv MINE.csv``: two machines, each against the same reference on the CPU.

Each table is of `opcheck`, of a generated test or msprobe's accuracy_checking_details. Prints what is wrong, the worst
first, and all that was not judged; writes details.csv (a row per output), result.csv (a row per call) and opdiff.md; of
msprobe's own files, or with -gpu and -npu, msprobe's two as well.

One pair of dumps compared as ``accprobe compare`` does it: replayed where that decides, written to its folder.

What the command line says is one value, `DumpPair`, and these functions take it: check, compare, write.

Not here: how a command is run (run.py), measuring (comparison/labelled_pairs.py), judging (opcheck/diff), what the
words on the command line mean and what is printed (compare.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_accprobe.cli import options, places
from vllm_accprobe.cli.endings import CommandError, NothingThere
from vllm_accprobe.cli.options import option
from vllm_accprobe.cli.output import answer, progress, say_notes, say_written

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.data import TokenTexts, Vocabulary


ALL_LABELS = "ACCPROBE_LABELS"
"""Environment variable for the command: 1 counts labels that no set_task_id precedes, too (vllm_accprobe/labels.py)."""
ENVS = ("ATB_OUTPUT_DIR", "ACLTRANSFORMER_HOME_PATH", "ASDOPS_LOG_TO_FILE_DIR")
"""Directories of the caller's own environment are searched, too, as the library does."""


def compare_labelled(dump: Path | None, opened: Any, how: Any, out: Path, verbose: bool) -> None:
    """opened: the dump where it is open already; how: compare.LabelOptions; out: for labels.csv and labels.json. Raises
    typer.Exit; with --exec the code is the command's own where the pairs pass and it failed."""
    from vllm_accprobe.comparison.labelled_pairs import compare_labels, count_pairs
    from vllm_accprobe.dump.label_files import LABEL_TAP
    from vllm_accprobe.formats.common.sniff import open_dump
    from vllm_accprobe.report import table as report

    limit = how.tolerance
    if limit is not None and not 0 <= limit < 1:
        raise CommandError(f"--tolerance: {limit} is no relative error; write for example 0.01")
    for directory in how.acl:
        places.require_directory(directory, "--acl")
    ours = {"labels.csv": places.csv_with(*report.LABEL_COLUMNS), "labels.json": places.SCHEMA_AND_VERDICT}
    if (dump is None) == (how.exec is None):
        raise CommandError("name a DUMP, or with --exec a command that labels tensors while it runs; one of the two")
    if how.exec is None and (how.dir is not None or how.types is not None):
        raise CommandError("--dir and --type are for --exec: they say what the command writes, and where")
    places.check(out, ours, dumps=[] if dump is None else [dump])
    code = 0
    if how.exec is not None:
        code, dump = _run(how.exec, how.dir, how.types)
    opened = opened or open_dump(dump)  # type: ignore[arg-type]
    roots = [*how.acl, *(Path(d) for name in ENVS if (d := os.environ.get(name)) and Path(d).is_dir())]
    with progress("comparing", count_pairs(opened)) as done:
        found = compare_labels(opened, roots, limit, done)
    say_notes(opened.problems)
    if not found.pairs and not found.unpaired:
        why = "; ".join(f"{n} x {reason}" for reason, n in found.skipped.items()) or "set_label was never called in it"
        raise NothingThere(f"{dump} holds no labels: {why}")
    out.mkdir(parents=True, exist_ok=True)
    written = report.write(found, out)
    for line in report.lines(found, None if verbose else 10):
        typer.echo(line)
    say_written(*written)
    answer(**report.to_json(found))
    verdict = report.verdict(found)
    if verdict is None:
        typer.echo(f"accprobe: {dump}: no pair of {LABEL_TAP}* could be compared", err=True)
    raise typer.Exit({"pass": code, "fail": 1, None: 3}[verdict])


def _run(line: str, place: str | None, types: str | None) -> tuple[int, Path]:
    """(the command's exit code, the dump with its labels). ATB writes, too, where ``types`` or the environment of its
    ancestor asks for it. Raises CommandError."""
    from vllm_accprobe.cli.run import launched, say
    from vllm_accprobe.run.atb import ANCESTOR, options_of

    atb = None
    if types is not None or os.environ.get(ANCESTOR, "0") not in ("", "0"):
        atb, notes = options_of({"types": types}, os.environ)
        for note in notes:
            say(note)
    ran = launched([line], {"dir": place}, atb, False, {ALL_LABELS: "1"})
    dumps = ran.watcher.dumps()
    if ran.code:
        say(f"the command ended with exit code {ran.code}")
    if not dumps:
        raise NothingThere("no label was captured: the command called no set_label of vllm_accprobe, or failed before")
    if len(dumps) > 1:
        named = ", ".join(map(str, dumps))
        raise CommandError(f"the command left {len(dumps)} dumps ({named}): compare each with `accprobe compare DUMP`")
    say(f"dump: {dumps[0]}")
    return ran.code, Path(dumps[0])


def compare_tables(
    golden: Path | None, mine: Path | None, joined: Path | None, how: Any, standard: str | None, out: Path,
    verbose: bool,
) -> None:  # fmt: skip
    """joined: torch_xray's table of both, to be written; how: compare.TableOptions. Raises typer.Exit."""
    from vllm_accprobe.opcheck import diff as lines
    from vllm_accprobe.opcheck.compat.msprobe import CompareFiles
    from vllm_accprobe.opcheck.compat.xray import SUMMARY_COLUMNS as SUMMARY
    from vllm_accprobe.opcheck.compat.xray import SummaryFile
    from vllm_accprobe.opcheck.diff import DiffTotals, SheetError, open_diff
    from vllm_accprobe.standards.finding import ERROR

    theirs = how.gpu is not None or how.npu is not None
    if theirs and (golden is not None or mine is not None):
        raise CommandError("-gpu and -npu stand for GOLDEN.csv and MINE.csv: name each file once")
    golden, mine = (how.gpu, how.npu) if theirs else (golden, mine)
    if golden is None or mine is None:
        raise CommandError("two files are needed: GOLDEN.csv MINE.csv, or -gpu FILE -npu FILE")
    for path in (golden, mine):
        if not path.exists():
            raise CommandError(
                f"{path} does not exist: name an opcheck.csv, a generated test's csv or msprobe's details"
            )
    standard = standard or ("msprobe" if joined is None else "xray")
    if joined is not None:
        places.check_place(joined, (), "RESULT.csv")
        places.check_own(joined, places.csv_with(*SUMMARY[:4]))
        places.writable(joined.parent, "RESULT.csv")
    ours = {
        "details.csv": places.matching(r"\A[^\n]*,dtype,shape,api,algorithm,level,status,message,"),
        "result.csv": places.matching(r"\A[^\n]*,api,forward,backward,outputs,algorithm,message\n"),
        "opdiff.md": places.matching(r"\A# [^\n]*\n\nGolden: `"),
    }
    places.check(out, ours)
    try:
        diff, totals = open_diff(golden, mine, standard, how.algorithm, how.by), DiffTotals()
        places.refuse_same(("GOLDEN", diff.golden.path), ("MINE", diff.mine.path), "file")
        out.mkdir(parents=True, exist_ok=True)
        with progress("opdiff", diff.mine.count() // lines.STEP) as done:
            msprobes = CompareFiles(out, time.strftime("%Y%m%d%H%M%S"))
            written = theirs or lines.is_msprobe(diff)
            table = SummaryFile(joined) if joined is not None else None
            gathering = [*([msprobes.add] if written else []), *([table.add] if table is not None else [])]

            def also(compared: object) -> None:
                for add in gathering:
                    add(compared)

            lines.write_details(diff, out / "details.csv", totals, done, also)
    except SheetError as e:
        raise CommandError(str(e)) from None
    lines.write_result(diff, out / "result.csv", totals)
    if not totals.judged:
        for line in lines.left_out(diff, totals):
            typer.echo(line)
        why = next(iter(totals.skipped), "no output is in both files" if totals.alone else "the files have no rows")
        raise NothingThere(f"nothing could be judged: {lines.safe(why)} ({golden}, {mine})")
    (out / "opdiff.md").write_text(lines.markdown(diff, totals), encoding="utf-8")
    for line in lines.lines(diff, totals, None if verbose else 10):
        typer.echo(line)
    more = [*(msprobes.write(totals) if written else ()), *([table.write()] if table is not None else [])]
    say_written(out / "result.csv", out / "details.csv", out / "opdiff.md", *more)
    answer(
        verdict="fail" if totals.statuses[ERROR] else "pass", standard=diff.standard, judged=totals.judged,
        statuses=totals.statuses, operators=dict(lines.operators(totals)), skipped=totals.skipped, alone=totals.alone,
        worst=[
            {"place": dict(zip(diff.keys, c.row.key, strict=False)), "api": c.api, "status": c.finding.status,
             "message": c.finding.message} for c in totals.worst_first()
        ],
    )  # fmt: skip
    raise typer.Exit(1 if totals.statuses[ERROR] else 0)


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
class DumpPair:
    """Golden and the options, as the command line has them. standard, rate: in force; rules: of the mapping file;
    options: what a comparison of the same dumps needs again (Comparison.options); vocabulary: of the model, for tokens
    as text."""

    golden: Path
    judging: JudgeOptions
    work: WorkOptions
    standard: str
    rate: float
    rules: Any
    options: tuple[str, ...]
    vocabulary: Vocabulary | None = None


def compared(pair: DumpPair, mine: Path, out: Path, before: Callable[[Comparison], object]) -> Comparison:
    """The finished comparison; ``out`` keeps its parts while it goes on. before: gets a verdict that a replay may
    change. Raises what the engine and the replay raise."""
    from dataclasses import replace

    from vllm_accprobe.cli import replay
    from vllm_accprobe.cli.endings import going_on
    from vllm_accprobe.comparison import engine, store

    judging, work = pair.judging, pair.work
    request = replay.ReplayRequest(
        pair.golden, mine, work.replay, judging.taps, judging.op_mapping_file, pair.rate, work.replay_seconds,
        judging.weights,
    )  # fmt: skip
    going_on("what was measured is", out / store.UNFINISHED)
    with replay.begun(request) as begun:
        with _progress("comparing") as advance, _tidy(out):
            result = engine.compare(
                pair.golden, mine, progress=advance, standard=pair.standard, taps=judging.taps, mapping=pair.rules,
                resume=out, ray=work.ray, jobs=work.jobs, floors=judging.floors, rate=pair.rate,
            )  # fmt: skip
        result = replay.replayed(result, request, begun, out, before)
    return replace(result, options=pair.options, out=str(out))


def write(
    result: Comparison, out: Path, measured: bool = True, vocabulary: Vocabulary | None = None
) -> list[Path]:  # fmt: skip
    """compare.csv, .json, .html, mine's tokens as text where there is a vocabulary; and measured.npz, where this is
    what was ``measured`` just now. Raises OSError."""
    import json

    from vllm_accprobe.comparison import store
    from vllm_accprobe.report import html, table

    out.mkdir(parents=True, exist_ok=True)
    table.write_csv(result, out / "compare.csv")
    (out / "compare.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    html.write_html(result, out / "compare.html", tokens=_texts(vocabulary, result))
    if result.measured is not None and measured:
        store.save(result.measured, out)
        store.forget(out)
    return [out / name for name in ("compare.csv", "compare.json", "compare.html")]


def _texts(vocabulary: Vocabulary | None, result: Comparison) -> TokenTexts | None:
    """Mine's tokens as text; a line on stderr where no ids were recorded."""
    if vocabulary is None:
        return None
    from vllm_accprobe.report.html.data import token_texts

    texts = token_texts(vocabulary, result.mine_path)
    if texts.missing:
        typer.echo(f"accprobe: {texts.missing}", err=True)
    return texts


def check_dumps(golden: Path | None, mine: Path | None, floors: list[Path]) -> None:
    """Raises CommandError where two of them are the same dump."""
    from vllm_accprobe.cli.places import refuse_same

    if golden is None or mine is None:
        return
    refuse_same(("GOLDEN", golden), ("MINE", mine))
    for floor in floors:  # of what is judged, a floor would excuse all that is wrong with it
        refuse_same(("--floor", floor), ("GOLDEN", golden))
        refuse_same(("--floor", floor), ("MINE", mine))


def check_out(out: Path, dumps: list[Path], measured: bool) -> None:
    """Raises CommandError where ``out`` is no place for what `write` writes. measured: as there."""
    from vllm_accprobe.cli import places
    from vllm_accprobe.comparison.pair import COLUMNS

    ours = {
        "compare.csv": places.csv_with(*COLUMNS[:7]),
        "compare.json": places.SCHEMA_AND_VERDICT,
        "compare.html": places.matching("<title>[^<]*accprobe"),
    }
    if measured:
        ours["measured.npz"] = lambda head: head[30:38] == b"meta.npy"
        ours["replay.json"] = places.matching(r"\A\{\"blamed\":")
    places.check(out, ours, dumps=dumps)


def nothing(result: object) -> None:
    """What is read by programs holds the last verdict alone."""


@contextlib.contextmanager
def _tidy(out: Path) -> Iterator[None]:
    """Where there is nothing to compare, nothing stays behind."""
    from vllm_accprobe.comparison import store
    from vllm_accprobe.comparison.result import NothingCompared

    there = out.exists()
    try:
        yield
    except NothingCompared:
        store.forget(out)
        if not there:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal's stderr, nothing in a pipe."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))
