"""Two runs of an evaluation: whether they differ beyond chance, and on which questions.

The problem: evaluation tools write the question, the answer and the score in different words; the n-th line is the same
question only if no run was sharded or shuffled; and 26 right answers of 50 against 24 are taken for a drop. The idea:
an `Answer` has hashes, scores and its place in the file; pairs have the same task, filter and hash of the question.
Only questions that flipped count: McNemar's exact test for right or wrong, the sign-flip test (of which it is a case)
for other scores, Holm's rule over all metrics. Each p comes with an interval and the number of questions that would be
needed. Signs: mine - golden; lost: golden right and mine wrong; won: the reverse. Sources: lm_eval/evaluator.py,
evaluation_tracker.py; opencompass/openicl/icl_evaluator, tasks/openicl_eval.py; evalscope's reviews.

Not here: sentences (report/servers.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.judge import distributions, statistic

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


HARNESS = "lm-evaluation-harness"
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


def read_lines(path: Path, side: Side, tool: LineTool) -> None:
    """Adds a file's answers to ``side``, and what is none to its counts. Raises OSError."""
    seen = Counter[str]()
    for at, raw in _lines(path):
        try:
            line = parse(raw)
        except ValueError:  # UnicodeDecodeError is one
            side.left_out[NO_JSON] += 1
            continue
        if not tool.is_line(line):
            side.left_out[NO_SAMPLE] += 1
            continue
        answer = tool.answer(line, (path, at), seen)
        if answer.scores:
            side.answers.append(answer)
        else:
            side.left_out[NO_METRIC] += 1


def _harness_answer(line: dict[str, Any], place: Place, seen: Counter[str]) -> Answer:
    """seen: how often each question came before in the file."""
    name, key = str(line["doc_id"]), _hash(line, "doc_hash") or _document(line)
    scores, way = _scores(line), line.get("filter")
    if scores and not isinstance(way, str):  # before 0.4.8 the filters' lines follow one another, nameless
        seen[name + key] += 1
        way = "" if seen[name + key] == 1 else f"filter {seen[name + key]}"
    prompt = _hash(line, "prompt_hash") or digest(next(iter(_arguments(line)), [None])[0])
    target = _hash(line, "target_hash") or (digest(str(line["target"])) if "target" in line else "")
    response = digest(line["resps"]) if "resps" in line else ""
    return Answer(task_of(place[0]), str(way), key, name, prompt, target, response, scores, place)


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
    args = line.get("arguments")
    requests = list(args.values()) if isinstance(args, dict) else args if isinstance(args, list) else []
    rows = [list(r.values()) if isinstance(r, dict) else r for r in requests]
    return [r for r in rows if isinstance(r, list) and r]


def harness_prompts(place: Place) -> list[dict[str, Any]]:
    """A request that generates: its text or messages, with its limit and stops. A choice that was scored: context and
    continuation as one text, of which one more token is asked, because what was scored are the prompt's own tokens."""
    line = _line_at(place)
    found: list[dict[str, Any]] = []
    for first, *others in _arguments(line):
        request = _asked(first)
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


def _line_at(place: Place) -> Any:
    path, at = place
    with path.open("rb") as f:
        f.seek(at)
        return parse(f.readline().strip().removeprefix(b"\xef\xbb\xbf"))


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


EVALSCOPE = "evalscope"
REVIEWS = "reviews"


def is_review(line: Any) -> bool:
    """``{"index", "input", "target", "sample_score": {"score": {"value": {metric: number}, "prediction": ...}}}``."""
    return isinstance(line, dict) and "index" in line and isinstance(line.get("sample_score"), dict)


def _review_answer(line: dict[str, Any], place: Place, _: Counter[str]) -> Answer:
    score = line["sample_score"].get("score")
    score = score if isinstance(score, dict) else {}
    value = score.get("value")
    scores = {str(k): number(v) for k, v in value.items()} if isinstance(value, dict) else {}
    name, prompt = str(line["index"]), digest(line.get("input"))
    target, said = digest(line.get("target")), digest(score.get("prediction"))
    return Answer(place[0].stem, "", prompt or digest(f"index {name}"), name, prompt, target, said, scores, place)


def review_prompts(place: Place) -> list[dict[str, Any]]:
    """The messages of the same index in predictions/ beside reviews/, else the review's own input."""
    line = _line_at(place)
    for _, raw in _lines(predictions) if (predictions := _beside(place[0], REVIEWS)).is_file() else ():
        try:
            found = parse(raw)
        except ValueError:
            continue
        if isinstance(found, dict) and found.get("index") == line["index"]:
            messages = found.get("messages")
            if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
                return [{"messages": [{k: m[k] for k in ("role", "content") if k in m} for m in messages]}]
    text = line.get("input")
    return [{"prompt": text}] if isinstance(text, str) and text else []


@dataclass(frozen=True)
class LineTool:
    """A tool that writes a line of json for each question. is_file: which files of a folder are."""

    name: str
    is_line: Callable[[Any], bool]
    answer: Callable[[dict[str, Any], Place, Counter[str]], Answer]
    prompts: Prompts
    is_file: Callable[[Path], bool]


