"""What `opcheck` and `online serve` say and write of a check that is done. Not here: the check, its lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common import here
from vllm_accprobe.cli.common.json_answer import answer, say_written
from vllm_accprobe.cli.common.options import NothingThere, say_notes

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.run.result_row import Checked
    from vllm_accprobe.opcheck.run.whole import CheckedRun
    from vllm_accprobe.opcheck.run.worker import Job

_WORST = ("tap", "cls", "role", "rank", "step", "call", "request", "position", "column", "measure", "measured",
          "allowed", "created", "severity", "tier", "chance", "message")  # fmt: skip


def conclude(
    found: CheckedRun, dump: Path, job: Job, out: Path, standard: str, chosen: bool, verbose: bool,
    more: Callable[[Path], list[Path]] = lambda out: [],
) -> None:  # fmt: skip
    """The report of a check whose opcheck.csv is written, with its files. chosen: not all calls were asked for; more:
    writes further files. Raises typer.Exit with the exit code."""
    from vllm_accprobe.judge import profile
    from vllm_accprobe.opcheck.habits import decided
    from vllm_accprobe.opcheck.run import result_row, table
    from vllm_accprobe.opcheck.run.totals import totals as count

    say_notes(found.problems)
    if job.repeat or job.batch:
        here.say_here(job, found.rows, out, None if verbose else 10)
    checked, machine = decided.settle(found.rows, strict=standard == result_row.STRICT)
    if checked != found.rows:
        table.resettle(out / "opcheck.csv", checked)
    totals = count(checked)
    if not totals.checked and not totals.statuses.get(result_row.FAIL):
        reason = next(iter(totals.skipped), "no call matches" if chosen else "the dump holds no call")
        near = "" if found.rows or not chosen else near_names(dump, job.ops)
        raise NothingThere(f"{dump}: nothing could be checked: {reason}{near}")
    table.write_result(checked, out / "result.csv")
    for line in table.lines(checked, totals, most=None if verbose else 10, machine=machine):
        typer.echo(line)
    written = [out / "opcheck.csv", out / "result.csv"]
    if machine.habits:
        written.append(out / profile.NAME)
        told = profile.Profile(machine.habits, profile.host_of(run_json(dump)), machine.units)
        written[-1].write_text(told.to_json(), encoding="utf-8")
    written += more(out)
    say_written(*written)
    wrong = bool(totals.statuses.get(result_row.FAIL) or totals.statuses.get(result_row.ERROR))
    answer(
        verdict="fail" if wrong else "pass", calls=totals.calls, checked=totals.checked, statuses=totals.statuses,
        skipped=totals.skipped, wrong=[_module(group) for group in table.failures(checked)], machine=machine.habits,
    )  # fmt: skip
    raise typer.Exit(1 if wrong else 0)


def near_names(dump: Path, globs: Sequence[str]) -> str:
    """What is said behind globs over operators, classes and paths that match none: the nearest names; "" without."""
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.dump.select import nearest
    from vllm_accprobe.formats import open_dump

    try:
        opened = open_dump(dump)
    except DumpError:
        return ""
    names = {name for r in opened.records if r.step is not None for name in (r.tap, r.cls) if name}
    found = nearest(globs, names | {op.op for op in opened.ops})
    return f"; the nearest names: {', '.join(found)}" if found else ""


def _module(group: list[Checked]) -> dict[str, object]:
    """The worst output of a module, with how many of its outputs failed."""
    worst = max(group, key=lambda r: r.severity)
    return {name: getattr(worst, name) for name in _WORST} | {"outputs": len(group)}


def run_json(dump: Path) -> object:
    """run.json of a directory; None where it has none that can be read (opening the dump tells why)."""
    import json

    try:
        path = dump / "run.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < 1 << 24 else None
    except (OSError, ValueError, RecursionError):
        return None
