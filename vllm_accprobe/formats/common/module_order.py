"""In which order the modules of a torch dump ran, where nobody wrote it down.

The problem: a tree of modules is in the order of declaration (attention, mlp, norms), and the first wrong tensor is
only the first if the order is that of execution. The idea: what one module gave out and another took in is the same
tensor, so that equal statistics tell who ran first among the children of one module; where these tell nothing, the
order in which modules of such names usually run does, and then the declaration.
Not here: where the statistics come from (msit.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from vllm_accprobe.formats.io import plain_file


def execution_order(
    modules: list[str], declared: list[str], tables: Mapping[str, Mapping[str, tuple[Any, ...]]]
) -> dict[str, tuple[int, int]]:
    """module → (place of its inputs, place of its outputs): what a module encloses runs between the two.

    tables: role → (dtype, shape, statistics) of each module. Siblings run in the order in which they hand tensors on;
    one that was waiting for another runs right behind it, and where nothing is handed on the declaration decides."""
    known = set(modules)
    index = {m: i for i, m in enumerate([*declared, *sorted(known - set(declared), key=plain_file.natural)])}
    children: dict[str, list[str]] = defaultdict(list)
    members = known | {up for m in known for up in _above(m)}
    for m in sorted(members, key=lambda m: index.get(m, len(index))):
        children[m.rpartition(".")[0]].append(m)
    children = {up: _usual(below) for up, below in children.items()}
    gives: dict[str, set[Any]] = defaultdict(set)
    takes: dict[str, set[Any]] = defaultdict(set)
    for m, table in tables.items():
        for role, row in table.items():
            if row[2] is not None:
                side = takes if role.startswith("input") else gives
                for up in (m, *_above(m)):
                    side[up].add((row[0], row[2]))
    places: dict[str, tuple[int, int]] = {}
    clock = 0
    waiting: list[tuple[str, bool]] = [(m, False) for m in reversed(_sorted(children.get("", []), gives, takes))]
    start: dict[str, int] = {}
    while waiting:
        m, done = waiting.pop()
        clock += 1
        if done:
            places[m] = (start[m], clock)
            continue
        start[m] = clock
        waiting.append((m, True))
        waiting += [(c, False) for c in reversed(_sorted(children.get(m, []), gives, takes))]
    return places


_USUAL = tuple(
    re.compile(p, re.I)
    for p in (
        r"embed_tokens|wte|word_embeddings?|embed_in|tok_embeddings|embedding",
        r"rotary\w*",
        r"input_layernorm|ln_?1|norm_?1|attention_norm",
        r"(self_)?att(entio)?n",
        r"post_attention_layernorm|ln_?2|norm_?2|ffn_norm",
        r"mlp|ffn|feed_forward|block_sparse_moe|moe",
        r"q_proj|qkv_proj|query_key_value|wq",
        r"k_proj|wk",
        r"v_proj|wv",
        r"q_norm",
        r"k_norm",
        r"o_proj|wo|out_proj",
        r"gate_proj|gate_up_proj|w1|c_fc|fc1",
        r"up_proj|w3",
        r"act(_fn|ivation)?",
        r"down_proj|w2|fc2",
        r"layers|h|blocks",
        r"norm|ln_f|final_layernorm",
        r"model|transformer|backbone",
        r"lm_head|output_layer|embed_out",
    )
)  # fmt: skip


def _usual(siblings: list[str]) -> list[str]:
    """Siblings whose names are known in the order in which such modules run; the others stay where they are."""
    known = {}
    for s in siblings:
        own = s.rpartition(".")[2]
        place = next((i for i, p in enumerate(_USUAL) if p.fullmatch(own)), None)
        if place is not None:
            known[s] = place
    ordered = iter(sorted(known, key=lambda s: known[s]))
    return [next(ordered) if s in known else s for s in siblings]


def _above(module: str) -> list[str]:
    out = []
    while "." in module:
        module = module.rpartition(".")[0]
        out.append(module)
    return out


def _sorted(siblings: list[str], gives: Mapping[str, set[Any]], takes: Mapping[str, set[Any]]) -> list[str]:
    """Siblings in the order of execution as far as it is known; given in the order of declaration."""
    makers: dict[Any, list[str]] = defaultdict(list)
    for s in siblings:
        for value in gives.get(s, ()):
            makers[value].append(s)
    before: dict[str, set[str]] = {}
    for s in siblings:
        own = takes.get(s, set())
        before[s] = {m for value in own for m in makers.get(value, ()) if m != s}
    left = list(siblings)
    out: list[str] = []
    ready: list[str] = []
    while left:
        free = [s for s in left if not before[s] - set(out)]
        chosen = next((s for s in reversed(ready) if s in free), None)
        if chosen is None:  # a circle of equal values says nothing
            chosen = free[0] if free else left[0]
        left.remove(chosen)
        out.append(chosen)
        ready += [s for s in reversed(left) if chosen in before[s] and not before[s] - set(out)]
    return out
