"""Which tokens the prompts of a pass are to be answered with: golden's, or those of the folder's own first pass.

The problem: two servers' answers part at the first token that they do not choose alike, and so do two passes of one
server; what comes after says nothing about numbers. The idea: prompts go as the token ids that golden read, answers
along the token ids that golden gave, in every pass; a free folder's second pass goes along its own first. And one pass
more, `score`: prompt and answer as one prompt, of which each token has a log-probability.
Not here: how a server is made to (ways.py, client.py), sending (passes.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.sending import prompts as prompts_file
from vllm_accprobe.gate.sending import replies, ways
from vllm_accprobe.gate.sending.client import OtherIds, Sender
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.reply import Reply

SCORE = "score"
"""The arrival word of the pass that is scored, which is always the last one."""
LOOKED_AT = 32
"""Chosen: prompts of golden's whose token ids are compared; one would do for most vocabularies."""


class AlongError(Exception):
    """One line: what a folder or a server cannot be used for. Exit code 2."""


@dataclass(frozen=True)
class Forcing:
    """What passes are forced, beside the prompts. how: the way (ways.py) in which this server is forced, None for not
    at all. golden: the digest of the token ids that all passes go along, None in a free folder. score: whether there is
    a last pass that is scored."""

    how: str | None = None
    golden: str | None = None
    score: bool = False

    def way(self, index: int, word: str) -> str | None:
        """Of pass ``index``, whose arrival has ``word``; None: it is free."""
        if word == SCORE:
            return ways.SCORED
        if self.golden is not None:
            return self.how
        return self.how if index > 0 and self.how != ways.SCORED else None

    def lines(self, index: int, word: str, lines: list[PromptLine], first: dict[str, Reply]) -> list[PromptLine]:
        """What is sent in pass ``index``. first: the replies of pass 0, where it is over."""
        if word == SCORE:
            return [_scored(line, first.get(line.name)) for line in lines]
        if self.golden is not None or self.way(index, word) is None:
            return lines
        return [along(line, first.get(line.name)) or line for line in lines]


FREE = Forcing()


def along(line: PromptLine, reply: Reply | None) -> PromptLine | None:
    """``line`` with the prompt and the answer of ``reply`` as token ids; None where it has none. A prompt with images
    stays as it is: token ids do not have them."""
    if reply is None or reply.refused is not None or not reply.token_ids or not reply.prompt_token_ids:
        return None
    answer = tuple(reply.token_ids)
    if line.messages is not None and has_images(line):
        return replace(line, max_tokens=None, stop=None, along=answer)
    return PromptLine(line.name, token_ids=tuple(reply.prompt_token_ids), along=answer)


def _scored(line: PromptLine, reply: Reply | None) -> PromptLine:
    """All tokens after the first, as an answer to that one."""
    full = along(line, reply)
    if full is None or full.token_ids is None:
        return PromptLine(line.name, token_ids=(0,), along=())
    whole = full.token_ids + (full.along or ())
    return PromptLine(line.name, token_ids=whole[:1], along=whole[1:])


def has_images(line: PromptLine) -> bool:
    parts = [p for m in line.messages or () for p in (m["content"] if isinstance(m.get("content"), list) else ())]
    return any(isinstance(p, dict) and p.get("type") != "text" for p in parts)


def forced_lines(golden: replies.Sent) -> list[PromptLine]:
    """Golden's prompts as its token ids, each with the answer of its pass 0; without those that have no answer or no
    token ids. Raises AlongError, PromptsError."""
    asked = prompts_file.read(str(golden.path / replies.PROMPTS))
    first = golden.passes[0] if golden.passes else {}
    found = [forced for line in asked if (forced := along(line, first.get(line.name))) is not None]
    if not found:
        raise AlongError(f"{golden.path} has no token ids to go along: its server has to be vLLM, and to have answered")
    return found


def digest(golden: replies.Sent) -> str:
    """SHA-256 of the token ids of golden's pass 0."""
    ids = sorted((r.name, r.prompt_token_ids, r.token_ids) for r in golden.passes[0].values() if r.token_ids)
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def check_vocabulary(sender: Sender, golden: replies.Sent) -> None:
    """Raises OtherIds where this server makes other token ids of golden's prompts; ServerLost. Nothing is known of a
    server that does not tell, or of golden's prompts that are no texts (templates of chats change without harm)."""
    first, seen, other = golden.passes[0], 0, 0
    for line in prompts_file.read(str(golden.path / replies.PROMPTS)):
        reply = first.get(line.name)
        if line.text is None or reply is None or not reply.prompt_token_ids or seen == LOOKED_AT:
            continue
        ids = sender.tokenized(line.text)
        if ids is None:
            return
        seen, other = seen + 1, other + (ids != reply.prompt_token_ids)
    if other:
        raise OtherIds(
            f"the server makes other token ids of {other} of {seen} prompts than golden's did: its vocabulary is "
            "another one, and tokens cannot be compared"
        )


def planned(
    sender: Sender, golden: str | None, passes: int, score: bool | None, begun: dict[str, Any] | None
) -> Forcing:
    """How ``sender``'s server is forced, for a new folder or for one that was begun (its send.json).

    golden: the digest of what all passes go along. passes: the free or forced ones. score: None: where the server can.
    Raises AlongError, ServerLost.
    """
    if begun is not None:
        return _gone_on_with(sender, golden, score, begun)
    how = sender.how_forced() if golden is not None or passes > 1 else None
    if golden is not None and how is None:
        raise AlongError(f"{sender.url} cannot be forced along golden's tokens: {ways.HOW_TO}")
    can = score is not False and (how == ways.SCORED or sender.can(ways.SCORED))
    if score and not can:
        raise AlongError(f"{sender.url} does not tell log-probabilities of prompts: leave --score away")
    return Forcing(how, golden, can)


def _gone_on_with(sender: Sender, golden: str | None, score: bool | None, begun: dict[str, Any]) -> Forcing:
    was = (begun.get("along") or {}).get("sha256")
    if was != golden:
        raise AlongError(
            "the folder was begun along " + ("other tokens" if was else "no tokens") + ": name another --out"
        )
    words = [(p.get("arrive"), p.get("forced")) for p in begun["passes"]]
    how = next((forced for word, forced in words if forced and word != SCORE), None)
    plan = Forcing(how, golden, any(word == SCORE for word, _ in words))
    if score not in (None, plan.score):
        raise AlongError(f"the folder was begun with{'' if plan.score else 'out'} --score: name another --out")
    if begun.get("complete"):
        return plan
    needed = {how} | ({ways.SCORED} if plan.score else set())
    for way in sorted(w for w in needed if w):
        if not sender.can(way):
            raise AlongError(f"the folder was begun with a server that was forced ({way}), and {sender.url} cannot be")
    return plan


def told(plan: Forcing, golden: replies.Sent, lines: int) -> str:
    """How, and how many of golden's prompts could not be."""
    said = ways.NOT_EXERCISED if plan.how == ways.SCORED else f"by {plan.how}"
    left = int(golden.about.get("prompts", {}).get("count", lines)) - lines
    return said + (f"; {left} of golden's prompts have no answer in its first pass" if left > 0 else "")


def golden_of(path: Path) -> replies.Sent:
    """Raises FolderError, AlongError, OSError."""
    golden = replies.read(path)
    if not golden.passes or not golden.passes[0]:
        raise AlongError(f"{path} has no answers to go along")
    return golden
