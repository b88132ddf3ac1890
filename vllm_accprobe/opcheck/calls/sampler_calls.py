"""What a sampler's call should return, row by row, by the parameters of each row's request.

The problem: a batch mixes greedy and random requests, each with its own filters, seed and penalties, and a reference of
the sampler is a function of the call alone. The idea: judge/sampling_rules.py computes every row of the call from its
request's line in the journal, the model's logits and the tokens before; what follows is handed to the reference as
plain tensors in ``Call.extra["sampled"]``. Not here: the rules, and which logits (neighbours.py).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_accprobe.align.tokens import SampledHistory, SampledRow
from vllm_accprobe.dump.schema import EXPONENTIAL, FILTERED, NOISE, NOISE_DRAWS, SCALED, SamplingParameters
from vllm_accprobe.judge import sampling_rules as rules
from vllm_accprobe.opcheck.reference import Call

_TOKEN, _LEFT, _IDS = "output.token", "output.masked_logits", "output.masked_ids"
_FORCED_AS_NONE = 0.9
"""Chosen: a top-k of so much of the vocabulary is none: runners write the vocabulary's size, padded or not."""


def facts_of(dump: Any, rank: int, step: int, call: Call, rows: SampledHistory) -> dict[str, Any]:
    """``sampled`` of a sampler's call; {} where its rows are not known. `Call.extra` has the logits already."""
    first = next((t for role, t in call.outputs.items() if role.startswith("output.")), None)
    history = rows.of(step, len(first)) if first is not None and first.dim() else []
    if not history or any(len(t) != len(history) for t in call.outputs.values()):
        return {}
    masks = [None if h.request is None else dump.masks.get((rank, step, h.request.req)) for h in history]
    draw = noise_of(call.attrs)
    logits = call.extra.get("logits")
    if logits is None or logits.dim() != 2 or len(logits) != len(history):
        logits = None
    found, others = [], rows.asked(step)
    for i, (h, mask) in enumerate(zip(history, masks, strict=True)):
        found.append(
            rules.LogitsRow(
                h.asks, _raw(call, logits, i), _left(call, i), _token(call, i), h.prompt, h.output, h.generated,
                h.drafts, None if mask is None else tuple(mask.by), draw, others, bool(call.attrs.get(SCALED)),
                str(call.attrs.get(FILTERED) or ""), _broken(call, logits, i),
            )
        )  # fmt: skip
    out = _judged(call, history, found)
    out["settings"] = _settings(call, history, 0 if logits is None else logits.shape[1])
    out |= {"by_row": found, "again": functools.partial(_judged, call, history)}  # for causes, which ask otherwise
    return {"sampled": out}


def _judged(call: Call, history: Sequence[SampledRow], rows: Sequence[rules.LogitsRow]) -> dict[str, Any]:
    checked = [rules.check(row) for row in rows]
    out: dict[str, Any] = {}
    if _TOKEN in call.outputs:
        out |= _tokens(call.outputs[_TOKEN], checked, history)
    if _LEFT in call.outputs and _IDS in call.outputs:
        out |= _lefts(call, rows, checked, history)
    return out


def noise_of(attrs: Mapping[str, Any]) -> rules.Draw | None:
    """The noise of the engine whose sampler has these attributes, where this machine draws the same."""
    kind, drew = attrs.get(NOISE), attrs.get(NOISE_DRAWS)
    if kind == EXPONENTIAL and drew:
        tokens = (int(_exponential(64, seed, 1).argmin()) for seed in range(1, 9))
        return _by_exponential if ",".join(map(str, tokens)) == drew else None
    return rules.draw_of(kind, drew)


