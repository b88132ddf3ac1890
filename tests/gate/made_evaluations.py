"""Evaluations' files as the tools write them, made up: lm-evaluation-harness (lm_eval/evaluator.py and
loggers/evaluation_tracker.py of 0.4.x) and OpenCompass (tasks/openicl_eval.py, openicl/icl_inferencer/)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sample(
    i: int, metrics: Mapping[str, Any], *, way: str = "none", prompt: str = "", said: str = "", doc: Any = None
) -> dict[str, Any]:
    """One line: question ``i`` under one filter."""
    doc = {"question": f"how much is {i} and {i}?", "answer": str(2 * i)} if doc is None else doc
    prompt = prompt or f"Question: {doc['question']}\nAnswer:"
    said = said or f"it is {2 * i}"
    return {
        "doc_id": i,
        "doc": doc,
        "target": str(2 * i),
        "arguments": {
            "gen_args_0": {"arg_0": prompt, "arg_1": {"until": ["\n\n"], "max_gen_toks": 64, "temperature": 0}}
        },
        "resps": [[said]],
        "filtered_resps": [said],
        "filter": way,
        "metrics": list(metrics),
        "doc_hash": sha(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": sha(prompt),
        "target_hash": sha(str(2 * i)),
        **metrics,
    }


def choice(i: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """One line of a multiple-choice task: a request for each choice."""
    line = sample(i, metrics)
    line["arguments"] = {f"gen_args_{k}": {"arg_0": f"{i} is", "arg_1": f" {c}"} for k, c in enumerate(("odd", "even"))}
    line["resps"] = [[["-1.0", "False"]], [["-2.0", "True"]]]
    return line


def write_samples(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def right(n: int, wrong: Sequence[int], **how: Any) -> list[dict[str, Any]]:
    """n lines of which these are wrong."""
    return [sample(i, {"exact_match": 0.0 if i in set(wrong) else 1.0}, **how) for i in range(n)]


def write_opencompass(root: Path, task: str, correct: Sequence[Any], *, questions: bool = True) -> Path:
    """results/tiny/TASK.json and predictions/tiny/TASK.json below ``root``. questions: False for the details of an
    evaluator's own, which has none."""
    asked = {
        str(i): {
            "origin_prompt": [{"role": "HUMAN", "prompt": f"how much is {i} and {i}?"}],
            "prediction": f"it is {i}",
            "gold": str(2 * i),
        }
        for i in range(len(correct))
    }
    details: Any = {str(i): {"pred": 7, "answer": str(2 * i), "is_correct": c} for i, c in enumerate(correct)}
    if questions:
        details = [
            {"example_abbr": f"{task}_{i}", "pred": ["x"], "answer": [str(2 * i)], "correct": [c]}
            for i, c in enumerate(correct)
        ]
    for folder, value in (("results", {"accuracy": 50.0, "details": details}), ("predictions", asked)):
        (root / folder / "tiny").mkdir(parents=True, exist_ok=True)
        (root / folder / "tiny" / f"{task}.json").write_text(json.dumps(value, indent=4), encoding="utf-8")
    return root / "results/tiny" / f"{task}.json"
