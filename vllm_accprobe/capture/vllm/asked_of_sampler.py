"""What a request asks of the sampler, taken once, when the scheduler first names it.

The problem: whether a token is right depends on the request's temperature, filters, seed, penalties, biases and word
lists, and a batch that mixes two requests up has the wrong ones in its own tensors. The idea: the scheduler's output
carries each new request's own parameters, in every release and for both runners; they are copied from there, before the
runner has made anything of them, and stand in the request's line of the journal. Lists are cut; what is cut is named,
and is in the digest all the same. Not here: what the runner makes of them (sampling.py), what follows
(judge/sampling_rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from vllm_accprobe.capture.forcing.tokens_asked import KEY as NAMED
from vllm_accprobe.dump.schema import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    BUDGET,
    GRAMMAR,
    MIN_TOKENS,
    NAMED_TOKENS,
    TRACE,
    WATERMARK,
    SamplingParameters,
)

LISTED = 4096
"""Chosen: tokens of one list that a line holds, 30 kB at most."""
_PROMPT = 1 << 15
"""Chosen: distinct tokens of a prompt: those of nearly all prompts, 200 kB at most, and only with a repetition
penalty."""


def sampling_of(new: Any, prompt: Sequence[int] | None) -> SamplingParameters | None:
    """Of the scheduler's entry of a new request; None for a pooling request, and where a release has other types.
    prompt: its token ids, None for embeddings."""
    params = getattr(new, "sampling_params", None)
    if params is None:
        return None
    try:
        return _copied(params, prompt)
    except (TypeError, ValueError, AttributeError):
        return None


def _copied(params: Any, prompt: Sequence[int] | None) -> SamplingParameters:
    def number(name: str, default: float) -> float:
        value = getattr(params, name, None)
        return default if value is None else float(value)

    repetition = number("repetition_penalty", 1.0)
    bias = {int(t): float(b) for t, b in (getattr(params, "logit_bias", None) or {}).items()}
    allowed = getattr(params, "allowed_token_ids", None)
    allowed = None if allowed is None else sorted(map(int, allowed))
    least = int(number("min_tokens", 0))
    stop = sorted(map(int, getattr(params, "all_stop_token_ids", None) or ())) if least else []
    words = [tuple(map(int, w)) for w in getattr(params, "bad_words_token_ids", None) or ()]
    also = set()
    for there, word in (
        (getattr(params, "structured_outputs", None) or getattr(params, "guided_decoding", None), GRAMMAR),
        (getattr(params, "thinking_token_budget", None), BUDGET),
        (getattr(params, "trace_decode_token_ids", None), TRACE),
        (getattr(params, "watermarking", None), WATERMARK),
        ((getattr(params, "extra_args", None) or {}).get(NAMED), NAMED_TOKENS),
        (len(bias) > LISTED, BIAS),
        (len(allowed or ()) > LISTED, ALLOWED),
        (len(stop) > LISTED, MIN_TOKENS),
        (sum(map(len, words)) > LISTED, BAD_WORDS),
    ):
        if there:
            also.add(word)
    seen = sorted(set(prompt)) if repetition != 1.0 and prompt is not None else None
    seed = getattr(params, "seed", None)
    plain = (
        number("temperature", 1.0), number("top_p", 1.0), int(number("top_k", 0)), number("min_p", 0.0),
        None if seed is None else int(seed), repetition, number("presence_penalty", 0.0),
        number("frequency_penalty", 0.0),
    )  # fmt: skip
    every = repr((plain, sorted(bias.items()), allowed, least, stop, words, sorted(also)))
    return SamplingParameters(
        *plain,
        bias=tuple(sorted(bias.items())) if BIAS not in also else (),
        allowed=None if allowed is None or ALLOWED in also else tuple(allowed),
        min_tokens=least,
        stop=tuple(stop) if MIN_TOKENS not in also else (),
        bad_words=tuple(words) if BAD_WORDS not in also else (),
        prompt=None if seen is None or len(seen) > _PROMPT else tuple(map(int, seen)),
        also=tuple(sorted(also)),
        digest=xxhash.xxh3_128_hexdigest(every.encode()),
    )
