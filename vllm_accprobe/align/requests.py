"""Which request of the golden is which request of mine.

The problem: engines number requests in the order they arrive, clients name them as they like, and the same prompt may
be sent twice, or once to each of two LoRA adapters. The idea: a request is its prompt (by hash), its adapter (by name)
and, to tell twins apart, its external id, its images and its ordinal; a pair is made by the strictest rule that fits.
Requests with one id and different prompts or adapters are not compared but reported, because this is the commonest
mistake in preparing two runs. A capture outside vLLM knows no adapter: its requests pair with any.
Not here: which rows a request has (tokens.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from vllm_accprobe.dump.schema import OWN_REQUEST, Request

Numbered = dict[tuple[int, int], Request]
Identity = tuple[str, str, str, int, str]


@dataclass(frozen=True)
class RequestPlan:
    """pairs: (golden, mine, rule); ``label`` names a pair in reports. different: one id, two prompts or adapters."""

    pairs: list[tuple[Request, Request, str]]
    only_golden: list[Request]
    only_mine: list[Request]
    different: list[tuple[Request, Request]]
    images_differ: list[tuple[Request, Request]] = field(default_factory=list)

    @property
    def rehashed(self) -> bool:
        """Whether images differ by their hashes in every request that has any, and in nothing else that is known of
        them: so it is where two releases hash one image in two ways."""
        both = [(g, m) for g, m, _ in self.pairs if g.images and m.images]
        return bool(both) and all(
            len(g.images) == len(m.images)
            and all(a.hash and b.hash and a.hash != b.hash and (a.pos, a.n) == (b.pos, b.n)
                    for a, b in zip(g.images, m.images, strict=True))
            for g, m in both
        )  # fmt: skip

    def lines(self) -> list[str]:
        """The plan in sentences: how many requests paired by which rule, and who is left."""
        rules: dict[str, int] = defaultdict(int)
        for _, _, rule in self.pairs:
            rules[rule] += 1
        lines = [f"requests: {n} paired by {rule}" for rule, n in rules.items()]
        for side, left in (("golden", self.only_golden), ("mine", self.only_mine)):
            if left:
                names = ", ".join(repr(r.id) for r in left[:5]) + (", ..." if len(left) > 5 else "")
                lines.append(f"requests: {len(left)} only in {side}: {names}")
        lines += [f"requests: {g.id!r} has {what_differs(g, m)}, not compared" for g, m in self.different]
        return lines


def what_differs(golden: Request, mine: Request) -> str:
    """Why two requests of one id are not one, in words: their prompts, or their adapters."""
    if (golden.prompt, golden.prompt_len) != (mine.prompt, mine.prompt_len):
        return "different prompt tokens"
    adapters = [repr(r.adapter[:80]) if r.adapter else "none" for r in (golden, mine)]
    return f"different adapters (golden {adapters[0]}, mine {adapters[1]})"


def identity(request: Request) -> Identity:
    """What makes lines of different ranks the same request."""
    return (request.internal_id, request.id, request.prompt, request.ordinal, request.adapter or "")


def distinct(requests: Numbered) -> list[Request]:
    """Each request once, in order of first appearance, whatever the number of ranks that saw it."""
    seen: dict[Identity, Request] = {}
    for key in sorted(requests, key=lambda k: (k[1], k[0])):
        seen.setdefault(identity(requests[key]), requests[key])
    return list(seen.values())


def pair_requests(golden: list[Request], mine: list[Request]) -> RequestPlan:
    """Pairs by id and prompt, then by prompt, images and ordinal, then prompt and ordinal, then prompt and order; the
    prompt with its adapter, and only then, in the same order, those of which one side knows no adapter."""
    pairs: list[tuple[Request, Request, str]] = []
    left = [[r for r in side if r.id != OWN_REQUEST] for side in (golden, mine)]

    def match(rule: str, key: Callable[[Request], Hashable]) -> None:
        waiting: dict[Any, list[Request]] = defaultdict(list)
        for g in left[0]:
            waiting[key(g)].append(g)
        rest: list[Request] = []
        for m in left[1]:
            found = waiting.get(key(m))
            if found:
                pairs.append((found.pop(0), m, rule))
            else:
                rest.append(m)
        taken = {id(g) for g, _, _ in pairs}
        left[0], left[1] = [g for g in left[0] if id(g) not in taken], rest

    rules: tuple[tuple[str, Callable[[Request], tuple[Hashable, ...]]], ...] = (
        ("id and prompt", lambda r: (r.id, r.prompt, r.prompt_len)),
        ("prompt, images and ordinal", lambda r: (r.prompt, r.prompt_len, _images(r), r.ordinal)),
        ("prompt and ordinal", lambda r: (r.prompt, r.prompt_len, r.ordinal)),
        ("prompt and order", lambda r: (r.prompt, r.prompt_len)),
    )
    for rule, key in rules:
        match(rule, lambda r, key=key: (*key(r), r.adapter))  # type: ignore[misc]
    if any(all(r.adapter is None for r in side) for side in (golden, mine)):
        for rule, key in rules:  # first to those that have none
            match(rule, lambda r, key=key: (*key(r), r.adapter or ""))  # type: ignore[misc]
        for rule, key in rules:
            match(rule, key)
    by_id = {r.id: r for r in left[0]}
    different = [(by_id[m.id], m) for m in left[1] if m.id in by_id]
    images = [(g, m) for g, m, _ in pairs if _images_differ(g, m)]
    order = {id(r): i for i, r in enumerate(golden)}
    pairs.sort(key=lambda p: order[id(p[0])])
    return RequestPlan(pairs, left[0], left[1], different, images)


def _images_differ(golden: Request, mine: Request) -> bool:
    """Where both hashes are known; a capture outside vLLM does not know them."""
    if len(golden.images) != len(mine.images):
        return True
    return any(g.hash and m.hash and g.hash != m.hash for g, m in zip(golden.images, mine.images, strict=True))


def _images(request: Request) -> tuple[str, ...]:
    return tuple(i.hash for i in request.images)
