"""What a client calls a request, of what vLLM's engine calls it.

The problem: front ends put words before a client's id and numbers behind it. The idea: one rule for all of them, which
gives every name that a client may use. Not here: prompts, by which requests are told apart as well (core/rows.py).
"""

from __future__ import annotations

import re

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_FRONT = re.compile(r"^(cmpl|chatcmpl|generate-tokens|embd|resp|score|rerank|classify|pool)-(?=.)")


def external_ids(internal: str) -> tuple[str, ...]:
    """What a client may call the request that the engine calls ``internal``; the shortest, best one last.

    vLLM makes ``cmpl-<X-Request-Id>-<prompt index>-<8 random hex>`` of a completion and
    ``chatcmpl-<X-Request-Id>-<8 random hex>`` of a chat; ``generate-tokens-...`` in the same way of /inference.
    """
    names = [internal]
    without = _SUFFIX.sub("", internal)
    if without != internal:
        names.append(without)
    front = _FRONT.match(without)
    if front:
        without = without[front.end() :]
        names.append(without)
        if front[1] not in ("chatcmpl", "generate-tokens") and without.endswith("-0"):
            names.append(without[:-2])
    return tuple(names)
