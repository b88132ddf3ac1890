"""Folders of `send`, made up: a server whose numbers have the noise of its batches, and perhaps a fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.replies import Reply, Row, request_id

Fault = Callable[[int, int, int], float]
"""(length of the prompt, ordinal of the token, index of the pass): the size of what is added."""


def reply(
    name: str, length: int, tokens: int, noise: Callable[[int], Any], *, cached: int = 0, forced: str | None = None
) -> Reply:
    """Of a model that is the same for all: token k of a prompt has log-probabilities that depend on both; ``noise``
    gives what is added to the five of token k. forced: the tokens are those of the model without noise."""
    top, ids, chosen, margins = [], [], [], []
    for k in range(tokens):
        base = np.array([-0.4, -1.6, -3.0, -4.0, -5.0]) - 0.01 * ((length * 7 + k * 3) % 11)
        values = base + noise(k)
        order = np.argsort(-values, kind="stable")
        names = [int(100 + k * 5 + i) for i in order]
        top.append((names, [float(values[i]) for i in order]))
        ids.append(100 + k * 5 if forced else names[0])
        chosen.append(float(values[ids[-1] - 100 - k * 5]))
        margins.append(top[-1][1][0] - top[-1][1][1])
    return Reply(
        name, 0.0, 0.1, list(range(length)), ids, list(chosen), top, list(margins), "length", cached, None, forced
    )


def folder(
    path: Path, seed: int, *, prompts: int = 12, tokens: int = 10, noise: float = 0.01, fault: Fault | None = None,
    arrive: tuple[str, ...] = ("one", "all"), change: Callable[[int, Reply], Reply | None] = lambda i, r: r,
    forced: str | None = None, own: float = 0.0, steps: Callable[[int, int, int], list[Row]] | None = None,
) -> Path:  # fmt: skip
    """Prompts p0, p1, ... of 20, 40, ... tokens in each pass. noise: of batches, another in each pass; own: of the
    server's rounding, the same in each pass; fault may take the pass's index, too; steps: rows of the engine's log of
    (pass, prompt's number, its length)."""
    draw = np.random.default_rng(seed)
    passes = [{"arrive": word, "answered": prompts, "refused": 0, "resumed": 0} for word in arrive]
    about = {"schema": replies.SCHEMA, "prompts": {"count": prompts}, "passes": passes, "complete": True}
    replies.begin(path, "", about)
    for index in range(len(arrive)):
        writer = replies.ReplyWriter(path / replies.pass_name(index))
        for i in range(prompts):
            length = 20 * (i + 1)

            def drawn(k: int, length: int = length, index: int = index) -> Any:
                wrong = fault(length, k, index) if fault else 0.0
                same = np.random.default_rng((length, k)).normal(0, wrong, 5) if wrong else 0.0  # in every batch
                rounded = np.random.default_rng((seed, length, k)).normal(0, own, 5) if own else 0.0
                return same + rounded + draw.normal(0, noise, 5)

            made = change(i, reply(f"p{i}", length, tokens, drawn, forced=forced))
            if made is not None:
                writer.add(made)
        writer.close()
    if steps is not None:
        _log(path, steps, prompts, len(arrive))
    return path


def _log(path: Path, steps: Callable[[int, int, int], list[Row]], prompts: int, passes: int) -> None:
    """A line for each row; requests that are said to be beside it have other names."""
    (path / "steps-0").mkdir(mode=0o700)
    with (path / "steps-0" / "steps-rank0.jsonl").open("w", encoding="utf-8") as f:
        for index in range(passes):
            for i in range(prompts):
                for step, before, scheduled, requests in steps(index, i, 20 * (i + 1)):
                    others = [[f"other-{k}", 0, 1] for k in range(requests - 1)]
                    asked = [[request_id(f"p{i}", index), before, scheduled], *others]
                    f.write(json.dumps({"step": step, "requests": asked}) + "\n")
