"""What a path of samples is read as: files and folders of both tools, and what is none."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_evaluations import choice, right, sample, write_opencompass, write_samples

from vllm_accprobe.dump import files
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.common import result_tables
from vllm_accprobe.gate import evaluations, trainer
from vllm_accprobe.gate.evaluations import SamplesError
from vllm_accprobe.gate.sending import prompts, replies

TIME = "2026-11-23T10-00-00.000001"


def test_a_line_becomes_an_answer(tmp_path: Path) -> None:
    path = write_samples(tmp_path / f"samples_gsm8k_cot_{TIME}.jsonl", right(3, [1], way="strict-match"))
    side = evaluations.open_side(path)
    assert [a.scores for a in side.answers] == [{"exact_match": 1.0}, {"exact_match": 0.0}, {"exact_match": 1.0}]
    assert {(a.task, a.way) for a in side.answers} == {("gsm8k_cot", "strict-match")}
    assert evaluations.requests(side.answers[2].place) == [
        {"prompt": "Question: how much is 2 and 2?\nAnswer:", "max_tokens": 64, "stop": ["\n\n"], "temperature": 0}
    ]


def test_older_files_have_no_hashes_no_metrics_and_no_filters(tmp_path: Path) -> None:
    new = right(2, [])
    old = []
    for line in new:
        kept = {
            k: v for k, v in line.items() if k not in ("metrics", "filter", "doc_hash", "prompt_hash", "target_hash")
        }
        kept["arguments"] = [list(a.values()) for a in line["arguments"].values()]
        old += [kept, {**kept, "exact_match": 0.0}]
    side = evaluations.open_side(write_samples(tmp_path / "old.jsonl", old))
    fresh = evaluations.open_side(write_samples(tmp_path / "new.jsonl", new))
    assert [(a.way, a.scores["exact_match"]) for a in side.answers] == [("", 1), ("filter 2", 0)] * 2
    for a, b in zip(side.answers[::2], fresh.answers, strict=True):
        assert (a.key, a.prompt, a.target, a.response) == (b.key, b.prompt, b.target, b.response)
        assert evaluations.requests(a.place) == evaluations.requests(b.place)


HELLO = [{"role": "user", "content": "hello"}]
HOW = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 5}


def asked(*arguments: Any) -> dict[str, Any]:
    """A line whose request has these arguments in place of the usual ones."""
    line = sample(1, {"acc": 1.0})
    line["arguments"]["gen_args_0"].update({f"arg_{i}": a for i, a in enumerate(arguments) if a is not None})
    return line


@pytest.mark.parametrize(
    ("line", "requests"),
    [
        (choice(4, {"acc": 1.0}), [{"prompt": "4 is odd", "max_tokens": 1}, {"prompt": "4 is even", "max_tokens": 1}]),
        (asked([json.dumps(HELLO)]), [{"messages": HELLO, "max_tokens": 64, "stop": ["\n\n"], "temperature": 0}]),
        # numbers alone, by the names that a server knows
        (asked(None, HOW | {"do_sample": True, "min_p": "x", "top": 3}),
         [{"prompt": "Question: how much is 1 and 1?\nAnswer:", **HOW}]),
    ],
    ids=["choices", "chat", "sampling"],
)  # fmt: skip
def test_what_a_question_asks(line: dict[str, Any], requests: list[dict[str, Any]], tmp_path: Path) -> None:
    """`accprobe send` takes the lines."""
    side = evaluations.open_side(write_samples(tmp_path / "s.jsonl", [line]))
    assert evaluations.requests(side.answers[0].place) == requests
    kept = prompts.read(str(write_samples(tmp_path / "p.jsonl", requests)))
    assert [(p.text, p.messages and [*p.messages], p.max_tokens) for p in kept] == [
        (r.get("prompt"), r.get("messages"), r.get("max_tokens")) for r in requests
    ]
    assert all(p.parameters == {k: r[k] for k in HOW if k in r} for p, r in zip(kept, requests, strict=True))


READERS: dict[str, Callable[[Path], object]] = {
    "samples.jsonl": evaluations.open_side,
    "trainer.jsonl": trainer.read,
    "prompts.jsonl": lambda path: prompts.read(str(path)),
    "prompts.txt": lambda path: prompts.read(str(path)),
    "pass-0.jsonl": lambda path: replies.read_pass(path.parent, 0),
    "steps-0/steps-rank0.jsonl": lambda path: replies.read_steps(path.parents[1]),
    "comparator_report.jsonl": result_tables.read,
}


@pytest.mark.parametrize("name", READERS)
def test_a_line_without_an_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever people bring in lines: a line's length is bounded, and the error names the file."""
    monkeypatch.setattr(files, "MAX_LINE", 2000)
    monkeypatch.setattr(prompts, "MAX_LINE", 2000)
    lines = [{"type": "config", "prompt": "x"}, sample(1, {"acc": 1.0}, said="x" * 2000)]
    path = write_samples(tmp_path / name, lines)
    with pytest.raises(DumpError, match=rf"{re.escape(name)}: a line has more than .*one object on each line"):
        READERS[name](path)


