"""What `accprobe compare` does with what is no pair of dumps: one labelled dump, tables, runs to calibrate by.

One dump: the pairs that a program named with set_label, or run it first. Two tables (of `opcheck`, a generated test or
msprobe's accuracy_checking_details): two machines, each against the same reference. One file of another tool's results
(`inspect` shows it, too, and a run of an evaluation): what it says in its own words. Calibration: what runs of golden's
side differ by, a few numbers per tap; with --profile how one dump's machine computes, operator by operator.

Not here: which it is (compare.py), two dumps (compare_pair.py), measuring (comparison/labelled_pairs.py), judging
(opcheck/diff).
"""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli import output_paths
from vllm_accprobe.cli.output import answer, say_notes, say_written, show
from vllm_accprobe.progress import USUAL as say, progress
from vllm_accprobe.refusals import CODES, CommandError, NothingThere
from vllm_accprobe.whole_file import write_text

ALL_LABELS = "ACCPROBE_LABELS"
"""Environment variable for the command: 1 counts labels that no set_task_id precedes, too (vllm_accprobe/labels.py)."""
_NAMES = 10_000
"""Of files and folders, in a folder that is looked through for an evaluation."""
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
        output_paths.require_directory(directory, "--acl")
    ours = {"labels.csv": output_paths.csv_with(*report.LABEL_COLUMNS), "labels.json": output_paths.SCHEMA_AND_VERDICT}
    if (dump is None) == (how.exec is None):
        raise CommandError("name a DUMP, or with --exec a command that labels tensors while it runs; one of the two")
    if how.exec is None and (how.dir is not None or how.types is not None):
        raise CommandError("--dir and --type are for --exec: they say what the command writes, and where")
    output_paths.check(out, ours, dumps=[] if dump is None else [dump])
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
    show(report.lines(found, None if verbose else 10))
    answer(**report.to_json(found))
    out.mkdir(parents=True, exist_ok=True)
    say_written(*report.write(found, out))
    verdict = report.verdict(found)
    if verdict is None:
        typer.echo(f"accprobe: {dump}: no pair of {LABEL_TAP}* could be compared", err=True)
    raise typer.Exit(CODES[verdict] or code)


def _run(line: str, place: str | None, types: str | None) -> tuple[int, Path]:
    """(the command's exit code, the dump with its labels). ATB writes, too, where ``types`` or the environment of its
    ancestor requires it. Raises CommandError."""
    from vllm_accprobe.cli.run import launched
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


def show_results(path: Path | None, judge: bool = False) -> None:
    """What a file of another tool's results says; nothing of another file. judge: typer.Exit by its verdicts. Raises
    DumpError."""
    from vllm_accprobe.formats.common import result_tables
    from vllm_accprobe.report.text import count, safe

    if path is None or (found := result_tables.read(path)) is None:
        return
    kind = found.kind
    words = (f"{column}: " + ", ".join(f"{n:,} {safe(word, 40)}" for word, n in verdicts.most_common())
             for column, verdicts in found.verdicts.items())  # fmt: skip
    first = "; ".join((f"{kind.what}: {count(found.rows, 'row')}", *words))
    lines = [first + ("" if found.judged else ": no verdict")]
    for number, name, row in found.bad:
        place = kind.place(name) if kind.place is not None else None
        where = f" (tap {' '.join(filter(None, place))})" if place else ""
        cells = [f"{c} {row[c]}" for c in (*kind.verdicts, *kind.values, kind.message) if row.get(c)]
        why = ", ".join(cells)
        lines.append(safe(f"  row {number:,}: {name}{where}{': ' if name else ''}{why}", 500))
    if hidden := found.errors + found.warnings - len(found.bad):
        lines.append(f"  ... {hidden:,} more in the file")
    if found.note:
        lines.append(found.note)
    if found.alone:
        lines.append(f"{count(found.alone, 'row')} without a {kind.partner}: nothing was compared there, whatever "
                     f"{kind.verdicts[0]} says")  # fmt: skip
    if found.unparsed:
        lines.append(f"{count(found.unparsed, 'name')} that cannot be parsed, the first {safe(found.first_unparsed)!r}")
    for line in (*lines, kind.then):
        typer.echo(line)
    code = 1 if found.errors else 0 if found.judged else 3
    answer(kind=kind.what, verdict={0: "pass", 1: "fail", 3: None}[code], rows=found.rows, verdicts=found.verdicts,
           bad=[{"row": number, "name": name, **row} for number, name, row in found.bad], without_partner=found.alone,
           unparsed_names=found.unparsed, note=found.note, next=kind.then)  # fmt: skip
    if judge:
        raise typer.Exit(code)


