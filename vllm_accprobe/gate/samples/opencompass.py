"""OpenCompass's results with details, and the predictions they were made from.

The problem: ``results/MODEL/DATASET.json`` has a score for each question but often not the question, which stands in
``predictions/MODEL/DATASET.json``, or in parts of it (DATASET_0.json, ...); and each evaluator spells its details in a
way of its own. The idea: both are read and joined by index; right or wrong is what the evaluators' base class takes for
it (correct, is_correct, cascade_correct), and where there is none, whatever number is no part of the question.
Sources: opencompass/openicl/icl_evaluator/icl_base_evaluator.py, tasks/openicl_eval.py, openicl/icl_inferencer/.
Not here: folders of such files (sides.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.samples.answers import Answer, Place, SamplesError, Side, digest, number, parse

TOOL = "OpenCompass"
RESULTS, PREDICTIONS = "results", "predictions"
RIGHT = ("correct", "is_correct", "cascade_correct")
NO_DETAILS = "files without details of each question"
NO_SCORE = "questions without a score"
_NO_SCORES = frozenset({
    "pred", "prediction", "predictions", "answer", "answers", "gold", "reference", "references", "origin_prediction",
    "prompt", "origin_prompt", "type", "idx", "id", "index", "example_abbr", "res_length", "all_input_length",
    "example_id", "problem_id",
})  # fmt: skip
_ROLES = {"HUMAN": "user", "BOT": "assistant", "SYSTEM": "system"}


def is_results(value: Any) -> bool:
    """Of an evaluator: with details, or at least with numbers."""
    if not isinstance(value, dict):
        return False
    return "details" in value or (bool(value) and any(isinstance(v, (int, float)) for v in value.values()))


def is_predictions(value: Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    first = next(iter(value.values()))
    return isinstance(first, dict) and ("prediction" in first or "origin_prompt" in first)


def read(path: Path, side: Side) -> None:
    """Adds the answers of a results file to ``side``. Raises OSError, SamplesError."""
    questions = _details(load(path))
    if not questions:
        side.left_out[NO_DETAILS] += 1
        return
    predictions = _predictions(path)
    for index, item in questions.items():
        scores = _scores(item)
        if not scores:
            side.left_out[NO_SCORE] += 1
            continue
        asked = predictions.get(index, {})
        prompt = digest(item.get("prompt", asked.get("origin_prompt")))
        target = next((item[k] for k in ("answer", "references", "gold") if item.get(k) is not None), asked.get("gold"))
        said = asked.get("prediction", item.get("origin_prediction", item.get("pred")))
        side.by_index |= not prompt
        side.answers.append(
            Answer(path.stem, "", prompt, str(index), prompt, digest(target), digest(said), scores, (path, index))
        )


def load(path: Path) -> Any:
    """Raises OSError, SamplesError for what is no json."""
    try:
        return parse(path.read_bytes())
    except ValueError as e:
        raise SamplesError(f"{path} is no json: {e}") from None


def _details(value: Any) -> dict[int, dict[str, Any]]:
    """Each question's details by its index in the data set."""
    given = value.get("details") if isinstance(value, dict) else None
    if isinstance(given, dict):
        items = [(int(k), v) for k, v in given.items() if re.fullmatch(r"\d{1,9}", k)]
    else:
        items = list(enumerate(given)) if isinstance(given, list) else []
    found = {}
    for index, item in items:
        if isinstance(item, dict):
            named = re.search(r"_(\d{1,9})\Z", str(item.get("example_abbr", "")))
            found[int(named[1]) if named else index] = item
    return found


def _scores(item: dict[str, Any]) -> dict[str, float | None]:
    for key in RIGHT:
        if item.get(key) is not None:
            value = _mean(item[key])
            return {} if value is None else {"correct": value}
    found = {k: _mean(v) for k, v in item.items() if k not in _NO_SCORES}
    return {k: v for k, v in found.items() if v is not None}


def _mean(value: Any) -> float | None:
    """A number, or the mean of a question's several runs."""
    if not isinstance(value, list):
        return number(value)
    numbers = [number(v) for v in value]
    known = [n for n in numbers if n is not None]
    return sum(known) / len(known) if known and len(known) == len(numbers) else None


def _predictions(results: Path) -> dict[int, dict[str, Any]]:
    """By index; empty where the folder of predictions is not beside that of results. Raises OSError, SamplesError."""
    parts = list(results.parts)
    if RESULTS not in parts:
        return {}
    at = len(parts) - 1 - parts[::-1].index(RESULTS)
    whole = Path(*parts[:at], PREDICTIONS, *parts[at + 1 :])
    if whole.is_file():
        return _by_index(load(whole), 0)
    found: dict[int, dict[str, Any]] = {}
    part = whole.with_name(f"{whole.stem}_0{whole.suffix}")
    while part.is_file():
        found |= _by_index(load(part), len(found))
        part = whole.with_name(f"{whole.stem}_{int(part.stem.rsplit('_', 1)[1]) + 1}{whole.suffix}")
    return found


def _by_index(value: Any, first: int) -> dict[int, dict[str, Any]]:
    if not isinstance(value, dict):
        return {}
    numbered = {k: v for k, v in value.items() if re.fullmatch(r"\d{1,9}", k) and isinstance(v, dict)}
    return {first + int(k): v for k, v in numbered.items()}


def prompts(place: Place) -> list[dict[str, Any]]:
    """What was asked: a text, or messages where the prompt has roles."""
    path, index = place
    item = _details(load(path)).get(index, {})
    asked = item.get("prompt") or _predictions(path).get(index, {}).get("origin_prompt")
    if isinstance(asked, str) and asked:
        return [{"prompt": asked}]
    if isinstance(asked, list) and asked and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in asked):
        said = [(_ROLES.get(m["role"], m["role"].lower()), m.get("prompt", m.get("content"))) for m in asked]
        return [{"messages": [{"role": role, "content": text} for role, text in said if isinstance(text, str)]}]
    return []
