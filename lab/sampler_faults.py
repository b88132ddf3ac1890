"""Samplers and logits processors that do not do what their requests ask, planted in one engine of state_lab.py.

The problem: a sampler mixes the parameters of many requests in tensors by row, and real reports are of rows mixed up,
lists that are late, filters left out and seeds that are another's. The idea: small functions that each change one
method of one engine's sampler or runner, so that the next engine of the process is whole; the model's logits stay as
they are. ``FAULTS`` says of each what must be named. Not here: the engines (state_lab.py), the requests and what is
made of a dump (scripts/sampler_cases.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lab import state_lab as lab

SAMPLER = "sampler"


def _around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    owner.__dict__[name] = lambda *args, **kwargs: change(original, *args, **kwargs)


def _sampler(llm: Any) -> Any:
    return lab.runner_of(llm).sampler


def _metadata(llm: Any, change: Callable[[Any], dict[str, Any]]) -> None:
    """What the sampler gets has the fields that ``change`` gives; the runner's own stay."""

    def forward(original: Any, logits: Any, sampling_metadata: Any, **kwargs: Any) -> Any:
        return original(logits, replace(sampling_metadata, **change(sampling_metadata)), **kwargs)

    _around(_sampler(llm), "forward", forward)


def _rolled(value: Any) -> Any:
    return None if value is None else value.roll(1, 0)


# --- the choice -------------------------------------------------------------------------------------------------------


def second_best(llm: Any) -> None:
    """Greedy rows take the runner-up in batches of more than one row."""

    def greedy(original: Any, logits: Any) -> Any:
        return logits.topk(2, -1).indices[:, 1] if len(logits) > 1 else original(logits)

    _around(_sampler(llm), "greedy_sample", greedy)


