"""Prompts files of every shape, the shipped set, and what is no prompt."""

import ast
import base64
import importlib.util
import json
from pathlib import Path

import pytest

from vllm_accprobe.gate.sending import prompts
from vllm_accprobe.gate.sending.prompts import PromptLine, PromptsError, read

CHAT = [{"role": "user", "content": "hello"}]


def given(tmp_path: Path, name: str, *lines: object) -> str:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_jsonl(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    path = given(
        tmp_path, "p.jsonl", {"id": "a", "prompt": "one", "max_tokens": 5, "stop": "\n"}, {"messages": messages},
        {"token_ids": [1, 2, 3]}, {"prompt": [4, 5]}, {"prompt": "x", "metadata": 7}, "", '"bare"',
    )  # fmt: skip
    lines = read(path)
    assert lines[0] == PromptLine("a", text="one", max_tokens=5, stop=("\n",))
    assert lines[1] == PromptLine("p0001", messages=tuple(messages))
    assert [line.token_ids for line in lines[2:4]] == [(1, 2, 3), (4, 5)]
    assert [line.text for line in lines[4:]] == ["x", "bare"]
    (tmp_path / "again.jsonl").write_text(prompts.to_text(lines))
    assert read(str(tmp_path / "again.jsonl")) == lines  # what is kept is what is read


def test_parameters_are_kept_and_what_asks_for_nothing_is_not(tmp_path: Path) -> None:
    """OpenAI's batches too; data sets' own fields are none."""
    how = {"temperature": 0, "repetition_penalty": 1.1, "chat_template_kwargs": {"enable_thinking": False}}
    nothing = {"stream": False, "n": 1, "model": "gpt", "logprobs": True, "metadata": {"answer": "7"}, "seed": None}
    body = {"messages": CHAT, "max_completion_tokens": 4, **how, **nothing}
    batch = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body}
    turns = {"conversations": [{"from": "human", "value": "hello"}], "category": 3}
    path = given(tmp_path, "p.jsonl", body, batch, {"prompt": "x", "top_k": 5}, turns)
    lines = read(path)
    assert lines[0] == PromptLine("p0000", messages=tuple(CHAT), max_tokens=4, parameters=how)
    assert (lines[1].name, lines[1].parameters, lines[1].max_tokens) == ("b", how, 4)
    assert [line.parameters for line in lines[2:]] == [{"top_k": 5}, {}]
    (tmp_path / "again.jsonl").write_text(prompts.to_text(lines))
    assert read(str(tmp_path / "again.jsonl")) == lines


