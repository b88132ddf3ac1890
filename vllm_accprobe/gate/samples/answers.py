"""What one run of an evaluation said, whichever tool wrote it down.

The problem: two tools write in different words which question was asked, what was answered and how that was
scored; and a run of MMLU has 14,000 questions with prompts of many kilobytes. The idea: an `Answer` has hashes, scores
and the place where its line stands; prompts are read again from there, for the few questions that flipped.
Not here: the tools' formats (harness.py, opencompass.py), which of them a path holds (sides.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Place = tuple[Path, int]
"""A file, and where in it: the byte at which a line begins, or the index of a question."""
Prompts = Callable[[Place], list[dict[str, Any]]]
"""What was asked at a place: lines of a jsonl as `accprobe send` takes it, without ids."""


class SamplesError(Exception):
    """One line: which file is no samples, and what to give instead."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One question, answered and scored in one way.

    task, way: the task's name and the filter's (or metric list's) that was applied to the response; both may be empty.
    key: hash of the question; name: what the file calls it. prompt, target, response: hashes of the text that was sent,
    of the right answer and of what came back, empty where the file does not say. scores: by metric; None where the
    value is no finite number.
    """

    task: str
    way: str
    key: str
    name: str
    prompt: str
    target: str
    response: str
    scores: dict[str, float | None]
    place: Place


@dataclass
class Side:
    """One run. tool: who wrote it; left_out: by reason, how many lines, questions or files are not among the answers;
    by_index: whether questions have no other name than their number."""

    path: Path
    tool: str
    prompts: Prompts
    answers: list[Answer] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    by_index: bool = False


def digest(value: Any) -> str:
    """SHA-256 of a text, or of a value as json; empty for None."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def number(value: Any) -> float | None:
    """A score as a number: booleans are 0 and 1; None for what is none, or not finite."""
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def parse(text: str | bytes) -> Any:
    """A json value, NaN and infinities allowed, as Python's own writer writes them. Raises ValueError for anything
    else, too deep nesting too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
