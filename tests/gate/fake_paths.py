"""A vLLM without a model: answers that depend on the prompt's token ids, numbers on how they were asked for.

Prefix hits by salt, scores of prompts, batches: as far as `gate --self` and the trainer's gate can see, it is a server;
each fault is one path that gives other numbers. The noise of batches and of scoring is rounding on the logits' grid.
"""

import json
import random
import threading
import time
from typing import Any

from odd_server import odd

BLOCK = 16
STEP = 2.0**-5


class FakePaths:
    """fault: the path whose numbers are off by a nat: hit, batch, scoring, again, decode, or "". details: whether
    prefix hits are told; forced: whether it answers with named tokens, as with our plugin."""

    def __init__(self, fault: str = "", details: bool = True, forced: bool = True):
        self.fault, self.details, self.forced = fault, details, forced
        self.cache: dict[str, list[int]] = {}
        self.salts: list[tuple[str, str, int]] = []
        self.busy = self.asked = 0
        self.lock = threading.Lock()

    def serve(self) -> Any:
        return odd(self.answer, forced=True)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/health":
            return 200, b""
        if path != "/v1/completions":
            return 404, b""
        if body.get("min_tokens", 0) > body["max_tokens"]:
            return 400, b""  # as vLLM does
        with self.lock:
            self.busy, self.asked = self.busy + 1, self.asked + 1
            turn = self.asked
        try:
            return 200, self._completion(body, turn)
        finally:
            with self.lock:
                self.busy -= 1

    def _completion(self, body: dict[str, Any], turn: int) -> bytes:
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else [ord(c) for c in prompt]
        salt = body.get("cache_salt", "")
        had = self.cache.get(salt, [])
        same = next((i for i, (a, b) in enumerate(zip(had, ids, strict=False)) if a != b), min(len(had), len(ids)))
        hit = min(same, len(ids) - 1) // BLOCK * BLOCK
        scored = body.get("prompt_logprobs") is not None
        named = (body.get("vllm_xargs") or {}).get("accprobe_along") if self.forced else None
        along = [int(t) for t in named.split()] if named else None
        cached = 0 if scored else hit
        self.salts.append((salt, "score" if scored else "ask", cached))
        self.cache[salt] = ids
        batch = self.busy > 1
        time.sleep(0.01)
        batch = batch or self.busy > 1
        wrong = {"hit": cached > 0, "batch": batch, "scoring": scored, "again": turn % 2 == 0}.get(self.fault, False)
        how = f"{batch} {cached > 0} {scored}"
        if scored:
            entries: list[Any] = [None]
            for k in range(1, len(ids)):
                entries.append({str(t): {"logprob": v} for t, v in self.top(ids[:k], how, wrong, ids[k])})
            choice: dict[str, Any] = {"token_ids": [1], "prompt_token_ids": ids, "prompt_logprobs": entries}
        else:
            out: list[int] = []
            tops = []
            for k in range(body["max_tokens"]):
                decode = self.fault == "decode" and bool(out)
                top = self.top([*ids, *out], how, wrong or decode, along[k] if along else None)
                tops.append(top)
                out.append(along[k] if along else top[0][0])
            said = {
                "token_logprobs": [dict(t)[i] for t, i in zip(tops, out, strict=True)],
                "top_logprobs": [_named(t) for t in tops],
            }
            choice = {"token_ids": out, "prompt_token_ids": ids, "finish_reason": "length", "logprobs": said}
        usage = {"prompt_tokens_details": {"cached_tokens": cached}} if self.details else {}
        return json.dumps({"choices": [choice], "usage": usage}).encode()

    def top(self, context: list[int], how: str, wrong: bool, token: int | None = None) -> list[tuple[int, float]]:
        """The best five after ``context``, best first, and ``token``."""
        draw = random.Random(hash(tuple(context)))
        ids = draw.sample(range(1000), 5)
        logits = [round(12 - 3 * i - draw.random(), 2) // STEP * STEP for i in range(5)]
        noise = random.Random(f"{how} {hash(tuple(context))}")
        if how != "False False False":
            logits = [v + STEP * noise.randint(-1, 1) for v in logits]
        if wrong:
            logits = [v + draw.choice((-1, 1)) for v in logits]  # a fault is the same in every way
        best = sorted(zip(ids, logits, strict=True), key=lambda p: -p[1])
        found = [(i, v - 13.0) for i, v in best]
        return found if token is None or token in ids else [*found, (token, -17.0)]


def _named(top: list[tuple[int, float]]) -> dict[str, float]:
    return {f"token_id:{i}": v for i, v in top}