def _exponential(n: int, seed: int, generated: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(generated + 1):
        noise = torch.empty(n).exponential_(generator=generator)
    return noise.double()


def _by_exponential(x: np.ndarray, seed: int, generated: int) -> int | None:
    """The largest quotient of probability and noise [vllm/v1/sample/ops/topk_topp_sampler.py, random_sample]."""
    scores = torch.softmax(torch.from_numpy(x), 0) / _exponential(len(x), seed, generated)
    best = scores.topk(min(2, len(x)))
    apart = len(x) == 1 or float(best.values[0]) > float(best.values[1]) * (1.0 + 2.0**-18)
    return int(best.indices[0]) if apart else None


def _raw(call: Call, logits: Any, i: int) -> np.ndarray | None:
    top, ids = call.outputs.get("output.top_logits"), call.outputs.get("output.top_ids")
    best = None if top is None or ids is None else (top[i].double().numpy(), ids[i].long().numpy())
    if logits is not None and rules.is_of(raw := np.asarray(logits[i].double().numpy()), best):
        return raw
    return rules.of_best(best, _left(call, i), _token(call, i))


def _broken(call: Call, logits: Any, i: int) -> bool:
    known = (t for t in (logits, call.outputs.get("output.top_logits")) if t is not None)
    return rules.broken(*(t[i].double().numpy() for t in known))


def _left(call: Call, i: int) -> tuple[np.ndarray, np.ndarray] | None:
    left, ids = call.outputs.get(_LEFT), call.outputs.get(_IDS)
    return None if left is None or ids is None else (left[i].double().numpy(), ids[i].long().numpy())


def _token(call: Call, i: int) -> int | None:
    tokens = call.outputs.get(_TOKEN)
    return None if tokens is None else int(tokens[i].reshape(-1)[0])


def _tokens(tokens: Any, checked: Sequence[rules.RowCheck], history: Sequence[SampledRow]) -> dict[str, Any]:
    took = tokens.reshape(-1).long().tolist()
    right = [c.token != rules.WRONG for c in checked]
    should = [t if ok else (c.should if c.should is not None else -1)
              for t, ok, c in zip(took, right, checked, strict=True)]  # fmt: skip
    chance = sum(c.token == rules.RIGHT and not c.drawn and h.asks is not None and not h.asks.greedy
                 for c, h in zip(checked, history, strict=True))  # fmt: skip
    return {
        "token": torch.tensor(should).reshape(tokens.shape),
        "token_rows": torch.tensor([c.token != rules.UNKNOWN for c in checked]),
        "token_why": _commonest(c.why_token for c in checked if c.token == rules.UNKNOWN),
        "token_note": _first(history, [c.why_token if c.token == rules.WRONG else "" for c in checked]),
        "token_source": f"of {chance} rows any token that the filters keep is right" if chance else "",
    }


def _lefts(
    call: Call, rows: Sequence[rules.LogitsRow], checked: Sequence[rules.RowCheck], history: Sequence[SampledRow]
) -> dict[str, Any]:
    values, ids = call.outputs[_LEFT].double().clone(), call.outputs[_IDS].long().clone()
    bound = torch.zeros_like(values)
    known = [c.left != rules.UNKNOWN for c in checked]
    for i, (row, c) in enumerate(zip(rows, checked, strict=True)):
        if c.left == rules.UNKNOWN:
            continue
        z, allowed = rules.processed(row)
        if c.left == rules.WRONG and c.best is not None:
            ids[i] = torch.from_numpy(c.best[1].copy())
        at = ids[i].numpy()
        scale = row.asks.temperature if row.scaled and row.asks is not None and not row.asks.greedy else 1.0
        real = np.isfinite(z[at]) if c.left == rules.WRONG else np.isfinite(values[i].numpy())
        values[i] = torch.from_numpy(np.where(real & ~np.isnan(z[at]), z[at] / scale, values[i].numpy()))
        bound[i] = torch.from_numpy(4.0 * allowed[at] / scale)
    wrong = [c.why_left if c.left == rules.WRONG else "" for c in checked]
    words, how = rules.commonest(c.ways for c in checked if c.left == rules.WRONG)
    words = words or tuple(sorted({w for c in checked if c.left == rules.WRONG for w in c.processors}))
    note = "; ".join(filter(None, (_first(history, wrong), how)))
    return {
        "left": values, "left_ids": ids, "left_bound": bound, "left_rows": torch.tensor(known),
        "left_why": _commonest(c.why_left for c in checked if c.left == rules.UNKNOWN),
        "left_note": f"logits processor: {' and '.join(words)}: {note}" if note and words else note,
    }  # fmt: skip


def _settings(call: Call, history: Sequence[SampledRow], vocabulary: int) -> dict[str, Any]:
    """By name of an input, what the runner should have for each row: (values, which rows are known)."""
    found = {}
    for name, due in _WANTED.items():
        captured = call.inputs.get(name)
        if captured is None or captured.dim() != 1 or len(captured) != len(history):
            continue
        mine = captured.double().tolist()
        values = [m if h.asks is None else due(h.asks, m, vocabulary) for h, m in zip(history, mine, strict=True)]
        known = torch.tensor([h.asks is not None for h in history])
        found[name] = torch.tensor(values, dtype=torch.float64).to(captured.dtype), known
    return found


def _top_k(asks: SamplingParameters, mine: float, vocabulary: int) -> float:
    none = not 0 < asks.top_k < vocabulary
    return mine if none and (mine <= 0 or mine >= _FORCED_AS_NONE * vocabulary) else float(asks.top_k)


_WANTED: dict[str, Any] = {
    "temperature": lambda a, mine, _: mine if a.greedy and mine <= 0.0 else a.temperature,
    "top_k": _top_k,
    "top_p": lambda a, mine, _: a.top_p,
    "min_p": lambda a, mine, _: a.min_p,
    "repetition_penalties": lambda a, mine, _: a.repetition,
    "presence_penalties": lambda a, mine, _: a.presence,
    "frequency_penalties": lambda a, mine, _: a.frequency,
}


def _commonest(reasons: Any) -> str:
    found = Counter(reasons).most_common(1)
    return found[0][0] if found else ""


def _first(history: Sequence[SampledRow], sentences: Sequence[str]) -> str:
    """The first sentence with its row's request, and how many more there are."""
    sentences_of_rows = [(h, s) for h, s in zip(history, sentences, strict=True) if s]
    if not sentences_of_rows:
        return ""
    h, sentence = sentences_of_rows[0]
    who = f"request {h.request.id!r}, " if h.request is not None else ""
    more = f", and {len(sentences_of_rows) - 1} more rows" if len(sentences_of_rows) > 1 else ""
    return f"{who}generated token {h.generated + 1}: {sentence}{more}"
