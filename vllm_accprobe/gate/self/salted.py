"""A sender whose requests meet the prefix cache only where they are meant to.

The problem: a prompt that was sent before, or that begins like another, is partly served from the prefix cache, so
that "fresh" is an accident. The idea: vLLM's ``cache_salt`` keeps requests of different salts apart in the cache; each
prompt of each path has a salt of its own, and whoever wants a hit asks first under the same salt, for one token. What
was found in the cache is told by the answer (``cached``).
Not here: which paths there are (own_paths.py); how answers are forced and scored (gate/sending/ways.py).
"""

from __future__ import annotations

import hashlib
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

from vllm_accprobe.gate.self.own_paths import REQUESTS, OwnPath, pieces
from vllm_accprobe.gate.sending.client import Reply, Sender
from vllm_accprobe.gate.sending.prompts import PromptLine


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
        free = replace(line, along=None, max_tokens=1)
        if self.own.before == "same":
            return [free]
        ids = line.token_ids or ()
        return [replace(free, token_ids=ids[:end]) for end in pieces(len(ids))]
