"""Folders of `send`, made up: a server whose numbers have the noise of its batches, and perhaps a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.client import Reply

Fault = Callable[[int, int], float]
"""(length of the prompt, ordinal of the token): the size of what is added, the same in every pass."""


def reply(name: str, length: int, tokens: int, noise: Callable[[int], Any], *, cached: int = 0) -> Reply:
    """Of a model that is the same for all: token k of a prompt has log-probabilities that depend on both; ``noise``
    gives what is added to the five of token k."""
    top, ids, chosen, margins = [], [], [], []
    for k in range(tokens):
        base = np.array([-0.4, -1.6, -3.0, -4.0, -5.0]) - 0.01 * ((length * 7 + k * 3) % 11)
        values = base + noise(k)
        order = np.argsort(-values, kind="stable")
        names = [int(100 + k * 5 + i) for i in order]
        top.append((names, [float(values[i]) for i in order]))
        ids.append(names[0])
        chosen.append(top[-1][1][0])
        margins.append(top[-1][1][0] - top[-1][1][1])
    return Reply(name, 0.0, 0.1, list(range(length)), ids, list(chosen), top, list(margins), "length", cached)


def folder(
    path: Path, seed: int, *, prompts: int = 12, tokens: int = 10, noise: float = 0.01, fault: Fault | None = None,
    arrive: tuple[str, ...] = ("one", "all"), change: Callable[[int, Reply], Reply | None] = lambda i, r: r,
) -> Path:  # fmt: skip
    """Prompts p0, p1, ... of 20, 40, ... tokens in each pass."""
    draw = np.random.default_rng(seed)
    passes = [{"arrive": word, "answered": prompts, "refused": 0, "resumed": 0} for word in arrive]
    about = {"schema": replies.SCHEMA, "prompts": {"count": prompts}, "passes": passes, "complete": True}
    replies.begin(path, "", about)
    for index in range(len(arrive)):
        writer = replies.ReplyWriter(path / replies.pass_name(index))
        for i in range(prompts):
            length = 20 * (i + 1)

            def drawn(k: int, length: int = length) -> Any:
                wrong = fault(length, k) if fault else 0.0
                same = np.random.default_rng((length, k)).normal(0, wrong, 5)  # a fault is the same in every batch
                return same + draw.normal(0, noise, 5)

            made = change(i, reply(f"p{i}", length, tokens, drawn))
            if made is not None:
                writer.add(made)
        writer.close()
    return path
