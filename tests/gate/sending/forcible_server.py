"""A server by hand that can be forced: one answer for each of the ways, with numbers that tell what was asked."""

import json
from collections.abc import Collection
from typing import Any

from odd_server import Answer

from vllm_accprobe.gate.sending import client


def forcible(can: Collection[str], *, swaps: bool = False, vocabulary: int = 1) -> Answer:
    """can: of `ways.WAYS`. swaps: its last named token is another. vocabulary: times the length of a text is its id.
    The log-probability of token i is -i / 100, and the best is token 1 with -0.01."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 200, json.dumps({"tokens": [len(body["prompt"]) * vocabulary]}).encode()
        if path == "/inference/v1/generate" and client.TRACE in can:
            ids = list(body["sampling_params"]["trace_decode_token_ids"])
            content = [_place(i) | {"top_logprobs": [_place(i), _place(1)]} for i in _swapped(ids, swaps)]
            choice = {"token_ids": _swapped(ids, swaps), "finish_reason": "length", "logprobs": {"content": content}}
            return 200, json.dumps({"choices": [choice], "prompt_token_ids": body["token_ids"]}).encode()
        if path != "/v1/completions" or (body.get("prompt_logprobs") and client.SCORED not in can):
            return 404, b""
        named = (body.get("vllm_xargs") or {}).get(client.KEY)
        ids = [2] * body["max_tokens"]
        if named is not None and client.PLUGIN in can:
            ids = _swapped([int(i) for i in named.split()], swaps)
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [len(body["prompt"])]
        top = [{f"token_id:{i}": -i / 100, "token_id:1": -0.01} for i in ids]
        choice = {"token_ids": ids, "prompt_token_ids": prompt, "finish_reason": "length",
                  "logprobs": {"token_logprobs": [-i / 100 for i in ids], "top_logprobs": top}}  # fmt: skip
        if body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [None, *({str(j): {"logprob": -j / 100} for j in {i, 1}} for i in prompt[1:])]
        return 200, json.dumps({"choices": [choice]}).encode()

    return answer


def _place(i: int) -> dict[str, Any]:
    return {"token_id": i, "logprob": -i / 100}


def _swapped(ids: list[int], swaps: bool) -> list[int]:
    return [*ids[:-1], ids[-1] + 1] if swaps else ids