def next_token(llm: Any) -> None:
    """Each token is one further in the vocabulary."""

    def sample(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, more = original(logits, *args, **kwargs)
        return (tokens + 1) % logits.shape[-1], more

    _around(_sampler(llm), "sample", sample)


def other_rows_token(llm: Any) -> None:
    """Each request gets the token of the row before it."""

    def sample(original: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, more = original(*args, **kwargs)
        return tokens.roll(1, 0), more

    _around(_sampler(llm), "sample", sample)


def stale_logits(llm: Any) -> None:
    """The last row is sampled from the logits that it had in the step before."""
    kept: list[Any] = []

    def sample(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        now = logits[-1].clone()
        if kept:
            logits[-1] = kept.pop()
        kept[:] = [now]
        return original(logits, *args, **kwargs)

    _around(_sampler(llm), "sample", sample)


def half_vocabulary(llm: Any) -> None:
    """The choice sees the first half of the vocabulary."""

    def sample(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        logits[:, logits.shape[1] // 2 :] = -torch.inf
        return original(logits, *args, **kwargs)

    _around(_sampler(llm), "sample", sample)


# --- temperature, filters, seeds --------------------------------------------------------------------------------------


def temperature_ignored(llm: Any) -> None:
    """Random rows are drawn at temperature 1."""
    _around(_sampler(llm), "apply_temperature", lambda original, logits, *_: logits)


def temperature_of_other_row(llm: Any) -> None:
    """The sampler has the temperatures one row further, where the row is random on both sides."""

    def change(m: Any) -> dict[str, Any]:
        t = m.temperature
        return {} if t is None else {"temperature": torch.where((t > 0) & (_rolled(t) > 0), _rolled(t), t)}

    _metadata(llm, change)


def _filters(llm: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    draw = _sampler(llm).topk_topp_sampler

    def forward(original: Any, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        return original(logits, generators, *change(k, p))

    _around(draw, "forward", forward)


def top_p_ignored(llm: Any) -> None:
    """No top-p."""
    _filters(llm, lambda k, p: (k, None))


def top_k_ignored(llm: Any) -> None:
    """No top-k."""
    _filters(llm, lambda k, p: (None, p))


def filters_of_other_row(llm: Any) -> None:
    """Top-k and top-p are those of the row before."""
    _filters(llm, lambda k, p: (_rolled(k), _rolled(p)))


def top_p_in_the_batch(llm: Any) -> None:
    """The runner's own batch has each row's top-p one row further."""
    runner = lab.runner_of(llm)

    def sample(original: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        right = batch.sampling_metadata
        batch.sampling_metadata = replace(right, top_p=_rolled(right.top_p))
        try:
            return original(*args, **kwargs)
        finally:
            batch.sampling_metadata = right

    _around(runner, "_sample", sample)


def min_p_ignored(llm: Any) -> None:
    """No min-p."""
    for one in lab.runner_of(llm).input_batch.logitsprocs.argmax_invariant:
        _around(one, "apply", lambda original, logits: logits)


def _generators(llm: Any, change: Callable[[dict[int, Any]], dict[int, Any]]) -> None:
    _metadata(llm, lambda m: {"generators": change(m.generators)})


def seed_of_other_row(llm: Any) -> None:
    """Seeded rows draw with each other's generators."""

    def change(held: dict[int, Any]) -> dict[int, Any]:
        rows = sorted(held)
        return {row: held[rows[i - 1]] for i, row in enumerate(rows)}

    _generators(llm, change)


def seed_ignored(llm: Any) -> None:
    """Seeded rows draw with the process's generator."""
    _generators(llm, lambda held: {})


def seed_drawn_twice(llm: Any) -> None:
    """A generator gives a number that nobody uses before each draw."""

    def change(held: dict[int, Any]) -> dict[int, Any]:
        for one in held.values():
            torch.randint(0, 2**31, (1,), generator=one)
        return held

    _generators(llm, change)


# --- what changes logits ----------------------------------------------------------------------------------------------


def penalties_ignored(llm: Any) -> None:
    """No penalties."""
    _around(_sampler(llm), "apply_penalties", lambda original, logits, *_: logits)


def _said(llm: Any, change: Callable[[list[list[int]]], list[list[int]]]) -> None:
    def penalise(original: Any, logits: Any, metadata: Any, output: Any) -> Any:
        return original(logits, metadata, change(output))

    _around(_sampler(llm), "apply_penalties", penalise)


def penalties_of_prompt_alone(llm: Any) -> None:
    """Penalties see no generated token."""
    _said(llm, lambda output: [[] for _ in output])


def penalties_late(llm: Any) -> None:
    """Penalties see all generated tokens but the last."""
    _said(llm, lambda output: [one[:-1] for one in output])


def penalties_of_other_row(llm: Any) -> None:
    """Penalties see what the row before has generated."""
    _said(llm, lambda output: output[-1:] + output[:-1])


def penalty_sizes_of_other_row(llm: Any) -> None:
    """Each row has the penalties of the row before."""
    names = ("repetition_penalties", "presence_penalties", "frequency_penalties")
    _metadata(llm, lambda m: {} if m.no_penalties else {n: _rolled(getattr(m, n)) for n in names})


def penalty_prompt_of_other_row(llm: Any) -> None:
    """Repetition sees the prompt of the row before."""
    _metadata(llm, lambda m: {} if m.no_penalties else {"prompt_token_ids": _rolled(m.prompt_token_ids)})


def _without(llm: Any, cls: str) -> None:
    for one in lab.runner_of(llm).input_batch.logitsprocs.non_argmax_invariant:
        if type(one).__name__ == cls:
            _around(one, "apply", lambda original, logits: logits)


def bias_ignored(llm: Any) -> None:
    """No logit bias."""
    _without(llm, "LogitBiasLogitsProcessor")


def bias_of_other_row(llm: Any) -> None:
    """A bias lands in the row before."""
    for one in lab.runner_of(llm).input_batch.logitsprocs.non_argmax_invariant:
        if type(one).__name__ == "LogitBiasLogitsProcessor":
            _around(one, "apply", lambda original, logits: original(logits.roll(1, 0)).roll(-1, 0))


def min_tokens_ignored(llm: Any) -> None:
    """Stop tokens are allowed from the first token on."""
    _without(llm, "MinTokensLogitsProcessor")


def allowed_ignored(llm: Any) -> None:
    """All tokens are allowed."""
    _metadata(llm, lambda m: {"allowed_token_ids_mask": None})


def allowed_of_other_row(llm: Any) -> None:
    """Each row has the allowed tokens of the row before."""
    _metadata(llm, lambda m: {"allowed_token_ids_mask": _rolled(m.allowed_token_ids_mask)})


def bad_words_ignored(llm: Any) -> None:
    """No bad words."""
    _metadata(llm, lambda m: {"bad_words_token_ids": {}})


@dataclass(frozen=True)
class Kind:
    """plant: of an engine. names: words of which the finding must have one."""

    plant: Callable[[Any], None]
    names: tuple[str, ...]


_CHOICE = (
    second_best, next_token, other_rows_token, stale_logits, half_vocabulary, temperature_ignored,
    temperature_of_other_row, top_p_ignored, top_k_ignored, filters_of_other_row, top_p_in_the_batch, min_p_ignored,
    seed_of_other_row, seed_ignored, seed_drawn_twice,
)  # fmt: skip
_PENALTIES = (
    penalties_ignored, penalties_of_prompt_alone, penalties_late, penalties_of_other_row, penalty_sizes_of_other_row,
    penalty_prompt_of_other_row,
)  # fmt: skip
FAULTS: dict[str, Kind] = {
    **{f.__name__: Kind(f, (SAMPLER,)) for f in _CHOICE},
    **{f.__name__: Kind(f, ("penalties",)) for f in _PENALTIES},
    "bias_ignored": Kind(bias_ignored, ("a logit bias",)),
    "bias_of_other_row": Kind(bias_of_other_row, ("a logit bias",)),
    "min_tokens_ignored": Kind(min_tokens_ignored, ("a minimum of tokens",)),
    "allowed_ignored": Kind(allowed_ignored, ("allowed token ids",)),
    "allowed_of_other_row": Kind(allowed_of_other_row, ("allowed token ids",)),
    "bad_words_ignored": Kind(bad_words_ignored, ("bad words",)),
}
