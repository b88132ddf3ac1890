"""``accprobe opdiff GOLDEN.csv MINE.csv``: two machines against the same CPU reference."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from vllm_accprobe.cli.common.json_answer import answer, say_written
from vllm_accprobe.cli.common.options import CommandError, NothingThere, progress


def opdiff(
    golden: Path = typer.Argument(
        None, metavar="GOLDEN.csv", help="Of the machine that is trusted, a GPU perhaps; or its folder."
    ),
    mine: Path = typer.Argument(None, metavar="MINE.csv", help="Of the other, an NPU or XPU perhaps."),
    joined: Path = typer.Argument(
        None, metavar="[RESULT.csv]", help="torch_xray's table of both, too, by its standard; see docs/migration.md."
    ),
    gpu: Path = typer.Option(None, "-gpu", "--gpu_csv_path", metavar="FILE", help="GOLDEN.csv as msprobe says it."),
    npu: Path = typer.Option(None, "-npu", "--npu_csv_path", metavar="FILE", help="MINE.csv as msprobe says it."),
    standard: str = typer.Option(
        None,
        "--standard",
        metavar="NAME",
        help="The limits: {standards} (operator: both verdicts); msprobe where none is named.",
    ),
    algorithm: list[str] = typer.Option(
        [],
        "--algorithm",
        metavar="GLOB=NAME",
        help="Judge these operators by absolute, benchmark, binary, ulp, dual-1000 or accumulative. Can be repeated.",
    ),
    by: str = typer.Option(
        "call",
        "--by",
        metavar="WHAT",
        help="call: output by output; tap, operator: what a module or an operator did over all its calls.",
    ),
    out: Path = typer.Option(
        Path("accprobe-opdiff"), "--out", "-o", "--out_path", metavar="DIR", help="Where the results go."
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more: the 200 worst outputs, not 10."),
) -> None:
    """Join two machines' opcheck.csv, generated tests' csv or msprobe's accuracy_checking_details.

    Prints what is wrong, the worst first, and all that was not judged; writes details.csv (a row per output),
    result.csv (a row per call) and opdiff.md; of msprobe's own files, or with -gpu and -npu, msprobe's two as well.
    Exit code 0: pass, 1: an output is wrong, 2: unreadable input, 3: nothing could be judged.
    """
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.common.same import refuse_same
    from vllm_accprobe.opcheck.diff import lines
    from vllm_accprobe.opcheck.diff.csv_rows import SheetError
    from vllm_accprobe.opcheck.diff.verdicts import DiffTotals, open_diff
    from vllm_accprobe.opcheck.precheck.compare_csv import CompareFiles
    from vllm_accprobe.opcheck.precheck.summary_csv import COLUMNS as SUMMARY
    from vllm_accprobe.opcheck.precheck.summary_csv import SummaryFile
    from vllm_accprobe.standards.finding import ERROR

    theirs = gpu is not None or npu is not None
    if theirs and (golden is not None or mine is not None):
        raise CommandError("-gpu and -npu stand for GOLDEN.csv and MINE.csv: name each file once")
    golden, mine = (gpu, npu) if theirs else (golden, mine)
    if golden is None or mine is None:
        raise CommandError("two files are needed: GOLDEN.csv MINE.csv, or -gpu FILE -npu FILE")
    for path in (golden, mine):
        if not path.exists():
            raise CommandError(
                f"{path} does not exist: name an opcheck.csv, a generated test's csv or msprobe's details"
            )
    standard = standard or ("msprobe" if joined is None else "xray")
    if joined is not None:
        outputs.check_place(joined, (), "RESULT.csv")
        known = outputs.csv_with(*SUMMARY[:4])
        if joined.is_symlink() or (joined.exists() and not outputs.is_ours(joined, known)):
            raise CommandError(f"{joined} is not of this command: nothing is overwritten; name another file")
        outputs.writable(joined.parent, "RESULT.csv")
    ours = {
        "details.csv": outputs.matching(r"\A[^\n]*,dtype,shape,api,algorithm,level,status,message,"),
        "result.csv": outputs.matching(r"\A[^\n]*,api,forward,backward,outputs,algorithm,message\n"),
        "opdiff.md": outputs.matching(r"\A# [^\n]*\n\nGolden: `"),
    }
    outputs.check(out, ours)
    try:
        diff, totals = open_diff(golden, mine, standard, algorithm, by), DiffTotals()
        refuse_same(("GOLDEN", diff.golden.path), ("MINE", diff.mine.path), "file")
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
