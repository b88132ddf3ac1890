"""The gate's laboratory itself: its cases, its prompts, and rows that only an engine knows."""

from types import SimpleNamespace

import accprobe_fault_rows
import pytest
import torch

from lab.gate_pairs import CLEAN, FAULTS, LENGTHS, WAYS, prompts


def test_the_cases_are_those_that_the_page_counts() -> None:
    assert len(CLEAN) == 20
    assert len([case for case in FAULTS if case.axis]) >= 6
    titles = [case.title for case in (*CLEAN, *FAULTS)]
    assert len(set(titles)) == len(titles)
    assert {case.half for case in CLEAN} == {case.half for case in FAULTS} == {"tuned", "held-out"}
    assert all(case.floor != WAYS[case.golden].engine.get("dtype", "bfloat16") for case in (*CLEAN, *FAULTS))


def test_prompts_are_the_same_every_time_and_some_begin_alike() -> None:
    one = prompts(3)
    assert one == prompts(3) != prompts(4)
    assert sorted(len(line["token_ids"]) for line in one) == list(LENGTHS)
    heads = [tuple(line["token_ids"][:32]) for line in one if len(line["token_ids"]) > 40]
    assert len(heads) - len(set(heads)) + 1 > 5


@pytest.mark.parametrize(
    ("condition", "expected"), [("hit", [1, 1, 1, 0, 0, 1]), ("chunk>=2", [0, 0, 0, 0, 0, 0]), ("position>=9", [0] * 6)]
)
def test_a_hit_is_no_second_chunk(monkeypatch: pytest.MonkeyPatch, condition: str, expected: list[int]) -> None:
    """A request that begins at position 4 behind a hit, a new one of two tokens, and one that decodes after a hit."""
    engine = accprobe_fault_rows.Engine()
    engine.runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b", "c", "gone"]))
    engine.begun = {"a": 4, "b": 0, "c": 4}
    monkeypatch.setattr(accprobe_fault_rows, "ENGINE", engine)
    monkeypatch.setattr(accprobe_fault_rows, "_query_starts", lambda: torch.tensor([0, 3, 5, 6], dtype=torch.int32))
    root = torch.nn.Module()
    root.forward = lambda *args, **kwargs: None  # type: ignore[method-assign]
    rows = accprobe_fault_rows.Rows(root, condition)
    root.forward(torch.zeros(6), torch.tensor([4, 5, 6, 0, 1, 8]))
    assert rows.mask(6).int().tolist() == expected
