"""Two runs of an evaluation: whether they differ beyond chance, and on which questions.

The problem: evaluation tools write the question, the answer and the score in different words; the n-th line is the same
question only if no run was sharded or shuffled; and 26 right answers of 50 against 24 are taken for a drop. The idea:
an `Answer` has hashes, scores and its place in the file; pairs have the same task, filter and hash of the question.
Only questions that flipped count: McNemar's exact test for right or wrong, the sign-flip test (of which it is a case)
for other scores, Holm's rule over all metrics. Each p comes with an interval and the number of questions that would be
needed. Signs: mine - golden; lost: golden right and mine wrong; won: the reverse. What each tool writes is a `Shape` in
one table; of answers without scores texts are compared. Sources: lm_eval/evaluator.py, evaluation_tracker.py;
opencompass/openicl/icl_evaluator, icl_inferencer, tasks/openicl_eval.py; ais_bench's output_handler;
evalscope/api/evaluator/cache.py.

Not here: sentences (report/servers.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.decode import Text, fits
from vllm_accprobe.dump.files import MAX_LINE, DumpError, bounded_line, bounded_lines
from vllm_accprobe.judge import distributions, statistic

Place = tuple[Path, int]
"""A file, and where in it: the byte at which a line begins, or -1 - the index of a question in a document."""


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
    tool: str = ""
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


OTHER_TARGET = "questions whose right answer is not the same on both sides"


@dataclass
class Matched:
    """pairs: (golden, mine). only_golden, only_mine: answers without a partner, by (task, filter). left_out: pairs that
    are none, by reason. other_prompts: pairs whose prompts are not the same text; other_responses: whose responses."""

    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    only_golden: Counter[tuple[str, str]] = field(default_factory=Counter)
    only_mine: Counter[tuple[str, str]] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    other_prompts: int = 0
    other_responses: int = 0
    notes: list[str] = field(default_factory=list)


def match(golden: Side, mine: Side) -> Matched:
    """All pairs, in golden's order."""
    found = Matched(notes=[*golden.notes, *mine.notes])
    left, right = golden.answers, _named_alike(golden.answers, mine.answers, found)
    by_index = golden.by_index or mine.by_index
    if by_index:
        found.notes.append("questions are paired by their number: a file has no prompts (OpenCompass's predictions are "
                           "looked for beside its results)")  # fmt: skip
    theirs: dict[tuple[str, str, str], list[Answer]] = defaultdict(list)
    for answer in right:
        theirs[_key(answer, by_index)].append(answer)
    for several in theirs.values():
        several.sort(key=_order)
    for a, b in _partners(left, theirs, by_index):
        if b is None:
            found.only_golden[a.task, a.way] += 1
        elif a.target and b.target and a.target != b.target:
            found.left_out[OTHER_TARGET] += 1
        else:
            found.pairs.append((a, b))
            found.other_prompts += bool(a.prompt and b.prompt and a.prompt != b.prompt)
            found.other_responses += bool(a.response and b.response and a.response != b.response)
    for several in theirs.values():
        for answer in several:
            found.only_mine[answer.task, answer.way] += 1
    return found


def _key(answer: Answer, by_index: bool) -> tuple[str, str, str]:
    return answer.task, answer.way, answer.name if by_index else answer.key


def _order(answer: Answer) -> tuple[int, str]:
    """Numbers by their value, and before names."""
    return (int(answer.name), "") if answer.name.isdecimal() and len(answer.name) < 19 else (1 << 62, answer.name)


def _partners(
    answers: list[Answer], theirs: dict[tuple[str, str, str], list[Answer]], by_index: bool
) -> list[tuple[Answer, Answer | None]]:
    """Each answer with its partner, which is taken out of ``theirs``: first those with the same name."""
    partner: dict[int, Answer] = {}
    for i, answer in enumerate(answers):
        several = theirs.get(_key(answer, by_index), [])
        at = next((k for k, b in enumerate(several) if b.name == answer.name), None)
        if at is not None:
            partner[i] = several.pop(at)
    rest = sorted((i for i in range(len(answers)) if i not in partner), key=lambda i: _order(answers[i]))
    for i in rest:
        left = theirs.get(_key(answers[i], by_index))
        if left:
            partner[i] = left.pop(0)
    return [(answer, partner.get(i)) for i, answer in enumerate(answers)]


def _named_alike(golden: list[Answer], mine: list[Answer], found: Matched) -> list[Answer]:
    """Mine under golden's names of task and filter where each side has one: a renamed file says no task."""
    for what in ("task", "way"):
        ours, theirs = ({getattr(a, what) for a in side} for side in (golden, mine))
        if len(ours) == len(theirs) == 1 and ours != theirs:
            (name,), (other,) = ours, theirs
            mine = [replace(a, **{what: name}) for a in mine]
            if name and other:
                word = "task" if what == "task" else "filter"
                found.notes.append(f"golden's {word} is {name}, mine is {other}: taken as one")
    return mine


