"""The token ids that each server makes of a chat's messages, and where two servers make other ones.

The problem: mine is sent golden's token ids, so that only numbers are compared; a chat template, a system prompt that a
template adds, or a tokenizer that is another one on mine's side then stays unseen, and costs more of a benchmark than
any kernel. The idea: before its first pass each server renders them at its own /tokenize, with all that changes
a chat's tokens, and the ids are kept in OUT/rendered.jsonl, a line for each prompt. `compare` names the first token
that differs; where both sides' pieces make one text, it is the tokenizer that differs.

Not here: the numbers, which are compared along golden's ids for both (measure/).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import fits
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.client import Sender, ids_in, refusal
from vllm_accprobe.gate.sending.prompts import RENDERING, PromptLine, PromptsError
from vllm_accprobe.gate.sending.replies import Sent

RENDERED = "rendered.jsonl"
_ELSEWHERE = (404, 405, 422, 501)
"""Derived: HTTP of a server that has no /tokenize, or one that takes no messages."""
_KWARGS = ("documents", "reasoning_effort")
"""Derived: parameters of a chat that vLLM gives to the template, and /tokenize takes among the template's own."""
_MOST = 40
"""Chosen: characters of a token that are shown."""


@dataclass(frozen=True)
class Rendered:
    """What one server makes of a prompt. pieces: as its tokenizer writes each token; None where the server does not
    say. refused: the server's words, where it makes nothing of it."""

    token_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] | None = None
    refused: str | None = None

    @property
    def text(self) -> str | None:
        """None where it is not known."""
        return None if self.pieces is None else _decoded("".join(self.pieces))

    def token(self, k: int) -> tuple[int | None, str | None]:
        """(id, text) of token ``k``; None behind the last one."""
        if k >= len(self.token_ids):
            return None, None
        return self.token_ids[k], None if self.pieces is None else _decoded(self.pieces[k])


@dataclass(frozen=True)
class RenderGap:
    """A prompt of which two servers make other token ids. position: of the first that differs; golden, mine: tokens,
    and id and text of that one; refused: the words of the side that renders nothing. cause: what differs."""

    name: str
    position: int | None
    golden: tuple[int, int | None, str | None]
    mine: tuple[int, int | None, str | None]
    cause: str
    refused: str | None = None

    @property
    def sentence(self) -> str:
        """``prompt q3: golden renders 41 tokens, mine 40: they differ first at position 7: golden 198 ('\\n'), ...``"""
        head = f"prompt {self.name}: golden renders {self.golden[0]:,} tokens, mine {self.mine[0]:,}"
        if self.refused is not None:
            side = "mine" if self.golden[0] else "golden"
            return f"{head}: {side} refuses its messages ({self.refused})"
        tokens = f"golden {_shown(*self.golden[1:])}, mine {_shown(*self.mine[1:])}"
        return f"{head}: they differ first at position {self.position:,}: {tokens}: {self.cause}"


@dataclass(frozen=True)
class Rendering:
    """prompts: chats of golden's; compared: of those, rendered by both; notes: lines for people."""

    prompts: int
    compared: int
    different: tuple[RenderGap, ...]
    notes: tuple[str, ...] = ()


def chats(lines: Iterable[PromptLine]) -> list[PromptLine]:
    return [line for line in lines if line.messages is not None]


def sent_chats(folder: Path) -> list[PromptLine]:
    """Those that a folder was sent. Raises FolderError, OSError."""
    try:
        return chats(replies.prompts_of(folder))
    except PromptsError as e:
        raise replies.FolderError(str(e)) from None


def render(sender: Sender, lines: Sequence[PromptLine], out: Path) -> str:
    """Asks for what ``out`` does not have yet. Returns why it ended before the last one, "" where it did not. Raises
    ServerLost, OSError."""
    path = out / RENDERED
    replies.cut(path)
    had = _read(path)
    left = [line for line in lines if line.name not in had]
    if not left:
        return ""
    with closing(replies.LineWriter(path)) as writer:
        for line in left:
            status, answer = sender.exchange("POST", "/tokenize", request_body(line, sender.model))
            ids = ids_in(answer) if status == 200 else None
            if ids is not None:
                writer.write({"name": line.name, "token_ids": ids, "pieces": answer.get("token_strs")})
            elif status == 200 or status in _ELSEWHERE or _answers(sender, line):
                return f"{sender.url} renders no chats at /tokenize (HTTP {status})"
            else:
                writer.write({"name": line.name, "refused": refusal(status, answer, line)})
    return ""


