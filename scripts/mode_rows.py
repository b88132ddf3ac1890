"""Whether each row of a dump is the one it is called, held against what was asked and answered.

The problem: a row map that is wrong by one gives plausible numbers. The idea: the request's own prompt and the tokens
that the client got say which token stands at which position (of requests that the engine names itself, the hash of the
prompt); ids, phases and positions of the row map are held against
these, and the output of the embedding, bit by bit, against the weight's row of that token: so a row's bytes are shown
to be that token's, without asking the runner. Not here: comparing two dumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support.engine import Ask

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import DECODE, PREFILL, TOKENS, hash_tokens

_SHOWN = 5
_EMBEDDINGS = ("embed_tokens", "word_embeddings", "backbone.embeddings")


def wrong_rows(dump: Dump, asks: Sequence[Ask], answers: Sequence[Sequence[int]]) -> tuple[int, list[str]]:
    """(rows checked, what is wrong in words): of the row maps, and of the embeddings' outputs where they were kept.

    answers: the tokens that each ask got; fewer where a model pools.
    """
    texts, prompts = {}, {}
    for i, ask in enumerate(asks):
        name = ask.id or f"ask-{i}"
        prompts[name] = ask.embeds[0] if ask.embeds else len(ask.ids)
        texts[name] = [*([-1] * prompts[name] if ask.embeds else ask.ids), *(answers[i] if i < len(answers) else [])]
    by_prompt = {hash_tokens(a.ids): a.id or f"ask-{i}" for i, a in enumerate(asks) if not a.embeds}
    several = {a.id or f"ask-{i}" for i, a in enumerate(asks) if (a.sampling or {}).get("n", 1) > 1}
    wrong: list[str] = []
    count = 0
    reached: dict[tuple[int, int], dict[int, int]] = {}
    for (rank, step, space), rows in sorted(dump.rows.items()):
        if space != TOKENS:
            continue
        at = 0
        for s in rows.segments:
            request = dump.requests[(rank, s.req)]
            name = request.id if request.id in texts else by_prompt.get(request.prompt or "", request.id)
            text, prompt = texts.get(name, []), prompts.get(name, request.prompt_len)
            if request.id not in texts and name in several:  # of several answers it is known only what they answer
                text = text[:prompt]
            said = rows.ids[at : at + s.n]
            at += s.n
            sure = s.n - (s.drafts or 0)
            for j in range(s.n):
                p = s.pos + j
                count += 1
                phase = PREFILL if p < prompt else DECODE
                if phase != s.phase:
                    wrong.append(f"rank {rank} step {step} {request.id} position {p} is called {s.phase}")
                if j < sure:
                    reached.setdefault((rank, s.req), {})[p] = said[j] if said else -1
                if j < sure and p < len(text) and text[p] >= 0 and said and said[j] != text[p]:
                    wrong.append(f"rank {rank} step {step} {request.id} position {p}: token {said[j]}, not {text[p]}")
    for (rank, req), found in reached.items():
        request = dump.requests[(rank, req)]
        missing = set(range(request.prompt_len)) - set(found)
        if missing:
            wrong.append(f"rank {rank} {request.id}: {len(missing)} rows of the prompt are not there")
        elif texts.get(request.id, [0])[0] >= 0 and request.prompt:
            ids = [found[p] for p in range(request.prompt_len)]
            if hash_tokens(ids) != request.prompt:
                wrong.append(f"rank {rank} {request.id}: the rows of its prompt are not the prompt's tokens")
    more, told = _embedded(dump)
    return count + more, [*wrong, *told][:_SHOWN]


def _embedded(dump: Dump) -> tuple[int, list[str]]:
    """The outputs of the embedding of tokens against the rows of its weight."""
    weights: dict[tuple[int, str], Any] = {}
    count, wrong = 0, []
    for r in dump.records:
        if r.step is None and r.role == "param.weight" and r.tap.endswith(_EMBEDDINGS) and r.payload is not None:
            weights[(r.rank, r.tap)] = dump.read(r)
    for r in dump.records:
        weight = weights.get((r.rank, r.tap))
        space = None if r.step is None else dump.rows.get((r.rank, r.step, r.rows or ""))
        if weight is None or space is None or r.role != "output.0" or r.payload is None or not space.ids:
            continue
        bits = dump.read(r)
        ids = np.array(space.ids)
        known = (ids >= 0) & (ids < len(weight))
        if bits.shape[1:] != weight.shape[1:] or len(bits) != len(ids):
            continue
        same = (bits[known] == weight[ids[known]]).all(axis=1)
        count += int(known.sum())
        if not same.all():
            wrong.append(f"{r.tap} step {r.step}: {int((~same).sum())} of {len(same)} rows are not their tokens'")
    return count, wrong
