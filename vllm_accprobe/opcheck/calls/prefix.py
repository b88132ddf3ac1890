"""Whose rows stand before a request that began in the middle, because its prompt's beginning was cached already.

The problem: after a prefix hit the engine computes only the end of a prompt, and attention looks back at keys and
values that an earlier request wrote: they are in the dump, under another name. The idea: the capture says whose they
are (journal line ``cached``), position by position. Older captures do not: there a dump holds the hash of each prompt
and the token ids of the rows that were computed; if the beginning of an earlier request and the end of this one hash
to this one's prompt, and adapter, salt and images are the same, the beginning is this one's, too. A guess that is
wrong has another hash. Where the rows are not this request's own (another adapter, image, salt or text), or nobody
knows whose they are, no row behind them is checked, and that is said. Not here: the rows themselves (history.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_accprobe.dump.journal.state_lines import CachedPrefix
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Request, hash_tokens

_TRIES = 64
"""Different beginnings that are tried for one request."""
_MOST = 1 << 22
"""Positions a request may have: a dump may come from a stranger."""
UNKNOWN = "nobody knows which request wrote the cached rows that its request begins with"
ABSENT = "the cached rows that its request begins with are of a request that is not in the dump"
TEXT = "the cached rows that its request begins with are those of other tokens"


@dataclass(frozen=True)
class Prefix:
    """The first ``n`` positions of a request, which each of ``donors`` (requests of the same rank) has as well; where
    several requests computed them, ``runs`` says who: (first position, end, request). why: for what reason no row of
    the request is checked from step ``since`` on, "" where they are."""

    n: int
    donors: tuple[int, ...] = ()
    runs: tuple[tuple[int, int, int], ...] = ()
    why: str = ""
    since: int = 0

    def parts(self) -> Sequence[tuple[int, int, tuple[int, ...]]]:
        """(first position, end, donors), in order."""
        return [(low, high, (owner,)) for low, high, owner in self.runs] or [(0, self.n, self.donors)]


def prefixes(dump: Dump, rank: int) -> Mapping[int, Prefix]:
    """By request: the beginning that it did not compute itself, where the dump says or proves whose it is."""
    recorded: dict[int, list[CachedPrefix]] = {}
    for on, line in getattr(dump, "cached", ()):
        if on == rank:
            recorded.setdefault(line.req, []).append(line)
    first: dict[int, int] = {}
    for (r, _, name), space in dump.rows.items():
        for s in space.segments if r == rank and name == "tokens" else ():
            first[s.req] = min(s.pos, first.get(s.req, s.pos))
    found: dict[int, Prefix] = {}
    if not any(first.values()) and not recorded:
        return found
    tokens, begun = _tokens(dump, rank)
    whole = {req: [held[p] for p in range(len(held))] for req, held in tokens.items() if _unbroken(held, 0)}
    for req, lines in recorded.items():
        if (prefix := _recorded(dump, rank, req, lines, tokens)) is not None:
            found[req] = prefix
    for req in sorted(set(tokens) - set(whole), key=lambda r: begun[r]):
        own, request = tokens[req], dump.requests.get((rank, req))
        n = min(own)
        if request is None or not request.prompt or not n < request.prompt_len or not _unbroken(own, n):
            continue
        rest = [own[p] for p in range(n, n + len(own))]
        if req in recorded:
            if (ids_before := _start(found.get(req), tokens)) is not None:
                whole[req] = [*ids_before, *rest]
            continue
        tried: dict[tuple[int, ...], list[int]] = {}
        for other, ids in whole.items():
            fits = len(ids) >= n and begun[other] <= begun[req]
            fits = fits and not _other_context(dump.requests.get((rank, other)), request, n)
            if fits and (tuple(ids[:n]) in tried or len(tried) < _TRIES):
                tried.setdefault(tuple(ids[:n]), []).append(other)
        for start, donors in tried.items():
            if hash_tokens([*start, *rest[: request.prompt_len - n]]) == request.prompt:
                found[req] = Prefix(n, tuple(donors))
                whole[req] = [*start, *rest]
                break
    return found


def _recorded(
    dump: Dump, rank: int, req: int, lines: Sequence[CachedPrefix], tokens: Mapping[int, Mapping[int, int]]
) -> Prefix | None:
    """What the capture says of a request's beginning. A later line is of a request that was preempted: what it found is
    its own text again, unless the capture says that it is not."""
    line = next((one for one in lines if one.why), lines[0])
    runs = tuple((run.low, min(run.low + run.n, _MOST), run.owner) for run in line.runs if 0 <= run.low < _MOST)
    if not runs:
        return None
    n = max(high for _, high, _ in runs)
    if line.why:
        return Prefix(n, why=f"its history is not its own: {line.why}", since=line.step)
    request = dump.requests.get((rank, req))
    for low, high, owner in runs:
        if owner == req:
            continue
        theirs = dump.requests.get((rank, owner))
        if owner < 0 or theirs is None or request is None:
            return Prefix(n, why=UNKNOWN if owner < 0 else ABSENT, since=line.step)
        if other := _other_context(theirs, request, high):
            why = f"its history is not its own: positions {low} to {high - 1} were written by request '{theirs.id}'"
            why += other
            return Prefix(n, why=why, since=line.step)
    prefix = Prefix(n, runs=runs, since=line.step)
    start, own = _start(prefix, tokens), tokens.get(req, {})
    if start is not None and request is not None and request.prompt and min(own, default=-1) == n:
        rest = [own[p] for p in range(n, request.prompt_len) if p in own]
        if n + len(rest) == request.prompt_len and hash_tokens([*start, *rest]) != request.prompt:
            return Prefix(n, why=TEXT, since=line.step)
    return prefix


def _start(prefix: Prefix | None, tokens: Mapping[int, Mapping[int, int]]) -> list[int] | None:
    """The token ids of a recorded beginning; None where the dump has not all of them."""
    if prefix is None or prefix.why:
        return None
    out: list[int] = []
    for low, high, owner in prefix.runs:
        held = tokens.get(owner, {})
        if low != len(out) or high - low > len(held) or not all(p in held for p in range(low, high)):
            return None
        out += [held[p] for p in range(low, high)]
    return out


def _other_context(theirs: Request | None, request: Request, n: int) -> str:
    """What another request has otherwise than ``request`` in its first ``n`` positions, besides its tokens; "" for
    nothing."""
    if theirs is None:
        return " that is not known"
    if (theirs.adapter or "") != (request.adapter or ""):
        return f" with {f'adapter {theirs.adapter}' if theirs.adapter else 'no adapter'}"
    if theirs.salt != request.salt:
        return " with another cache salt"
    shown = [[(i.hash, i.pos, i.n) for i in r.images if i.pos < n] for r in (theirs, request)]
    return " with another image" if shown[0] != shown[1] else ""


def _tokens(dump: Dump, rank: int) -> tuple[dict[int, dict[int, int]], dict[int, int]]:
    """By request: the token ids by position of all its rows, and its first step."""
    tokens: dict[int, dict[int, int]] = {}
    begun: dict[int, int] = {}
    for (r, step, name), space in sorted(dump.rows.items(), key=lambda kv: kv[0][:2]):
        if r != rank or name != "tokens" or len(space.ids) != space.n:
            continue
        start = 0
        for s in space.segments:
            if s.pos >= 0 and s.pos + s.n <= _MOST:
                ids = space.ids[start : start + s.n]
                tokens.setdefault(s.req, {}).update(zip(range(s.pos, s.pos + s.n), ids, strict=True))
                begun.setdefault(s.req, step)
            start += s.n
    return {req: held for req, held in tokens.items() if held}, begun


def _unbroken(held: Mapping[int, int], first: int) -> bool:
    return min(held) == first and max(held) == first + len(held) - 1
