"""A pack's prompts and answers: there and back, and what a stranger may not write into them; the shipped prompts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.gate.sending import prompts as prompts_file, replies
from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.replies import LineWriter, ReplyWriter, Sent
from vllm_accprobe.golden import prompts
from vllm_accprobe.golden.answers import KIND, to_text, unpacked


def sent(root: Path) -> Sent:
    """Three prompts, of which one was refused, and one is a chat."""
    lines = [PromptLine("a", text="Größe"), PromptLine("chat", messages=({"role": "user", "content": "x"},)),
             PromptLine("no", text="refused")]  # fmt: skip
    about = {"schema": 1, "url": "http://somewhere:1", "server": {"model": "/home/me/m", "version": "0.32.0"},
             "settings": {"top": 2, "max_tokens": 3}, "passes": [{"arrive": "one"}, {"arrive": "score"}]}  # fmt: skip
    replies.begin(root, prompts_file.to_text(lines), about)
    values = [float(np.float32(v)) for v in (-0.1, -1 / 3, -7.25e-9)]
    top: list[Any] = [([5, 6], [v, float(np.float32(v - 1.0))]) for v in values]
    for k in range(2):
        writer = ReplyWriter(root / replies.pass_name(k))
        for name in ("a", "chat"):
            writer.add(Reply(name, 0.1, 0.2, [1, 2], [5, 6, 7], values, top, [1.0] * 3, "length", forced="scored"))
        writer.add(Reply("no", 0.0, 0.0, refused="HTTP 400"))
        writer.close()
    rendering = LineWriter(root / "rendered.jsonl")
    rendering.write({"name": "chat", "token_ids": [1, 2], "pieces": ["x", "y"]})
    rendering.close()
    return replies.read(root)


def test_there_and_back_to_the_bit(tmp_path: Path) -> None:
    golden = sent(tmp_path / "sent")
    text = to_text(golden, 1000.0, 10.0, {"tensors": 3})
    assert not any(word in text for word in ("somewhere", "/home", "refused"))
    (tmp_path / "answers.jsonl").write_text(text, encoding="utf-8")
    found, head = unpacked(tmp_path / "answers.jsonl", tmp_path / "again")
    assert (head.arrive, head.top, head.max_tokens, head.model, head.row, head.noise) == (
        ["one", "score"], 2, 3, "m", 1000.0, {"tensors": 3})  # fmt: skip
    names = [line.name for line in replies.prompts_of(found.path)]
    assert names == ["a", "chat"]
    for k in range(2):
        for name in names:
            ours, theirs = found.passes[k][name], golden.passes[k][name]
            for what in ("prompt_token_ids", "token_ids", "logprobs", "top", "margins", "finish", "forced"):
                assert getattr(ours, what) == getattr(theirs, what), what
    assert (found.path / "rendered.jsonl").read_text() == (golden.path / "rendered.jsonl").read_text()
    assert to_text(found, 1000.0, 10.0, {"tensors": 3}) == text


HEAD = {"kind": KIND, "schema": 1, "arrive": ["one"], "top": 2, "max_tokens": 3}
REPLY = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-1.0], "top": []}
LINE: dict[str, Any] = {"prompt": {"id": "a", "prompt": "x"}, "passes": [REPLY]}


CALL = {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "4"}


def messages(*found: Any) -> dict[str, Any]:
    return LINE | {"prompt": {"id": "a", "messages": list(found)}}


def chat(part: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": [part]})


@pytest.mark.parametrize(("lines", "says"), [
    ([HEAD, LINE], ""),
    ([HEAD, chat({"type": "text", "text": "x"})], ""),
    ([HEAD, chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})], ""),
    ([], "cannot be used (it is not JSON"),
    ([HEAD | {"kind": "x"}, LINE], "another version, or none of ours"),
    ([HEAD, LINE | {"passes": []}], "a prompt has 0 passes, not 1"),
    ([HEAD, LINE | {"passes": [None]}], "a prompt has 1 passes, not 1"),
    ([HEAD, LINE | {"passes": [REPLY | {"token_ids": ["2"]}]}], "passes[0].token_ids[0] is '2'"),
    ([HEAD, LINE | {"passes": [REPLY | {"token_ids": [-1]}]}], "passes[0].token_ids[0] is -1"),
    ([HEAD, LINE | {"passes": [REPLY | {"logprobs": []}]}], "other numbers of tokens"),
    ([HEAD, LINE | {"prompt": {"id": "a", "prompt": "x", "images": ["/etc/passwd"]}}], "has the field images"),
    ([HEAD, chat({"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}})], "not in the pack itself"),
    ([HEAD, chat({"type": "video_url", "video_url": {"url": "http://x"}})], "not in the pack itself"),
    ([HEAD, chat({"type": "text", "text": "x"}), "["], "it is not JSON"),
    ([HEAD, chat({"type": "text", "text": "x", "image_url": {"url": "http://x"}})], "not in the pack itself"),
    ([HEAD, messages({"role": "user", "content": {"type": "image_url"}})], "neither a text nor a list"),
    ([HEAD, messages({"role": "user", "content": "x", "url": "http://x"})], "a message with the field 'url'"),
    ([HEAD, messages({"role": "user", "content": "x", "tool_calls": "x"})], "tool_calls is neither a text nor a list"),
    ([HEAD, messages("x")], "a message without a role"),
    ([HEAD, messages({"role": "user", "content": "x", "name": "n"}, CALL, ANSWERED)], ""),
    ([HEAD, LINE | {"prompt": {"id": "a", "messages": [CALL], "tools": [{"type": "function"}],
                               "chat_template_kwargs": {"enable_thinking": False}}}], ""),
    ([HEAD, chat({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA=="}})], ""),
    ([HEAD, chat({"type": "audio_url", "audio_url": {"url": "data:image/png;base64,AA=="}})], "not in the pack itself"),
    ([HEAD, chat({"type": "file", "file": {"url": "data:file/x"}})], "not in the pack itself"),
    ([HEAD | {"arrive": []}, LINE | {"passes": []}], "it has no pass"),
    ([HEAD, LINE | {"passes": [REPLY | {"prompt_token_ids": [1 << 31]}]}], "a token id is too large"),
    ([HEAD, LINE | {"passes": [REPLY | {"logprobs": [-1e300]}]}], "beyond float32"),
    ([HEAD, LINE | {"passes": [REPLY | {"top": [[[2], [-1e39]]]}]}], "beyond float32"),
])  # fmt: skip
def test_what_a_stranger_writes(lines: list[Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    if not says:
        assert list(unpacked(path, tmp_path / "out")[0].passes[0]) == ["a"]
        return
    with pytest.raises(DumpError) as raised:
        unpacked(path, tmp_path / "out")
    assert says in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_pack_without_answers(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="has no prompts and answers: `accprobe golden make` writes them"):
        unpacked(tmp_path / "none", tmp_path / "out")


def test_the_shipped_prompts(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    lines = [*prompts.texts(), *prompts.images()]
    path = tmp_path / "prompts.jsonl"
    path.write_text(prompts_file.to_text(lines), encoding="utf-8")
    assert prompts_file.read(str(path)) == lines
    scripts = {word for line in lines if line.text for c in line.text
               for word, low, high in (("arabic", 0x600, 0x6FF), ("chinese", 0x4E00, 0x9FFF), ("hindi", 0x900, 0x97F),
                                       ("cyrillic", 0x400, 0x4FF)) if low <= ord(c) <= high}  # fmt: skip
    assert scripts == {"arabic", "chinese", "hindi", "cyrillic"}
    assert 1500 < max(len(line.text or "") for line in lines) < 4000
    for name, (formula, width, height, _) in prompts.IMAGES.items():
        found = image.open(io.BytesIO(prompts.png(formula, width, height)))
        assert (found.format, found.mode, found.size) == ("PNG", "RGB", (width, height)), name
        assert found.tobytes() == bytes(v for y in range(height) for x in range(width) for v in formula(x, y))


@pytest.mark.parametrize("vocabulary", [4, 500, 151_936])
def test_ids_by_formula_lie_in_the_vocabulary(vocabulary: int) -> None:
    lines = prompts.by_formula(vocabulary)
    assert [len(line.token_ids or ()) for line in lines] == list(prompts.LENGTHS)
    ids = [i for line in lines for i in line.token_ids or ()]
    assert min(ids) >= 3
    assert max(ids) < vocabulary
    if vocabulary > 4:
        assert lines[1].token_ids[:7] * 2 == lines[1].token_ids[:14]  # type: ignore[index]
        assert len(set(lines[4].token_ids or ())) > 100