def test_the_tables_name_what_the_installed_vllm_takes() -> None:
    """And nothing else; fields are read from the source, which costs no import of torch."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed here")
    openai = Path(spec.origin).parent / "entrypoints" / "openai"
    fields = {
        route: fields_of(openai / route / "protocol.py", f"{name}Request")
        for route, name in (("chat_completion", "ChatCompletion"), ("completion", "Completion"))
    }
    ours = {"messages", "prompt", "max_tokens", "max_completion_tokens", "stop"}
    ours |= prompts.IGNORED | prompts.NEUTRAL.keys()
    sent = prompts.SAMPLING | prompts.REQUEST
    assert fields["completion"] - ours - sent == set()
    assert fields["chat_completion"] - ours - sent - prompts.CHAT == set()
    assert sent <= fields["completion"]
    assert sent | prompts.CHAT <= fields["chat_completion"]


def fields_of(path: Path, name: str) -> set[str]:
    (found,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            and not n.target.id.startswith("_")}  # fmt: skip


def test_sharegpt_up_to_the_last_question(tmp_path: Path) -> None:
    turns = [{"from": f, "value": v} for f, v in (("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"id": "s1", "conversations": turns}], indent=2))
    (line,) = read(str(path))
    assert line.name == "s1"
    assert line.messages is not None
    assert [(m["role"], m["content"]) for m in line.messages] == [("user", "a"), ("assistant", "b"), ("user", "c")]


def test_plain_text_and_images(tmp_path: Path) -> None:
    assert [line.text for line in read(given(tmp_path, "p.txt", "one", "", "two {"))] == ["one", "two {"]
    (tmp_path / "u.jsonl").write_text('\ufeff{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")  # no ends of lines
    assert [line.text for line in read(tmp_path / "u.jsonl")] == ["a\u2028b\x85c"]
    (tmp_path / "i.png").write_bytes(b"image")
    (line,) = read(given(tmp_path, "i.jsonl", {"prompt": "what?", "images": ["i.png", "https://x/y.jpg"]}))
    assert line.messages is not None
    first, second, text = line.messages[0]["content"]
    assert first["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"image").decode()
    assert second["image_url"]["url"] == "https://x/y.jpg"
    assert text == {"type": "text", "text": "what?"}


def test_the_shipped_set() -> None:
    lines = read("default")
    assert [prompts.digest(lines)] == [prompts.digest(read("default"))]
    by_name = {line.name: line.text or "" for line in lines}
    assert len(by_name["five"]) < 30
    assert 30_000 < len(by_name["long-8000"]) < 36_000
    shared = [by_name[f"prefix-{k}"] for k in range(3)]
    assert len(set(shared)) == 3
    assert len({text[:2300] for text in shared}) == 1
    assert {round(len(by_name[f"long-{n}"]) / n) for n in prompts.LENGTHS} == {4}
    assert sum("一" <= c <= "鿿" for c in by_name["chinese"]) > 20


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{torn"], "line 1 is no json"),
        ([{"prompt": "a"}, 7], "line 2"),
        ([{"prompt": ""}], "not an empty one"),
        ([{"prompt": "a", "token_ids": [1]}], "one of prompt"),
        ([{"text": "a"}], "one of prompt"),
        ([{"token_ids": ["a"]}], "list of numbers"),
        ([{"token_ids": [True]}], "list of numbers"),
        ([{"messages": ["a"]}], "role and content"),
        ([{"id": "a b", "prompt": "x"}], "printable ASCII"),
        ([{"id": "é", "prompt": "x"}], "printable ASCII"),
        ([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}], "stands twice"),
        ([{"prompt": "x", "max_tokens": 0}], "max_tokens"),
        ([{"prompt": "x", "stop": [1]}], "stop"),
        ([{"prompt": "x", "images": ["nowhere.png"]}], "nowhere.png"),
        ([{"conversations": [{"from": "human"}]}], "conversations"),
        ([{"prompt": "a"}, {"prompt": "x", "repetition_penality": 1.1}],
         r"p.jsonl, line 2: repetition_penality is no parameter of vLLM's \(repetition_penalty\?\): correct it"),
        ([{"prompt": "x", "chat_template_kwargs": {}}], "chat_template_kwargs is a parameter of chats"),
        ([{"messages": CHAT, "chat_template_kwargs": []}], "chat_template_kwargs is an object"),
        ([{"prompt": "x", "min_tokens": "2"}], "min_tokens is a number"),
        ([{"prompt": "x", "stream": True}], "stream does not go with a comparison: answers are read whole"),
        ([{"prompt": "x", "n": 2}], "n does not go with a comparison"),
        ([{"prompt": "x", "truncate_prompt_tokens": 4}], "shorten it"),
        ([{"custom_id": "a", "url": "/v1/embeddings", "body": {"prompt": "x"}}], "url is none of /v1/chat/completions"),
        ([{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "top": 1}}], "line 1: top is no param"),
        (["[" * 100_000], "is no json"),
        ([""], "has no prompts"),
    ],
)
def test_what_is_no_prompt_is_named(lines: list[object], says: str, tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=says):
        read(given(tmp_path, "p.jsonl", *lines))


def test_columns_of_a_data_set_are_counted_and_not_sent(tmp_path: Path) -> None:
    notes: list[str] = []
    lines = [{"prompt": "a", "answer": "7", "\x1b[2J": 1}, {"messages": CHAT, "answer": "8", "top_p": 0.5}]
    found = read(given(tmp_path, "p.jsonl", *lines), notes.append)
    assert [line.parameters for line in found] == [{}, {"top_p": 0.5}]
    assert len(notes) == 1
    assert notes[0].endswith("not sent, with how many lines: answer (2), ? (1)")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    for name, says in (("nowhere", "no file"), ("b.txt", "UTF-8")):
        with pytest.raises(PromptsError, match=says):
            read(str(tmp_path / name))
