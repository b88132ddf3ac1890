"""One pair of dumps compared as ``accprobe compare`` does it: replayed where that decides, written to its folder.

The idea: what was given is one value, and these functions take it: check, compare, write. Not here: what the words on
the command line mean (cli/compare.py), what is printed (compare_formats.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.token_text import TokenTexts, Vocabulary


@dataclass(frozen=True)
class AskedPair:
    """What was asked for beside the dump to judge. rules: of the mapping file; options: what a comparison of the same
    dumps needs again (Comparison.options); vocabulary: of the model, for tokens as text."""

    golden: Path
    standard: str
    taps: str | None
    mapping: Path | None
    rules: Any
    ray: str | None
    jobs: int
    floors: list[Path]
    rate: float
    replay: bool | None
    options: tuple[str, ...]
    vocabulary: Vocabulary | None = None
    replay_seconds: float = 60.0
    weights: Path | None = None


def compared(given: AskedPair, mine: Path, out: Path, before: Callable[[Comparison], object]) -> Comparison:
    """The finished comparison; ``out`` keeps its parts while it goes on. before: told of a verdict that a replay may
    change. Raises what the engine and the replay raise."""
    from dataclasses import replace

    from vllm_accprobe.cli.interrupts import kept
    from vllm_accprobe.cli.replay import replaying
    from vllm_accprobe.comparison import engine
    from vllm_accprobe.comparison.store import resume

    choices: dict[str, Any] = {"standard": given.standard, "taps": given.taps, "mapping": given.rules, "resume": out,
                               "ray": given.ray, "jobs": given.jobs, "floors": given.floors,
                               "rate": given.rate}  # fmt: skip
    asked = replaying.Asked(given.golden, mine, given.replay, given.taps, given.mapping, given.rate,
                            given.replay_seconds, given.weights)  # fmt: skip
    kept.going_on("what was measured is", out / resume.NAME)
    with replaying.begun(asked) as begun:
        with _progress("comparing") as advance, _tidy(out):
            result = engine.compare(given.golden, mine, progress=advance, **choices)
        result = replaying.replayed(result, asked, begun, out, before)
    return replace(result, options=given.options, out=str(out))


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
    from vllm_accprobe.cli.common.same import refuse_same

    if golden is None or mine is None:
        return
    refuse_same(("GOLDEN", golden), ("MINE", mine))
    for floor in floors:  # of what is judged, a floor would excuse all that is wrong with it
        refuse_same(("--floor", floor), ("GOLDEN", golden))
        refuse_same(("--floor", floor), ("MINE", mine))


def check_out(out: Path, dumps: list[Path], measured: bool) -> None:
    """Raises CommandError where ``out`` is no place for what `write` writes. measured: as there."""
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.comparison.result import COLUMNS

    ours = {
        "compare.csv": outputs.csv_with(*COLUMNS[:7]),
        "compare.json": outputs.SCHEMA_AND_VERDICT,
        "compare.html": outputs.matching("<title>[^<]*accprobe"),
    }
    if measured:
        ours["measured.npz"] = lambda head: head[30:38] == b"meta.npy"
        ours["replay.json"] = outputs.matching(r"\A\{\"blamed\":")
    outputs.check(out, ours, dumps=dumps)


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
