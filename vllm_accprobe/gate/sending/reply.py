"""An answer as numbers, whichever of a server's routes gave it.

The problem: of an answer only token ids and log-probabilities can be compared, OpenAI's routes give texts, and each of
vLLM's ways to force or score tokens has an answer of another shape. The idea: one Reply, and a function for each shape;
what a server leaves out is None, what is no answer is a reply that was refused.
Not here: asking (client.py), where it is kept (replies.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

_TOKEN = "token_id:"
_NONE = "an answer that is none of a completion"


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt, one list entry for each generated token.

    prompt_token_ids, token_ids: None where the server does not say. logprobs: of the token that was chosen, natural;
    top: (ids, log-probabilities) of the most likely, and of the chosen one where it is not among them, best first, the
    ids None where the server gives texts; margins: the best log-probability minus the second, None where there is no
    second. finish: stop or length. cached: prompt tokens from the prefix cache. began, seconds: since the pass began.
    refused: why there is no answer. forced: the way in which token_ids were named beforehand (ways.py); then top is
    still the server's own. None: they are the server's own choice.
    """

    name: str
    began: float
    seconds: float
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    top: list[tuple[list[int] | None, list[float]]] | None = None
    margins: list[float | None] | None = None
    finish: str | None = None
    cached: int | None = None
    refused: str | None = None
    forced: str | None = None


def completion(reply: Reply, answer: Any) -> Reply:
    """A reply with what the json of either of OpenAI's routes says; refused where it is no answer of a completion."""
    try:
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        said = choice.get("logprobs")
        if isinstance(said, dict) and "content" in said:
            content = said["content"] or []
            chosen = [_number(c.get("logprob")) for c in content]
            tops = [_top([(t["token"], t["logprob"]) for t in c.get("top_logprobs") or []]) for c in content]
        elif isinstance(said, dict):
            chosen = [_number(v) for v in said.get("token_logprobs") or []]
            tops = [_top(list((t or {}).items())) for t in said.get("top_logprobs") or []]
        else:
            return replace(reply, refused="an answer without log-probabilities")
        return replace(
            reply,
            prompt_token_ids=_ids(prompt),
            token_ids=_ids(choice.get("token_ids")),
            logprobs=chosen,
            top=tops,
            margins=_margins(tops),
            finish=str(choice.get("finish_reason")),
            cached=details.get("cached_tokens") if isinstance(details, dict) else None,
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return replace(reply, refused=_NONE)


def generated(reply: Reply, answer: Any) -> Reply:
    """Of vLLM's /inference/v1/generate: numbers throughout."""
    try:
        choice = answer["choices"][0]
        content = choice["logprobs"]["content"]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        tops = [_best({int(t["token_id"]): t["logprob"] for t in [*c["top_logprobs"], c]}) for c in content]
        return replace(
            reply,
            prompt_token_ids=_ids(answer.get("prompt_token_ids")),
            token_ids=_ids(choice["token_ids"]),
            logprobs=[_number(c["logprob"]) for c in content],
            top=tops,
            margins=_margins(tops),
            finish=str(choice.get("finish_reason")),
            cached=details.get("cached_tokens"),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return replace(reply, refused=_NONE)


def scored(reply: Reply, answer: Any, first: int) -> Reply:
    """Of a prompt that vLLM was asked to score (``prompt_logprobs``): its tokens from number ``first`` on are taken for
    the answer to those before."""
    try:
        choice = answer["choices"][0]
        said, ids = choice["prompt_logprobs"], choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        places = [{int(i): t["logprob"] for i, t in place.items()} for place in said[first:]]
        chosen = [int(i) for i in ids[first:]]
        tops = [_best(place) for place in places]
        return replace(
            reply,
            prompt_token_ids=_ids(ids[:first]),
            token_ids=chosen,
            logprobs=[_number(place[i]) for place, i in zip(places, chosen, strict=True)],
            top=tops,
            margins=_margins(tops),
            finish="length",
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return replace(reply, refused="an answer without log-probabilities of its prompt")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _ids(value: Any) -> list[int] | None:
    return [int(v) for v in value] if isinstance(value, list) else None


def _top(pairs: list[tuple[str, float]]) -> tuple[list[int] | None, list[float]]:
    """Best first; equal ones by id, so that their order says nothing about the server."""
    known = [(token, float(value)) for token, value in pairs if isinstance(value, (int, float))]
    if all(token.startswith(_TOKEN) for token, _ in known):
        numbered = sorted(((int(token[len(_TOKEN) :]), value) for token, value in known), key=lambda p: (-p[1], p[0]))
        return [i for i, _ in numbered], [v for _, v in numbered]
    return None, sorted((v for _, v in known), reverse=True)


def _best(values: dict[int, Any]) -> tuple[list[int] | None, list[float]]:
    known = sorted(((i, float(v)) for i, v in values.items()), key=lambda p: (-p[1], p[0]))
    return [i for i, _ in known], [v for _, v in known]


def _margins(tops: list[tuple[list[int] | None, list[float]]]) -> list[float | None]:
    return [round(t[1][0] - t[1][1], 6) if len(t[1]) > 1 else None for t in tops]
