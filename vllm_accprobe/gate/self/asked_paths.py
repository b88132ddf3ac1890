"""All paths of one server, one after the other, into one folder.

    OUT/PATH/           a folder of `send` for each path, with one pass
    OUT/engine-N.log    what the servers that we started said

The problem: the paths need one another's answers (what is scored is what was decoded), some need a server of their
own, and one that does not start with a changed command must not cost the others. The idea: the first path gives token
ids and answers; what comes later is sent as ids under its own salt, and along these answers where the server can be
forced; each path is a `send`, so an interrupted run goes on.
Not here: the paths (own_paths.py), the verdict (odd_one.py).
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.self import own_paths
from vllm_accprobe.gate.self.odd_one import Replies
from vllm_accprobe.gate.self.own_paths import BASE, EQUAL, OwnPath
from vllm_accprobe.gate.self.salted import SaltedSender
from vllm_accprobe.gate.sending import along, passes, replies, ways
from vllm_accprobe.gate.sending.arrival import parse
from vllm_accprobe.gate.sending.client import Sender, SendError
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.serving import served
from vllm_accprobe.gate.sides import Asking

NO_IDS = "the server does not say which token ids it read and wrote (vLLM's return_token_ids)"
NO_SCORES = "the server does not tell log-probabilities of prompts"
NONE = "no prompt is long enough, or none has token ids"


@dataclass
class PathAnswers:
    """paths: in order; answers: by the path's name; missing: why one has none; notes: what a reader should know."""

    paths: list[OwnPath] = field(default_factory=list)
    answers: dict[str, Replies] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PathAsking:
    """What is the same for all paths; tell: told of each path as it begins."""

    out: Path
    made: Mapping[str, Any]
    asking: Asking = field(default_factory=Asking)
    tell: Callable[[str], None] = lambda said: None


def is_url(side: str) -> bool:
    return side.startswith(("http://", "https://"))


def ask(side: str, key: str, environ: Mapping[str, str], lines: list[PromptLine], how: PathAsking) -> PathAnswers:
    """side: a URL, or a command. Raises SendError, FolderError, OSError where the first path has no answer."""
    found = PathAnswers()
    if is_url(side):
        _all(own_paths.REQUESTS, side, key, lines, how, found)
        found.notes.append("a URL is not started again: eager, scheduling and chunks are asked of a command only")
        return found
    try:
        words = shlex.split(side)
    except ValueError as e:
        raise SendError(f"CMD: {e}") from None
    how.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _kept(own_paths.REQUESTS, how.out, found):
        with served(own_paths.command(words), environ, how.out, how.asking.ready_s) as (url, key):
            _all(own_paths.REQUESTS, url, key, lines, how, found)
    lengths = [len(r.prompt_token_ids or ()) for r in found.answers[BASE].values()]
    changed: dict[str, list[OwnPath]] = {}
    for path in own_paths.restarts(words, max(lengths, default=0)):
        changed.setdefault(own_paths.command(words, path), []).append(path)
    for command, these in changed.items():
        if _kept(these, how.out, found):
            continue
        try:
            with served(command, environ, how.out, how.asking.ready_s) as (url, key):
                _all(these, url, key, lines, how, found)
        except SendError as e:  # one changed command that does not serve costs its own paths only
            for path in these:
                found.paths += [] if path in found.paths else [path]
                found.missing.setdefault(path.name, str(e).replace("--engine: ", ""))
    return found


def _all(
    these: Sequence[OwnPath], url: str, key: str, lines: list[PromptLine], how: PathAsking, found: PathAnswers
) -> None:
    """Of one server. Raises SendError."""
    plain = Sender(url, key, timeout=how.asking.timeout, top=how.asking.top)
    plain = replace(plain, max_tokens=how.asking.max_tokens, model=how.asking.model)
    known, server = plain.introduced()
    forced, salt = known.how_forced(), secrets.token_hex(16)
    decoding = forced if forced != ways.SCORED else None
    for path in these:
        how.tell(path.says)
        found.paths.append(path)
        way = ways.SCORED if path.scored else decoding if path.name != BASE and path.rule != EQUAL else None
        if path.scored and not (forced == ways.SCORED or known.can(ways.SCORED)):
            found.missing[path.name] = NO_SCORES
            continue
        sent = lines if path.name == BASE else _lines(lines, found.answers[BASE], path, way)
        if not sent:
            found.missing[path.name] = NONE
            continue
        own = {f.name: getattr(known, f.name) for f in fields(known)}
        sender = SaltedSender(**own, own=path, salt=salt)
        plan = along.FREE if way is None else along.Forcing(way, along.digest(replies.read(how.out / BASE)))
        folder, made = how.out / path.name, dict(how.made) | {"path": path.name}
        passes.send(sender, server, sent, [parse(path.arrive)], how.asking.concurrency, folder, made, plan=plan)
        found.answers[path.name] = replies.read(folder).passes[0]
        if path.name == BASE:
            _check(found, decoding)


def _check(found: PathAnswers, forced: str | None) -> None:
    told = [r for r in found.answers[BASE].values() if r.refused is None]
    if told and not any(r.token_ids and r.prompt_token_ids for r in told):
        raise SendError(NO_IDS)
    if told and all(r.cached is None for r in told):
        found.notes.append(
            f"the server does not tell its prefix hits ({own_paths.DETAILS}): whether a prompt was fresh is not known"
        )
    if forced is None:
        found.notes.append(f"answers are compared up to the first other token; to force the server, {ways.HOW_TO}")


def _lines(lines: list[PromptLine], base: Replies, path: OwnPath, way: str | None) -> list[PromptLine]:
    """What the first path answered, as its token ids, and along its answers with a ``way``; images stay as they are."""
    found = []
    for line in lines:
        forced = along.along(line, base.get(line.name))
        if forced is None or (forced.token_ids is None and (path.scored or path.before == "pieces")):
            continue
        if path.before == "pieces" and not own_paths.pieces(len(forced.token_ids or ())):
            continue
        limits = {"along": None, "max_tokens": line.max_tokens, "stop": line.stop}
        found.append(forced if way is not None else replace(forced, **limits))  # type: ignore[arg-type]
    return found


def _kept(these: Sequence[OwnPath], out: Path, found: PathAnswers) -> bool:
    """Takes over what an earlier run of the same command has, where it has all."""
    folders = [out / path.name for path in these]
    if not all(replies.exists(f) and replies.read_about(f).get("complete") for f in folders):
        return False
    for path, folder in zip(these, folders, strict=True):
        found.paths.append(path)
        found.answers[path.name] = replies.read(folder).passes[0]
    return True
