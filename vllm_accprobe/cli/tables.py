"""``accprobe compare GOLDEN.csv MINE.csv``: two machines, each against the same reference on the CPU.

Each table is of `opcheck`, of a generated test or msprobe's accuracy_checking_details. Prints what is wrong, the worst
first, and all that was not judged; writes details.csv (a row per output), result.csv (a row per call) and opdiff.md; of
msprobe's own files, or with -gpu and -npu, msprobe's two as well. Not here: judging (opcheck/diff).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli import places
from vllm_accprobe.cli.endings import CommandError, NothingThere
from vllm_accprobe.cli.output import answer, progress, say_written


def compare_tables(
    golden: Path | None, mine: Path | None, joined: Path | None, how: Any, standard: str | None, out: Path,
    verbose: bool,
) -> None:  # fmt: skip
    """joined: torch_xray's table of both, to be written; how: compare.TableOptions. Raises typer.Exit."""
    from vllm_accprobe.opcheck.diff import lines
    from vllm_accprobe.opcheck.diff.csv_rows import SheetError
    from vllm_accprobe.opcheck.diff.verdicts import DiffTotals, open_diff
    from vllm_accprobe.opcheck.precheck.compare_csv import CompareFiles
    from vllm_accprobe.opcheck.precheck.summary_csv import COLUMNS as SUMMARY
    from vllm_accprobe.opcheck.precheck.summary_csv import SummaryFile
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