HARNESS, EVALSCOPE, OPENCOMPASS, AISBENCH = "lm-evaluation-harness", "evalscope", "OpenCompass", "AISBench"
REVIEWS, RESULTS, PREDICTIONS = "reviews", "results", "predictions"
NAME = re.compile(r"samples_(?P<task>.+)_(?P<time>[^_]+)\.jsonl?\Z", re.DOTALL)
_KNOWN = frozenset({
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash", "prompt_hash",
    "target_hash",
})  # fmt: skip
NO_JSON = "lines that are no json"
NO_SAMPLE = "lines that are no sample of a question"
NO_METRIC = "lines without a metric"
NO_TEXT = "answers without a text"
NO_DETAILS = "files without details of each question"
NO_SCORE = "questions without a score"
NOT_RESULTS = "json files that are no results"
SUMMARY = "summaries of lm-evaluation-harness, which writes its samples with --log_samples"
RIGHT = ("correct", "is_correct", "cascade_correct")
_NO_SCORES = frozenset({
    "pred", "prediction", "predictions", "answer", "answers", "gold", "reference", "references", "origin_prediction",
    "prompt", "origin_prompt", "type", "idx", "id", "index", "example_abbr", "res_length", "all_input_length",
    "example_id", "problem_id",
})  # fmt: skip
_ROLES = {"HUMAN": "user", "BOT": "assistant", "SYSTEM": "system"}
Item = dict[str, Any]
Scores = dict[str, float | None]


def at(item: Any, paths: str) -> Any:
    """What is at the first of these paths that leads to a value, e.g. ``choices.0.text|answer``; else None."""
    for path in paths.split("|"):
        value = item
        for key in path.split("."):
            if isinstance(value, list) and key.isdecimal():
                value = value[int(key)] if int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def _harness_scores(line: Item) -> Scores:
    names = line.get("metrics")
    if isinstance(names, list):
        return {n: number(line.get(n)) for n in names if isinstance(n, str) and n in line}
    found = {n: number(v) for n, v in line.items() if n not in _KNOWN}
    return {n: v for n, v in found.items() if v is not None}


def _opencompass_scores(item: Item) -> Scores:
    for key in RIGHT:
        if item.get(key) is not None:
            value = _mean(item[key])
            return {} if value is None else {"correct": value}
    found = {k: _mean(v) for k, v in item.items() if k not in _NO_SCORES}
    return {k: v for k, v in found.items() if v is not None}


def _mean(value: Any) -> float | None:
    """A number, or the mean of a question's several runs."""
    values = value if isinstance(value, list) else [value]
    known = [n for n in map(number, values) if n is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _scores_at(path: str) -> Callable[[Item], Scores]:
    """Of a number, or of numbers by metric."""

    def scores(item: Item) -> Scores:
        value = at(item, path)
        found = value if isinstance(value, dict) else {} if number(value) is None else {"correct": value}
        return {str(k): number(v) for k, v in found.items()}

    return scores


def _harness_hashes(line: Item) -> tuple[str, str, str]:
    """doc_hash as the harness makes it (without a document, of the number that the question has), and those of prompt
    and target."""

    def stored(name: str, made: Callable[[], str]) -> str:
        value = line.get(name)
        return value if isinstance(value, str) and value else made()

    document = lambda: json.dumps(line["doc"], indent=2, ensure_ascii=False)  # noqa: E731
    return (
        stored("doc_hash", lambda: digest(document() if "doc" in line else f"doc_id {line['doc_id']}")),
        stored("prompt_hash", lambda: digest(at(_arguments(line), "0.0"))),
        stored("target_hash", lambda: digest(str(line["target"]) if "target" in line else None)),
    )


@dataclass(frozen=True)
class Shape:
    """How a tool writes one question. needs, name, prompt, target, response: paths, as ``at`` reads them.

    needs: all are there in such an item; way: where several lines have the same question, what tells them apart;
    scores: None for answers that were not scored; none: what an item without a score is counted as; mirrors: the
    folder whose files have more of the same question in predictions/; hashes: of question, prompt and right answer,
    where the file has them.
    """

    tool: str
    needs: tuple[str, ...]
    name: str
    prompt: str
    target: str
    response: str
    scores: Callable[[Item], Scores] | None = None
    none: str = NO_METRIC
    way: str = ""
    mirrors: str = ""
    hashes: Callable[[Item], tuple[str, str, str]] | None = None

    def fits(self, item: Any) -> bool:
        return isinstance(item, dict) and all(at(item, path) is not None for path in self.needs)


SCORED = Shape(OPENCOMPASS, ("idx", "details"), "idx", "prompt|origin_prompt", "answer|references|gold",
               "prediction|origin_prediction|pred", _opencompass_scores, NO_SCORE, mirrors=RESULTS)  # fmt: skip
"""An item of OpenCompass' details, which has no key that all evaluators write."""
PREDICTED = replace(SCORED, needs=("idx", "prediction|origin_prompt"), scores=None)
SHAPES = (
    Shape(HARNESS, ("doc_id", "resps|doc|metrics"), "doc_id", "", "", "resps", _harness_scores, way="filter",
          hashes=_harness_hashes),
    Shape(EVALSCOPE, ("index", "sample_score"), "index", "messages|input", "target", "sample_score.score.prediction",
          _scores_at("sample_score.score.value"), mirrors=REVIEWS),
    Shape(EVALSCOPE, ("index", "model_output"), "index", "messages", "target",
          "model_output.choices.0.message.content"),
    # before 1.0
    Shape(EVALSCOPE, ("raw_input", "choices.0.review"), "index|answer_id", "raw_input", "choices.0.review.gold",
          "choices.0.message.content", _scores_at("choices.0.review.result")),
    Shape(EVALSCOPE, ("raw_input", "choices.0.message"), "index|answer_id", "raw_input", "",
          "choices.0.message.content"),
    replace(PREDICTED, tool=AISBENCH, needs=("data_abbr", "id"), name="id"),  # its results are OpenCompass' details
    PREDICTED,
)  # fmt: skip
"""Tried in this order."""


def _arguments(line: Item) -> list[list[Any]]:
    """The arguments of each request: ``{"gen_args_0": {"arg_0": ...}}``, or, in older files, lists."""
    args = line.get("arguments")
    requests = list(args.values()) if isinstance(args, dict) else args if isinstance(args, list) else []
    rows = [list(r.values()) if isinstance(r, dict) else r for r in requests]
    return [r for r in rows if isinstance(r, list) and r]


def _messages(value: Any) -> Any:
    """Messages without what no request has (ids, sources, the answer at the end); anything else as it is."""
    if not fits(list[Item], value) or not all(isinstance(m.get("role"), str) for m in value):
        return value
    turns = [{"role": _ROLES.get(m["role"], m["role"].lower()), "content": at(m, "content|prompt")} for m in value]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return [turn for turn in turns if turn["content"] is not None]


def _prompt(item: Item, paths: str) -> Any:
    found = (_messages(at(item, path)) for path in paths.split("|"))
    return next((value for value in found if value), None)


def requests(place: Place, documents: Documents | None = None) -> list[dict[str, Any]]:
    """The requests of a question, as lines of a jsonl that `accprobe send` takes, without ids."""
    item, shape = (documents or Documents()).item(place)
    if shape.tool == HARNESS:
        return _harness_requests(item)
    value = _prompt(item, shape.prompt)
    if isinstance(value, str):
        return [{"prompt": value}]
    return [{"messages": value}] if fits(list[Item], value) else []


def response(place: Place, documents: Documents | None = None) -> str:
    """The text that came back."""
    item, shape = (documents or Documents()).item(place)
    value = at(item, shape.response)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
             "seed")  # fmt: skip
