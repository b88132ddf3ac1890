"""What errcheck leaves for people and scripts: one small JSON file per rank, and the first of all ranks.

The problem: a NaN that one rank makes reaches all ranks within a layer, the ranks do not talk to each other about it,
and whoever reads it afterwards has neither torch nor the engine. The idea: each rank keeps ``errcheck-rank0000.json``
up to date (written in one piece, so that a killed rank leaves the last whole one); the earliest finding by step, then
by pipeline stage, then by order within the step, is the first; ranks that say the same place are named together, since
a sum over ranks makes all of them bad at once. Not here: how anything is found, and tensors (capture/errcheck/).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import DecodeError, load
from vllm_accprobe.dump.files import numbered_siblings

PATTERN = "errcheck-rank*.json"
MOST_ROWS = 16
_MOST_BYTES = 8 << 20
GOOD_BAD, BAD_BAD, PARAMETER, UNSURE = "good in, bad out", "bad in, bad out", "bad parameter", "bad out"


class ErrcheckError(ValueError):
    """A findings file that is none. One line."""


@dataclass(frozen=True)
class FirstBad:
    """The first bad output of a rank.

    kind: NaN, Inf or saturation; nan, inf, saturated: elements. order: of checked outputs within the step.
    verdict: good in, bad out; bad in, bad out; bad parameter; bad out (the inputs are not known).
    rows: at most 16 of the bad rows: request, position, phase, row. inputs: role, state, nan, inf, saturated.
    before: the tap that was checked before. tensors: where the call's tensors are, or why they are not.
    """

    step: int
    order: int
    time: float
    tap: str
    cls: str
    role: str
    call: int
    kind: str
    nan: int
    inf: int
    saturated: int
    verdict: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()
    bad_rows: int = 0
    all_rows: int = 0
    inputs: tuple[Mapping[str, Any], ...] = ()
    parameters: tuple[str, ...] = ()
    before: str = ""
    tensors: str = ""


@dataclass(frozen=True)
class RankReport:
    """A rank's file. state: watching, closed, or off (``why``). later: steps with bad values after the first one."""

    rank: int
    pid: int = 0
    pp: int = 0
    dp: int = 0
    state: str = "watching"
    why: str = ""
    kinds: tuple[str, ...] = ()
    taps: int = 0
    steps: int = 0
    later: int = 0
    places: Mapping[str, int] = field(default_factory=dict)
    first: FirstBad | None = None
    parameters: tuple[str, ...] = ()

    def key(self) -> tuple[float, int, int, int]:
        """Earlier is smaller. Steps of data-parallel engines are counted apart: there the clock decides."""
        f = self.first
        assert f is not None
        return (f.time if self.dp else float(f.step), self.pp, f.order, self.rank)


def write(root: Path, report: RankReport) -> None:
    """Puts the rank's file in place, 0600. Raises OSError."""
    path = root / f"errcheck-rank{report.rank:04d}.json"
    temporary = root / f".errcheck.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump({"schema": 1, **asdict(report)}, file, indent=1)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(root: Path) -> list[RankReport]:
    """The files of all ranks under ``root`` (and of further further engines: ``root.2`` ...), by rank.

    Raises ErrcheckError for a file that is no such report.
    """
    found: list[RankReport] = []
    for place in itertools.takewhile(Path.is_dir, numbered_siblings(root)):
        found += map(_report, sorted(place.glob(PATTERN)))
    return found


def remove_clean(root: Path) -> None:
    """Removes the reports under ``root``, and folders that are empty then, where every rank closed its report and has
    found nothing. Raises ErrcheckError as `read` does."""
    reports = read(root)
    if not reports or any(r.first is not None or r.parameters or r.state != "closed" for r in reports):
        return
    for place in list(itertools.takewhile(Path.is_dir, numbered_siblings(root))):
        for path in place.glob(PATTERN):
            path.unlink()
        with contextlib.suppress(OSError):  # a dump lies there, too
            place.rmdir()


