"""Samplers and logits processors that do not do what their requests ask, planted in one engine of state_lab.py.

The problem: a sampler mixes the parameters of many requests in tensors by row, and real reports are of rows mixed up,
lists that are late, filters left out and seeds that are another's. The idea: ``FAULTS`` is a table: what is wrong, what
must be named, and the change of one method of one engine's sampler or runner, so that the next engine of the process is
whole; the model's logits stay as they are. Not here: the engines (state_lab.py), the requests and what is made of a
dump (scripts/sampler_cases.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lab.state_lab import around, runner_of

SAMPLER = "sampler"
Plant = Callable[[Any], None]


def _method(name: str, change: Callable[..., Any]) -> Plant:
    """Of the sampler. change: (the method, its arguments) → what it gives."""
    return lambda llm: around(runner_of(llm).sampler, name, change)


def _metadata(change: Callable[[Any], dict[str, Any]]) -> Plant:
    """What the sampler gets has the fields that ``change`` gives; the runner's own stay."""

    def forward(original: Any, logits: Any, sampling_metadata: Any, **kwargs: Any) -> Any:
        return original(logits, replace(sampling_metadata, **change(sampling_metadata)), **kwargs)

    return _method("forward", forward)


def _tokens(change: Callable[[Any, int], Any]) -> Plant:
    """change: (tokens, size of the vocabulary) → tokens."""

    def sample(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, more = original(logits, *args, **kwargs)
        return change(tokens, logits.shape[-1]), more

    return _method("sample", sample)


def _filters(change: Callable[[Any, Any], tuple[Any, Any]]) -> Plant:
    def forward(original: Any, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        return original(logits, generators, *change(k, p))

    return lambda llm: around(runner_of(llm).sampler.topk_topp_sampler, "forward", forward)


def _generators(change: Callable[[dict[int, Any]], dict[int, Any]]) -> Plant:
    return _metadata(lambda m: {"generators": change(m.generators)})


def _output(change: Callable[[list[list[int]]], list[list[int]]]) -> Plant:
    """What penalties see of the generated tokens."""
    return _method("apply_penalties", lambda original, logits, m, output: original(logits, m, change(output)))


def _penalised(*names: str) -> Plant:
    """Where there are penalties, these fields are those of the row before."""
    return _metadata(lambda m: {} if m.no_penalties else {n: _rolled(getattr(m, n)) for n in names})


def _processor(cls: str, change: Callable[..., Any] = lambda original, logits: logits) -> Plant:
    """A logits processor, by its class; without ``change`` it does nothing."""

    def plant(llm: Any) -> None:
        processors = runner_of(llm).input_batch.logitsprocs
        for one in (*processors.argmax_invariant, *processors.non_argmax_invariant):
            if type(one).__name__ == cls:
                around(one, "apply", change)

    return plant


def _rolled(value: Any) -> Any:
    return None if value is None else value.roll(1, 0)


def _second_best(original: Any, logits: Any) -> Any:
    return logits.topk(2, -1).indices[:, 1] if len(logits) > 1 else original(logits)


def _stale_logits(llm: Any) -> None:
    kept: list[Any] = []

    def sample(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        now = logits[-1].clone()
        if kept:
            logits[-1] = kept.pop()
        kept[:] = [now]
        return original(logits, *args, **kwargs)

    _method("sample", sample)(llm)


def _half_vocabulary(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    logits[:, logits.shape[1] // 2 :] = -torch.inf
    return original(logits, *args, **kwargs)


def _other_temperature(m: Any) -> dict[str, Any]:
    t = m.temperature
    return {} if t is None else {"temperature": torch.where((t > 0) & (_rolled(t) > 0), _rolled(t), t)}


def _top_p_in_the_batch(llm: Any) -> None:
    runner = runner_of(llm)

    def sample(original: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        right = batch.sampling_metadata
        batch.sampling_metadata = replace(right, top_p=_rolled(right.top_p))
        try:
            return original(*args, **kwargs)
        finally:
            batch.sampling_metadata = right

    around(runner, "_sample", sample)


def _other_seed(generators: dict[int, Any]) -> dict[int, Any]:
    rows = sorted(generators)
    return {row: generators[rows[i - 1]] for i, row in enumerate(rows)}


def _drawn_twice(generators: dict[int, Any]) -> dict[int, Any]:
    for one in generators.values():
        torch.randint(0, 2**31, (1,), generator=one)
    return generators


@dataclass(frozen=True)
class Kind:
    """what: a sentence; plant: of an engine; names: what the finding must name."""

    what: str
    plant: Plant
    names: str = SAMPLER


_PENALTIES, _BIAS, _ALLOWED = "penalties", "a logit bias", "allowed token ids"
FAULTS = {
    "second_best": Kind("Greedy rows take the runner-up in batches of more than one row",
                        _method("greedy_sample", _second_best)),
    "next_token": Kind("Each token is one further in the vocabulary", _tokens(lambda tokens, n: (tokens + 1) % n)),
    "other_rows_token": Kind("Each request gets the token of the row before it",
                             _tokens(lambda tokens, n: tokens.roll(1, 0))),
    "stale_logits": Kind("The last row is sampled from the logits that it had in the step before", _stale_logits),
    "half_vocabulary": Kind("The choice sees the first half of the vocabulary", _method("sample", _half_vocabulary)),
    "temperature_ignored": Kind("Random rows are drawn at temperature 1",
                                _method("apply_temperature", lambda original, logits, *_: logits)),
    "temperature_of_other_row": Kind("The sampler has the temperatures one row further, where the row is random on "
                                     "both sides", _metadata(_other_temperature)),
    "top_p_ignored": Kind("No top-p", _filters(lambda k, p: (k, None))),
    "top_k_ignored": Kind("No top-k", _filters(lambda k, p: (None, p))),
    "filters_of_other_row": Kind("Top-k and top-p are those of the row before",
                                 _filters(lambda k, p: (_rolled(k), _rolled(p)))),
    "top_p_in_the_batch": Kind("The runner's own batch has each row's top-p one row further", _top_p_in_the_batch),
    "min_p_ignored": Kind("No min-p", _processor("MinPLogitsProcessor")),
    "seed_of_other_row": Kind("Seeded rows draw with each other's generators", _generators(_other_seed)),
    "seed_ignored": Kind("Seeded rows draw with the process's generator", _generators(lambda generators: {})),
    "seed_drawn_twice": Kind("A generator gives a number that nobody uses before each draw",
                             _generators(_drawn_twice)),
    "penalties_ignored": Kind("No penalties", _method("apply_penalties", lambda original, logits, *_: logits),
                              _PENALTIES),
    "penalties_of_prompt_alone": Kind("Penalties see no generated token", _output(lambda rows: [[] for _ in rows]),
                                      _PENALTIES),
    "penalties_late": Kind("Penalties see all generated tokens but the last",
                           _output(lambda rows: [one[:-1] for one in rows]), _PENALTIES),
    "penalties_of_other_row": Kind("Penalties see what the row before has generated",
                                   _output(lambda rows: rows[-1:] + rows[:-1]), _PENALTIES),
    "penalty_sizes_of_other_row": Kind("Each row has the penalties of the row before",
        _penalised("repetition_penalties", "presence_penalties", "frequency_penalties"), _PENALTIES),
    "penalty_prompt_of_other_row": Kind("Repetition sees the prompt of the row before",
                                        _penalised("prompt_token_ids"), _PENALTIES),
    "bias_ignored": Kind("No logit bias", _processor("LogitBiasLogitsProcessor"), _BIAS),
    "bias_of_other_row": Kind("A bias lands in the row before", _processor("LogitBiasLogitsProcessor",
        lambda original, logits: original(logits.roll(1, 0)).roll(-1, 0)), _BIAS),
    "min_tokens_ignored": Kind("Stop tokens are allowed from the first token on",
                               _processor("MinTokensLogitsProcessor"), "a minimum of tokens"),
    "allowed_ignored": Kind("All tokens are allowed", _metadata(lambda m: {"allowed_token_ids_mask": None}), _ALLOWED),
    "allowed_of_other_row": Kind("Each row has the allowed tokens of the row before",
        _metadata(lambda m: {"allowed_token_ids_mask": _rolled(m.allowed_token_ids_mask)}), _ALLOWED),
    "bad_words_ignored": Kind("No bad words", _metadata(lambda m: {"bad_words_token_ids": {}}), "bad words"),
}  # fmt: skip