"""Generation arguments that go to a server under the same name."""


def _harness_requests(line: Item) -> list[dict[str, Any]]:
    """A request that generates: its text or messages, with its limit and stops. A choice that was scored: context and
    continuation as one text, of which one more token is asked, because what was scored are the prompt's own tokens."""
    found: list[dict[str, Any]] = []
    for first, *others in _arguments(line):
        request = _request_of(first)
        if request is None:
            continue
        how = next((o for o in others if isinstance(o, dict)), None)
        continuation = next((o for o in others if isinstance(o, str)), None)
        if how is not None:
            request |= _limits(how)
        elif continuation is not None and "prompt" in request:
            request = {"prompt": request["prompt"] + continuation, "max_tokens": 1}
        if request not in found:
            found.append(request)
    return found


def _request_of(first: Any) -> dict[str, Any] | None:
    if isinstance(first, list) and len(first) == 1:  # messages are wrapped, as json in a list
        first = first[0]
    if not isinstance(first, str):
        return None
    if first.startswith("[{"):
        try:
            messages = parse(first)
        except ValueError:
            messages = None
        if fits(list[Item], messages) and all("role" in m for m in messages):
            return {"messages": messages}
    return {"prompt": first} if first else None


def _limits(how: dict[str, Any]) -> dict[str, Any]:
    """max_tokens, stop and the sampling of a request's generation arguments, in `send`'s words."""
    limit = next(
        (how[k] for k in ("max_gen_toks", "max_tokens", "max_new_tokens") if isinstance(how.get(k), int)), None
    )
    stop = how.get("until")
    stop = [stop] if isinstance(stop, str) else stop
    out: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
    if stop and fits(list[Text], stop):
        out["stop"] = stop
    sampling = {k: v for k, v in how.items() if k in _SAMPLING and number(v) is not None and not isinstance(v, bool)}
    return out | sampling


_BOM = b"\xef\xbb\xbf"


def _has_lines(path: Path) -> bool:
    """Whether it is a file of lines of json, by the first line that is json: before it there may be others, which are
    counted later. Anything else is one document."""
    with path.open("rb") as f:
        for _ in range(1000):
            if not (raw := f.readline(MAX_LINE)):
                break
            line = raw.strip().removeprefix(_BOM)
            if line in (b"{", b"["):
                return False
            try:
                value = parse(line or b"!")
            except ValueError:
                continue
            if path.suffix == ".jsonl":
                return not isinstance(value, list) and not (isinstance(value, dict) and "details" in value)
            return any(shape.fits(value) for shape in SHAPES)
    return path.suffix == ".jsonl"


def _numbers_of(value: Any) -> bool:
    """Whether it is what an evaluator of OpenCompass returned: with details, or at least with numbers."""
    if not isinstance(value, dict):
        return False
    return "details" in value or any(isinstance(v, (int, float)) for v in value.values())


