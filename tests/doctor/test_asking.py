"""Prompts of a file. Sending them is tested with a server that answers (tests/cli/test_doctor_graphs.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_accprobe.doctor.graph_proof import AskingError, Prompt, read_prompts


@pytest.mark.parametrize(("line", "prompt"), [
    ("Plain text, as it is", "Plain text, as it is"),
    ('"in quotes"', "in quotes"),
    ("[3, 1, 4]", (3, 1, 4)),
    ('{"prompt": "a"}', "a"),
    ('{"prompt_token_ids": [5, 6]}', (5, 6)),
    ("42", "42"),
])  # fmt: skip
def test_a_line(tmp_path: Path, line: str, prompt: Prompt) -> None:
    (tmp_path / "f").write_text(f"\n{line}\n\n")
    assert read_prompts(tmp_path / "f") == (prompt,)


@pytest.mark.parametrize("line", ['{"text": "a"}', "[1, -2]", '[1, "a"]', "{}", '""'])
def test_what_is_no_prompt_is_named_by_its_line_and_not_quoted(tmp_path: Path, line: str) -> None:
    (tmp_path / "f").write_text(f"good\n{line}\n")
    with pytest.raises(AskingError, match="f, line 2: neither a text nor a list of token ids") as raised:
        read_prompts(tmp_path / "f")
    assert line not in str(raised.value)


def test_nothing_and_too_much(tmp_path: Path) -> None:
    for text, said in (("\n", "0 prompts"), ("a\n" * 257, "257 prompts"), ("a" * (5 << 20), "more than 4 MB")):
        (tmp_path / "f").write_text(text)
        with pytest.raises(AskingError, match=said):
            read_prompts(tmp_path / "f")
