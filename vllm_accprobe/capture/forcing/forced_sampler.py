"""Puts the asked tokens in place of the sampled ones, before anybody gathers a log-probability.

The problem: the next step must read the asked token, and the answer must have that token's log-probability under this
server's own distribution. The idea: both generations of runners have a sampler whose ``sample`` chooses the tokens,
and gather log-probabilities of what it returns; so its result is changed, on the sampler's instance. Which token a row
is to get follows from the scheduler's numbers alone (computed before, and computed now), which are right with
asynchronous scheduling, chunks, prefix hits and after preemption; a row in the middle of a prompt gets none, and the
engine throws its sample away.
Not here: what a request asks for (tokens_asked.py), who hears of requests and steps (forcing_observer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_accprobe.capture.core.rows import Scheduled
from vllm_accprobe.capture.forcing.tokens_asked import NamedTokens


def wrap(sampler: Any, around: Callable[..., Any]) -> bool:
    """Calls ``around(original, logits, ...)`` in place of ``sampler.sample``; False where there is no such method."""
    original = getattr(sampler, "sample", None)
    if not callable(original):
        return False

    def sample(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    sampler.__dict__["sample"] = sample  # an nn.Module (V1) looks there, too
    return True


def named(rows: Sequence[Scheduled], asked: dict[str, NamedTokens]) -> list[int]:
    """The token that each row is to get, -1 where the sampled one stays."""
    found = ((row, asked.get(row.internal)) for row in rows)
    return [-1 if one is None else one.at(row.start + row.n) for row, one in found]


def replaced(result: Any, tokens: Sequence[int]) -> Any:
    """``result`` of a sampler (token ids [rows], or a tuple that begins with them) with ``tokens`` in place.

    Raises RuntimeError where there are not as many rows.
    """
    sampled = result if isinstance(result, torch.Tensor) else result[0]
    if sampled.numel() != len(tokens):
        raise RuntimeError(f"the sampler has {sampled.numel()} rows, the batch {len(tokens)}")
    wanted = _on(torch.tensor(tokens, dtype=sampled.dtype), sampled.device).view(sampled.shape)
    changed = torch.where(wanted >= 0, wanted, sampled)
    return changed if isinstance(result, torch.Tensor) else (changed, *result[1:])


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    if device.type == "cpu":
        return tensor
    try:
        tensor = tensor.pin_memory()
    except RuntimeError:  # a device whose host memory cannot be pinned
        return tensor.to(device)
    return tensor.to(device, non_blocking=True)
