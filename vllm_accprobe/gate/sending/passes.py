"""All prompts to a server, once for each pass, with or without teacher forcing.

The problem: a difference between two servers means nothing without that of a server from itself, and what a server
computes depends on the batch; after the first token that differs, texts differ; a server may die in the middle. The
idea: a pass has a word for how requests arrive (one: each after the answer before; all: at once; poisson:RATE: at
moments that are the same every time). Prompts go as golden's token ids and along golden's answers, or along the
folder's own first pass; a last pass, `score`, sends prompt and answer as one prompt. A few threads empty a queue; the
first failure that is not one prompt's stops the rest, and what was answered is in the folder.

Not here: how a server is forced (client.py), the folder (replies.py), a command that serves (gate/sides.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_accprobe import __version__
from vllm_accprobe.gate.sending import client, prompts as prompts_file, rendering, replies
from vllm_accprobe.gate.sending.client import SCORED, OtherIds, Reply, Sender, SendError
from vllm_accprobe.gate.sending.prompts import REQUEST, SAMPLING, PromptLine

SCORE = "score"
"""The arrival word of the pass that is scored, which is always the last one."""
LOOKED_AT = 32
"""Chosen: prompts of golden's whose token ids are compared; one would do for most vocabularies."""


class TeacherForcingError(Exception):
    """One line: what a folder or a server cannot be used for. Exit code 2."""


@dataclass(frozen=True)
class Forcing:
    """What passes are forced, beside the prompts. how: the way (client.py) in which this server is forced, None for not
    at all. golden: the digest of the token ids that all passes go along, None in a free folder. score: whether there is
    a last pass that is scored."""

    how: str | None = None
    golden: str | None = None
    score: bool = False

    def way(self, index: int, word: str) -> str | None:
        """Of pass ``index``, whose arrival has ``word``; None: it is free."""
        if word == SCORE:
            return client.SCORED
        if self.golden is not None:
            return self.how
        return self.how if index > 0 and self.how != client.SCORED else None

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
    parameters = line.only(SAMPLING, REQUEST)
    return PromptLine(line.name, token_ids=tuple(reply.prompt_token_ids), along=answer, parameters=parameters)


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
    token ids. Raises TeacherForcingError, PromptsError."""
    prompts = prompts_file.read(str(golden.path / replies.PROMPTS))
    first = golden.passes[0] if golden.passes else {}
    found = [forced for line in prompts if (forced := along(line, first.get(line.name))) is not None]
    if not found:
        raise TeacherForcingError(
            f"{golden.path} has no token ids to go along: its server has to be vLLM, and to have answered"
        )
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
        ids = sender.tokenized(line)
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
    Raises TeacherForcingError, ServerLost.
    """
    if begun is not None:
        return _gone_on_with(sender, golden, score, begun)
    how = sender.how_forced() if golden is not None or passes > 1 else None
    if golden is not None and how is None:
        raise TeacherForcingError(f"{sender.url} cannot be forced along golden's tokens: {client.HOW_TO_FORCE}")
    can = score is not False and (how == client.SCORED or sender.can(client.SCORED))
    if score and not can:
        raise TeacherForcingError(f"{sender.url} does not tell log-probabilities of prompts: leave --score away")
    return Forcing(how, golden, can)


def _gone_on_with(sender: Sender, golden: str | None, score: bool | None, begun: dict[str, Any]) -> Forcing:
    words = [(p.get("arrive"), p.get("forced")) for p in begun["passes"]]
    how = next((forced for word, forced in words if forced and word != SCORE), None)
    plan = Forcing(how, golden, any(word == SCORE for word, _ in words))
    if score not in (None, plan.score):
        raise TeacherForcingError(f"the folder was begun with{'' if plan.score else 'out'} --score: name another --out")
    if begun.get("complete"):
        return plan
    needed = {how} | ({client.SCORED} if plan.score else set())
    for way in sorted(w for w in needed if w):
        if not sender.can(way):
            raise TeacherForcingError(
                f"the folder was begun with a server that was forced ({way}), and {sender.url} cannot be"
            )
    return plan


def describe(plan: Forcing, golden: replies.Sent, lines: int) -> str:
    """How, and how many of golden's prompts could not be."""
    method = client.NOT_EXERCISED if plan.how == client.SCORED else f"by {plan.how}"
    left = int(golden.about.get("prompts", {}).get("count", lines)) - lines
    return method + (f"; {left} of golden's prompts have no answer in its first pass" if left > 0 else "")


def golden_of(path: Path) -> replies.Sent:
    """Raises FolderError, TeacherForcingError, OSError."""
    golden = replies.read(path)
    if not golden.passes or not golden.passes[0]:
        raise TeacherForcingError(f"{path} has no answers to go along")
    return golden