def _items(path: Path, named: bool) -> Iterator[tuple[int, Item, Shape | str]]:
    """(where it is, one question, its shape; or why it is none). named: by the user, not found in a folder. Raises
    OSError, SamplesError."""
    if not _has_lines(path):
        value = _load(path)
        found = _document(path, value)
        yield from ((-1 - i, item, shape) for i, (item, shape) in found.items())
        if not found and isinstance(value, dict) and "results" in value and ("configs" in value or "config" in value):
            yield 0, {}, SUMMARY
        elif not found:
            yield 0, {}, NO_DETAILS if _numbers_of(value) and (named or RESULTS in path.parts) else NOT_RESULTS
        return
    for start, raw in _lines(path):
        try:
            item = parse(raw)
        except ValueError:  # UnicodeDecodeError is one
            yield start, {}, NO_JSON
            continue
        yield start, item, next((shape for shape in SHAPES if shape.fits(item)), NO_SAMPLE)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(where it begins, the line) of each that is not empty. Raises OSError, DumpError for one that is too long."""
    start = 0
    for raw in bounded_lines(path):
        if stripped := raw.strip():
            yield start, stripped.removeprefix(_BOM)
        start += len(raw)


def _load(path: Path) -> Any:
    """Raises OSError, SamplesError for what is no json."""
    try:
        return parse(path.read_bytes())
    except ValueError as e:
        hint = "" if path.suffix == ".json" else "; `accprobe inspect` says what it is"
        raise SamplesError(f"{path} is no json: {e}{hint}") from None


def _document(path: Path, value: Any) -> dict[int, tuple[Item, Shape]]:
    """The questions of one document by their index: a list of samples, OpenCompass' predictions, or its details with
    the predictions next to them."""
    if isinstance(value, list):
        found = ((i, item, next((s for s in SHAPES if s.fits(item)), None)) for i, item in enumerate(value))
        return {i: (item, shape) for i, item, shape in found if shape is not None}
    if not isinstance(value, dict):
        return {}
    if "details" not in value:
        items = {i: {"idx": i, **item} for i, item in _by_index(value).items()}
        return {i: (item, PREDICTED) for i, item in items.items() if PREDICTED.fits(item)}
    details = value["details"]
    items = dict(enumerate(details)) if isinstance(details, list) else _by_index(details)
    predictions = _predictions(path)
    out: dict[int, tuple[Item, Shape]] = {}
    for i, item in items.items():
        if isinstance(item, dict):
            named = re.search(r"_(\d{1,9})\Z", str(item.get("example_abbr", "")))
            index = int(named[1]) if named else i
            out[index] = ({"idx": index, **predictions.get(index, {}), **item}, SCORED)
    return out


def _by_index(value: Any, first: int = 0) -> dict[int, Item]:
    if not isinstance(value, dict):
        return {}
    numbered = {k: v for k, v in value.items() if re.fullmatch(r"\d{1,9}", k) and isinstance(v, dict)}
    return {first + int(k): v for k, v in numbered.items()}


def _predictions(results: Path) -> dict[int, Item]:
    """By index; empty where the folder of predictions is not next to that of results. Raises OSError, SamplesError."""
    whole = _mirrored(results, RESULTS)
    found: dict[int, Item] = {}
    if whole != results:
        for part in [whole] if whole.is_file() else _parts(whole):
            found |= _by_index(_load(part), len(found))
    return found


def _parts(whole: Path) -> list[Path]:
    """The files that a run on several cards wrote: ``gsm8k_0.json``, ``gsm8k_1.json``."""
    out: list[Path] = []
    while (part := whole.with_name(f"{whole.stem}_{len(out)}{whole.suffix}")).is_file():
        out.append(part)
    return out


def _mirrored(path: Path, folder: str) -> Path:
    """The path in predictions/ that matches one in ``folder``; ``path`` itself where it does not lie there."""
    parts = list(path.parts)
    if folder not in parts:
        return path
    last = len(parts) - 1 - parts[::-1].index(folder)
    return Path(*parts[:last], PREDICTIONS, *parts[last + 1 :])


class Documents:
    """Questions that are read again, a document once."""

    def __init__(self) -> None:
        self._read: dict[Path, dict[int, tuple[Item, Shape]]] = {}

    def item(self, place: Place) -> tuple[Item, Shape]:
        """The question at a place, with what predictions/ says of it."""
        path, start = place
        if start < 0:
            if path not in self._read:
                self._read[path] = _document(path, _load(path))
            return self._read[path][-1 - start]
        with path.open("rb") as f:
            f.seek(start)
            item = parse(bounded_line(f, path).strip().removeprefix(_BOM))
        shape = next(shape for shape in SHAPES if shape.fits(item))
        other = _mirrored(path, shape.mirrors)
        for _, raw in _lines(other) if other != path and other.is_file() else ():
            try:
                found = parse(raw)
            except ValueError:
                continue
            if at(found, shape.name) == at(item, shape.name):
                return {**found, **item}, shape
        return item, shape


def _read(file: Path, side: Side, first: int = 0, task: str | None = None) -> int:
    """Adds a file's answers to ``side``, and what is none to its counts; how many questions it has. first: the number
    of its first one; task: where the file's name does not say it. Raises OSError, SamplesError."""
    seen, questions = Counter[str](), 0
    for start, item, shape in _items(file, file == side.path):
        if isinstance(shape, str) or shape.tool != (side.tool or shape.tool):
            side.left_out[shape if isinstance(shape, str) else NO_SAMPLE] += 1
            continue
        side.tool = shape.tool
        questions += 1
        scores = {} if shape.scores is None else shape.scores(item)
        text = at(item, shape.response)
        if not scores and (shape.scores is not None or text is None):
            side.left_out[NO_TEXT if shape.scores is None else shape.none] += 1
            continue
        number_of = at(item, shape.name)
        name = str(first + number_of if first and isinstance(number_of, int) else number_of)
        if shape.hashes is not None:
            key, prompt, target = shape.hashes(item)
        else:
            prompt, target = digest(_prompt(item, shape.prompt)), digest(at(item, shape.target))
            key = prompt or digest(f"index {name}")
            side.by_index |= not prompt
        way = item.get(shape.way) if shape.way else ""
        if not isinstance(way, str):
            seen[name + key] += 1  # before 0.4.8 the filters' lines follow one another, nameless
            way = "" if seen[name + key] == 1 else f"filter {seen[name + key]}"
        of = task_of(file, shape) if task is None else task
        side.answers.append(Answer(of, way, key, name, prompt, target, digest(text), scores, (file, start)))
    return questions