def test_one_document_on_one_line_is_none_of_jsonls_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 2000)
    document = tmp_path / "s.json"
    document.write_text(json.dumps([sample(i, {"acc": 1.0}) for i in range(9)]))
    assert len(evaluations.open_side(document).answers) == 9


def test_what_is_no_sample_is_counted(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "s.jsonl", right(3, []))
    good = path.read_bytes()
    torn = [
        b"{torn",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"17",
        b'{"doc_id": 4, "doc": 1}',
        b"",
        b'{"a": ' + b"9" * 5000 + b"}",
    ]
    path.write_bytes(b"\n".join([torn[0], good.strip(), *torn[1:]]) + b"\n" + good[:40])
    side = evaluations.open_side(path)
    assert len(side.answers) == 3
    assert side.left_out == {evaluations.NO_JSON: 5, evaluations.NO_SAMPLE: 1, evaluations.NO_METRIC: 1}
    assert [evaluations.requests(a.place)[0]["max_tokens"] for a in side.answers] == [64] * 3


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    lines = [
        sample(i, {"a": float("nan"), "b": [1, 2], "c": True, "d": 10**400, "e": "x", "f": None}) for i in range(2)
    ]
    side = evaluations.open_side(write_samples(tmp_path / "s.jsonl", lines))
    assert side.answers[0].scores == {"a": None, "b": None, "c": 1.0, "d": None, "e": None, "f": None}


def test_opencompass_without_predictions_has_only_numbers(tmp_path: Path) -> None:
    file = write_opencompass(tmp_path, "t", [True], questions=False)
    (tmp_path / "predictions/tiny/t.json").unlink()
    side = evaluations.open_side(file)
    assert side.by_index
    assert evaluations.requests(side.answers[0].place) == []


def test_opencompass_of_several_runs_is_their_mean(tmp_path: Path) -> None:
    file = write_opencompass(tmp_path, "t", [True, False])
    value = json.loads(file.read_text())
    value["details"][0]["correct"] = [True, False, True, True]
    value["details"][1] = {"example_abbr": "t_1", "pred": ["5"], "answer": ["6"], "rouge1": [40.0]}
    file.write_text(json.dumps(value))
    assert [a.scores for a in evaluations.open_side(file).answers] == [{"correct": 0.75}, {"rouge1": 40.0}]


WRONG = {
    "nowhere": (None, "does not exist"),
    "empty.jsonl": ("", "no answered question"),
    "text.txt": ("hello\nyou\n", "is no json"),
    "unscored.jsonl": ('{"index": 0, "model_output": {}}\n', "1 answers without a text"),
    "valueless.jsonl": ('{"index": 0, "sample_score": {"score": 7}}\n', "1 lines without a metric"),
    "results.json": ('{"results": {}, "configs": {}}', "name the samples_"),
    "textless.json": ('{"0": {"origin_prompt": "x"}, "1": 7}', "1 answers without a text"),
    "utf16.jsonl": ('{"doc_id": 1, "resps": []}\n'.encode("utf-16"), "lines that are no json"),
    "torn.json": ('{"0": {"origin_prompt": "x", "predic', "is no json"),
    "types.jsonl": ('{"choices": {"0": 1}, "raw_input": 1}\n{"idx": [], "gold": 1e999}\n', "2 lines that are no"),
    "other.json": ('{"hello": "you"}', "has no samples"),
    "list.json": ("[1, 2]", "has no samples"),
    "deep.json": ("[" * 200_000, "is no json"),
    "nodetails.json": ('{"accuracy": 20.0}', "--dump-eval-details"),
    "odd.json": ('{"details": {"0": 7, "x": {"correct": true}, "1": {"pred": 3}}}', "no answered question"),
    "lines.jsonl": ("1\n2\n", "no answered question"),
    "folder": (None, "no answered question"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_has_no_answers_is_one_line(name: str, tmp_path: Path) -> None:
    text, says = WRONG[name]
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    elif name == "folder":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.json").write_text("{")
    with pytest.raises(SamplesError, match=says) as e:
        evaluations.open_side(tmp_path / name)
    assert name in str(e.value)
