"""One server against itself: which of its paths gives other numbers than rounding explains.

The problem: a server has many paths to the same token (alone or in a batch, whole or in chunks, fresh or cached, decode
or scoring, compiled or not), and without a second machine nothing says what is right. The idea: an `OwnPath` says how
prompts are sent or how the command is changed, each under cache salts of its own, and the paths measure each other.
What must be equal is compared as bits; the others may differ by a few times what the *other* paths differ in the mean,
and by a few steps of the logits' grid (log-probabilities of bfloat16 logits differ by multiples of a power of two).
Each path is a folder of `send` with one pass, so that an interrupted run is resumed. A fault that all paths share needs
a second server.

Not here: sending and forcing (sending/), lines (report/servers.py).
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.gate.measure.gating import ROUNDED
from vllm_accprobe.gate.measure.token_gaps import gaps, spread
from vllm_accprobe.gate.sending import client, passes, replies
from vllm_accprobe.gate.sending.client import Reply, Sender, SendError
from vllm_accprobe.gate.sending.passes import parse
from vllm_accprobe.gate.sending.prompts import GRAMMAR, RENDERING, PromptLine
from vllm_accprobe.gate.served_run import served
from vllm_accprobe.gate.sides import COMMAND, SendSettings, ServerSide
from vllm_accprobe.judge import distributions
from vllm_accprobe.progress import waiting

_FINE = 12
"""Chosen: steps down to 2^-12; the spacing of float16 logits around 4 is 2^-8, of bfloat16 2^-5."""
_OFF = 4e-6
"""Derived: log-probabilities of size 16 to 32 in float32 are 2^-19 apart (1.9e-6), and two are subtracted."""
_LEAST = 4
"""Derived: a value lies by chance so close to the grid of 2^-12 with 2 * 4e-6 / 2.4e-4 = 0.03; four with 1e-6."""


def step(values: Sequence[float]) -> float:
    """The largest power of two, at most 1, of which all differences of ``values`` (log-probabilities, nats) are
    multiples; 0.0 where there is none down to 2^-12, or where fewer than 5 values differ."""
    offs = sorted({values[0] - v for v in values} - {0.0}) if values else []
    if len(offs) < _LEAST:
        return 0.0
    for k in range(_FINE + 1):
        grid = 2.0**-k
        if all(abs(off - round(off / grid) * grid) <= _OFF for off in offs):
            return grid
    return 0.0


EQUAL, ROUNDING = "the same bits", "rounding"
BASE = "alone"
DETAILS = "--enable-prompt-tokens-details"
EAGER = "--enforce-eager"
SYNC = "--no-async-scheduling"
ASYNC = "--async-scheduling"
CHUNK = "--long-prefill-token-threshold"
MAX_PIECES = 4
"""Chosen: into how many pieces a prompt is cut; each is a request."""
PIECE = 128
"""Chosen: tokens of a piece at least; the largest block of a prefix cache (vLLM's CPU backend), and only whole blocks
are found again."""
MIN_CHUNK = 16
"""Chosen: tokens of a chunk at least; a usual block of a cache."""


@dataclass(frozen=True)
class OwnPath:
    """name: in tables and folders. says: what is compared with what. rule: EQUAL or ROUNDING. arrive: `send`'s word.
    before: what is asked of the cache first: "" nothing, "same" the same prompt, "pieces" growing beginnings of it.
    scored: prompt and answer are a prompt, whose tokens' log-probabilities are requested. against: the way that it is
    compared with. add, drop: words of the command, for a server of its own."""

    name: str
    says: str
    rule: str = ROUNDING
    arrive: str = "one"
    before: str = ""
    scored: bool = False
    against: str = BASE
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    @property
    def restarts(self) -> bool:
        return bool(self.add or self.drop)


REQUESTS = (
    OwnPath(BASE, "one request at a time, fresh"),
    OwnPath("again", "the same request alone, once more", EQUAL),
    OwnPath("batch", "all requests at once, against alone", arrive="all"),
    OwnPath("hit", "the prompt's prefix from the cache, against fresh", before="same"),
    OwnPath("pieces", "the prompt in pieces, each after the cached ones before it, against whole", before="pieces"),
    OwnPath("scoring", "prompt and answer scored as a prompt, against decode", scored=True),
)
"""What one server can be asked."""


def restarts(words: Sequence[str], longest: int) -> list[OwnPath]:
    """What needs another server: the ways that ``words`` do not go already. longest: tokens of the longest prompt."""
    found = []
    if EAGER in words:
        found.append(OwnPath("compiled", "compiled, against eager", drop=(EAGER,)))
    else:
        found.append(OwnPath("eager", "eager, against compiled", add=(EAGER,)))
    sync = SYNC in words
    name, add, drop = ("async", (ASYNC,), (SYNC,)) if sync else ("sync", (SYNC,), (ASYNC,))
    mode = "asynchronous scheduling, against synchronous" if sync else "synchronous scheduling, against asynchronous"
    found.append(OwnPath(name, mode, EQUAL, add=add, drop=drop))
    mode += ", all requests at once"
    found.append(OwnPath(f"{name}-batch", mode, arrive="all", against="batch", add=add, drop=drop))
    chunk = max(1 << max((longest // MAX_PIECES).bit_length() - 1, 0), MIN_CHUNK)
    if longest > chunk and not any(w.startswith(CHUNK) for w in words):
        found.append(
            OwnPath("chunks", f"the prompt in chunks of {chunk} tokens, against whole", add=(f"{CHUNK}={chunk}",))
        )
    return found


def path_command(words: Sequence[str], way: OwnPath | None = None) -> str:
    """As it is started: with the server telling its prefix hits, and with ``way``'s changes."""
    kept = [w for w in words if way is None or w not in way.drop]
    added = [] if DETAILS in kept else [DETAILS]
    return shlex.join([*kept, *added, *(way.add if way else ())])


def pieces(length: int) -> list[int]:
    """Where the beginnings of a prompt end that are requested before the whole: multiples of PIECE, ascending."""
    size = -(-length // (MAX_PIECES * PIECE)) * PIECE
    return list(range(size, length, size))


@dataclass(frozen=True)
class SaltedSender(Sender):
    """own: how the cache is met. salt: of this run, random, so that no run before it is found in the cache."""

    own: OwnPath = REQUESTS[0]
    salt: str = ""

    def __repr__(self) -> str:
        return f"SaltedSender({self.url!r})"

    def body(self, line: PromptLine) -> tuple[str, dict[str, Any]]:
        route, body = super().body(line)
        salt = hashlib.sha256(f"{self.salt} {self.own.name} {line.name}".encode()).hexdigest()
        return route, body | {"cache_salt": salt}

    def ask(self, line: PromptLine, request_id: str, open_ones: dict[int, socket.socket], zero: float) -> Reply:
        request_id = f"{line.name}.{self.own.name}"
        began = time.monotonic()
        for k, first in enumerate(self._before(line)):
            filled = super().ask(first, f"{request_id}.{k}", open_ones, zero)
            if filled.refused is not None:
                return filled
        reply = super().ask(line, request_id, open_ones, zero)
        return replace(reply, began=round(began - zero, 6), seconds=round(time.monotonic() - began, 6))

    def _before(self, line: PromptLine) -> list[PromptLine]:
        """What fills the cache for ``line``, whose token ids are known."""
        if not self.own.before:
            return []
        free = replace(line, along=None, max_tokens=1, parameters=line.only(RENDERING))
        if self.own.before == "same":
            return [free]
        ids = line.token_ids or ()
        return [replace(free, token_ids=ids[:end]) for end in pieces(len(ids))]


TIMES = 4.0
"""Chosen: how many times what the others differ in the mean is still rounding."""
STEPS = 2.0
"""Measured: a tiny Qwen2 in bfloat16 on the CPU, compiled against eager, is 0.67 steps of its logits apart in the mean;
three times that. Its other paths give the same bits."""
FAR = 6.0
"""Measured: of 288 tokens of that pair the worst is 3.6 steps apart; 6 are far beyond."""
FAR_RATE = 0.01
"""Derived: none of 288 correct tokens is so far apart, so with 95% at most 3 / 288 are (the rule of three)."""
RATE = 0.05
"""Chosen: as of two servers."""
NO_HIT = "prompts of which nothing was found in the cache"
NOT_FRESH = "prompts that should have been fresh and were in the cache"

Replies = Mapping[str, Reply]


@dataclass
class Distance:
    """Between two paths: by prompt gap, logits' step, ordinal and `token_gaps.spread` (0 where there is none) of each
    token that both have read alike. unequal: prompts whose answers are not the same to the bit; left_out: prompts, by
    reason."""

    by_prompt: dict[str, np.ndarray] = field(default_factory=dict)
    flips: int = 0
    unequal: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def all(self) -> np.ndarray:
        """float64 [tokens, 4]: gap, step, ordinal, spread."""
        return np.concatenate([np.zeros((0, 4)), *self.by_prompt.values()])

    @property
    def usual(self) -> tuple[float, float]:
        """The mean gap, and what one in a hundred is beyond."""
        sizes = self.all[:, 0]
        return (float(sizes.mean()), float(np.quantile(sizes, 1 - FAR_RATE))) if len(sizes) else (0.0, 0.0)

    @property
    def rounds(self) -> bool:
        """Whether rounding may explain what they differ by: else the way measures others only where no other does."""
        wide = float(np.sqrt(np.square(self.all[:, 3]).mean())) if self.by_prompt else 0.0
        return not wide or self.usual[0] <= ROUNDED * wide


@dataclass(frozen=True)
class PathFinding:
    """What one way showed. tokens, prompts: compared; flips: tokens that are not the same; unequal: prompts that are
    not the same to the bit. mean, worst: gaps in nats; allowance: of a token, in the mean; p: that an equal or merely
    rounding way has so many tokens beyond it, over all prompts or in one of them, times how often it was tested;
    outliers: prompts beyond, worst first. ok: None where nothing was compared. why: the reason, for people."""

    way: OwnPath
    ok: bool | None
    why: str
    prompts: int = 0
    tokens: int = 0
    flips: int = 0
    unequal: int = 0
    mean: float = 0.0
    worst: float = 0.0
    allowance: float | None = None
    p: float | None = None
    outliers: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SelfGate:
    """findings: a way each; outliers: the names of those that are not ok; agree: whether these agree with one another,
    so that what they were compared with may be the one that is off. None where there are fewer than two."""

    findings: tuple[PathFinding, ...]
    outliers: tuple[str, ...]
    agree: bool | None
    rate: float
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str | None:
        """None where nothing was compared."""
        known = [f for f in self.findings if f.ok is not None]
        return None if not known else "fail" if self.outliers else "pass"


def judge(
    paths: list[OwnPath], answers: Mapping[str, Replies], rate: float = RATE, missing: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> SelfGate:  # fmt: skip
    """answers: by the way's name. missing: why a way has none."""
    checked = [w for w in paths if w.name != BASE]
    distances = {
        w.name: distance(answers[w.against], answers[w.name], w)
        for w in checked
        if w.name in answers and w.against in answers
    }
    noisy = [w.name for w in checked if w.name in distances and w.rule != EQUAL and distances[w.name].by_prompt]
    findings = []
    for w in checked:
        d = distances.get(w.name)
        if d is None or not d.by_prompt:
            why = (missing or {}).get(w.name, "no prompt could be compared")
            findings.append(PathFinding(w, None, why, left_out={} if d is None else dict(d.left_out)))
            continue
        measures = [distances[name] for name in noisy if name != w.name]
        others = np.array([m.usual for m in [m for m in measures if m.rounds] or measures]).reshape(-1, 2)
        floor = (float(np.median(others[:, 0])), float(np.median(others[:, 1]))) if len(others) else (0.0, 0.0)
        findings.append(_judged(w, d, floor, rate / max(len(distances), 1)))
    outliers = tuple(f.way.name for f in findings if f.ok is False)
    return SelfGate(tuple(findings), outliers, _agree(outliers, answers, findings, rate), rate, notes)


def distance(golden: Replies, mine: Replies, way: OwnPath) -> Distance:
    """Token by token up to the first that is not the same; prompts that did not meet the cache as they should are left
    out, where the server tells."""
    found = Distance()
    for name, reply in golden.items():
        other = mine.get(name)
        if other is None:
            continue
        if way.before and other.cached == 0:
            found.left_out[NO_HIT] += 1
            continue
        if not way.before and not way.scored and other.cached:
            found.left_out[NOT_FRESH] += 1
            continue
        # Decoded, forced and scored tokens are the same text here: which of them they are is what is asked.
        tokens, _, why = gaps(replace(reply, forced=None), replace(other, forced=None))
        rows = [
            (t.gap, step(reply.top[t.ordinal][1]), t.ordinal, spread(reply, t.ordinal) or 0.0)
            for t in tokens
            if t.gap is not None and reply.top is not None
        ]
        if why is not None or not rows:
            found.left_out[why or "prompts without log-probabilities of the same tokens"] += 1
            continue
        found.by_prompt[name] = np.array(rows, np.float64)
        found.flips += sum(_other_best(reply, other, t.ordinal) for t in tokens)
        if (reply.token_ids, reply.logprobs, reply.top) != (other.token_ids, other.logprobs, other.top):
            found.unequal.append(name)
    return found


def _other_best(reply: Reply, other: Reply, k: int) -> bool:
    """Whether the other path holds another token than the chosen one for more likely, forced along it or not."""
    ids, values = (other.top or [])[k]
    token = (reply.token_ids or [])[k]
    return ids is None or token not in ids or values[ids.index(token)] < values[0]


def _judged(way: OwnPath, d: Distance, floor: tuple[float, float], rate: float) -> PathFinding:
    rows = d.all
    p, outliers = beyond(d, floor)
    allowance = max(TIMES * floor[0], STEPS * float(rows[:, 1].mean()))
    unequal = len(d.unequal)
    if way.rule == EQUAL and unequal and not way.restarts:
        ok, why = False, "the same request in the same batch must give the same bits"
        outliers = tuple(d.unequal)
    elif p <= rate:
        ok, why = False, "further apart than rounding explains"
    elif way.scored or unequal:
        ok, why = True, "within rounding"
        if way.rule == EQUAL:
            why = "not the same bits, within rounding: another start may have chosen other kernels"
        elif not rows[:, 0].any():
            why = "the same numbers"
    else:
        ok, why = True, "the same bits"
    return PathFinding(
        way, ok, why, len(d.by_prompt), len(rows), d.flips, unequal, float(rows[:, 0].mean()), float(rows[:, 0].max()),
        None if way.rule == EQUAL and not way.restarts else allowance, p, outliers if not ok else (), dict(d.left_out),
    )  # fmt: skip


def beyond(d: Distance, floor: tuple[float, float]) -> tuple[float, tuple[str, ...]]:
    """(p, the prompts that are beyond, worst first). floor: the others' usual distances. p: of three questions, each a
    binomial test [of signs: W. Dixon, A. Mood, J. Am. Stat. Assoc. 41 (1946) 557], the least, times how often was
    asked."""
    means, firsts, tokens_of = [], [], []
    for name, rows in d.by_prompt.items():
        sizes, steps, ordinals = rows.T[:3]
        over = sizes > np.maximum(TIMES * floor[0], STEPS * steps)
        means.append(bool(sizes.mean() > max(TIMES * floor[0], STEPS * float(steps.mean()))))
        far = bool((sizes > np.maximum(TIMES * floor[1], FAR * steps))[ordinals == 0].any())
        firsts.append(far)
        p = _tail(int(over.sum()), len(over))
        tokens_of.append((p, -float(sizes.max()), name, means[-1] or far))
    each = min(p for p, *_ in tokens_of) * len(tokens_of)
    least = min(_tail(sum(means), len(means)), each, _tail(sum(firsts), len(firsts), FAR_RATE))
    return min(1.0, 3.0 * least), tuple(name for _, _, name, further in sorted(tokens_of) if further)


def _tail(k: int, n: int, q: float = 0.5) -> float:
    """P(at least k of n), each with q."""
    return distributions.binomial_at_least(k, n, q)


def _agree(
    outliers: tuple[str, ...], answers: Mapping[str, Replies], findings: list[PathFinding], rate: float
) -> bool | None:
    """Whether the outliers give the same as one another, within the widest of their allowances."""
    ways = [f.way for f in findings if f.way.name in outliers]
    if len(ways) < 2 or any(w.against != BASE for w in ways):
        return None
    widest = max(f.allowance or 0.0 for f in findings if f.way.name in outliers) / TIMES
    pairs = [(a, b) for i, a in enumerate(ways) for b in ways[i + 1 :]]
    for a, b in pairs:
        d = distance(answers[a.name], answers[b.name], OwnPath("", "", before=b.before, scored=b.scored))
        if not d.by_prompt or beyond(d, (widest, widest))[0] <= rate / len(pairs):
            return False
    return True


NO_IDS = "the server does not say which token ids it read and wrote (vLLM's return_token_ids)"
NO_SCORES = "the server does not tell log-probabilities of prompts"
NONE = "no prompt is long enough, or none has token ids"
_NAME = "the server"


@dataclass
class PathAnswers:
    """paths: in order; answers: by the path's name; missing: why one has none; notes: what a reader should know."""

    paths: list[OwnPath] = field(default_factory=list)
    answers: dict[str, Replies] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PathSettings:
    """What is the same for all paths; tell: gets each path as it begins."""

    out: Path
    made: Mapping[str, Any]
    settings: SendSettings = field(default_factory=SendSettings)
    tell: Callable[[str], None] = lambda said: None


def is_url(side: str) -> bool:
    return side.startswith(("http://", "https://"))


def ask(side: str, key: str, environ: Mapping[str, str], lines: list[PromptLine], how: PathSettings) -> PathAnswers:
    """side: a URL, or a command. Raises SendError, FolderError, OSError where the first path has no answer."""
    found = PathAnswers()
    if is_url(side):
        _check_begun(side, lines, how)
        _all(REQUESTS, side, key, lines, how, found)
        found.notes.append("a URL is not started again: eager, scheduling and chunks need a command")
        return found
    try:
        words = shlex.split(side)
    except ValueError as e:
        raise SendError(f"CMD: {e}") from None
    _check_begun(side, lines, how)
    how.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _kept(REQUESTS, how.out, found):
        with served(_NAME, path_command(words), environ, how.out, how.settings.ready_s, how.settings.say) as run:
            _all(REQUESTS, run.command.url, run.command.key, lines, how, found)
    lengths = [len(r.prompt_token_ids or ()) for r in found.answers[BASE].values()]
    changed: dict[str, list[OwnPath]] = {}
    for path in restarts(words, max(lengths, default=0)):
        changed.setdefault(path_command(words, path), []).append(path)
    for command, these in changed.items():
        if _kept(these, how.out, found):
            continue
        try:
            with served(_NAME, command, environ, how.out, how.settings.ready_s, how.settings.say) as run:
                _all(these, run.command.url, run.command.key, lines, how, found)
        except SendError as e:  # one changed command that does not serve costs its own paths only
            for path in these:
                found.paths += [] if path in found.paths else [path]
                found.missing.setdefault(path.name, str(e))
    return found


def _check_begun(side: str, lines: list[PromptLine], how: PathSettings) -> None:
    """Raises FolderError where the folder was begun with another command, other prompts or settings."""
    s = how.settings
    settings = {"top": s.top, "max_tokens": s.max_tokens, "concurrency": s.concurrency}
    about = passes.begun(how.out / BASE, lines, settings, None)
    if about is not None and about.get("side") not in (None, digest(side)):
        raise replies.FolderError(f"{how.out} is of another command: name another --out")


def digest(side: str) -> str:
    """Of a command or a URL, which may hold a key."""
    return ServerSide(COMMAND, side).digest


def _all(
    these: Sequence[OwnPath], url: str, key: str, lines: list[PromptLine], how: PathSettings, found: PathAnswers
) -> None:
    """Of one server. Raises SendError."""
    with waiting(lambda: "asking what the server can", how.settings.say):
        known, server = how.settings.sender(url, key).introduced()
        forced = known.how_forced()
    salt = secrets.token_hex(16)
    decoding = forced if forced != client.SCORED else None
    for path in these:
        how.tell(path.says)
        found.paths.append(path)
        way = client.SCORED if path.scored else decoding if path.name != BASE and path.rule != EQUAL else None
        if path.scored and not (forced == client.SCORED or known.can(client.SCORED)):
            found.missing[path.name] = NO_SCORES
            continue
        sent = lines if path.name == BASE else _lines(lines, found.answers[BASE], path, way)
        if not sent:
            found.missing[path.name] = NONE
            continue
        own = {f.name: getattr(known, f.name) for f in fields(known)}
        sender = SaltedSender(**own, own=path, salt=salt)
        plan = passes.FREE if way is None else passes.Forcing(way, passes.digest(replies.read(how.out / BASE)))
        folder, made = how.out / path.name, dict(how.made) | {"path": path.name}
        with waiting(lambda path=path: f"sending: {path.says}", how.settings.say):  # type: ignore[misc]
            passes.send(sender, server, sent, [parse(path.arrive)], how.settings.concurrency, folder, made, plan=plan)
        found.answers[path.name] = replies.read(folder).passes[0]
        if path.name == BASE:
            _check(found, decoding)


def _check(found: PathAnswers, forced: str | None) -> None:
    answered = [r for r in found.answers[BASE].values() if r.refused is None]
    if answered and not any(r.token_ids and r.prompt_token_ids for r in answered):
        raise SendError(NO_IDS)
    if answered and all(r.cached is None for r in answered):
        found.notes.append(
            f"the server does not tell its prefix hits ({DETAILS}): whether a prompt was fresh is not known"
        )
    if forced is None:
        found.notes.append(
            f"answers are compared up to the first other token; to force the server, {client.HOW_TO_FORCE}"
        )


def _lines(lines: list[PromptLine], base: Replies, path: OwnPath, way: str | None) -> list[PromptLine]:
    """What the first path answered, as its token ids, and along its answers with a ``way``; images stay as they are."""
    found = []
    for line in lines:
        forced = passes.along(line, base.get(line.name))
        if forced is None or (forced.token_ids is None and (path.scored or path.before == "pieces")):
            continue
        if path.scored and line.only(GRAMMAR):  # which a server that reads its tokens does not apply
            continue
        if path.before == "pieces" and not pieces(len(forced.token_ids or ())):
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