def task_of(path: Path, shape: Shape) -> str:
    """The task that a file's name says; of the harness empty where it was renamed."""
    if shape.tool != HARNESS:
        return path.stem.removeprefix("tmp_")
    found = NAME.match(path.name)
    return found["task"] if found else ""


def open_side(path: Path) -> Side:
    """All answers of a file or folder. Raises SamplesError for what has none, OSError."""
    if not path.exists():
        raise SamplesError(f"{path} does not exist: name a samples_*.jsonl of lm-evaluation-harness, evalscope's "
                           "reviews, OpenCompass's results, or a folder of one of them")  # fmt: skip
    side = Side(path)
    if path.is_dir():
        with os.scandir(path):  # raises where the folder may not be read, which its walk passes over
            _folder(path, side)
    elif path.is_file():
        _read(path, side)
    else:
        raise SamplesError(f"{path} is no plain file: a pipe or device is read twice; write it to a file first")
    if not side.answers:
        raise SamplesError(_nothing(path, side))
    return side


def _nothing(path: Path, side: Side) -> str:
    if SUMMARY in side.left_out:
        return (f"{path} is the summary of lm-evaluation-harness: name the samples_*.jsonl beside it "
                "(lm_eval --log_samples)")  # fmt: skip
    if set(side.left_out) == {NOT_RESULTS} and path.is_file():
        return f"{path} has no samples of lm-evaluation-harness, reviews of evalscope or results of OpenCompass"
    why = "; ".join(f"{n:,} {what}" for what, n in side.left_out.items()) or "it is empty"
    hint = ": run OpenCompass or AISBench with --dump-eval-details" if NO_DETAILS in side.left_out else ""
    if (path / "run.json").is_file():
        hint = ": it is a dump, and `accprobe compare` compares dumps"
    return f"{path} has no answered question ({why}){hint}"


SOURCES: tuple[Callable[[Path], bool], ...] = (
    lambda p: p.name.startswith("samples_") and p.suffix == ".jsonl",
    lambda p: REVIEWS in p.absolute().parts[-3:-1],
    lambda p: p.suffix == ".json" and (PREDICTIONS not in p.parts or RESULTS in p.parts),
    lambda p: PREDICTIONS in p.absolute().parts[:-1],
    lambda p: p.suffix == ".jsonl",
)
"""Which files of a folder are read: the first of these that any answer comes from. Answers with scores come first."""


def _folder(path: Path, side: Side) -> None:
    """Reads the files of one model. Raises OSError, SamplesError."""
    files = sorted(p for p in path.rglob("*.json*") if p.suffix in (".json", ".jsonl") and p.is_file())
    for chooses in SOURCES:
        chosen = [p for p in files if chooses(p)]
        files = [p for p in files if not chooses(p)]
        first = Counter[tuple[Path, str | None]]()
        for file, task in _newest(path, chosen, side):
            try:
                first[file.parent, task] += _read(file, side, first[file.parent, task] if task else 0, task)
            except (SamplesError, DumpError):
                side.left_out["files that are no json"] += 1
        if side.answers:
            _one_model(path, [a.place[0] for a in side.answers])
            return
    if n := sum(1 for p in path.rglob("*.csv") if p.is_file()):
        side.left_out["csv files of no tool that is read"] += n


def _newest(path: Path, files: list[Path], side: Side) -> Iterator[tuple[Path, str | None]]:
    """(file, task where it is a part of one that was split). One file for each task: the last by the time in its name;
    a finished one before what it was resumed from."""
    names, by_task = set(files), dict[tuple[Path, str], list[Path]]()
    for file in files:
        found = NAME.match(file.name)
        by_task.setdefault((file.parent, found["task"] if found else file.name), []).append(file)
    for (parent, task), several in by_task.items():
        file = max(several, key=lambda file: file.name)
        if len(several) > 1:
            side.notes.append(f"{path}: of {len(several)} files of {task} the newest is taken, {file.name}")
        part = re.fullmatch(r"(.+)_\d{1,6}", file.stem)
        whole = parent / f"{part[1]}{file.suffix}" if part else file
        parts = _parts(whole) if whole not in names else []
        if file in parts:
            yield from ((p, whole.stem) for p in parts if file == parts[0])
        elif not (file.stem.startswith("tmp_") and parent / f"{file.stem[4:]}.json" in names):
            yield file, None


def _one_model(path: Path, files: list[Path]) -> None:
    folders = sorted({file.parent for file in files})
    if len(folders) > 1:
        raise SamplesError(f"{path} has the samples of {len(folders)} models or runs, {folders[0]} and {folders[1]}: "
                           "name one of these folders")  # fmt: skip


def select(side: Side, tasks: Sequence[str], ways: Sequence[str], metrics: Sequence[str]) -> None:
    """Keeps what these globs choose; an empty list chooses all."""

    def matches(name: str, globs: Sequence[str]) -> bool:
        return not globs or any(fnmatchcase(name, g) for g in globs)

    kept = []
    for a in side.answers:
        if matches(a.task, tasks) and matches(a.way, ways):
            scores = {m: v for m, v in a.scores.items() if matches(m, metrics)}
            if scores or not (a.scores or metrics):
                kept.append(replace(a, scores=scores) if len(scores) < len(a.scores) else a)
    side.answers = kept


