"""Samples of lm-evaluation-harness: ``samples_<task>_<time>.jsonl`` of ``lm_eval --log_samples``.

The problem: a line is one question under one filter, and its metrics stand in it as keys of their own, between all the
others; versions before 0.4.8 do not list them, and older ones have no hashes. The idea: ``metrics`` and the hashes are
taken where they stand, and made as the harness makes them where not (lm_eval/evaluator.py, evaluation_tracker.py:
doc_hash is the SHA-256 of the document as indented json).
Not here: folders of such files (sides.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.samples.answers import Answer, Place, Side, digest, number, parse

TOOL = "lm-evaluation-harness"
NAME = re.compile(r"samples_(?P<task>.+)_(?P<time>[^_]+)\.jsonl\Z", re.DOTALL)
_KNOWN = frozenset({
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash", "prompt_hash",
    "target_hash",
})  # fmt: skip
NO_JSON = "lines that are no json"
NO_SAMPLE = "lines that are no sample of a question"
NO_METRIC = "lines without a metric"


def task_of(path: Path) -> str:
    """The task that a file's name says, empty where it was renamed."""
    found = NAME.match(path.name)
    return found["task"] if found else ""


def is_sample(line: Any) -> bool:
    return isinstance(line, dict) and "doc_id" in line and ("resps" in line or "doc" in line or "metrics" in line)


def read(path: Path, side: Side) -> None:
    """Adds a file's answers to ``side``, and what is none to its counts. Raises OSError."""
    task, seen = task_of(path), Counter[str]()
    for at, raw in _lines(path):
        try:
            line = parse(raw)
        except ValueError:  # UnicodeDecodeError is one
            side.left_out[NO_JSON] += 1
            continue
        if not is_sample(line):
            side.left_out[NO_SAMPLE] += 1
            continue
        scores = _scores(line)
        if not scores:
            side.left_out[NO_METRIC] += 1
            continue
        name, key = str(line["doc_id"]), _hash(line, "doc_hash") or _document(line)
        way = line.get("filter")
        if not isinstance(way, str):  # before 0.4.8 the filters' lines follow one another, nameless
            seen[name + key] += 1
            way = "" if seen[name + key] == 1 else f"filter {seen[name + key]}"
        prompt = _hash(line, "prompt_hash") or digest(next(iter(_arguments(line)), [None])[0])
        target = _hash(line, "target_hash") or (digest(str(line["target"])) if "target" in line else "")
        response = digest(line["resps"]) if "resps" in line else ""
        side.answers.append(Answer(task, way, key, name, prompt, target, response, scores, (path, at)))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(where it begins, the line) of each that is not empty."""
    at = 0
    with path.open("rb") as f:
        for raw in f:
            if stripped := raw.strip():
                yield at, stripped.removeprefix(b"\xef\xbb\xbf")
            at += len(raw)


def _scores(line: dict[str, Any]) -> dict[str, float | None]:
    names = line.get("metrics")
    if isinstance(names, list):
        return {n: number(line.get(n)) for n in names if isinstance(n, str) and n in line}
    found = {n: number(v) for n, v in line.items() if n not in _KNOWN}
    return {n: v for n, v in found.items() if v is not None}


def _hash(line: dict[str, Any], key: str) -> str:
    value = line.get(key)
    return value if isinstance(value, str) else ""


def _document(line: dict[str, Any]) -> str:
    """doc_hash as the harness makes it; without a document, of the number that the question has."""
    if "doc" not in line:
        return digest(f"doc_id {line['doc_id']}")
    return digest(json.dumps(line["doc"], indent=2, ensure_ascii=False))


def _arguments(line: dict[str, Any]) -> list[list[Any]]:
    """The arguments of each request: ``{"gen_args_0": {"arg_0": ...}}``, or, in older files, lists."""
    given = line.get("arguments")
    requests = list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else []
    rows = [list(r.values()) if isinstance(r, dict) else r for r in requests]
    return [r for r in rows if isinstance(r, list) and r]


def prompts(place: Place) -> list[dict[str, Any]]:
    """A request that generates: its text or messages, with its limit and stops. A choice that was scored: context and
    continuation as one text, of which one more token is asked, because what was scored are the prompt's own tokens."""
    path, at = place
    with path.open("rb") as f:
        f.seek(at)
        line = parse(f.readline().strip().removeprefix(b"\xef\xbb\xbf"))
    found: list[dict[str, Any]] = []
    for first, *others in _arguments(line):
        asked = _asked(first)
        if asked is None:
            continue
        how = next((o for o in others if isinstance(o, dict)), None)
        continuation = next((o for o in others if isinstance(o, str)), None)
        if how is not None:
            asked |= _limits(how)
        elif continuation is not None and "prompt" in asked:
            asked = {"prompt": asked["prompt"] + continuation, "max_tokens": 1}
        if asked not in found:
            found.append(asked)
    return found


def _asked(first: Any) -> dict[str, Any] | None:
    if isinstance(first, list) and len(first) == 1:  # messages are wrapped, as json in a list
        first = first[0]
    if not isinstance(first, str):
        return None
    if first.startswith("[{"):
        try:
            messages = parse(first)
        except ValueError:
            messages = None
        if isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages):
            return {"messages": messages}
    return {"prompt": first} if first else None


def _limits(how: dict[str, Any]) -> dict[str, Any]:
    """max_tokens and stop of a request's generation arguments. Temperature is not taken over: `send` has its own."""
    limit = next(
        (how[k] for k in ("max_gen_toks", "max_tokens", "max_new_tokens") if isinstance(how.get(k), int)), None
    )
    stop = how.get("until")
    stop = [stop] if isinstance(stop, str) else stop
    out: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
    if isinstance(stop, list) and stop and all(isinstance(s, str) and s for s in stop):
        out["stop"] = stop
    return out
