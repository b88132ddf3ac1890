"""All ways of asking one server, one after the other, into one folder.

    OUT/WAY/            a folder of `send` for each way, with one pass
    OUT/engine-N.log    what the servers that we started said

The problem: the ways need one another's answers (what is scored is what was decoded), some need a server of their
own, and one that does not start with a changed command must not cost the others. The idea: the first way gives token
ids and answers; what comes later is sent as ids under its own salt; each way is a `send`, so an interrupted run goes
on.
Not here: the ways (ways.py), the verdict (odd_one.py).
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.self import ways
from vllm_accprobe.gate.self.odd_one import Replies
from vllm_accprobe.gate.self.salted import SaltedSender
from vllm_accprobe.gate.self.ways import BASE, Way
from vllm_accprobe.gate.sending import passes, replies
from vllm_accprobe.gate.sending.arrival import parse
from vllm_accprobe.gate.sending.client import Sender, SendError
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.serving import served

NO_IDS = "the server does not say which token ids it read and wrote (vLLM's return_token_ids)"


@dataclass
class WayAnswers:
    """answers: by the way's name; missing: why a way has none; notes: what a reader should know."""

    ways: list[Way] = field(default_factory=list)
    answers: dict[str, Replies] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class How:
    """What is the same for all ways; tell: told of each way as it begins, and of how many there are at least."""

    out: Path
    made: Mapping[str, Any]
    concurrency: int = 64
    ready_s: float = 1800.0
    timeout: float = 600.0
    top: int = 20
    max_tokens: int = 32
    tell: Callable[[str], None] = lambda said: None


def is_url(side: str) -> bool:
    return side.startswith(("http://", "https://"))


def ask(side: str, key: str, environ: Mapping[str, str], lines: list[PromptLine], how: How) -> WayAnswers:
    """side: a URL, or a command. Raises SendError, FolderError, OSError where the first way has no answer."""
    asked = WayAnswers()
    if is_url(side):
        _all(ways.REQUESTS, side, key, lines, how, asked)
        asked.notes.append("a URL is not started again: eager, scheduling and chunks are asked of a command only")
        return asked
    try:
        words = shlex.split(side)
    except ValueError as e:
        raise SendError(f"--self: {e}") from None
    how.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(not replies.exists(how.out / w.name) for w in ways.REQUESTS) or not _complete(how.out, ways.REQUESTS):
        with served(ways.command(words), environ, how.out, how.ready_s) as (url, key):
            _all(ways.REQUESTS, url, key, lines, how, asked)
    else:
        _kept(ways.REQUESTS, how.out, asked)
    lengths = [len(r.prompt_token_ids or ()) for r in asked.answers[BASE].values()]
    changed: dict[str, list[Way]] = {}
    for way in ways.restarts(words, max(lengths, default=0)):
        changed.setdefault(ways.command(words, way), []).append(way)
    for command, these in changed.items():
        if all(replies.exists(how.out / w.name) for w in these) and _complete(how.out, these):
            _kept(these, how.out, asked)
            continue
        try:
            with served(command, environ, how.out, how.ready_s) as (url, key):
                _all(these, url, key, lines, how, asked)
        except SendError as e:
            for way in these:
                asked.ways += [] if way in asked.ways else [way]
                asked.missing.setdefault(way.name, str(e).replace("--engine: ", ""))
    return asked


def _all(these: Any, url: str, key: str, lines: list[PromptLine], how: How, asked: WayAnswers) -> None:
    """Of one server. Raises SendError."""
    plain = Sender(url, key, timeout=how.timeout, top=how.top, max_tokens=how.max_tokens)
    known, server = plain.introduced()
    salt = secrets.token_hex(16)
    for way in these:
        how.tell(way.says)
        asked.ways.append(way)
        send = SaltedSender(known.url, known.key, known.timeout, known.top, known.max_tokens, known.model)
        sent = lines if way.name == BASE else _as_ids(lines, asked.answers[BASE], way, asked)
        send = replace(send, way=way, salt=salt, along=_answers(asked) if way.scored else None)
        if not sent:
            asked.missing[way.name] = "no prompt of which the token ids are known"
            continue
        folder, made = how.out / way.name, dict(how.made) | {"way": way.name}
        passes.send(send, server, sent, [parse(way.arrive)], how.concurrency, folder, made)
        asked.answers[way.name] = replies.read(folder).passes[0]
        if way.name == BASE:
            _check(asked)


def _check(asked: WayAnswers) -> None:
    told = [r for r in asked.answers[BASE].values() if r.refused is None]
    if told and not any(r.token_ids and r.prompt_token_ids for r in told):
        raise SendError(NO_IDS)
    if told and all(r.cached is None for r in told):
        asked.notes.append(
            f"the server does not tell its prefix hits ({ways.DETAILS}): whether a prompt was fresh or hit is not known"
        )


def _answers(asked: WayAnswers) -> dict[str, tuple[int, ...]]:
    return {name: tuple(r.token_ids or ()) for name, r in asked.answers[BASE].items()}


def _as_ids(lines: list[PromptLine], base: Replies, way: Way, asked: WayAnswers) -> list[PromptLine]:
    """The prompts that the first way answered, as its token ids; images cannot be said in ids."""
    found = []
    for line in lines:
        reply = base.get(line.name)
        if reply is None or not reply.prompt_token_ids or not reply.token_ids:
            continue
        if _has_images(line):
            if not way.scored and way.before != "pieces":
                found.append(line)
            continue
        if way.before == "pieces" and not ways.pieces(len(reply.prompt_token_ids)):
            continue
        found.append(replace(line, text=None, messages=None, token_ids=tuple(reply.prompt_token_ids)))
    return found


def _has_images(line: PromptLine) -> bool:
    parts = [p for m in line.messages or () if isinstance(m.get("content"), list) for p in m["content"]]
    return any(isinstance(p, dict) and p.get("type") != "text" for p in parts)


def _complete(out: Path, these: Any) -> bool:
    return all(replies.read_about(out / w.name).get("complete") for w in these)


def _kept(these: Any, out: Path, asked: WayAnswers) -> None:
    """What an earlier run of the same command has."""
    for way in these:
        asked.ways.append(way)
        asked.answers[way.name] = replies.read(out / way.name).passes[0]
