"""How large a pack will be, from a model's config.json, before anything runs.

The idea: what a model's modules pass to one another is known (run/dump_size.py); pack.py's own rule for the budget then
says which kinds of calls, how many rows and how many sketches fit. Lines of text are counted by what they took in packs
that were made (measured, scripts/pack_sizes.py --check). Not here: vision towers, what a checkpoint weighs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_accprobe.golden.pack import SKETCH_SHARE, default_bytes, first_kinds, is_outer, kind_of_tap
from vllm_accprobe.golden.sketch import BYTES
from vllm_accprobe.run.dump_size import StoredTensor, decoder

_LINE, _PLACE, _MODULE, _PARAMETER, _STEP, _ROW = 20, 8, 12, 110, 50, 3
"""Measured: bytes of text, deflated, of a tensor's line, a sketch's place, a module's line, a parameter's two lines, a
step's lines, a row's token and segment."""
_EVERY, _SAMPLED = 12, 4 + 2 * 20 * 4
"""derived: of every row its id and position; of a row of logits the sampled token and the best 20 with their ids."""
_FIXED = 3000
"""Measured: manifest, run.json and the headers."""


@dataclass(frozen=True)
class PackSize:
    """row: bytes of one row of every tensor; budget: of the file; kinds, of_kinds: kinds of calls that are in full, of
    how many; full, sketched: rows; bytes: of the pack; capture: of these rows of every tensor."""

    row: int
    budget: int
    kinds: int
    of_kinds: int
    full: int
    sketched: int
    bytes: int
    capture: int


def tensors_of(config: Mapping[str, Any]) -> list[StoredTensor]:
    """What a row has in layers and behind them, logits too."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    return [*decoder(config), StoredTensor(hidden, (), ("lm_head",)), StoredTensor(vocab, ("lm_head",))]


def pack_size(
    config: Mapping[str, Any], *, rows: int, steps: int, size: int = 2, budget: int | None = None,
    full: int | None = None, sketched: int | None = None, sampled: int | None = None,
) -> PackSize:  # fmt: skip
    """rows: of the golden, steps: in which they were computed; size: bytes of a number. budget: by default the model's;
    full, sketched: rows, where these are known already; sampled: rows of logits, by default one a step."""
    tensors = tensors_of(config)
    cost: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    taps: set[str] = set()
    for t in tensors:
        first = (*t.makers, *t.takers)[0]
        cost[kind_of_tap(first)] += t.numbers * (t.width or size)
        for tap in (*t.makers, *t.takers):
            lines[kind_of_tap(tap)] += 1
            taps.add(tap)
    row = sum(cost.values())
    limit = default_bytes(row) if budget is None else budget
    names = sum(t.numbers >= 16 and not t.width for t in tensors) + _joined(config) * 2
    places = sum(lines.values())
    base = _FIXED + _MODULE * len(taps) + _PARAMETER * _parameters(config) + _STEP * steps
    base += rows * (_ROW + _EVERY) + (steps if sampled is None else sampled) * _SAMPLED
    room = max(limit - base - _PLACE * places, 0)
    outer = {kind_of_tap(tap): is_outer(tap) for tap in taps}
    kinds = first_kinds({k: cost[k] + _LINE * lines[k] for k in lines}, outer, room * (1 - SKETCH_SHARE))
    of_row, of_lines = sum(cost[k] for k in kinds), _LINE * sum(lines[k] for k in kinds)
    of_row -= _less(config, kinds) * size // 3
    if full is None:
        full = min(int(room * (1 - SKETCH_SHARE) / max(of_row + of_lines, 1)), rows)
    if sketched is None:
        sketched = min(int(room * SKETCH_SHARE / (BYTES * names)), rows)
    some = min(full, steps)
    whole = base + _PLACE * places + full * of_row + some * of_lines + sketched * names * BYTES
    return PackSize(row, limit, len(kinds), len(lines), full, sketched, whole, (full + sketched) * row)


def _heads(config: Mapping[str, Any]) -> int:
    """Elements of q and k in a row."""
    n = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // n
    return int(dim * (n + (config.get("num_key_value_heads") or n)))


def _joined(config: Mapping[str, Any]) -> int:
    """Layers whose q and k, before and behind their rotary embedding, dump_size.py counts as one tensor."""
    return 0 if config.get("kv_lora_rank") else int(config["num_hidden_layers"])


def _less(config: Mapping[str, Any], kinds: Collection[str]) -> int:
    """Elements that one kind of row in three, the first of a prompt, does not have: no logits, and q and k at position
    0, which the rotary embedding leaves as they are."""
    head = config["vocab_size"] + config["hidden_size"] if "lm_head" in kinds else 0
    turned = any(k.endswith("rotary_emb") for k in kinds)
    return int(head + turned * _joined(config) * _heads(config))


def _parameters(config: Mapping[str, Any]) -> int:
    """Tensors of weights with a fingerprint: two norms and four matrices a layer, or so; three outside."""
    return 6 * int(config["num_hidden_layers"]) + 3
