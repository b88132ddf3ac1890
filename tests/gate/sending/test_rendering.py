"""Chats and parameters: what is sent where, what each server renders, and the first token that differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forcible_server import forcible
from odd_server import odd

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import client, passes, rendering, replies
from vllm_accprobe.gate.sending.client import Reply, Sender
from vllm_accprobe.gate.sending.prompts import PromptLine, to_text

CHAT = ({"role": "user", "content": "a secret question"},)
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HOW = {"temperature": 0.5, "min_tokens": 3, "cache_salt": "s", "tools": TOOLS, "vllm_xargs": {"x": 1}}
LINE = PromptLine("q", messages=CHAT, max_tokens=4, stop=("\n",), parameters=HOW)
FORCED = passes.along(LINE, Reply("q", 0.0, 0.0, [5, 6], [7, 8]))


@pytest.mark.parametrize(
    ("line", "way", "route", "sent", "without"),
    [
        (LINE, None, "/v1/chat/completions",
         {"temperature": 0.5, "seed": 0, "min_tokens": 3, "tools": TOOLS, "tool_choice": "none", "max_tokens": 4,
          "stop": ["\n"], "vllm_xargs": {"x": 1}, "top_logprobs": 20}, {"prompt", "ignore_eos"}),
        (FORCED, client.PLUGIN, "/v1/completions",
         {"prompt": [5, 6], "temperature": 0.5, "seed": 0, "min_tokens": 2, "max_tokens": 2, "ignore_eos": True,
          "cache_salt": "s", "vllm_xargs": {"x": 1, client.KEY: "7 8"}}, {"tools", "tool_choice", "messages", "stop"}),
        (FORCED, client.TRACE, client.GENERATE, {"token_ids": [5, 6], "cache_salt": "s"},
         {"temperature", "vllm_xargs"}),
        (FORCED, client.SCORED, "/v1/completions",
         {"prompt": [5, 6, 7, 8], "temperature": 0.0, "max_tokens": 1}, {"min_tokens", "cache_salt", "tools"}),
    ],
)  # fmt: skip
def test_what_is_sent(line: PromptLine, way: str | None, route: str, sent: dict[str, Any], without: set[str]) -> None:
    there, body = Sender("http://x", model="m", way=way).body(line)
    assert (there, {k: v for k, v in body.items() if k in sent}, without & body.keys()) == (route, sent, set())
    if way == client.TRACE:
        params = body["sampling_params"]
        assert (params["temperature"], params["min_tokens"], params["max_tokens"]) == (0.5, 2, 2)
        assert "cache_salt" not in params


def test_a_format_of_answers_is_refused_where_it_cannot_be_sent() -> None:
    line = PromptLine("q", token_ids=(5,), along=(7,), parameters={"response_format": {"type": "json_object"}})
    whys = [client.unsendable(line, way, 1024) for way in client.WAYS]
    assert whys == [None, "response_format is not sent by trace replay: write structured_outputs", None]


def test_what_tokenize_gets() -> None:
    """Only what changes tokens; what vLLM gives to the template beside its own arguments is among these."""
    how = HOW | {"reasoning_effort": "none", "documents": [{"text": "d"}], "chat_template_kwargs": {"end": 1}}
    assert rendering.request_body(PromptLine("q", messages=CHAT, parameters=how), "m") == {
        "model": "m", "messages": list(CHAT), "return_token_strs": True, "tools": TOOLS,
        "chat_template_kwargs": {
            "reasoning_effort": "none", "documents": [{"text": "d"}], "enable_thinking": False, "end": 1
        },
    }  # fmt: skip


# --- two folders ---


def sent(
    path: Path, rendered: dict[str, Any], names: str = "abc", prompt: Callable[[str], list[int]] = lambda name: [1, 2]
) -> replies.Sent:
    """Of chats; rendered: lines of rendered.jsonl by the prompt's id. prompt: the ids that were computed."""
    lines = [PromptLine(name, messages=CHAT) for name in names]
    replies.begin(path, to_text(lines), {"schema": 1, "passes": [{"arrive": "one"}], "complete": True})
    writer = replies.ReplyWriter(path / replies.pass_name(0))
    for name in names:
        writer.add(Reply(name, 0.0, 0.0, prompt(name) or None, [7]))
    writer.close()
    if rendered:
        text = "".join(json.dumps({"name": name, **value}) + "\n" for name, value in rendered.items())
        (path / rendering.RENDERED).write_text(text + '{"name": "torn')
    return replies.read(path)


def ids(*token_ids: int, pieces: list[str] | None = None) -> dict[str, Any]:
    return {"token_ids": token_ids, "pieces": pieces}


HELLO = ids(9, 198, 198, pieces=["hi", "Ċ", "Ċ"])


