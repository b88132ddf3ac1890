"""Which samples a path holds: one file, or a folder of many tasks, of either tool.

The problem: people name a file, the folder of a model, or the folder of a whole run, with several tasks and perhaps
several times; and what they name by mistake is the summary beside the samples. The idea: files are known by what is in
them and not by their names; of one task the newest file counts; two models in one folder are refused.
Not here: what is in the files (harness.py, opencompass.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from vllm_accprobe.gate.samples import harness, opencompass
from vllm_accprobe.gate.samples.answers import SamplesError, Side, parse

_HEAD = 1 << 24
"""A first line, at most."""


def open_side(path: Path) -> Side:
    """All answers of a file or folder. Raises SamplesError for what has none, OSError."""
    if not path.exists():
        raise SamplesError(f"{path} does not exist: name a samples_*.jsonl of lm-evaluation-harness, OpenCompass's "
                           "results, or a folder of either")  # fmt: skip
    side = _folder(path) if path.is_dir() else _file(path)
    if not side.answers:
        why = "; ".join(f"{n:,} {what}" for what, n in side.left_out.items()) or "it is empty"
        hint = ": run OpenCompass with --dump-eval-details" if opencompass.NO_DETAILS in side.left_out else ""
        raise SamplesError(f"{path} has no answered question ({why}){hint}")
    return side


def _file(path: Path) -> Side:
    if _is_harness(path):
        side = Side(path, harness.TOOL, harness.prompts)
        harness.read(path, side)
        return side
    value = opencompass.load(path)
    if isinstance(value, dict) and "results" in value and ("configs" in value or "config" in value):
        raise SamplesError(f"{path} is the summary of lm-evaluation-harness: name the samples_*.jsonl beside it "
                           "(lm_eval --log_samples)")  # fmt: skip
    if opencompass.is_predictions(value):
        raise SamplesError(f"{path} has predictions without scores: name OpenCompass's results/MODEL/DATASET.json")
    if not opencompass.is_results(value):
        raise SamplesError(f"{path} is neither samples of lm-evaluation-harness nor results of OpenCompass")
    side = Side(path, opencompass.TOOL, opencompass.prompts)
    opencompass.read(path, side)
    return side


def _is_harness(path: Path) -> bool:
    """Whether the first line that is json is a sample: lines before it, which are none, are counted later. A file of
    which nothing is json is one by its ending."""
    with path.open("rb") as f:
        for _ in range(1000):
            line = f.readline(_HEAD)
            if not line:
                break
            try:
                value = parse(line.strip().removeprefix(b"\xef\xbb\xbf") or b"!")
            except ValueError:
                if line.strip() in (b"{", b"["):  # a document of many lines
                    return False
                continue
            return harness.is_sample(value) or (path.suffix == ".jsonl" and not opencompass.is_results(value))
    return path.suffix == ".jsonl"


def _folder(path: Path) -> Side:
    samples = sorted(p for p in path.rglob("samples_*.jsonl") if p.is_file())
    results = sorted(p for p in path.rglob("*.json") if p.is_file() and _of_results(p))
    if samples:
        side = Side(path, harness.TOOL, harness.prompts)
        for file in _newest(path, samples, side):
            harness.read(file, side)
        return side
    side = Side(path, opencompass.TOOL, opencompass.prompts)
    found = [file for file in results if _has_details(file, side)]
    _one_model(path, found)
    for file in found:
        opencompass.read(file, side)
    return side


def _has_details(file: Path, side: Side) -> bool:
    """What has none is counted: other programs' json files, too, because a folder may have any."""
    try:
        value = opencompass.load(file)
    except SamplesError:
        side.left_out["files that are no json"] += 1
        return False
    if isinstance(value, dict) and "details" in value:
        return True
    named = opencompass.RESULTS in file.parts and opencompass.is_results(value)
    side.left_out[opencompass.NO_DETAILS if named else "json files that are no results"] += 1
    return False


def _of_results(file: Path) -> bool:
    return opencompass.PREDICTIONS not in file.parts or opencompass.RESULTS in file.parts


def _newest(path: Path, files: list[Path], side: Side) -> Iterable[Path]:
    """One file for each task, the last by the time in its name."""
    _one_model(path, files)
    by_task: dict[str, list[Path]] = {}
    for file in files:
        by_task.setdefault(harness.task_of(file), []).append(file)
    for task, several in by_task.items():
        several.sort(key=lambda file: file.name)
        if len(several) > 1:
            side.notes.append(f"{path}: of {len(several)} files of {task} the newest is taken, {several[-1].name}")
        yield several[-1]


def _one_model(path: Path, files: list[Path]) -> None:
    folders = sorted({file.parent for file in files})
    if len(folders) > 1:
        raise SamplesError(f"{path} has the samples of {len(folders)} models or runs, {folders[0]} and {folders[1]}: "
                           "name one of these folders")  # fmt: skip


def select(side: Side, tasks: Sequence[str], ways: Sequence[str], metrics: Sequence[str]) -> None:
    """Keeps what these globs choose; an empty list chooses all."""

    def wanted(name: str, globs: Sequence[str]) -> bool:
        return not globs or any(fnmatchcase(name, g) for g in globs)

    kept = []
    for a in side.answers:
        if wanted(a.task, tasks) and wanted(a.way, ways):
            scores = {m: v for m, v in a.scores.items() if wanted(m, metrics)}
            if scores:
                kept.append(replace(a, scores=scores) if len(scores) < len(a.scores) else a)
    side.answers = kept
