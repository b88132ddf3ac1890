"""The ways in which a server can be made to answer with tokens that are named beforehand.

The problem: after a token that two servers do not choose alike they answer other texts, and nothing more can be
compared. The idea, in the order in which a server is asked:

- ``accprobe``: our plugin in the server (``VLLM_ACCPROBE_FORCE=1``, or the probe with it) puts the tokens in place of
  those that were sampled. All of the server's code runs as in serving.
- ``trace replay``: vLLM's own, from 0.32 on, with model runner V2 and ``--enable-trace-replay --enable-scale-out``.
- ``scored``: prompt and answer are sent as one prompt, with log-probabilities of its tokens. Any vLLM can do it. It
  exercises no decode kernel, no prefix cache, and no batch of decodes.

Not here: what is sent for a free answer (client.py), which tokens (along.py).
"""

from __future__ import annotations

from typing import Any

from vllm_accprobe.dump.schema import OWN_REQUEST
from vllm_accprobe.gate.sending.prompts import PromptLine

PLUGIN, TRACE, SCORED = "accprobe", "trace replay", "scored"
WAYS = (PLUGIN, TRACE, SCORED)
KEY = "accprobe_along"
"""The same word as in capture/forcing/tokens_asked.py."""
GENERATE = "/inference/v1/generate"
PROBE = PromptLine(OWN_REQUEST, token_ids=(3, 4, 5), along=(7, 3, 9, 4))
"""What a server is asked to find out whether it can: ids that every vocabulary has, and nobody would choose so."""
NOT_EXERCISED = "scored as part of a prompt: decode kernels and the prefix cache are not exercised"
HOW_TO = (
    "start it with VLLM_ACCPROBE_FORCE=1 (accprobe installed there, no speculative decoding), or vLLM from 0.32 on "
    "with --enable-trace-replay --enable-scale-out"
)


def unsendable(line: PromptLine, way: str | None, longest: int) -> str | None:
    """Why ``line``, whose tokens are named, is not sent at all. longest: tokens that are scored."""
    assert line.along is not None
    if not line.along:
        return "no answer to go along"
    if line.token_ids is None and way != PLUGIN:
        return f"images are not sent along by {way}"
    if way == SCORED and len(line.token_ids or ()) + len(line.along) > longest:
        return f"longer than {longest:,} tokens with its answer (--score-tokens)"
    return None


def body(line: PromptLine, way: str | None, model: str, top: int) -> tuple[str, dict[str, Any]]:
    """(route, what is sent) for a line whose tokens are named."""
    assert line.along is not None
    greedy: dict[str, Any] = {"max_tokens": len(line.along), "temperature": 0.0, "seed": 0, "ignore_eos": True}
    if way == TRACE:
        params = greedy | {"logprobs": top, "trace_decode_token_ids": list(line.along), "detokenize": False}
        asked = {"model": model, "token_ids": list(line.token_ids or ()), "return_token_ids": True}
        return GENERATE, asked | {"sampling_params": params}
    common = {"model": model, "return_token_ids": True, "return_tokens_as_token_ids": True} | greedy
    if way == SCORED:
        whole = [*(line.token_ids or ()), *line.along]
        return "/v1/completions", common | {"prompt": whole, "prompt_logprobs": top, "max_tokens": 1}
    common |= {"vllm_xargs": {KEY: " ".join(map(str, line.along))}}
    if line.messages is not None:
        return "/v1/chat/completions", common | {
            "messages": list(line.messages), "logprobs": True, "top_logprobs": top
        }  # fmt: skip
    return "/v1/completions", common | {"prompt": list(line.token_ids or ()), "logprobs": top}