@pytest.mark.parametrize(
    ("golden", "mine", "says"),
    [
        (HELLO, HELLO, None),
        (HELLO, ids(9, 4, pieces=["hi", "Ġä½łå¥½"]),
         "golden renders 3 tokens, mine 2: they differ first at position 1: golden 198 ('\\n'), mine 4 (' 你好'): "
         "chat template or tokenizer"),
        (HELLO, ids(9, 271, pieces=["hi", "ĊĊ"]),
         "golden renders 3 tokens, mine 2: they differ first at position 1: golden 198 ('\\n'), mine 271 ('\\n\\n'): "
         "tokenizer, the text is the same"),
        (HELLO, ids(9, 198, pieces=["hi", "Ċ"]),
         "golden renders 3 tokens, mine 2: they differ first at position 2: golden 198 ('\\n'), mine ends there: "
         "chat template or tokenizer"),
        (HELLO, ids(8, 198, 198), "golden renders 3 tokens, mine 3: they differ first at position 0: golden 9 ('hi'), "
         "mine 8: chat template or tokenizer"),
        (HELLO, {"refused": "HTTP 400: no template"},
         "golden renders 3 tokens, mine 0: mine refuses its messages (HTTP 400: no template)"),
        ({"refused": "HTTP 400"}, {"refused": "HTTP 400"}, None),
        (ids(9, 5, pieces=["▁hi", "\x1b[31m" + "x" * 99]), ids(9, 6, pieces=["▁hi", "▁x"]),
         "golden renders 2 tokens, mine 2: they differ first at position 1: golden 5 ('\\x1b[31m" + "x" * 35 + "'), "
         "mine 6 (' x'): chat template or tokenizer"),
    ],
)  # fmt: skip
def test_the_first_token_that_differs(golden: Any, mine: Any, says: str | None, tmp_path: Path) -> None:
    left, right = sent(tmp_path / "golden", {"a": golden}, "a"), sent(tmp_path / "mine", {"a": mine}, "a")
    found = rendering.compare(left, right)
    assert found is not None
    assert [gap.sentence for gap in found.different] == ([] if says is None else [f"prompt a: {says}"])
    json.dumps(rendering.to_json(found))


def test_what_was_computed_stands_in_for_what_was_not_rendered(tmp_path: Path) -> None:
    """And what nobody knows is counted; a /tokenize that is not what its own server computes is a note."""
    golden = sent(tmp_path / "golden", {"a": ids(1, 3)})
    other = sent(tmp_path / "other", {}, prompt=lambda name: [1, 3] if name == "a" else [])
    found = rendering.compare(golden, other)
    assert found is not None
    assert (found.prompts, found.compared, found.different) == (3, 1, ())
    assert [note[:40] for note in found.notes] == [
        "2 of 3 chats were not rendered by both s", "golden's /tokenize renders 1 chats, a fi"
    ]  # fmt: skip
    (golden.path / replies.PROMPTS).write_text(to_text([PromptLine("a", text="no chat")]))
    assert rendering.compare(golden, other) is None
    (golden.path / replies.PROMPTS).write_text("{}\n")
    with pytest.raises(replies.FolderError, match="line 1: write one of prompt"):
        rendering.compare(golden, other)


# --- servers ---


def chatting(status: int, chat: int = 200) -> Callable[[str, dict[str, Any]], tuple[int, bytes]]:
    """status: of /tokenize for messages; chat: of chats. A refusal quotes the prompt."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        said = json.dumps({"error": {"message": f"no template for {CHAT[0]['content']}"}}).encode()
        if path == "/tokenize":
            return (status, said) if status != 200 else (200, b'{"tokens": [5, 6], "token_strs": ["a", "b"]}')
        if path == "/v1/chat/completions":
            top = [{"token": "token_id:7", "logprob": -0.1}, {"token": "token_id:8", "logprob": -3.0}]
            choice: dict[str, Any] = {"token_ids": [7], "finish_reason": "stop"}
            choice |= {"logprobs": {"content": [top[0] | {"top_logprobs": top}]}}
            good = json.dumps({"choices": [choice], "prompt_token_ids": [5, 6]}).encode()
            return (chat, said if chat != 200 else good)
        return forcible({client.PLUGIN})(path, body)

    return answer


@pytest.mark.parametrize(
    ("status", "chat", "kept", "says"),
    [
        (200, 200, {"token_ids": [5, 6], "pieces": ["a", "b"]}, ""),
        (404, 200, None, "renders no chats at /tokenize (HTTP 404): token ids of chats are those that were computed"),
        (400, 200, None, "renders no chats at /tokenize (HTTP 400)"),  # another kind of server: it answers the chat
        (400, 400, {"refused": "HTTP 400: no template for ..."}, ""),
    ],
)
def test_a_server_is_asked_before_its_first_pass(status, chat, kept, says, tmp_path, capsys):
    lines = [PromptLine("a", messages=CHAT), PromptLine("b", token_ids=(5,))]
    (tmp_path / "p.jsonl").write_text(to_text(lines))
    words = ["send", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out"), "--no-score"]
    path = tmp_path / "out" / rendering.RENDERED
    with odd(chatting(status, chat), forced=True) as (url, seen):
        assert main([*words, "--url", url]) == 0
        assert [p for p, name in seen if name != client.PROBE.name][:2] == ["/tokenize", "/v1/chat/completions"]
        out = capsys.readouterr().out
        assert "secret" not in out + path.read_text()
        assert (says in out, out.count("note: ")) == (True, int(bool(says)))
        assert [json.loads(raw) for raw in path.read_text().splitlines()] == ([{"name": "a", **kept}] if kept else [])
        asked = seen.count(("/tokenize", ""))
        assert main([*words, "--url", url]) == 0
        assert seen.count(("/tokenize", "")) == asked + (kept is None)  # what is there is not asked for again
    if status == 200:  # mine is asked for golden's messages, and gets golden's token ids
        with odd(chatting(200), forced=True) as (url, seen):
            to = ["send", "--teacher-force", str(tmp_path / "out"), "--url", url, "--out", str(tmp_path / "mine")]
            assert main([*to, "--no-score"]) == 0
            assert "/v1/chat/completions" not in [p for p, _ in seen]
        assert replies.read(tmp_path / "mine").passes[0]["a"].prompt_token_ids == [5, 6]
        assert path.read_bytes() == (tmp_path / "mine" / rendering.RENDERED).read_bytes()