LINE_TOOLS = (
    LineTool(HARNESS, is_sample, _harness_answer, harness_prompts, lambda p: p.name.startswith("samples_")),
    LineTool(EVALSCOPE, is_review, _review_answer, review_prompts, lambda p: p.absolute().parts[-3:-2] == (REVIEWS,)),
)

OPENCOMPASS = "OpenCompass"
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


def read_opencompass(path: Path, side: Side) -> None:
    """Adds the answers of a results file to ``side``. Raises OSError, SamplesError."""
    questions = _details(load_opencompass(path))
    if not questions:
        side.left_out[NO_DETAILS] += 1
        return
    predictions = _predictions(path)
    for index, item in questions.items():
        scores = _opencompass_scores(item)
        if not scores:
            side.left_out[NO_SCORE] += 1
            continue
        found = predictions.get(index, {})
        prompt = digest(item.get("prompt", found.get("origin_prompt")))
        target = next((item[k] for k in ("answer", "references", "gold") if item.get(k) is not None), found.get("gold"))
        answered = found.get("prediction", item.get("origin_prediction", item.get("pred")))
        side.by_index |= not prompt
        side.answers.append(
            Answer(path.stem, "", prompt, str(index), prompt, digest(target), digest(answered), scores, (path, index))
        )


def load_opencompass(path: Path) -> Any:
    """Raises OSError, SamplesError for what is no json."""
    try:
        return parse(path.read_bytes())
    except ValueError as e:
        raise SamplesError(f"{path} is no json: {e}") from None


def _details(value: Any) -> dict[int, dict[str, Any]]:
    """Each question's details by its index in the data set."""
    details = value.get("details") if isinstance(value, dict) else None
    if isinstance(details, dict):
        items = [(int(k), v) for k, v in details.items() if re.fullmatch(r"\d{1,9}", k)]
    else:
        items = list(enumerate(details)) if isinstance(details, list) else []
    found = {}
    for index, item in items:
        if isinstance(item, dict):
            named = re.search(r"_(\d{1,9})\Z", str(item.get("example_abbr", "")))
            found[int(named[1]) if named else index] = item
    return found


def _opencompass_scores(item: dict[str, Any]) -> dict[str, float | None]:
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
    whole = _beside(results, RESULTS)
    if whole == results:
        return {}
    if whole.is_file():
        return _by_index(load_opencompass(whole), 0)
    found: dict[int, dict[str, Any]] = {}
    part = whole.with_name(f"{whole.stem}_0{whole.suffix}")
    while part.is_file():
        found |= _by_index(load_opencompass(part), len(found))
        part = whole.with_name(f"{whole.stem}_{int(part.stem.rsplit('_', 1)[1]) + 1}{whole.suffix}")
    return found


def _beside(path: Path, folder: str) -> Path:
    """The path in predictions/ that matches one in ``folder``; ``path`` itself where it does not lie there."""
    parts = list(path.parts)
    if folder not in parts:
        return path
    at = len(parts) - 1 - parts[::-1].index(folder)
    return Path(*parts[:at], PREDICTIONS, *parts[at + 1 :])


def _by_index(value: Any, first: int) -> dict[int, dict[str, Any]]:
    if not isinstance(value, dict):
        return {}
    numbered = {k: v for k, v in value.items() if re.fullmatch(r"\d{1,9}", k) and isinstance(v, dict)}
    return {first + int(k): v for k, v in numbered.items()}


def opencompass_prompts(place: Place) -> list[dict[str, Any]]:
    """What was asked: a text, or messages where the prompt has roles."""
    path, index = place
    item = _details(load_opencompass(path)).get(index, {})
    value = item.get("prompt") or _predictions(path).get(index, {}).get("origin_prompt")
    if isinstance(value, str) and value:
        return [{"prompt": value}]
    if isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        turns = [(_ROLES.get(m["role"], m["role"].lower()), m.get("prompt", m.get("content"))) for m in value]
        return [{"messages": [{"role": role, "content": text} for role, text in turns if isinstance(text, str)]}]
    return []


_HEAD = 1 << 24
"""A first line, at most."""


def open_side(path: Path) -> Side:
    """All answers of a file or folder. Raises SamplesError for what has none, OSError."""
    if not path.exists():
        raise SamplesError(f"{path} does not exist: name a samples_*.jsonl of lm-evaluation-harness, evalscope's "
                           "reviews, OpenCompass's results, or a folder of one of them")  # fmt: skip
    side = _folder(path) if path.is_dir() else _file(path)
    if not side.answers:
        why = "; ".join(f"{n:,} {what}" for what, n in side.left_out.items()) or "it is empty"
        hint = ": run OpenCompass with --dump-eval-details" if NO_DETAILS in side.left_out else ""
        raise SamplesError(f"{path} has no answered question ({why}){hint}")
    return side


