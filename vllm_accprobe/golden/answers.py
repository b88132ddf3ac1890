"""Golden's prompts and answers as the one text file of a pack, and as a folder of `send` again.

The problem: to check a server, a pack must have the texts, token ids, answers and log-probabilities of golden, which
`send` keeps in five files, with paths and addresses of golden's machine; and a pack may be a stranger's. The idea: one
JSONL file. The first line says how it was made; then a line for each answered prompt has the prompt, what /tokenize
made of a chat, and one reply for each pass. Log-probabilities are float32 numbers in their shortest decimal form, and
become the same bits again. Whatever is read is checked by type; a prompt may name no file and no address.

Elsewhere: the folder (gate/sending/replies.py), the zip (pack.py, pack_sketches.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from vllm_accprobe.dump.decode import Count, DecodeError, Size, at_most, parse
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.gate.sending import prompts as prompts_file, replies
from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.rendering import RENDERED
from vllm_accprobe.gate.sending.replies import LineWriter, ReplyWriter, Sent

KIND = "accprobe golden answers"
_MOST_LINE = 64 << 20
_LARGEST = float(np.finfo(np.float32).max)
_NOT_HERE = ("images", "conversations", "body", "url")
"""Fields of a prompt that name files, or other forms than `send` keeps."""
_MESSAGE: Mapping[str, Any] = {
    "role": str, "content": (str, list), "name": str, "tool_calls": list, "tool_call_id": str, "tools": list,
    "reasoning": str, "reasoning_content": str,
}  # fmt: skip
"""Fields of a message that a server reads [vLLM: entrypoints/chat_utils.py]. Media are read from its content alone."""
_INLINE = {kind: f"data:{kind.removesuffix('_url')}/" for kind in ("image_url", "video_url", "audio_url")}
"""How the address of such a part begins where the bytes are in it."""


@dataclass(frozen=True)
class AnswersHeader:
    """How the answers were made. arrive: a word for each pass; row, sampled: bytes of a captured row (RowSizes); noise:
    of golden from itself (make.Noise)."""

    arrive: list[str]
    top: Count
    max_tokens: Count
    model: str = ""
    version: str | None = None
    row: Size = 0.0
    sampled: Size = 0.0
    noise: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _PackedReply:
    prompt_token_ids: list[Count]
    token_ids: list[Count]
    logprobs: list[float | None]
    top: list[tuple[list[Count], list[float]]]
    finish: str | None = None
    forced: str | None = None


@dataclass(frozen=True)
class _PackedPrompt:
    prompt: dict[str, Any]
    passes: Annotated[list[_PackedReply | None], at_most(8)]
    rendered: dict[str, Any] | None = None


def to_text(sent: Sent, row: float, sampled: float, noise: Mapping[str, Any]) -> str:
    """The file's text, of the prompts that pass 0 answered with token ids. row, sampled: see AnswersHeader. Raises
    PromptsError, OSError."""
    settings, server = sent.about.get("settings", {}), sent.about.get("server", {})
    head = {
        "kind": KIND, "schema": replies.SCHEMA, "arrive": [p.get("arrive") for p in sent.about["passes"]],
        "top": settings.get("top", 0), "max_tokens": settings.get("max_tokens", 0),
        "model": Path(str(server.get("model", ""))).name, "version": server.get("version"), "row": row,
        "sampled": sampled, "noise": dict(noise),
    }  # fmt: skip
    path = sent.path / RENDERED
    rendered = {one["name"]: one for one in replies.lines(path)} if path.is_file() else {}
    lines = [head]
    for prompt in replies.prompts_of(sent.path):
        passes = [_plain(found.get(prompt.name)) for found in sent.passes]
        if passes and passes[0] is not None:
            more = {"rendered": rendered[prompt.name]} if prompt.name in rendered else {}
            lines.append({"prompt": prompt.to_json(), "passes": passes, **more})
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)


def _plain(reply: Reply | None) -> dict[str, Any] | None:
    """None where it has no token ids or no numbers."""
    if reply is None or reply.refused or not reply.prompt_token_ids or not reply.token_ids or reply.logprobs is None:
        return None
    top = [(ids, _short(values)) for ids, values in reply.top or () if ids is not None]
    found = {"prompt_token_ids": reply.prompt_token_ids, "token_ids": reply.token_ids,
             "logprobs": _short(reply.logprobs), "top": top if len(top) == len(reply.token_ids) else []}  # fmt: skip
    return found | {k: v for k in ("finish", "forced") if (v := getattr(reply, k)) is not None}


def _short(values: Iterable[float | None]) -> list[float | None]:
    """float32 numbers with as few digits as say which they are."""
    return [None if v is None else float(np.format_float_positional(np.float32(v), unique=True)) for v in values]


def _exact(values: Iterable[float | None]) -> list[float | None]:
    return [None if v is None else float(np.float32(v)) for v in values]


def unpacked(path: Path, into: Path) -> tuple[Sent, AnswersHeader]:
    """The folder of `send` in ``into``, and how it was made. Raises DumpError for a file that is none of ours, or
    damaged; PromptsError, OSError."""
    try:
        with path.open(encoding="utf-8") as file:
            head = parse(AnswersHeader, file.readline(_MOST_LINE), _MOST_LINE, {"kind": KIND, "schema": replies.SCHEMA})
            if not head.arrive:
                raise DecodeError("it has no pass")
            found = [_checked(parse(_PackedPrompt, line, _MOST_LINE), len(head.arrive)) for line in file]
    except FileNotFoundError:
        raise DumpError("the pack has no prompts and answers: `accprobe golden make` writes them") from None
    except (DecodeError, UnicodeDecodeError) as e:
        why = "it is no text in UTF-8" if isinstance(e, UnicodeDecodeError) else str(e)
        raise DumpError(
            f"the pack's prompts and answers cannot be used ({why}): `accprobe golden make` writes them"
        ) from None
    about = {
        "schema": replies.SCHEMA, "server": {"model": head.model, "version": head.version},
        "prompts": {"count": len(found)}, "complete": True,
        "settings": {"top": head.top, "max_tokens": head.max_tokens, "arrive": head.arrive},
        "passes": [{"arrive": word, "answered": len(found), "refused": 0, "resumed": 0} for word in head.arrive],
    }  # fmt: skip
    text = "".join(json.dumps(one.prompt, ensure_ascii=False) + "\n" for one in found)
    replies.begin(into, text, about)
    names = [line.name for line in prompts_file.read(str(into / replies.PROMPTS))]
    for k in range(len(head.arrive)):
        writer = ReplyWriter(into / replies.pass_name(k))
        for name, one in zip(names, found, strict=True):
            if (reply := one.passes[k]) is not None:
                writer.add(_reply(name, reply))
        writer.close()
    rendering = LineWriter(into / RENDERED)
    for name, one in zip(names, found, strict=True):
        if one.rendered is not None:
            rendering.write({**one.rendered, "name": name})
    rendering.close()
    return replies.read(into), head


def _checked(one: _PackedPrompt, passes: int) -> _PackedPrompt:
    """Raises DecodeError for other numbers of things than there must be, and for a prompt that names a file or an
    address."""
    if len(one.passes) != passes or one.passes[0] is None:
        raise DecodeError(f"a prompt has {len(one.passes)} passes, not {passes}")
    for r in one.passes:
        if r is None:
            continue
        if len(r.logprobs) != len(r.token_ids) or len(r.top) not in (0, len(r.token_ids)):
            raise DecodeError("a reply has other numbers of tokens and log-probabilities")
        _check_numbers(r)
    check_prompt(one.prompt)
    return one


def check_prompt(prompt: Mapping[str, Any]) -> None:
    """Raises DecodeError for a prompt that names a file or an address, and for fields of messages that no server
    reads: a pack carries neither."""
    if wrong := next((key for key in _NOT_HERE if key in prompt), ""):
        raise DecodeError(f"a prompt has the field {wrong}")
    messages = prompt.get("messages")
    for message in messages if isinstance(messages, (list, tuple)) else ():
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DecodeError("a prompt has a message without a role")
        if strange := next((key for key in message if key not in _MESSAGE), None):
            raise DecodeError(f"a prompt has a message with the field {strange[:40]!r}")
        if wrong := next((k for k, v in message.items() if v is not None and not isinstance(v, _MESSAGE[k])), ""):
            raise DecodeError(f"a prompt has a message whose {wrong} is neither a text nor a list")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or not (_is_text(part) or _is_inline(part)):
                raise DecodeError("a prompt has an image that is not in the pack itself")


def _check_numbers(reply: _PackedReply) -> None:
    """Raises DecodeError for ids beyond int32 and for log-probabilities beyond float32."""
    ids = [reply.prompt_token_ids, reply.token_ids, *(ids for ids, _ in reply.top)]
    if any(i >= 1 << 31 for some in ids for i in some):
        raise DecodeError("a token id is too large")
    values: list[Sequence[float | None]] = [reply.logprobs, *(values for _, values in reply.top)]
    if any(v is not None and abs(v) > _LARGEST for some in values for v in some):
        raise DecodeError("a log-probability is beyond float32")


def _is_text(part: Mapping[str, Any]) -> bool:
    return set(part) == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)


def _is_inline(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    media = part.get(kind) if isinstance(kind, str) else None
    if not isinstance(media, dict) or set(part) != {"type", kind}:
        return False
    url = media.get("url")
    return isinstance(url, str) and url.startswith(_INLINE.get(str(kind), "\0"))


def _reply(name: str, packed: _PackedReply) -> Reply:
    top: list[tuple[list[int] | None, list[float]]] = [
        (list(ids), [v for v in _exact(values) if v is not None]) for ids, values in packed.top
    ]
    margins = [round(v[0] - v[1], 6) if len(v) > 1 else None for _, v in top]
    return Reply(
        name, 0.0, 0.0, list(packed.prompt_token_ids), list(packed.token_ids), _exact(packed.logprobs),
        top or None, margins or None, packed.finish, forced=packed.forced,
    )  # fmt: skip
