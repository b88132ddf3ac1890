"""Folders and files of evaluations as people bring them: recognised, read, and answered in the tool's own words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_evaluations import right, write_opencompass, write_samples

from vllm_accprobe.cli import main

N = 120
Lines = list[dict[str, Any]]


def text(i: int, wrong: set[int]) -> str:
    return f"{'bad' if i in wrong else 'good'} {i}"


def message(role: str, content: str, side: str) -> dict[str, Any]:
    return {"id": f"{side}{role}{content}", "content": content, "source": None, "role": role}


def predicted(wrong: set[int], side: str, n: int = N) -> Lines:
    """evalscope's predictions since 1.0: random ids, the answer behind what was asked."""
    return [
        {"index": i, "model": "m", "messages": [message("user", f"q {i}", side), message("assistant", "x", side)],
         "model_output": {"choices": [{"message": message("assistant", text(i, wrong), side), "stop_reason": "stop"}]}}
        for i in range(n)
    ]  # fmt: skip


def reviewed(wrong: set[int], side: str) -> Lines:
    """evalscope's reviews of 1.0.0, whose input is the messages, with ids."""
    return [
        {"index": i, "input": [message("user", f"q {i}", side)], "target": str(i), "sample_score": {
            "score": {"value": {"acc": float(i not in wrong)}, "prediction": text(i, wrong)}, "sample_id": i}}
        for i in range(N)
    ]  # fmt: skip


def earlier(wrong: set[int], _: str) -> Lines:
    """evalscope's reviews before 1.0."""
    return [
        {"answer_id": f"answer-{i}", "index": i, "raw_input": {"question": f"q {i}"}, "choices": [
            {"message": {"content": text(i, wrong)}, "review": {"gold": str(i), "pred": "", "result": i not in wrong}}]}
        for i in range(N)
    ]  # fmt: skip


def asked(wrong: set[int], _: str) -> dict[str, Any]:
    """OpenCompass' predictions."""
    turns = [{"role": "HUMAN", "prompt": "q"}, {"role": "BOT", "prompt": ""}]
    return {str(i): {"origin_prompt": [*turns], "prediction": text(i, wrong), "gold": str(i)} for i in range(N)}


def lines_at(name: str, make: Callable[[set[int], str], Lines]) -> Callable[[Path, set[int]], None]:
    return lambda home, wrong: void(write_samples(home / name, make(wrong, home.name)))


def void(_: object) -> None:
    pass


