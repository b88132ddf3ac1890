"""Token ids sent as a prompt, of which the server tells each token's log-probability.

The problem: of tokens that another program chose, any vLLM can say how likely it holds them, without sampling them
again. The idea: ``prompt_logprobs`` of one request for the prompt and its answer together; the numbers come from the
prefill kernels, all positions at once, and the prefix cache is not read. What decode computes is not seen by it.
Not here: forcing tokens in decode, which the server's own sampler has to be told.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_accprobe.gate.sending.client import Reply, Sender, SendError, ServerLost
from vllm_accprobe.gate.sending.prompts import PromptLine

NO_SCORES = "an answer without the prompt's log-probabilities"


def score(
    sender: Sender, name: str, ids: Sequence[int], request_id: str, open_ones: dict[int, socket.socket], zero: float,
    top: int = 0,
) -> Reply:  # fmt: skip
    """A reply with the log-probability of each of ids[1:]: token_ids are ids[1:], logprobs and top of these. Raises
    ServerLost, SendError."""
    route, body = sender.body(PromptLine(name, token_ids=tuple(ids), max_tokens=1))
    body = {k: v for k, v in body.items() if k != "logprobs"} | {"prompt_logprobs": top}
    began = time.monotonic()
    status, answer = sender._exchange("POST", route, body, request_id, open_ones)
    reply = Reply(name, round(began - zero, 6), round(time.monotonic() - began, 6))
    if status in (401, 403):
        raise SendError(f"{sender.url} wants a key ({status}): put it into VLLM_API_KEY")
    if status != 200:
        if status >= 500 and not sender.healthy():
            raise ServerLost(f"the server says {status} and is not healthy")
        return replace(reply, refused=f"HTTP {status}")
    return understood(reply, ids, answer)


def understood(reply: Reply, ids: Sequence[int], answer: Any) -> Reply:
    """With what vLLM's json says; refused where it says nothing of the prompt."""
    try:
        said = answer["choices"][0]["prompt_logprobs"]
        if len(said) != len(ids):
            return replace(reply, refused=NO_SCORES)
        chosen: list[float | None] = []
        tops: list[tuple[list[int] | None, list[float]]] = []
        for token, entry in zip(ids[1:], said[1:], strict=True):
            known = {int(k): float(v["logprob"]) for k, v in entry.items() if math.isfinite(v["logprob"])}
            best = sorted(known.items(), key=lambda p: (-p[1], p[0]))
            chosen.append(known.get(token))
            tops.append(([i for i, _ in best], [v for _, v in best]))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return replace(reply, refused=NO_SCORES)
    margins = [round(v[0] - v[1], 6) if len(v) > 1 else None for _, v in tops]
    return replace(
        reply, prompt_token_ids=list(ids[:1]), token_ids=list(ids[1:]), logprobs=chosen, top=tops, margins=margins,
        finish="length",
    )  # fmt: skip