def request_body(line: PromptLine, model: str) -> dict[str, Any]:
    """What is sent to /tokenize."""
    parameters = line.only(RENDERING)
    kwargs = {k: parameters.pop(k) for k in _KWARGS if k in parameters}
    if "reasoning_effort" in kwargs:
        kwargs["enable_thinking"] = kwargs["reasoning_effort"] != "none"  # as vLLM does
    kwargs |= parameters.pop("chat_template_kwargs", {})
    body = {"model": model, "messages": list(line.messages or ()), "return_token_strs": True} | parameters
    return body | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _answers(sender: Sender, line: PromptLine) -> bool:
    """Whether it answers a chat that its /tokenize refuses: another kind of server."""
    return sender.exchange("POST", *sender.body(replace(line, max_tokens=1, parameters=line.only(RENDERING))))[0] == 200


def _read(path: Path) -> dict[str, Rendered]:
    """By the prompt's id; what is no such line is left out."""
    found: dict[str, Rendered] = {}
    for line in replies.lines(path) if path.is_file() else ():
        try:
            name, ids, pieces, refused = line["name"], line.get("token_ids"), line.get("pieces"), line.get("refused")
        except (TypeError, KeyError, AttributeError):
            continue
        ids = ids_in({"tokens": ids})
        strings = fits(list[str], pieces) and len(pieces) == len(ids or ())
        if isinstance(name, str) and (ids or isinstance(refused, str)):
            found[name] = Rendered(tuple(ids or ()), tuple(pieces) if strings else None, None if ids else refused)
    return found


def rendered(sent: Sent) -> dict[str, Rendered]:
    """Of a folder's chats: what /tokenize made of them, else what was computed. Raises FolderError, OSError."""
    found = _read(sent.path / RENDERED)
    first = sent.passes[0] if sent.passes else {}
    for line in sent_chats(sent.path):
        reply = first.get(line.name)
        if line.name not in found and reply is not None and reply.prompt_token_ids:
            found[line.name] = Rendered(tuple(reply.prompt_token_ids))
    return found


def compare(golden: Sent, mine: Sent) -> Rendering | None:
    """None where golden was sent no chats. Raises FolderError, OSError."""
    names = [line.name for line in sent_chats(golden.path)]
    if not names:
        return None
    ours, theirs = rendered(golden), rendered(mine)
    both = [name for name in names if name in ours and name in theirs]
    gaps = [gap for name in both if (gap := _gap(name, ours[name], theirs[name])) is not None]
    notes = []
    if alone := len(names) - len(both):
        notes.append(f"{alone:,} of {len(names):,} chats were not rendered by both servers (/tokenize): whether mine's "
                     "template and tokenizer are golden's is not known of them")  # fmt: skip
    first = golden.passes[0] if golden.passes else {}
    other = [name for name in both if (reply := first.get(name)) is not None and reply.prompt_token_ids
             and ours[name].token_ids and tuple(reply.prompt_token_ids) != ours[name].token_ids]  # fmt: skip
    if other:
        notes.append(f"golden's /tokenize renders {len(other):,} chats, {other[0]} first, unlike its own "
                     "/v1/chat/completions, whose token ids are compared")  # fmt: skip
    return Rendering(len(names), len(both), tuple(gaps), tuple(notes))


def _gap(name: str, golden: Rendered, mine: Rendered) -> RenderGap | None:
    if golden.token_ids == mine.token_ids:
        return None
    sizes = len(golden.token_ids), len(mine.token_ids)
    if refused := golden.refused or mine.refused:
        return RenderGap(name, None, (sizes[0], None, None), (sizes[1], None, None), "refused", refused)
    pairs = zip(golden.token_ids, mine.token_ids, strict=False)
    k = next((k for k, (a, b) in enumerate(pairs) if a != b), min(sizes))
    same = golden.text is not None and golden.text == mine.text
    cause = "tokenizer, the text is the same" if same else "chat template or tokenizer"
    return RenderGap(name, k, (sizes[0], *golden.token(k)), (sizes[1], *mine.token(k)), cause)


def _shown(token: int | None, text: str | None) -> str:
    if token is None:
        return "ends there"
    return f"{token}" if text is None else f"{token} ({text[:_MOST]!r})"


_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [b for b in range(256) if b not in _PLAIN]
_BYTES = {chr(b): b for b in _PLAIN} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
"""The characters in which byte-level tokenizers write bytes [A. Radford et al., GPT-2, encoder.py, 2019]."""


def _decoded(piece: str) -> str:
    """A token's text; as it is where it is not of a byte-level tokenizer, with sentencepiece's blanks."""
    try:
        return bytes(_BYTES[c] for c in piece).decode()
    except (KeyError, UnicodeDecodeError):
        return piece.replace("\u2581", " ")


def to_json(found: Rendering) -> dict[str, Any]:
    """For programs."""
    sides = ("tokens", "id", "text")
    gaps = [{"name": gap.name, "position": gap.position, "golden": dict(zip(sides, gap.golden, strict=True)),
             "mine": dict(zip(sides, gap.mine, strict=True)), "cause": gap.cause, "refused": gap.refused}
            for gap in found.different]  # fmt: skip
    return {"prompts": found.prompts, "compared": found.compared, "different": gaps}