def _file(path: Path) -> Side:
    if (tool := _line_tool(path)) is not None:
        side = Side(path, tool.name, tool.prompts)
        read_lines(path, side, tool)
        return side
    value = load_opencompass(path)
    if isinstance(value, dict) and "results" in value and ("configs" in value or "config" in value):
        raise SamplesError(f"{path} is the summary of lm-evaluation-harness: name the samples_*.jsonl beside it "
                           "(lm_eval --log_samples)")  # fmt: skip
    if is_predictions(value):
        raise SamplesError(f"{path} has predictions without scores: name OpenCompass's results/MODEL/DATASET.json")
    if not is_results(value):
        raise SamplesError(f"{path} has no samples of lm-evaluation-harness, reviews of evalscope or "
                           "results of OpenCompass")
    side = Side(path, OPENCOMPASS, opencompass_prompts)
    read_opencompass(path, side)
    return side


def _line_tool(path: Path) -> LineTool | None:
    """Whose the first line that is json is: lines before it, which are none, are counted later. A .jsonl of nobody's is
    read as the harness's. Raises SamplesError for answers that were not scored."""
    with path.open("rb") as f:
        for _ in range(1000):
            line = f.readline(_HEAD)
            if not line:
                break
            try:
                value = parse(line.strip().removeprefix(b"\xef\xbb\xbf") or b"!")
            except ValueError:
                if line.strip() in (b"{", b"["):  # a document of many lines
                    return None
                continue
            if isinstance(value, dict) and "model_output" in value and "sample_score" not in value:
                raise SamplesError(f"{path} has evalscope's predictions, without scores: name the file in {REVIEWS}/ "
                                   "beside it, or the run's folder")  # fmt: skip
            found = next((tool for tool in LINE_TOOLS if tool.is_line(value)), None)
            return found or (LINE_TOOLS[0] if path.suffix == ".jsonl" and not is_results(value) else None)
    return LINE_TOOLS[0] if path.suffix == ".jsonl" else None


def _folder(path: Path) -> Side:
    for tool in LINE_TOOLS:
        if files := sorted(p for p in path.rglob("*.jsonl") if tool.is_file(p) and p.is_file()):
            side = Side(path, tool.name, tool.prompts)
            for file in _newest(path, files, side):
                read_lines(file, side, tool)
            return side
    results = sorted(p for p in path.rglob("*.json") if p.is_file() and _of_results(p))
    side = Side(path, OPENCOMPASS, opencompass_prompts)
    found = [file for file in results if _has_details(file, side)]
    _one_model(path, found)
    for file in found:
        read_opencompass(file, side)
    if not found:
        for what in ("csv", "jsonl"):
            if n := sum(1 for p in path.rglob(f"*.{what}") if p.is_file()):
                side.left_out[f"{what} files of no tool that is read"] += n
    return side


def _has_details(file: Path, side: Side) -> bool:
    """What has none is counted: other programs' json files, too, because a folder may have any."""
    try:
        value = load_opencompass(file)
    except SamplesError:
        side.left_out["files that are no json"] += 1
        return False
    if isinstance(value, dict) and "details" in value:
        return True
    named = RESULTS in file.parts and is_results(value)
    side.left_out[NO_DETAILS if named else "json files that are no results"] += 1
    return False


def _of_results(file: Path) -> bool:
    return PREDICTIONS not in file.parts or RESULTS in file.parts


def _newest(path: Path, files: list[Path], side: Side) -> Iterable[Path]:
    """One file for each task, the last by the time in its name."""
    _one_model(path, files)
    by_task: dict[str, list[Path]] = {}
    for file in files:
        by_task.setdefault(task_of(file) or file.stem, []).append(file)
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
    """What two runs say together. matched: the pairs and what is none; flips: by task, as golden has them."""

    matched: Matched
    contrasts: tuple[Contrast, ...]
    flips: tuple[FlippedAnswer, ...]
    no_numbers: tuple[tuple[str, int], ...]
    rate: float

    @property
    def verdict(self) -> str:
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
    return Evaluation(matched, contrasts, tuple(_flips(matched.pairs, binary)), tuple(without.items()), rate)


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
    """One for each pair that flipped by a metric of right or wrong; of tasks that have none, the WORST by any score."""
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
    return found + scored[:WORST]


def prompts(flips: Iterable[FlippedAnswer], of: Prompts) -> tuple[list[dict[str, Any]], int]:
    """(lines for `accprobe send`, how many questions have no prompt in the files). A question that flipped under
    several filters is one. ids are printable ASCII: they become the requests' ids."""
    lines: dict[str, dict[str, Any]] = {}
    without, seen = 0, set()
    for flip in flips:
        a = flip.golden
        if (a.task, a.key, a.name) in seen:
            continue
        seen.add((a.task, a.key, a.name))
        requests = of(a.place)
        without += not requests
        for k, line in enumerate(requests):
            base = "-".join(filter(None, (a.task, a.name, str(k) if len(requests) > 1 else "")))
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
