"""A transformers golden's tensors in the order in which vLLM has them.

The problem: each model's code in transformers has its own names for what its experts read, and its own order of what
its router gives out; and a loader of vLLM may store the rows of a head's queries and keys in another order (Llama 4:
the two of each rotated pair, which transformers has side by side, are half a head apart). The idea: shapes, dtypes and
values show which is which: logits are what the router's input and weight give, a weight's rows are equal to the bit.
Where nothing shows it, the tensor stays as it is. Not here: names of modules (vllm_names.py).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from vllm_accprobe.align.derived import LARGEST, ROWS, View, derive
from vllm_accprobe.align.mapping import HALVES
from vllm_accprobe.dump.dtypes import DTYPES, round_to_bfloat16, widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Record

_ROUTED = ("input.top_k_index", "input.top_k_weights")
_NEAR = 1e-2
"""Chosen: relative error of logits computed again; scores made of them are off by far more."""


def in_order(theirs: Any, own: Any) -> tuple[Any, list[str]]:
    """(``theirs`` with such tensors in vLLM's order, lines). theirs: a dump of transformers; own: of vLLM."""
    roles, heads = _roles(theirs), _paired_heads(theirs, own)
    if not roles and not heads:
        return theirs, []
    records: list[Record] = []
    for r in theirs.records:
        role, head = roles.get((r.tap, r.role), r.role), heads.get(r.tap, 0)
        turned = head and (r.role.startswith("output.") or r.role in ("param.weight", "param.bias"))
        made: Record | str = r
        if turned:
            made = derive([r], r.tap, role, join=HALVES, heads=(head,), rule="mapping pairs of a head as halves")
        elif role != r.role:
            made = derive([r], r.tap, role, rule="mapping routing in the usual order")
        records.append(r if isinstance(made, str) else made)
    lines = [f"mapping: {len(roles)} tensors of routers and experts have other names in golden"] if roles else []
    if heads:
        lines.append(f"mapping: rows of {len(heads)} projections are in another order in mine, pairs as halves")
    return View(theirs, records), lines


def _roles(dump: Any) -> dict[tuple[str, str], str]:
    """(tap, role) → vLLM's role, where it is another: of a router's outputs (logits, weights, chosen experts), and of
    what experts read."""
    first: dict[str, dict[str, Record]] = defaultdict(dict)
    for r in dump.records:
        first[r.tap].setdefault(r.role, r)
    found: dict[tuple[str, str], str] = {}
    for tap, has in first.items():
        given = {role: r for role, r in has.items() if role.startswith("output.") and len(r.shape) == 2}
        if "param.weight" in has and len(given) > 1:
            order = _router(dump, has, given)
        else:
            order = {}
            chosen = _one_kind(has, "input.", "int")
            weights = _one_kind(has, "input.", "float", has[chosen].shape) if chosen else ""
            if tap.endswith("experts") and weights:
                order = dict(zip((chosen, weights), _ROUTED, strict=True))
        found |= {(tap, role): new for role, new in order.items() if role != new}
    return found


def _one_kind(has: dict[str, Record], begin: str, kind: str, shape: tuple[int, ...] = ()) -> str:
    """The one role of that kind of two dimensions; "" where there is none or several."""
    fits = [role for role, r in has.items() if role.startswith(begin) and len(r.shape) == 2
            and DTYPES[r.dtype].kind == kind and (not shape or r.shape == shape)]  # fmt: skip
    return fits[0] if len(fits) == 1 else ""


def _router(dump: Any, has: dict[str, Record], given: dict[str, Record]) -> dict[str, str]:
    """The outputs of a router, by role; none where it shows no logits."""
    experts = has["param.weight"].shape[:1]
    fits = [role for role, r in given.items() if DTYPES[r.dtype].kind == "float" and r.shape[-1:] == experts]
    if len(fits) > 1:
        fits = [role for role in fits if _is_product(dump, has, given[role])]
    if len(fits) != 1:
        return {}
    chosen = _one_kind(given, "output.", "int")
    scores = _one_kind(given, "output.", "float", given[chosen].shape) if chosen else ""
    first = [fits[0], *(role for role in (scores, chosen) if role and role != fits[0])]
    order = first + [role for role in given if role not in first]
    return {role: f"output.{i}" for i, role in enumerate(order)} if sorted(given) == sorted(
        f"output.{i}" for i in range(len(given))) else {}  # fmt: skip


def _is_product(dump: Any, has: dict[str, Record], out: Record) -> bool:
    """Whether ``out`` is what the module's one input and its weight give."""
    weight = has["param.weight"]
    inputs = [r for role, r in has.items() if role.startswith("input.") and r.shape[-1:] == weight.shape[1:]]
    values = [_values(dump, r, slice(0, ROWS)) for r in (*inputs[:1], out)] + [_values(dump, weight)]
    if len(inputs) != 1 or any(v is None or v.ndim != 2 for v in values):
        return False
    x, y, w = (v.astype(np.float64) for v in values if v is not None)
    bias = _values(dump, has["param.bias"]) if "param.bias" in has else None
    if len(x) != len(y) or (bias is not None and bias.shape != w.shape[:1]):
        return False
    right = x @ w.T + (0.0 if bias is None else bias)
    return bool(np.linalg.norm(right - y) <= _NEAR * np.linalg.norm(right))


def _paired_heads(theirs: Any, own: Any) -> dict[str, int]:
    """Projections of golden whose weight mine has with the pairs of each head as halves, and the size of a head. Not
    where golden turns by a cosine and a sine, as all do that turn halves: there mine's weight is a wrong one."""
    weights = {r.tap: r for r in theirs.records if r.role == "param.weight"}
    mine = {r.tap: r for r in reversed(own.records) if r.role == "param.weight"}
    turned = {r.tap.removesuffix(".rotary_emb") for r in theirs.records if r.role == "input.position_embeddings.1"
              or (r.role == "output.1" and r.tap.endswith(".rotary_emb"))}  # fmt: skip
    found: dict[str, int] = {}
    for module in (m for modules in own.modules.values() for m in modules if m.cls == "QKVParallelLinear"):
        size, heads, r = module.attrs.get("head_size"), module.attrs.get("num_heads"), mine.get(module.tap)
        if not isinstance(size, int) or not isinstance(heads, int) or size < 2 or size % 2 or r is None:
            continue
        block = module.tap.rpartition(".")[0]
        if not turned.isdisjoint((block, block.rpartition(".layers.")[0])):
            continue
        for name, begin in (("q_proj", 0), ("k_proj", heads * size)):
            golden = weights.get(f"{block}.{name}")
            head = None if golden is None else _values(theirs, golden, slice(0, size))
            stored = None if head is None else _values(own, r, slice(begin, begin + size))
            if golden is None or head is None or stored is None:
                continue
            if head.shape != stored.shape or len(head) < size:
                continue
            if r.dtype == "bfloat16":
                head = widen(round_to_bfloat16(head.astype(np.float32)), r.dtype)
            head = head.astype(stored.dtype)
            if not (head == stored).all() and (np.concatenate([head[::2], head[1::2]]) == stored).all():
                found[golden.tap] = size
    return found


def _values(dump: Any, r: Record, rows: slice = slice(None)) -> np.ndarray | None:
    """Some rows, which lie along dimension 0."""
    if r.payload is None or r.row_dim or not r.shape or (rows.stop is None and r.payload.nbytes > LARGEST):
        return None
    try:
        return widen(dump.read_rows(r, rows), r.dtype)
    except (DumpError, OSError):
        return None
