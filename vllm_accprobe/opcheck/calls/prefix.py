"""Whose rows stand before a request that began in the middle, because its prompt's beginning was cached already.

The problem: after a prefix hit the engine computes only the end of a prompt, and attention looks back at keys and
values that an earlier request wrote: they are in the dump, under another name. The idea: a dump holds the hash of each
prompt and the token ids of the rows that were computed; if the beginning of an earlier request and the end of this one
hash to this one's prompt (and their pictures are the same), the beginning is this one's, too. A guess that is wrong has
another hash. Not here: the rows themselves (history.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import hash_tokens

_TRIES = 64
"""Different beginnings that are tried for one request."""
_MOST = 1 << 22
"""Positions a request may have: a dump may come from a stranger."""


@dataclass(frozen=True)
class Prefix:
    """The first ``n`` positions of a request, which each of ``donors`` (requests of the same rank) has as well."""

    n: int
    donors: tuple[int, ...]


def prefixes(dump: Dump, rank: int) -> Mapping[int, Prefix]:
    """By request: the beginning that it did not compute itself, where the dump proves whose it is."""
    first: dict[int, int] = {}
    for (r, _, name), space in dump.rows.items():
        for s in space.segments if r == rank and name == "tokens" else ():
            first[s.req] = min(s.pos, first.get(s.req, s.pos))
    found: dict[int, Prefix] = {}
    if not any(first.values()):
        return found
    tokens, begun = _tokens(dump, rank)
    whole = {req: [held[p] for p in range(len(held))] for req, held in tokens.items() if _unbroken(held, 0)}
    for req in sorted(set(tokens) - set(whole), key=lambda r: begun[r]):
        own, request = tokens[req], dump.requests.get((rank, req))
        n = min(own)
        if request is None or not request.prompt or not n < request.prompt_len or not _unbroken(own, n):
            continue
        rest = [own[p] for p in range(n, n + len(own))]
        tried: dict[tuple[int, ...], list[int]] = {}
        for other, ids in whole.items():
            known = dump.requests.get((rank, other))
            fits = len(ids) >= n and begun[other] <= begun[req] and known is not None and known.images == request.images
            if fits and (tuple(ids[:n]) in tried or len(tried) < _TRIES):
                tried.setdefault(tuple(ids[:n]), []).append(other)
        for start, donors in tried.items():
            if hash_tokens([*start, *rest[: request.prompt_len - n]]) == request.prompt:
                found[req] = Prefix(n, tuple(donors))
                whole[req] = [*start, *rest]
                break
    return found


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
