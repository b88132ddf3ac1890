"""Who changes the logits of a row between the model and the sampler: grammars, word lists, biases, penalties.

The problem: a grammar forbids tokens, and a comparison that does not know it calls the sampler wrong. The idea: the
runner's own bookkeeping says, once per step and without a tensor, which request has what; it is read just before
sampling, by request, in words that both of vLLM's runners share. Temperature, min-p, top-k and top-p leave the best
logit the best and are no masks. Not here: taking the logits that are left (sampling.py), what a flipped token then
means (judge).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

from vllm_accprobe.dump.schema import ALLOWED, BAD_WORDS, BIAS, BUDGET, GRAMMAR, MIN_TOKENS, PENALTIES, TRACE

Grammar = dict[str, "str | None"]
"""Engine's id of a request that a grammar constrains → hash of its row of the bitmask, or None where there are several.
The same hash means that the same tokens were allowed."""


def processor(obj: Any) -> str:
    """The word for a logits processor of somebody else, which may touch any row."""
    return f"logits processor {type(obj).__name__}"


def grammar_of(args: Iterable[Any]) -> Grammar:
    """The requests that a grammar constrains, of a call's arguments or of a scheduler's output: they stand in an object
    with ``structured_output_request_ids`` (a list, in 0.11 a dict) and a ``grammar_bitmask`` of int32 [rows, words]."""
    for value in args:
        names, mask = getattr(value, "structured_output_request_ids", None), getattr(value, "grammar_bitmask", None)
        if names and mask is not None:
            told = isinstance(names, list) and len(names) == len(mask)  # one row each: no drafts
            return {n: xxhash.xxh3_128_hexdigest(mask[i].tobytes()) if told else None for i, n in enumerate(names)}
    return {}


def masks_of(runner: Any, prepared: Any, names: Sequence[str], grammar: Grammar) -> dict[str, tuple[str, ...]]:
    """By engine's id of a request: what changes its logits in this step, sorted. Requests with nothing are left out.

    prepared: V2's batch of the step, None for V1. names: the batch's requests in row order.
    """
    found: dict[str, set[str]] = {name: {GRAMMAR} for name in names if name in grammar}
    if prepared is None:
        _of_input_batch(getattr(runner, "input_batch", None), names, found)
    else:
        _of_states(getattr(runner, "sampler", None), prepared, names, found)
    return {name: tuple(sorted(by)) for name, by in found.items()}


def tells(runner: Any) -> bool:
    """Whether `masks_of` sees all that this runner has: V2 of 0.13 and 0.14 keeps penalties and biases in tensors of
    the step only, where no entry does not mean no mask."""
    if not hasattr(runner, "prepare_inputs"):
        return getattr(getattr(runner, "input_batch", None), "sampling_metadata", None) is not None
    sampler = getattr(runner, "sampler", None)
    biases = any(hasattr(sampler, name) for name in ("logit_bias_state", "logits_processors"))
    return hasattr(sampler, "penalties_state") and biases


_Found = dict[str, set[str]]


def _of_input_batch(batch: Any, names: Sequence[str], found: _Found) -> None:
    """V1: sets of ids and dicts by row."""
    metadata = getattr(batch, "sampling_metadata", None)
    if metadata is None:
        return
    _ids(found, ALLOWED, getattr(batch, "has_allowed_token_ids", ()), names)
    for which in ("frequency", "presence", "repetition"):
        _ids(found, PENALTIES, getattr(batch, f"{which}_penalties_reqs", ()), names)
    _places(found, BAD_WORDS, getattr(metadata, "bad_words_token_ids", None) or (), names)
    for one in getattr(getattr(metadata, "logitsprocs", None), "non_argmax_invariant", ()):
        kind = type(one).__name__
        if kind == "MinTokensLogitsProcessor":
            _places(found, MIN_TOKENS, getattr(one, "min_toks", ()), names)
        elif kind == "LogitBiasLogitsProcessor":
            _places(found, BIAS, getattr(one, "biases", ()), names)
        else:
            _ids(found, processor(one), names, names)
    holder = getattr(metadata, "thinking_budget_state_holder", None)
    if holder is not None and holder.has_tracked_requests():
        _ids(found, BUDGET, names, names)


_OF_STATES = (
    ("num_allowed_token_ids", ALLOWED),
    ("num_logit_bias", BIAS),
    ("num_stop_token_ids", MIN_TOKENS),
    ("num_bad_words", BAD_WORDS),
    ("use_penalty", PENALTIES),
)
"""V2: arrays with a place for each request's state, and what a number there means."""


def _of_states(sampler: Any, prepared: Any, names: Sequence[str], found: _Found) -> None:
    """V2: arrays by request state, in the sampler's own objects, or (later releases) in a list of processors."""
    where = getattr(prepared, "idx_mapping_np", None)
    if sampler is None or where is None:
        return
    own = [getattr(sampler, name, None) for name in ("logit_bias_state", "penalties_state", "bad_words_state")]
    every = [o for o in (*own, *(getattr(sampler, "logits_processors", None) or ())) if o is not None]
    for one in {id(o): o for o in every}.values():
        arrays = [(_array(getattr(one, name)), word) for name, word in _OF_STATES if hasattr(one, name)]
        if not arrays:
            _ids(found, processor(one), names, names)
        for array, word in arrays:
            _ids(found, word, [name for name, at in zip(names, where, strict=False) if array[at]], names)
    if getattr(sampler, "trace_replay_state", None) is not None:
        _ids(found, TRACE, names, names)


def _array(value: Any) -> Any:
    """The host's side of a pair of buffers, or an array."""
    return getattr(value, "np", value)


def _ids(found: _Found, word: str, ids: Iterable[str], names: Sequence[str]) -> None:
    if ids:
        known = set(names)
        for name in ids:
            if name in known:
                found.setdefault(name, set()).add(word)


def _places(found: _Found, word: str, places: Iterable[int], names: Sequence[str]) -> None:
    for at in places:
        if 0 <= at < len(names):
            found.setdefault(names[at], set()).add(word)