def _report(path: Path) -> RankReport:
    try:
        return load(RankReport, path, _MOST_BYTES, {"schema": 1})
    except OSError as error:
        raise ErrcheckError(f"{path}: {error.strerror or error}") from None
    except DecodeError:
        raise ErrcheckError(f"{path}: no findings of errcheck") from None


def alive(reports: Sequence[RankReport]) -> bool:
    """Whether a process of this machine that has not closed its report still runs."""
    for report in reports:
        if report.state == "watching" and report.pid > 1:
            try:
                os.kill(report.pid, 0)
                return True
            except OSError:
                continue
    return False


def earliest(reports: Sequence[RankReport]) -> list[RankReport]:
    """The reports whose finding is the first of all: one, or several that name the same place of the same step."""
    bad = sorted((r for r in reports if r.first is not None), key=RankReport.key)
    if not bad:
        return []
    first = bad[0].first
    assert first is not None

    def same(report: RankReport) -> bool:
        f = report.first
        place = (first.step, first.tap, first.role)
        return f is not None and report.pp == bad[0].pp and (f.step, f.tap, f.role) == place

    return [r for r in bad if same(r)]


def sentence(finding: FirstBad) -> str:
    """The finding in one line, without its rank."""
    elements = ((finding.nan, "NaN"), (finding.inf, "Inf"), (finding.saturated, "saturated"))
    counts = [f"{n:,} {word}" for n, word in elements if n]
    place = f"{finding.tap} {finding.role}" + (f" (call {finding.call})" if finding.call else "")
    where = ""
    if finding.rows:
        row = finding.rows[0]
        where = f", request {row.get('request')} position {row.get('position')} ({row.get('phase')})"
        if finding.bad_rows > 1:
            where += f" and {finding.bad_rows - 1:,} more rows"
    numbers = f" ({', '.join(counts)})" if counts else ""
    return f"{finding.kind} in {place} [{finding.cls}], step {finding.step}{where}: {finding.verdict}{numbers}"


def lines(reports: Sequence[RankReport]) -> list[str]:
    """The outcome of a run: the first finding of all ranks, its inputs, then each rank's own."""
    if not reports:
        return ["nothing was watched: no vLLM engine with accprobe ran, and no torch module was called"]
    steps = max(r.steps for r in reports)
    off = [r for r in reports if r.state == "off"]
    found = earliest(reports)
    out: list[str] = []
    if found:
        first = found[0].first
        assert first is not None
        ranks = ", ".join(str(r.rank) for r in found)
        out.append(f"first: {sentence(first)}, rank{'s' if len(found) > 1 else ''} {ranks}")
        if len(found) > 1:
            out.append("  the same place on several ranks: a sum over ranks may have brought it from any of them")
        out += [f"  input {i.get('role')}: {i.get('state')}{_counts(i)}" for i in first.inputs]
        out += [f"  parameter {name}" for name in first.parameters]
        if first.verdict == BAD_BAD and first.before:
            out.append(f"  made outside of modules: the last good output before it is that of {first.before}")
        out.append(f"  tensors: {first.tensors}")
        for r in reports:
            if r.first is not None and r not in found:
                out.append(f"rank {r.rank}: {sentence(r.first)}")
        later = sum(r.later for r in reports)
        if later:
            out.append(f"bad values came in {later:,} more steps (over all ranks)")
    elif len(off) < len(reports):
        out.append(f"nothing bad in {steps:,} steps of {len(reports)} rank(s), {reports[0].taps} modules")
    for r in reports:
        out += [f"rank {r.rank}: parameter {name} (as loaded)" for name in r.parameters]
        if r.state == "off":
            out.append(f"rank {r.rank}: was not watched to the end: {r.why}")
        elif r.state == "watching":
            out.append(f"rank {r.rank}: did not close its report (killed?); it holds what was found by then")
    return out


def _counts(values: Mapping[str, Any]) -> str:
    words = [f"{values[k]:,} {k}" for k in ("nan", "inf", "saturated") if type(values.get(k)) is int and values[k]]
    return f" ({', '.join(words)})" if words else ""