def made_by(prompts: str) -> dict[str, str]:
    """What send.json says of the version, the prompts' source and the time."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"accprobe": __version__, "source": Path(prompts).name, "started": now}


SEED = 0


@dataclass(frozen=True)
class Arrival:
    """word: as the user wrote it. rate: of poisson, a second; None otherwise."""

    word: str
    rate: float | None = None

    @property
    def alone(self) -> bool:
        """Whether no request ever meets another."""
        return self.word in ("one", "score")

    def moments(self, n: int) -> list[float]:
        """Seconds after the beginning, ascending, of n requests."""
        if self.rate is None:
            return [0.0] * n
        draw, now, found = random.Random(SEED), 0.0, []
        for _ in range(n):
            found.append(now)
            now += draw.expovariate(self.rate)
        return found


def parse(word: str) -> Arrival:
    """Raises ValueError."""
    if word in ("one", "all"):
        return Arrival(word)
    found = re.fullmatch(r"poisson:(\d{1,6}(?:\.\d{1,6})?)", word)
    if found and float(found[1]) > 0:
        return Arrival(word, float(found[1]))
    raise ValueError(f"{word!r} is none of one, all and poisson:RATE (requests a second)")


def refusals(reasons: Mapping[str, int]) -> str:
    """``12 requests: HTTP 400: ...`` of `Done.reasons`, most frequent first."""
    most = sorted(reasons.items(), key=lambda item: -item[1])
    return "; ".join(f"{n:,} request{'s' * (n != 1)}: {why}" for why, n in most)


_NUMBER = re.compile(r"\d+")
_LOOK_S = 0.1
_CLOSING_S = 2.0


@dataclass(frozen=True)
class Done:
    """of: prompts in all passes; answered, refused: over all; sent: by this call; reasons: of refusals, by how many;
    where they differ in numbers only, the first; unrendered: why the server did not render all chats, "" where it
    did."""

    of: int
    answered: int
    refused: int
    sent: int
    reasons: dict[str, int]
    unrendered: str = ""


def settings(sender: Sender, arrive: list[Arrival], concurrency: int, plan: Forcing = FREE) -> dict[str, Any]:
    """What must be the same where a folder is gone on with."""
    words = [a.word for a in arrive]
    how = {"top": sender.top, "max_tokens": sender.max_tokens, "arrive": words, "concurrency": concurrency}
    return how | ({"score_tokens": sender.score_tokens} if plan.score or plan.how == SCORED else {})


def send(
    sender: Sender, server: dict[str, Any], lines: list[PromptLine], arrive: list[Arrival], concurrency: int, out: Path,
    made: dict[str, Any], progress: Callable[[int], None] = lambda done: None, plan: Forcing = FREE,
    before: Callable[[int], None] = lambda index: None, chats: Sequence[PromptLine] = (),
) -> Done:  # fmt: skip
    """Sends what ``out`` does not hold yet. server: from `Sender.introduced`; made: version and time, for send.json;
    progress: gets how many are done; plan: which passes are forced; before: called before each pass, while the server
    is idle; chats: prompts that the server renders for itself first. Raises ServerLost and SendError with what was
    kept, FolderError, OSError."""
    arrive = [*arrive, Arrival(SCORE)] if plan.score else arrive
    about = _about(sender, server, lines, settings(sender, arrive, concurrency, plan), out, made, plan)
    unrendered = rendering.render(sender, chats, out)
    done = sent = 0
    for index, arrival in enumerate(arrive):
        path = out / replies.pass_name(index)
        had = replies.answered(path)
        first = replies.read_pass(out, 0) if index else {}
        left = [line for line in plan.lines(index, arrival.word, lines, first) if line.name not in had]
        done += len(lines) - len(left)
        progress(done)
        if not left:
            continue
        if had:
            about["passes"][index]["resumed"] += 1
            replies.write_about(out, about)
        before(index)
        asking = replace(sender, way=plan.way(index, arrival.word))
        run = _Pass(asking, left, arrival, concurrency, index, path)
        try:
            run.go(progress, done)
        except (SendError, KeyboardInterrupt) as e:
            _count(about, out)
            if not isinstance(e, SendError) or isinstance(e, OtherIds):
                raise
            total = sum(p["answered"] + p["refused"] for p in about["passes"])
            kept = f"{total:,} of {len(lines) * len(arrive):,} answers are kept in {out}"
            raise type(e)(f"{e}; {kept}, and the same command goes on from there") from None
        finally:
            run.close()
        done += len(left)
        sent += len(left)
    reasons = _count(about, out)
    passes = about["passes"]
    return Done(
        len(lines) * len(arrive), sum(p["answered"] for p in passes), sum(p["refused"] for p in passes), sent, reasons,
        unrendered,
    )  # fmt: skip


def begun(out: Path, lines: list[PromptLine], how: Mapping[str, Any], golden: str | None) -> dict[str, Any] | None:
    """send.json of a folder that is gone on with, None where nothing was begun; whether a last pass is scored, the
    server decides. how: of `settings`, what is known; golden: the digest of the tokens that are forced. Raises
    FolderError where it was begun with something else."""
    about = replies.begun(out)
    if about is None:
        return None
    prompts = {"count": len(lines), "sha256": prompts_file.digest(lines)}
    was, forced = about.get("settings", {}), (about.get("along") or {}).get("sha256")
    other = "prompts" if about.get("prompts") != prompts else ""
    for name, now in how.items():
        if name in was and _unscored(was[name]) != _unscored(now):
            other = other or "settings"
    if forced != golden:
        along = "other tokens" if forced else "no tokens"
        raise replies.FolderError(f"{out} was begun along {along}: name another --out")
    if other:
        raise replies.FolderError(f"{out} has other {other}: name another --out, or those that it was begun with")
    return about


def _unscored(value: Any) -> Any:
    return [word for word in value if word != SCORE] if isinstance(value, list) else value


def _about(
    sender: Sender, server: dict[str, Any], lines: list[PromptLine], how: dict[str, Any], out: Path,
    made: dict[str, Any], plan: Forcing,
) -> dict[str, Any]:  # fmt: skip
    """send.json of a new folder, or of one that is gone on with."""
    about = begun(out, lines, how, plan.golden)
    if about is not None:
        if (was := about.get("server", {}).get("model")) != server["model"]:
            raise replies.FolderError(
                f"{out} has answers of the model {was}, this is {server['model']}: name another --out"
            )
        return about
    prompts = {"count": len(lines), "sha256": prompts_file.digest(lines)}
    passes: list[dict[str, Any]] = []
    for index, word in enumerate(how["arrive"]):
        way = plan.way(index, word)
        passes.append({"arrive": word, "answered": 0, "refused": 0, "resumed": 0} | ({"forced": way} if way else {}))
    along = {"along": {"sha256": plan.golden, "how": plan.how}} if plan.golden else {}
    about = {"schema": replies.SCHEMA, **made, "url": sender.url, "server": server, "prompts": prompts, "settings": how,
             **along, "passes": passes, "complete": False}  # fmt: skip
    replies.begin(out, prompts_file.to_text(lines), about)
    return about


def _count(about: dict[str, Any], out: Path) -> dict[str, int]:
    """Counts what the files hold into send.json; gives the reasons of refusals."""
    reasons: dict[str, int] = {}
    first: dict[str, str] = {}
    for index, one in enumerate(about["passes"]):
        found = replies.refusals(out, index)
        refused = [why for why in found.values() if why is not None]
        one["answered"], one["refused"] = len(found) - len(refused), len(refused)
        for why in refused:
            why = first.setdefault(_NUMBER.sub("", why), why)
            reasons[why] = reasons.get(why, 0) + 1
    about["complete"] = all(p["answered"] + p["refused"] == about["prompts"]["count"] for p in about["passes"])
    replies.write_about(out, about)
    return reasons


class _Pass:
    """One pass over ``lines``: threads that take the next line at its moment."""

    def __init__(
        self, sender: Sender, lines: list[PromptLine], arrival: Arrival, concurrency: int, index: int, path: Path
    ):
        self._sender, self._lines, self._index = sender, lines, index
        self._moments = arrival.moments(len(lines))
        self._workers = 1 if arrival.alone else min(concurrency, len(lines))
        self._writer = replies.ReplyWriter(path)
        self._lock = threading.Lock()
        self._next = self._done = 0
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._open: dict[int, socket.socket] = {}

    def go(self, progress: Callable[[int], None], before: int) -> None:
        """Returns when all are answered. before: done in other passes. Raises the first failure."""
        zero = time.monotonic()
        threads = [threading.Thread(target=self._work, args=(zero,), daemon=True) for _ in range(self._workers)]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not self._stop.is_set():
                time.sleep(_LOOK_S if len(self._lines) > 1 else _LOOK_S / 10)
                progress(before + self._done)
        finally:
            self._stop.set()
            self._let_go(threads)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._writer.close()

    def _work(self, zero: float) -> None:
        while not self._stop.is_set():
            with self._lock:
                i, self._next = self._next, self._next + 1
            if i >= len(self._lines) or self._stop.wait(max(zero + self._moments[i] - time.monotonic(), 0)):
                return
            line = self._lines[i]
            try:
                reply = self._sender.ask(line, replies.request_id(line.name, self._index), self._open, zero)
                if self._stop.is_set() and reply.refused is not None:  # whoever stopped may have cut this answer off
                    return
                self._writer.add(reply)
            except BaseException as e:
                with self._lock:
                    if self._failure is None and not self._stop.is_set():
                        problem = f"pass {self._index}, request {line.name}: {e}"
                        self._failure = type(e)(problem) if isinstance(e, SendError) else e
                self._stop.set()
                return
            with self._lock:
                self._done += 1

    def _let_go(self, threads: list[threading.Thread]) -> None:
        """Ends the waiting of what still waits. Its answers are not read."""
        deadline = time.monotonic() + _CLOSING_S
        while any(t.is_alive() for t in threads) and time.monotonic() < deadline:
            for one in list(self._open.values()):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            time.sleep(_LOOK_S / 10)
