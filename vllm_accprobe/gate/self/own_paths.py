"""The paths by which one server can compute one answer, and what each may change.

The problem: a server has many paths to the same token: a batch of one or of many, a prompt whole or in chunks, fresh or
with a prefix from the cache, decode or scoring, compiled or not. Each path has kernels and bookkeeping of its own, and
a fault in one of them is a fault though no second machine is there. The idea: a `OwnPath` says how the prompts are sent
(the same for every server), or how the command is changed (a restart); and whether it must give the same bits or may
round in another way. Some paths need only requests, so that a URL is enough.
Not here: sending (salted.py, passes.py), what is concluded (odd_one.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

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
    scored: prompt and answer are a prompt, whose tokens' log-probabilities are asked for. against: the way that it is
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
    said = "asynchronous scheduling, against synchronous" if sync else "synchronous scheduling, against asynchronous"
    found.append(OwnPath(name, said, EQUAL, add=add, drop=drop))
    said += ", all requests at once"
    found.append(OwnPath(f"{name}-batch", said, arrive="all", against="batch", add=add, drop=drop))
    chunk = max(1 << max((longest // MAX_PIECES).bit_length() - 1, 0), MIN_CHUNK)
    if longest > chunk and not any(w.startswith(CHUNK) for w in words):
        found.append(
            OwnPath("chunks", f"the prompt in chunks of {chunk} tokens, against whole", add=(f"{CHUNK}={chunk}",))
        )
    return found


def command(words: Sequence[str], way: OwnPath | None = None) -> str:
    """As it is started: with the server telling its prefix hits, and with ``way``'s changes."""
    kept = [w for w in words if way is None or w not in way.drop]
    added = [] if DETAILS in kept else [DETAILS]
    return shlex.join([*kept, *added, *(way.add if way else ())])


def pieces(length: int) -> list[int]:
    """Where the beginnings of a prompt end that are asked for before the whole: multiples of PIECE, ascending."""
    size = -(-length // (MAX_PIECES * PIECE)) * PIECE
    return list(range(size, length, size))
