"""Two dumps compared as ``accprobe compare`` does it: replayed where that decides, printed, and written to a folder.

Not here: what is compared (compare.py), the measuring (comparison/), the replay (opcheck/proof/replay_process.py)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import typer

from vllm_accprobe.cli import output_paths
from vllm_accprobe.cli.endings import going_on, imported
from vllm_accprobe.cli.output import Format, say_notes, say_written, show
from vllm_accprobe.comparison import engine, store
from vllm_accprobe.comparison.pair import COLUMNS
from vllm_accprobe.comparison.result import FALSE_ALARM_RATE, PASS, CompareError, Comparison, NothingCompared
from vllm_accprobe.golden.estimated import ComparedSides, compared_sides
from vllm_accprobe.opcheck.compat import xray
from vllm_accprobe.opcheck.proof import replay_process as replay
from vllm_accprobe.progress import on_terminal, waiting
from vllm_accprobe.report.html.data import Vocabulary, token_texts
from vllm_accprobe.report.text import size
from vllm_accprobe.whole_file import NoSpace, write_text

DEFAULT = "accprobe-report"


def compare_dumps(
    golden: Any, mine: Any, what: Any, judging: Any, work: Any, instead: Any, printed: Any
) -> NoReturn:
    """Two dumps (paths or None), or a saved comparison. The groups are those of compare.py: CompareOptions,
    JudgeOptions, WorkOptions, InsteadOptions, PrintOptions. Raises typer.Exit."""
    sheet, rejudge, form = what.sheet, instead.rejudge, printed.format
    output_paths.require_directory(judging.weights, "--weights")
    rate = FALSE_ALARM_RATE if judging.rate is None else judging.rate
    engine.check_rate(rate)
    _check_arguments(golden, mine, judging, work, instead)
    dumps = [d for d in (golden, mine) if d is not None]
    if golden is not None and mine is not None:
        output_paths.refuse_same(("GOLDEN", golden), ("MINE", mine))
        for floor in judging.floors:  # of what is judged, a floor would excuse all that is wrong with it
            output_paths.refuse_same(("--floor", floor), ("GOLDEN", golden))
            output_paths.refuse_same(("--floor", floor), ("MINE", mine))
    standard = xray.standard_for(sheet, judging.standard, rejudge is not None or instead.plan)
    if sheet is not None:
        output_paths.check_table(sheet, "RESULT.csv", xray.TABLE_COLUMNS[:2], dumps)
    home = rejudge if rejudge is None or rejudge.is_dir() else rejudge.parent
    out = what.out or (Path(DEFAULT) if home is None else _rejudged(home))
    if not instead.plan:
        _check_out(out, [*dumps, *judging.floors], rejudge is None)
    rules = engine.find_mapping(judging.op_mapping_file)
    vocabulary = None if instead.tokenizer is None else Vocabulary(instead.tokenizer)  # a wrong path is refused at once
    again = _again(judging, standard, rate)
    if rejudge is not None:
        assert home is not None
        result = engine.rejudge(store.load(rejudge), standard=standard, floors=judging.floors, rate=rate)
        result = replay.remembered(result, home) if work.replay is not False else result
        say_notes([replay.what_was_kept(result, home, work.replay)])
        result = replace(result, options=again, out=str(home))
    else:
        with compared_sides(golden, mine) as sides:
            if instead.plan:
                _show_plan(sides, judging, rules, form)
            result = _compared(sides, judging, work, rules, standard, rate, out, form)
        result = replace(result, options=again, out=str(out))
    _print(result, form, printed.verbosity)
    try:
        with waiting(lambda: f"writing the report to {out}"):
            written = _write(result, out, rejudge is None, vocabulary)
    except NoSpace:
        store.forget(out)
        raise
    if sheet is not None:
        from vllm_accprobe.report.table import write_csv_lines

        write_csv_lines(sheet, xray.TABLE_COLUMNS, xray.rows(result))
        written.append(sheet)
        typer.echo(xray.order(golden, mine), err=True)
    if printed.verbosity > 0:
        say_written(*written, err=form is not Format.terminal)
    raise typer.Exit(int(result.verdict != PASS))


def _show_plan(sides: ComparedSides, judging: Any, rules: Any, form: Format) -> NoReturn:
    from vllm_accprobe.comparison.plan.make_plan import make_plan

    plan = make_plan(*engine.open_both(sides.golden, sides.mine), taps=judging.taps, mapping=rules).lines()
    typer.echo(json.dumps({"schema": 1, "plan": list(plan)}, indent=1) if form is Format.json else "\n".join(plan))
    raise typer.Exit(0)


def _compared(
    sides: ComparedSides, judging: Any, work: Any, rules: Any, standard: str, rate: float, out: Path, form: Format
) -> Comparison:  # fmt: skip
    """The comparison with what its replay proves. Raises CompareError."""
    if work.ray is not None and any(sides.packs):
        raise CompareError("--ray: a golden pack is opened on this machine alone: compare without --ray")
    before = _print_before if form is Format.terminal else lambda result: None
    request = replay.ReplayRequest(
        sides.golden, sides.mine, work.replay, judging.taps, judging.op_mapping_file, rate, work.replay_seconds,
        judging.weights,
    )  # fmt: skip
    going_on("what was measured is", out / store.UNFINISHED)
    imported()
    with replay.begun(request) as begun:
        with _progress("comparing") as advance, _tidy(out):
            result = engine.compare(
                sides.golden, sides.mine, progress=advance, standard=standard, taps=judging.taps, mapping=rules,
                resume=out, ray=work.ray, jobs=work.jobs, floors=judging.floors, rate=rate,
            )  # fmt: skip
        result = sides.judged(result, taps=judging.taps, mapping=rules, standard=standard, floors=judging.floors)
        return replay.replayed(result, request, begun, out, before)


def _rejudged(home: Path) -> Path:
    """Where a comparison that is judged again goes: never over the first judgement."""
    home = home if home.name else home.resolve()
    return home.with_name(f"{home.name}-rejudged")


def _check_arguments(golden: Path | None, mine: Path | None, judging: Any, work: Any, instead: Any) -> None:
    if instead.rejudge is None and (golden is None or mine is None):
        raise CompareError("give two dumps, GOLDEN and MINE, or --rejudge DIR; accprobe compare --help says more")
    others = (golden, instead.plan, judging.taps, judging.op_mapping_file, work.ray, work.jobs, work.replay)
    if instead.rejudge is not None and any(others):
        raise CompareError("--rejudge judges what was measured: it takes no dumps, no --taps and no --plan")


def _again(judging: Any, standard: str, rate: float) -> tuple[str, ...]:
    """The words that another comparison of the same two dumps needs, too (Comparison.options)."""
    mapping, weights = judging.op_mapping_file, judging.weights
    out = ["--op-mapping-file", str(mapping)] if mapping is not None else []
    out += ["--taps", judging.taps] if judging.taps else []
    out += ["--standard", standard] if standard != "accprobe" else []
    out += [word for floor in judging.floor for word in ("--floor", str(floor))]
    out += ["--false-alarm-rate", str(rate)] if rate != FALSE_ALARM_RATE else []
    out += ["--weights", str(weights)] if weights is not None else []
    return tuple(out)


def _write(result: Comparison, out: Path, measured: bool, vocabulary: Vocabulary | None) -> list[Path]:
    """compare.csv, .json, .html, mine's tokens as text where there is a vocabulary; and measured.npz, where this is
    what was ``measured`` just now. Raises OSError."""
    from vllm_accprobe.report import html, table

    out.mkdir(parents=True, exist_ok=True)
    table.write_csv(result, out / "compare.csv")
    write_text(out / "compare.json", json.dumps(result.to_json(), indent=1) + "\n")
    texts = None
    if vocabulary is not None:
        texts = token_texts(vocabulary, result.mine_path)
        if texts.missing:
            typer.echo(f"accprobe: {texts.missing}", err=True)
    html.write_html(result, out / "compare.html", tokens=texts)
    if result.measured is not None and measured:
        store.save(result.measured, out)
        store.forget(out)
    return [out / name for name in ("compare.csv", "compare.json", "compare.html")]


def _check_out(out: Path, dumps: list[Path], measured: bool) -> None:
    """Raises CommandError where ``out`` is no place for what `_write` writes. measured: as there."""
    ours = {
        "compare.csv": output_paths.csv_with(*COLUMNS[:7]),
        "compare.json": output_paths.SCHEMA_AND_VERDICT,
        "compare.html": output_paths.matching("<title>[^<]*accprobe"),
    }
    if measured:
        ours["measured.npz"] = lambda head: head[30:38] == b"meta.npy"
        ours["replay.json"] = output_paths.matching(r"\A\{\"blamed\":")
    output_paths.check(out, ours, dumps=dumps)


@contextlib.contextmanager
def _tidy(out: Path) -> Iterator[None]:
    """Where there is nothing to compare, nothing stays behind."""
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
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, a line from time to time in a pipe."""
    if not on_terminal():
        now = [0, 0]
        with waiting(lambda: f"{label}: {size(now[0])} of {size(now[1])}" if now[1] else label):
            yield lambda done, total: now.__setitem__(slice(None), [done, total])
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


def _print(comparison: Comparison, form: Format, verbosity: int) -> None:
    """``verbosity`` is report.terminal's and concerns the terminal only."""
    if form is Format.terminal:
        from rich.console import Console

        from vllm_accprobe.report import terminal

        terminal.render(comparison, Console(highlight=False), verbosity=verbosity)
    elif form is Format.json:
        typer.echo(json.dumps(comparison.to_json(), indent=1))
    else:
        from vllm_accprobe.report import markdown

        show((markdown.markdown_lines if form is Format.markdown else markdown.github_lines)(comparison))
        if form is Format.github:
            markdown.write_summary(comparison)


def _print_before(comparison: Comparison) -> None:
    """The verdict by comparison on stderr, while a replay that may change it goes on."""
    from vllm_accprobe.report import facts

    typer.echo(f"before replay: {facts.headline(comparison)}", err=True)
