"""A series: ``accprobe compare GOLDEN DAY1 DAY2 …``, each dump against the golden in turn.

The problem: which day broke it is asked of many dumps, of which some cannot be read and none fits beside the others in
memory. The idea: one comparison at a time, written to a folder of the dump's name; what the series says of it is kept,
the rest goes; whatever is wrong with one dump is its line, and the others go on. After each the series is written, so
that an interrupted one is whole as far as it went. Not here: one comparison (dump_pair.py), what is said of a
series (report/series).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.dump_pair import DumpPair, check_dumps, check_out, compared, nothing, write
from vllm_accprobe.cli.endings import TRACEBACK, CommandError, explain
from vllm_accprobe.cli.output import Format, say_written

if TYPE_CHECKING:
    from vllm_accprobe.report.series.dump_entry import SeriesEntry

PAGE, DATA = "series.html", "series.json"


def split_more(more: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """What follows MINE: (torch_xray's table or None, more dumps). Only a last word that ends in .csv, and is no
    folder, is a table."""
    if more and more[-1].suffix == ".csv" and not more[-1].is_dir():
        return more[-1], list(more[:-1])
    return None, list(more)


def refuse(plan: bool, sheet: Path | None) -> None:
    """Raises CommandError for what two dumps have and a series has not."""
    if plan:
        raise CommandError("--plan says how two dumps are paired: give one MINE")
    if sheet is not None:
        raise CommandError(f"{sheet} is torch_xray's table of two dumps: give one MINE, or no .csv")


def names(dumps: Sequence[Path]) -> list[str]:
    """A folder's name for each dump: its own, with a number where that is taken."""
    found: list[str] = []
    for dump in dumps:
        name = own = Path(os.path.realpath(dump)).name if dump.name in ("", "..") else dump.name
        number = 2
        # Two names that differ in their case alone are one folder on some file systems.
        while name.lower() in {PAGE, DATA, *(n.lower() for n in found)}:
            name, number = f"{own}-{number}", number + 1
        found.append(name)
    return found


def series(pair: DumpPair, dumps: Sequence[Path], out: Path, form: Format, quiet: bool) -> int:
    """Compares each, writes and prints; returns the exit code. Raises CommandError and what a golden that cannot be
    read raises."""
    import gc

    from vllm_accprobe.cli import places
    from vllm_accprobe.report.series.dump_entry import exit_code

    folders = names(dumps)
    for dump in dumps:
        check_dumps(pair.golden, dump, pair.judging.floors)
    ours = {DATA: places.SCHEMA_AND_VERDICT, PAGE: places.matching("<title>[^<]*accprobe series")}
    everything = [pair.golden, *dumps, *pair.judging.floors]
    places.check(out, ours, dumps=everything)
    for folder in folders:
        check_out(out / folder, everything, True)
    entries: list[SeriesEntry] = []
    for i, (dump, folder) in enumerate(zip(dumps, folders, strict=True)):
        entries.append(_one(pair, dump, folder, out, f"comparing {folder} ({i + 1} of {len(dumps)})"))
        gc.collect()  # the last comparison goes before the next one comes
        if i == 0 and entries[0].code > 1:
            _golden_can_be_read(pair.golden)
        _write(pair.golden, entries, out)
    _say(pair.golden, entries, form)
    if not quiet:
        say_written(*(out / name for name in (DATA, PAGE)), err=form is not Format.terminal)
    return exit_code(entries)


def _one(pair: DumpPair, dump: Path, folder: str, out: Path, label: str) -> SeriesEntry:
    """Whatever goes wrong is the entry's line, as the command would say it of that dump alone."""
    from vllm_accprobe.report.series.dump_entry import entry_of, not_compared

    try:
        result = compared(pair, dump, out / folder, nothing, label)
        write(result, out / folder, vocabulary=pair.vocabulary)
    except Exception as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        why, code = explain(error)
        return not_compared(folder, str(dump), code, why)
    return entry_of(result, folder, str(dump), f"{folder}/compare.html")


def _golden_can_be_read(golden: Path) -> None:
    """Raises what the engine raises: then no dump can be compared with it, which is one line, not one for each."""
    from vllm_accprobe.comparison import engine

    engine.open_both(golden, golden)


def _write(golden: Path, entries: Sequence[SeriesEntry], out: Path) -> None:
    from vllm_accprobe.report.series.series_json import series_json
    from vllm_accprobe.report.series.series_page import write_series
    from vllm_accprobe.whole_file import write_text

    out.mkdir(parents=True, exist_ok=True)
    write_text(out / DATA, json.dumps(series_json(str(golden), entries), indent=1) + "\n")
    write_series(str(golden), entries, out / PAGE)


def _say(golden: Path, entries: Sequence[SeriesEntry], form: Format) -> None:
    from vllm_accprobe.report.series import series_json, series_lines

    if form is Format.json:
        typer.echo(json.dumps(series_json.series_json(str(golden), entries), indent=1))
        return
    kinds = {Format.terminal: series_lines.lines, Format.markdown: series_lines.markdown_lines}
    for line in kinds.get(form, series_lines.github_lines)(entries):
        typer.echo(line)
    if form is Format.github:
        from vllm_accprobe.report import github

        github.append_summary(series_lines.markdown_lines(entries))