def document_at(*names: str) -> Callable[[Path, set[int]], None]:
    """One file, or the parts of a run on several cards."""

    def write(home: Path, wrong: set[int]) -> None:
        items = list(asked(wrong, "").values())
        size = -(-N // len(names))
        for k, name in enumerate(names):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            part = {str(i): item for i, item in enumerate(items[k * size : (k + 1) * size])}
            (home / name).write_text(json.dumps(part, indent=4, ensure_ascii=False))

    return write


def of_aisbench(wrong: set[int], side: str) -> Lines:
    """AISBench's predictions, in the order in which they came back."""
    return [
        {"data_abbr": "gsm8k", "id": i, "success": True, "uuid": f"{side}{i}", "origin_prompt": f"q {i}",
         "prediction": text(i, wrong), "gold": str(i)}
        for i in sorted(range(N), key=lambda i: i * (7 if side == "mine" else 11) % N)
    ]  # fmt: skip


def unfinished(wrong: set[int], side: str) -> Lines:
    return [{"idx": int(i), **item} for i, item in asked(wrong, side).items()]


def without_details(home: Path, wrong: set[int]) -> None:
    document_at("predictions/m/gsm8k.json")(home, wrong)
    (home / "results/m").mkdir(parents=True)
    (home / "results/m/gsm8k.json").write_text('{"accuracy": 97.5}')


def harness(home: Path, wrong: set[int]) -> None:
    both = [line for way in ("strict-match", "flexible-extract") for line in right(N, sorted(wrong), way=way)]
    write_samples(home / "m/samples_gsm8k_2026-01-01T00-00-00.000001.jsonl", both)
    (home / "m/results_2026-01-01T00-00-00.000001.json").write_text('{"results": {}, "configs": {}}')


def listed(home: Path, wrong: set[int]) -> None:
    """The harness before 0.4.3: one json list."""
    (home / "m").mkdir(parents=True)
    path = home / "m/samples_gsm8k_2024-05-01T00-00-00.jsonl"
    path.write_text(json.dumps(right(N, sorted(wrong)), indent=2))


TEXTS = f"UNDECIDED: 3 of {N} answers are not the same text"
TESTED = "PASS: no difference beyond chance in"
BROUGHT: dict[str, tuple[Callable[[Path, set[int]], None], int, str, tuple[str, ...]]] = {
    "opencompass predictions": (document_at("predictions/m/gsm8k.json"), 3, TEXTS, ("gsm8k 5: equal up to",)),
    "opencompass parts": (
        document_at(*(f"predictions/m/gsm8k_{k}.json" for k in range(12))), 3, TEXTS, ("gsm8k 110: equal up to",)
    ),
    "opencompass unfinished": (lines_at("predictions/m/tmp_gsm8k.jsonl", unfinished), 3, TEXTS, ("gsm8k 5: equal",)),
    "aisbench": (lines_at("predictions/m/gsm8k.jsonl", of_aisbench), 3, TEXTS, ("gsm8k 5: equal up to character 0",)),
    "opencompass without details": (without_details, 3, TEXTS, ("1 files without details of each question",)),
    "opencompass results": (
        lambda home, wrong: void(write_opencompass(home, "gsm8k", [i not in wrong for i in range(N)])), 0, TESTED,
        (f"gsm8k correct: golden 119 of {N}, mine 116", "gsm8k 5: lost correct"),
    ),
    "evalscope predictions": (
        lines_at("predictions/m/gsm8k_main.jsonl", predicted), 3, TEXTS, ("gsm8k_main 5: equal up to character 0",)
    ),
    "evalscope reviews": (
        lines_at("reviews/m/gsm8k_main.jsonl", reviewed), 0, TESTED,
        (f"gsm8k_main acc: golden 119 of {N}, mine 116", "3 questions flipped: 3 lost, 0 won"),
    ),
    "evalscope before 1.0": (
        lines_at("reviews/m/gsm8k_main.jsonl", earlier), 0, TESTED,
        (f"gsm8k_main correct: golden 119 of {N}, mine 116",),
    ),
    "harness": (
        harness, 0, TESTED,
        (f"gsm8k exact_match (strict-match): golden 119 of {N}, mine 116", "3 questions flipped: 3 lost, 0 won",
         "gsm8k 5: lost exact_match (strict-match), exact_match (flexible-extract)"),
    ),
    "harness, a list": (listed, 0, TESTED, (f"gsm8k exact_match (none): golden 119 of {N}, mine 116",)),
}  # fmt: skip
"""Format → what writes a side, the exit code, how the first line begins, and what further lines say."""


@pytest.mark.parametrize("name", BROUGHT)
def test_each_is_read_and_answered(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, code, first, more = BROUGHT[name]
    for side, wrong in (("golden", {3}), ("mine", {3, 5, 8, 110})):
        (tmp_path / side).mkdir()
        write(tmp_path / side, wrong)
    files = [sorted(p for p in (tmp_path / side).rglob("*") if p.is_file()) for side in ("golden", "mine")]
    places = [(tmp_path / "golden", tmp_path / "mine"), *(zip(*files, strict=True) if len(files[0]) == 1 else ())]
    for golden, mine in places:
        capsys.readouterr()
        got = main(["eval-diff", str(golden), str(mine)])
        out, err = capsys.readouterr()
        assert (got, err) == (code, ""), (got, out, err)
        assert out.startswith(first), out
        assert not [m for m in more if m not in out], out
    same = main(["eval-diff", str(tmp_path / "golden"), str(tmp_path / "golden")])
    assert same == 2  # one folder is named twice


def test_equal_texts_pass_and_prompts_of_others_are_written(tmp_path, capsys):
    for side, wrong in (("a", {3}), ("b", {3}), ("c", {3, 7})):
        write_samples(tmp_path / side / "predictions/m/law.jsonl", predicted(wrong, side, 9))
    assert main(["eval-diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith("PASS: 9 answers, each the same text on both sides")
    flipped = tmp_path / "flipped.jsonl"
    assert main(["eval-diff", str(tmp_path / "a"), str(tmp_path / "c"), "--prompts-out", str(flipped)]) == 3
    assert json.loads(flipped.read_text()) == {"id": "law-7", "messages": [{"role": "user", "content": "q 7"}]}
    capsys.readouterr()
    assert main(["eval-diff", str(tmp_path / "a"), str(tmp_path / "c"), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["pairs"], found["other_responses"]) == (None, 9, 1)
    assert main(["eval-diff", str(tmp_path / "a"), str(tmp_path / "c"), "--csv", str(tmp_path / "m.csv")]) == 2


def test_empty_answers_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, said in (("a", "yes"), ("b", "")):
        lines = [{"idx": i, "origin_prompt": f"q {i}", "prediction": said if i < 4 else "no"} for i in range(6)]
        write_samples(tmp_path / side / "predictions/m/law.jsonl", lines)
    assert main(["eval-diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 3
    assert "empty answers: golden 0, mine 4" in capsys.readouterr().out
    failed = [{"data_abbr": "law", "id": i, "input": "q", "error_info": "500"} for i in range(7)]
    write_samples(tmp_path / "c/predictions/m/law.jsonl", of_aisbench(set(), "c"))
    write_samples(tmp_path / "c/predictions/m/law_failed.jsonl", failed)
    assert main(["inspect", str(tmp_path / "c")]) == 0
    assert "7 answers without a text" in capsys.readouterr().out