POWER = 0.8
"""Chosen: how likely the needed number of questions shows the difference; the habit of the field [J. Cohen, Statistical
Power Analysis for the Behavioral Sciences, 1988, 2.4]."""
LEVEL = 0.95
"""Chosen: of intervals."""
EXACT = 16
"""Chosen: so many differences that are not 0 have 65,536 patterns of signs, which are all tried."""
DRAWS = 99_999
"""Chosen: patterns that are drawn where there are more; the least p is 1e-5."""
MANY = 4096
"""Chosen: from so many differences on the sum over random signs is taken for normal, so that no draw takes long."""
_CHUNK = 1 << 22


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p: under the null each flip goes either way with 1/2 [Q. McNemar, Psychometrika 12 (1947) 153;
    exact: F. Mosteller, Biometrics 8 (1952) 220]. 1 where nothing flipped."""
    flips = lost + won
    return min(1.0, 2.0 * distributions.binomial_at_most(min(lost, won), flips, 0.5)) if flips else 1.0


def tango(lost: int, won: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Score interval of the difference of two paired proportions, (won - lost) / n: all differences that a score test
    does not reject [T. Tango, Statistics in Medicine 17 (1998) 891, eq. 10 to 13]. It has a width even where nothing
    flipped, which Wald's has not. n >= 1 pairs."""
    return -_upper(lost, won, n, level), _upper(won, lost, n, level)


def _upper(b: int, c: int, n: int, level: float) -> float:
    """The upper end for the difference (b - c) / n."""
    z = statistic.normal(1.0 - level)

    def score(d: float) -> float:
        off = b - c - n * d
        linear = (2.0 * n - b + c) * d - b - c
        root = math.sqrt(max(linear * linear + 8.0 * n * c * d * (1.0 - d), 0.0))
        q = (root - linear) / (4.0 * n)  # of the second kind of flip, by maximum likelihood under d
        variance = n * (2.0 * q + d * (1.0 - d))
        return off / math.sqrt(variance) + z if variance > 0 else (z if off >= 0 else -math.inf)

    low, high = (b - c) / n, 1.0 - 1e-12
    if low >= high or score(high) > 0:
        return 1.0
    return distributions.root(score, low, high)


def questions_needed(flipping: float, difference: float, alpha: float, power: float = POWER) -> int | None:
    """Pairs with which McNemar's test shows this difference, where this share of the questions flips
    [R. Connor, Biometrics 43 (1987) 207, eq. 3; O. Miettinen, Biometrics 24 (1968) 339]. None where there is none."""
    if not difference or flipping < abs(difference):
        return None
    z = statistic.normal(alpha) * math.sqrt(flipping)
    z += _beta(power) * math.sqrt(max(flipping - difference * difference, 0.0))
    return math.ceil((z / difference) ** 2)


def smallest_difference(flipping: float, n: int, alpha: float, power: float = POWER) -> float | None:
    """The least difference that n pairs show with this power, by the same formula; None where even one in which all
    flips go one way is not shown."""
    if flipping <= 0:
        return None

    def short(d: float) -> float:
        spread = _beta(power) * math.sqrt(max(flipping - d * d, 0.0))
        return statistic.normal(alpha) * math.sqrt(flipping) + spread - d * math.sqrt(n)

    return None if short(flipping) > 0 else distributions.root(short, 0.0, flipping)


