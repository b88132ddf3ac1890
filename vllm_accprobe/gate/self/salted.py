"""A sender whose requests meet the prefix cache only where they are meant to.

The problem: a prompt that was sent before, or that begins like another, is partly served from the prefix cache, so
that "fresh" is an accident. The idea: vLLM's ``cache_salt`` keeps requests of different salts apart in the cache; each
prompt of each way has a salt of its own, and whoever wants a hit asks first under the same salt, for one token. What
was found in the cache is told by the answer (``cached``).
Not here: which ways there are (ways.py); how scores are read (gate/trainer/scoring.py).
"""

from __future__ import annotations

import hashlib
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

from vllm_accprobe.gate.self.ways import REQUESTS, Way, pieces
from vllm_accprobe.gate.sending.client import Reply, Sender
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.trainer.scoring import score

SCORED_TOP = 5
"""Chosen: log-probabilities of each scored position; a prompt of 8,000 tokens answers with a few megabytes."""


@dataclass(frozen=True)
class SaltedSender(Sender):
    """way: how the cache is met. salt: of this run, random, so that no run before it is found in the cache. along: the
    answers that are scored, by prompt."""

    way: Way = REQUESTS[0]
    salt: str = ""
    along: dict[str, tuple[int, ...]] | None = None

    def __repr__(self) -> str:
        return f"SaltedSender({self.url!r})"

    def body(self, line: PromptLine) -> tuple[str, dict[str, Any]]:
        route, body = super().body(line)
        own = hashlib.sha256(f"{self.salt} {self.way.name} {line.name}".encode()).hexdigest()
        return route, body | {"cache_salt": own}

    def ask(self, line: PromptLine, request_id: str, open_ones: dict[int, socket.socket], zero: float) -> Reply:
        request_id = f"{line.name}.{self.way.name}"
        began = time.monotonic()
        for k, first in enumerate(self._before(line)):
            filled = super().ask(first, f"{request_id}.{k}", open_ones, zero)
            if filled.refused is not None:
                return filled
        if self.way.scored:
            reply = self._scored(line, request_id, open_ones, zero)
        else:
            reply = super().ask(line, request_id, open_ones, zero)
        return replace(reply, began=round(began - zero, 6), seconds=round(time.monotonic() - began, 6))

    def _before(self, line: PromptLine) -> list[PromptLine]:
        """What fills the cache for ``line``, whose token ids are known."""
        if not self.way.before:
            return []
        if self.way.before == "same":
            return [replace(line, max_tokens=1)]
        ids = line.token_ids or ()
        return [replace(line, token_ids=ids[:end], max_tokens=1) for end in pieces(len(ids))]

    def _scored(self, line: PromptLine, request_id: str, open_ones: dict[int, socket.socket], zero: float) -> Reply:
        prompt, answer = list(line.token_ids or ()), list((self.along or {}).get(line.name, ()))
        whole = score(self, line.name, [*prompt, *answer], request_id, open_ones, zero, top=min(self.top, SCORED_TOP))
        if whole.refused is not None or whole.top is None or whole.logprobs is None:
            return whole
        n = len(prompt) - 1  # the first of n - 1 entries is of token 1
        return replace(
            whole, prompt_token_ids=prompt, token_ids=answer, logprobs=whole.logprobs[n:], top=whole.top[n:],
            margins=(whole.margins or [])[n:],
        )  # fmt: skip
