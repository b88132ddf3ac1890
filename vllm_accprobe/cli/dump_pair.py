"""One pair of dumps compared as ``accprobe compare`` does it: replayed where that decides, written to its folder.

What the command line says is one value, `DumpPair`, and these functions take it: check, compare, write. Not here: what
the words on the command line mean and what is printed (compare.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from vllm_accprobe.cli import options

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.token_text import TokenTexts, Vocabulary


@dataclass(frozen=True)
class JudgeOptions:
    """By which limits, and of which tensors."""

    op_mapping_file: Annotated[
        Path | None,
        Option("--op-mapping-file", metavar="FILE", help="YAML or JSON: which place of mine is which of golden, see "
               "docs/formats.md."),
    ] = None  # fmt: skip
    taps: Annotated[
        str | None, Option("--taps", metavar="GLOBS", help="Only taps that match these globs; '!...' excludes.")
    ] = None
    standard: Annotated[
        str | None,
        Option("--standard", metavar="NAME", help="The limits: {standards}; accprobe by default. Of two tables: "
               "{tables}; msprobe by default."),
    ] = None  # fmt: skip
    floor: options.Floors = field(default_factory=list)
    rate: options.Rate = None
    weights: options.Weights = None

    @property
    def floors(self) -> list[Path]:
        return [Path(f) for f in self.floor]


@dataclass(frozen=True)
class WorkOptions:
    """How it is computed."""

    ray: Annotated[
        str | None,
        Option("--ray", metavar="ADDRESS", help="Measure on the machines of the Ray cluster at this address."),
    ] = None
    jobs: options.Jobs = 0
    replay: Annotated[
        bool | None,
        Option("--replay/--no-replay", help="Run all of both sides' operators again against references, which decides, "
               "or none. Needs torch. By default as many as --replay-seconds allow."),
    ] = None  # fmt: skip
    replay_seconds: Annotated[
        float,
        Option("--replay-seconds", min=0.0, show_default=False, metavar="S", help="Time for running operators again: "
               "what is suspected and what failed first, then some of all. Default: 60; 0: none."),
    ] = 60.0  # fmt: skip


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
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.comparison.store import resume

    judging, work = pair.judging, pair.work
    request = replay.ReplayRequest(
        pair.golden, mine, work.replay, judging.taps, judging.op_mapping_file, pair.rate, work.replay_seconds,
        judging.weights,
    )  # fmt: skip
    going_on("what was measured is", out / resume.NAME)
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

    from vllm_accprobe.comparison.store import resume, saved
    from vllm_accprobe.report import html, table

    out.mkdir(parents=True, exist_ok=True)
    table.write_csv(result, out / "compare.csv")
    (out / "compare.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    html.write_html(result, out / "compare.html", tokens=_texts(vocabulary, result))
    if result.measured is not None and measured:
        saved.save(result.measured, out)
        resume.forget(out)
    return [out / name for name in ("compare.csv", "compare.json", "compare.html")]


def _texts(vocabulary: Vocabulary | None, result: Comparison) -> TokenTexts | None:
    """Mine's tokens as text; a line on stderr where no ids were recorded."""
    if vocabulary is None:
        return None
    from vllm_accprobe.report.html.token_text import token_texts

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
    from vllm_accprobe.comparison.result import COLUMNS

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
    from vllm_accprobe.comparison.result import NothingCompared
    from vllm_accprobe.comparison.store import resume

    there = out.exists()
    try:
        yield
    except NothingCompared:
        resume.forget(out)
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