def evaluation(path: Path | None) -> Any:
    """The answers of an evaluation's run (gate/evaluations.Side); None for another path, and for a folder with more
    names than a run has."""
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.gate import evaluations

    if path is None or next(islice(path.rglob("*"), _NAMES, None), None) is not None:
        return None
    try:
        return evaluations.open_side(path)
    except (evaluations.SamplesError, DumpError, OSError):
        return None


def show_evaluation(path: Path) -> bool:
    """What a run of an evaluation says; whether ``path`` is one."""
    from vllm_accprobe.report import servers

    if (side := evaluation(path)) is None:
        return False
    lines = servers.side_lines(side)
    for line in lines:
        typer.echo(line)
    answer(kind=side.tool, answers=len(side.answers), about=lines, left_out=side.left_out)
    return True


def compare_tables(
    golden: Path | None, mine: Path | None, joined: Path | None, how: Any, standard: str | None, out: Path,
    verbose: bool,
) -> None:  # fmt: skip
    """joined: torch_xray's table of both, to be written; how: compare.TableOptions. Raises typer.Exit."""
    from vllm_accprobe.opcheck import diff as lines
    from vllm_accprobe.opcheck.compat.msprobe import CompareFiles
    from vllm_accprobe.opcheck.compat.xray import SUMMARY_COLUMNS as SUMMARY, SummaryFile
    from vllm_accprobe.opcheck.diff import DiffTotals, open_diff
    from vllm_accprobe.standards.finding import ERROR

    theirs = how.gpu is not None or how.npu is not None
    if theirs and (golden is not None or mine is not None):
        raise CommandError("-gpu and -npu stand for GOLDEN.csv and MINE.csv: name each file once")
    golden, mine = (how.gpu, how.npu) if theirs else (golden, mine)
    if golden is None or mine is None:
        raise CommandError("two files are needed: GOLDEN.csv MINE.csv, or -gpu FILE -npu FILE")
    for path in (golden, mine):
        if not path.exists():
            kinds = "an opcheck.csv, a generated test's csv or msprobe's details"
            raise CommandError(f"{path} does not exist: name {kinds}")
    standard = standard or ("msprobe" if joined is None else "xray")
    if joined is not None:
        output_paths.check_table(joined, "RESULT.csv", SUMMARY[:4])
    ours = {
        "details.csv": output_paths.matching(r"\A[^\n]*,dtype,shape,api,algorithm,level,status,message,"),
        "result.csv": output_paths.matching(r"\A[^\n]*,api,forward,backward,outputs,algorithm,message\n"),
        "opdiff.md": output_paths.matching(r"\A# [^\n]*\n\nGolden: `"),
    }
    output_paths.check(out, ours)
    diff, totals = open_diff(golden, mine, standard, how.algorithm, how.by), DiffTotals()
    output_paths.refuse_same(("GOLDEN", diff.golden.path), ("MINE", diff.mine.path), "file")
    out.mkdir(parents=True, exist_ok=True)
    more: list[Any] = [CompareFiles(out, time.strftime("%Y%m%d%H%M%S"))] if theirs or lines.is_msprobe(diff) else []
    more += [] if joined is None else [SummaryFile(joined)]

    def also(compared: object) -> None:
        for one in more:
            one.add(compared)

    with progress("opdiff", diff.mine.count() // lines.STEP) as done:
        lost = lines.write_details(diff, out / "details.csv", totals, done, also)
    if not totals.judged:
        show(lines.left_out(diff, totals))
        why = next(iter(totals.skipped), "no output is in both files" if totals.alone else "the files have no rows")
        raise NothingThere(f"nothing could be judged: {lines.safe(why)} ({golden}, {mine})")
    show(lines.lines(diff, totals, None if verbose else 10))
    answer(
        verdict="fail" if totals.statuses[ERROR] else "pass", standard=diff.standard, judged=totals.judged,
        statuses=totals.statuses, operators=dict(lines.operators(totals)), skipped=totals.skipped, alone=totals.alone,
        worst=[
            {"place": dict(zip(diff.keys, c.row.key, strict=False)), "api": c.api, "status": c.finding.status,
             "message": c.finding.message} for c in totals.worst_first()
        ],
    )  # fmt: skip
    if lost is not None:
        raise lost
    lines.write_result(diff, out / "result.csv", totals)
    write_text(out / "opdiff.md", lines.markdown(diff, totals))
    further = [path for one in more for path in one.write(totals)]
    say_written(out / "result.csv", out / "details.csv", out / "opdiff.md", *further)
    raise typer.Exit(int(bool(totals.statuses[ERROR])))


def calibrate(golden: Path | None, others: list[Path], how: Any, weights: Path | None, out: Path) -> None:
    """how: compare.CalibrateOptions; out: a folder, for calibration.json or profile.json. Raises CommandError."""
    if golden is None:
        raise CommandError("name runs of golden's side: accprobe compare GOLDEN RUN... --calibrate OUT")
    if how.profile:
        if others or how.accept_failing:
            raise CommandError("--profile is of one dump: leave out the others, or --profile")
        _profile(golden, weights, out)
        return
    if not others:
        raise CommandError("name a further run of golden's side behind GOLDEN, or ask for --profile")
    if weights is not None:
        raise CommandError("--weights goes with --profile")
    _floor(golden, others, out, how.accept_failing)


def _floor(golden: Path, others: list[Path], out: Path, failing: bool) -> None:
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.judge.calibration import KIND, NAME

    for i, other in enumerate(others):
        for name, earlier in (("GOLDEN", golden), *(("OTHER", o) for o in others[:i])):
            output_paths.refuse_same((name, earlier), ("OTHER", other))
    output_paths.check(out, {NAME: output_paths.matching(f'\\A\\{{"kind":\\s*"{KIND}"')}, dumps=[golden, *others])
    found = engine.calibrate(golden, others, failing=failing)
    path = found.save(out)
    typer.echo(f"{len(found.floors)} tensors from {len(found.runs)} run{'s' * (len(found.runs) != 1)} ({found.source})")
    for tap, worst in sorted(found.origins.items(), key=lambda o: -o[1])[:10]:
        typer.echo(f"golden's own runs differ at {tap}: {worst:.3g}; as much of it is no origin")
    say_written(path)
    answer(tensors=len(found.floors), runs=found.runs, source=found.source, origins=found.origins)


def _profile(dump: Path, model: Path | None, out: Path) -> None:
    from vllm_accprobe.cli.opcheck import opened_calls, require_torch
    from vllm_accprobe.judge.profile import NAME, OURS, Profile, host_of

    require_torch("compare --calibrate --profile")
    if not dump.exists():
        raise CommandError(f"{dump} does not exist: name a dump's directory or file")
    output_paths.check(out, {NAME: output_paths.matching(OURS)}, dumps=[dump])
    from vllm_accprobe.opcheck.machine_precision import of_machine
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run import pair, table

    calls = opened_calls(dump, model)
    taps = len(calls.taps())
    with progress("replaying", taps, steps=True) as to:
        [side] = pair.check_both([calls], default_references(), [], lambda done, of: to(done))
    _, found = of_machine.settle(side.rows)
    if not found.habits:
        raise NothingThere(f"{dump}: nothing of how its machine computes could be measured")
    show(table.computes(found))
    out.mkdir(parents=True, exist_ok=True)
    path = out / NAME
    write_text(path, Profile(found.habits, host_of(calls.dump.run), found.units).to_json())
    say_written(path)
    answer(habits=found.habits, units=found.units, unknown=found.unknown)