def sign_flip(differences: np.ndarray, seed: int = 0) -> float:
    """Two-sided p of the mean of paired differences, float64 [n]: under the null each has either sign [R. Fisher, The
    Design of Experiments, 1935, sec. 21]. No distribution is assumed, which a t-test does: scores such as BLEU or F1
    are bounded, skewed, and mostly equal on both sides. All signs up to EXACT differences, DRAWS of them with this
    seed, and (hits + 1) / (draws + 1) [B. Phipson, G. Smyth, Stat. Appl. Genet. Mol. Biol. 9 (2010) 39] up to MANY,
    from there on normal with the variance of the sum [W. Hoeffding, Ann. Math. Statist. 23 (1952) 169]."""
    d = np.asarray(differences, np.float64)
    d = d[d != 0]
    if not d.size:
        return 1.0
    d = d / np.abs(d).max()  # scores of 1e300 have sums, too
    reached = abs(float(d.sum())) * (1.0 - 1e-12)  # equal sums in another order of adding
    if d.size > MANY:
        return statistic.tail(reached / math.sqrt(float((d * d).sum())))
    if d.size <= EXACT:
        patterns = np.arange(1 << d.size)[:, None] >> np.arange(d.size) & 1
        return float(np.mean(np.abs((2.0 * patterns - 1.0) @ d) >= reached))
    random, hits, left = np.random.default_rng(seed), 0, DRAWS
    while left:
        rows = min(left, max(_CHUNK // d.size, 1))
        signs = np.unpackbits(np.frombuffer(random.bytes(-(-rows * d.size // 8)), np.uint8), count=rows * d.size)
        sums = 2.0 * (signs.reshape(rows, d.size) @ d) - d.sum()
        hits += int(np.count_nonzero(np.abs(sums) >= reached))
        left -= rows
    return (hits + 1) / (DRAWS + 1)


def mean_interval(differences: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Student's interval of the mean of float64 [n] [Student, Biometrika 6 (1908) 1]: approximate for skewed scores,
    which is why the test is another. Infinite for a single difference."""
    d = np.asarray(differences, np.float64)
    if d.size < 2:
        return -math.inf, math.inf
    half = distributions.t_quantile(d.size - 1, 0.5 + level / 2) * float(d.std(ddof=1)) / math.sqrt(d.size)
    return float(d.mean()) - half, float(d.mean()) + half


def needed_mean(differences: np.ndarray, alpha: float, power: float = POWER) -> int | None:
    """Pairs that show this mean at this spread: ((z_alpha/2 + z_beta) s / mean)^2 [J. Cohen, 1988, 2.3, normal]."""
    mean, spread = float(np.mean(differences)), float(np.std(differences))
    if not mean:
        return None
    return math.ceil(max(((statistic.normal(alpha) + _beta(power)) * spread / mean) ** 2, 1.0))


def holm(ps: list[float], rate: float) -> list[bool]:
    """Which of several tests reject so that any false one is as rare as ``rate``, however they depend on one another
    [S. Holm, Scand. J. Statist. 6 (1979) 65]."""
    rejected = [False] * len(ps)
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if ps[i] > rate / (len(ps) - rank):
            break
        rejected[i] = True
    return rejected


def _beta(power: float) -> float:
    return -statistic.normal(power, sides=1)


RATE = 0.05
"""Chosen: of false alarms in a whole comparison, the habit of the field [R. Fisher, Statistical Methods for Research
Workers, 1925, sec. 12]."""
_TOGETHER = re.compile(r"all \d+ tasks")
WORST = 50
"""Chosen: questions that are given as prompts where a metric knows no right or wrong."""
Known = dict[tuple[str, str, str], tuple[np.ndarray, int]]
"""By (task, filter, metric): float64 [n, 2] of golden and mine, and how many pairs have no number."""
NO_NUMBER = "values that are no finite numbers"


@dataclass(frozen=True)
class Contrast:
    """One metric of one task under one filter, over n pairs.

    binary: all values are 0 or 1. golden, mine: means. lost, won: flips, of scores how many are lower and higher.
    difference: mine - golden, in low .. high with paired.LEVEL. beyond: differs beyond chance. needed: pairs that would
    show this difference; smallest: the least that n pairs show, each with paired.POWER; None where there is none.
    left_out: pairs without a number on either side.
    """

    task: str
    way: str
    metric: str
    binary: bool
    n: int
    golden: float
    mine: float
    lost: int
    won: int
    difference: float
    low: float
    high: float
    p: float
    beyond: bool
    needed: int | None
    smallest: float | None
    left_out: int

    @property
    def together(self) -> bool:
        """Whether it is of several tasks."""
        return _TOGETHER.fullmatch(self.task) is not None


@dataclass(frozen=True)
class FlippedAnswer:
    """A question whose answer is not worth the same on both sides. lost, won: the metrics (with their filter) by
    which. size: the largest difference of a score."""

    golden: Answer
    mine: Answer
    lost: tuple[str, ...]
    won: tuple[str, ...]
    size: float


@dataclass(frozen=True)
class Evaluation:
    """What two runs say together. matched: the pairs and what is none; flips: by task, as golden has them; where no
    pair has scores on both sides, the answers that are not the same text."""

    matched: Matched
    contrasts: tuple[Contrast, ...]
    flips: tuple[FlippedAnswer, ...]
    no_numbers: tuple[tuple[str, int], ...]
    rate: float

    @property
    def texts(self) -> bool:
        """Whether texts alone were compared."""
        return bool(self.matched.pairs) and not any(a.scores and b.scores for a, b in self.matched.pairs)

    @property
    def verdict(self) -> str | None:
        """None where texts differ: whether by more than rounding does, no text says."""
        if self.texts:
            return None if self.flips else "pass"
        return "fail" if any(c.beyond for c in self.contrasts) else "pass"


def evaluate(matched: Matched, rate: float = RATE) -> Evaluation:
    """Tests every metric that both sides have. No contrasts where nothing is paired, or no metric has numbers."""
    values: dict[tuple[str, str, str], list[tuple[float | None, float | None]]] = defaultdict(list)
    for a, b in matched.pairs:
        for metric in a.scores.keys() & b.scores.keys():
            values[a.task, a.way, metric].append((a.scores[metric], b.scores[metric]))
    known: Known = {}
    without = Counter[str]()
    for where, several in sorted(values.items()):
        numbers = [(x, y) for x, y in several if x is not None and y is not None]
        if numbers:
            known[where] = (np.array(numbers, np.float64), len(several) - len(numbers))
        else:
            without[label(*where)] += len(several)
    known |= _together(known)
    level = rate / max(len(known), 1)
    found = [_contrast(where, scores, left, level) for where, (scores, left) in known.items()]
    beyond = holm([c["p"] for c in found], rate)
    contrasts = tuple(Contrast(**c, beyond=b) for c, b in zip(found, beyond, strict=True))
    binary = {(c.task, c.way, c.metric) for c in contrasts if c.binary}
    found_flips = tuple(_flips(matched.pairs, binary))
    result = Evaluation(matched, contrasts, found_flips, tuple(without.items()), rate)
    if not result.texts:
        return result
    other = (FlippedAnswer(a, b, (), (), 0.0) for a, b in matched.pairs if a.response != b.response)
    return replace(result, flips=tuple(other))


def _together(known: Known) -> Known:
    """A metric of right or wrong over all tasks that have it, where there are several: a drop that is spread over the
    57 tasks of MMLU shows in none of them."""
    groups: dict[tuple[str, str], list[tuple[np.ndarray, int]]] = defaultdict(list)
    for (_, way, metric), found in known.items():
        if _binary(found[0]):
            groups[way, metric].append(found)
    several = {where: found for where, found in groups.items() if len(found) > 1}
    return {
        (f"all {len(found)} tasks", *where): (np.concatenate([s for s, _ in found]), sum(n for _, n in found))
        for where, found in several.items()
    }


def _binary(scores: np.ndarray) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def label(task: str, way: str, metric: str) -> str:
    """``gsm8k exact_match (strict-match)``."""
    return " ".join(filter(None, (task, metric))) + (f" ({way})" if way else "")


def _contrast(where: tuple[str, str, str], scores: np.ndarray, left: int, level: float) -> dict[str, Any]:
    """Of float64 [n, 2]: golden, mine."""
    n, d = len(scores), scores[:, 1] - scores[:, 0]
    lost, won = int((d < 0).sum()), int((d > 0).sum())
    binary = _binary(scores)
    if binary:
        difference, flipping = (won - lost) / n, (won + lost) / n
        p, (low, high) = mcnemar(lost, won), tango(lost, won, n)
        needed, smallest = questions_needed(flipping, difference, level), smallest_difference(flipping, n, level)
    else:
        difference = float(d.mean())
        p, (low, high) = sign_flip(d), mean_interval(d)
        needed, smallest = needed_mean(d, level), None
    golden, mine = (float(scores[:, i].mean()) for i in (0, 1))
    task, way, metric = where
    return {"task": task, "way": way, "metric": metric, "binary": binary, "n": n, "golden": golden, "mine": mine,
            "lost": lost, "won": won, "difference": difference, "low": low, "high": high, "p": p, "needed": needed,
            "smallest": smallest, "left_out": left}  # fmt: skip


def _flips(pairs: Iterable[tuple[Answer, Answer]], binary: set[tuple[str, str, str]]) -> list[FlippedAnswer]:
    """Questions that flipped by a metric of right or wrong; of tasks that have none, the WORST by any score. A question
    that flipped under several filters is one."""
    tasks = {task for task, _, _ in binary}
    found: list[FlippedAnswer] = []
    scored: list[FlippedAnswer] = []
    for a, b in pairs:
        off = {}
        for metric in a.scores.keys() & b.scores.keys():
            x, y = a.scores[metric], b.scores[metric]
            if x is not None and y is not None and x != y:
                off[metric] = y - x
        counted = {m: v for m, v in off.items() if (a.task, a.way, m) in binary or a.task not in tasks}
        if not counted:
            continue
        names = {m: f"{m} ({a.way})" if a.way else m for m in sorted(counted)}
        lost, won = (tuple(names[m] for m in names if (counted[m] < 0) == down) for down in (True, False))
        flip = FlippedAnswer(a, b, lost, won, max(map(abs, counted.values())))
        (found if a.task in tasks else scored).append(flip)
    scored.sort(key=lambda flip: -flip.size)
    by_question: dict[tuple[str, str, str], FlippedAnswer] = {}
    for flip in found + scored[:WORST]:
        question = flip.golden.task, flip.golden.key, flip.golden.name
        if (same := by_question.get(question)) is not None:
            flip = replace(same, lost=same.lost + flip.lost, won=same.won + flip.won, size=max(same.size, flip.size))
        by_question[question] = flip
    return list(by_question.values())


def prompts(flips: Iterable[FlippedAnswer]) -> tuple[list[dict[str, Any]], int]:
    """(lines for `accprobe send`, how many questions have no prompt in the files). ids are printable ASCII: they become
    the requests' ids."""
    lines: dict[str, dict[str, Any]] = {}
    without, documents = 0, Documents()
    for flip in flips:
        a = flip.golden
        lines_of = requests(a.place, documents)
        without += not lines_of
        for k, line in enumerate(lines_of):
            base = "-".join(filter(None, (a.task, a.name, str(k) if len(lines_of) > 1 else "")))
            name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in base)[:120]
            unique, again = name, 1
            while unique in lines:
                again += 1
                unique = f"{name}.{again}"
            lines[unique] = {"id": unique, **line}
    return list(lines.values()), without


def to_json(e: Evaluation) -> dict[str, Any]:
    """For programs; infinite ends of intervals are null."""
    m = e.matched

    def sides(count: Counter[tuple[str, str]]) -> list[dict[str, Any]]:
        return [{"task": t, "filter": w, "questions": n} for (t, w), n in sorted(count.items())]

    def plain(c: Contrast) -> dict[str, Any]:
        fields = {k: v for k, v in vars(c).items() if k != "way"}
        fields = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        return {"task": c.task, "filter": c.way, **fields}

    return {
        "schema": 1,
        "verdict": e.verdict,
        "false_alarm_rate": e.rate,
        "pairs": len(m.pairs),
        "contrasts": [plain(c) for c in e.contrasts],
        "only_golden": sides(m.only_golden),
        "only_mine": sides(m.only_mine),
        "left_out": {**m.left_out, **{f"{NO_NUMBER}: {name}": n for name, n in e.no_numbers}},
        "other_prompts": m.other_prompts,
        "other_responses": m.other_responses,
        "notes": m.notes,
        "flipped": [
            {"task": f.golden.task, "question": f.golden.name, "lost": list(f.lost), "won": list(f.won)}
            for f in e.flips
        ],
    }
