"""Of which tensors of a transformers golden the queries, keys and values of vLLM's attention are made.

The problem: transformers hands them to a function, so that golden has no such tensor: it is made of the projections,
norms, cos and sin. Some layers do not rotate, some normalize behind the rotation, some turn neighbours in place of
halves; a wrong guess condemns a right layer. The idea: how mine made its own says it. Where mine's tensor is to the bit
what a module of its block gave out, golden's is that module's output; where the block calls a rotary embedding, its
settings say how it turns; elsewhere (vLLM's backend for models of transformers, whose code turns) the form that alone
gives mine's values out of mine's own tensors. What no form gives is not compared. Cosines of golden whose neighbours
are alike say how golden turns, whatever mine does, and so do the probabilities of its attention, where it has them.
Formulas: derived.py.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vllm_accprobe.align import derived
from vllm_accprobe.align.engines.vllm_names import OUTPUT, rope
from vllm_accprobe.align.mapping import RoleRule, Source, TapRule
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Record

_ATTENTION = re.compile(r".*layers\.\d+\.self_attn")
_ROLES = {"input.query": "q", "input.key": "k", "input.value": "v"}
_TURNED = {"input.query": (OUTPUT, "inplace.query"), "input.key": ("output.1", "inplace.key")}
"""What a rotary embedding makes of its inputs."""
_ROWS = 64
"""Chosen: the first rows of a tensor, which are read."""
_NEAR = 0.02
"""Chosen: relative error of these rows. Rounding q, cos, sin and their products to bfloat16 gives 0.4 to 0.6 %, another
form 20 % and more where a row stands behind the first few."""
_FITS, _APART = 1e-3, 1e-1
"""Chosen: shares of the scores that a scale does not explain: of golden's own form (a cap or a bias is beyond the first
number), and of the other one."""


def attention_inputs(own: Any, theirs: Any) -> tuple[dict[str, tuple[TapRule, ...]], dict[tuple[str, str], str]]:
    """(rules by tap, of attention and of the rotary embedding in front of it; by place, why it is not compared). own: a
    dump of vLLM."""
    rules: dict[str, tuple[TapRule, ...]] = {}
    changed: dict[tuple[str, str], str] = {}
    golden = _blocks(theirs)
    for path, taps in _blocks(own).items():
        if not _ATTENTION.fullmatch(path):
            continue
        block = _Block(own, path, taps, _Block(theirs, path, golden[path]) if path in golden else None)
        attention = [part for r in taps.get(f"{path}.attn", ()) if r.role in _ROLES for part in block.rules(r)]
        rotary = [part for role in _TURNED if block.turns in taps for part in block.turned(role)]
        for tap, parts in ((f"{path}.attn", attention), (block.turns, rotary)):
            rules[tap] = (TapRule(tap, tuple(parts), f"{tap.rpartition('.')[2]} ← q, k, v, cos, sin"),)
        changed |= block.changed()
    return rules, changed


def _blocks(own: Any) -> dict[str, dict[str, list[Record]]]:
    """By attention block: tensors by tap of the first step in which it ran."""
    blocks: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, tuple[int, int]] = {}
    for r in own.records:
        if r.step is not None and ".self_attn" in r.tap:
            block = r.tap[: r.tap.index(".self_attn") + len(".self_attn")]
            if first.setdefault(block, (r.rank, r.step)) == (r.rank, r.step) and not r.call:
                blocks[block][r.tap].append(r)
    return blocks


@dataclass
class _Block:
    """A layer's attention in the first step in which it ran."""

    dump: Any
    path: str
    taps: dict[str, list[Record]]
    golden: _Block | None = None

    @property
    def turns(self) -> str:
        return f"{self.path}.rotary_emb"

    def rules(self, r: Record) -> list[RoleRule]:
        """Of an input of attention."""
        letter = _ROLES[r.role]
        same = self._same(r)
        if same is not None and same.tap != self.turns:
            return [RoleRule(r.role, (Source(same.tap, same.role),))]
        if letter == "v":
            return [RoleRule(r.role, (Source(f"{self.path}.v_proj", OUTPUT),))]
        if any(x.role.startswith("output.") for x in self.taps.get(self.turns, ())):
            return [rule for source in self._made_by(r.role) for rule in self._rope(r.role, source)]
        return self._by_values(r, letter)

    def turned(self, role: str) -> list[RoleRule]:
        """Of an input of the rotary embedding, and of what that makes of it."""
        sources = self._made_by(role)
        given = [RoleRule(role, (Source(source, OUTPUT),)) for source in sources]
        return given + [rule for made in _TURNED[role] for s in sources for rule in self._rope(made, s)]

    def changed(self) -> dict[tuple[str, str], str]:
        """By place, why a query or key is not made of the projection alone: what the rotary embedding reads is none of
        what the block's modules gave out (Falcon-H1 scales its keys)."""
        found: dict[tuple[str, str], str] = {}
        for r in self.taps.get(self.turns, ()):
            if r.role in _TURNED and self.is_output(r, _ROLES[r.role]) is False:
                places = [(self.turns, role) for role in (r.role, *_TURNED[r.role])]
                places.append((f"{self.path}.attn", r.role))
                found |= dict.fromkeys(places, "mine's code changes what its projection gives out")
        return found

    def _made_by(self, role: str) -> list[str]:
        """Taps whose output the rotary embedding reads as ``role``: the first that golden has."""
        r = next((x for x in self.taps.get(self.turns, ()) if x.role == role), None)
        same = None if r is None else self._same(r)
        return [same.tap] if same is not None else [f"{self.path}.{_ROLES[role]}_{part}" for part in ("norm", "proj")]

    def is_output(self, r: Record, letter: str) -> bool | None:
        """Whether ``r`` is to the bit what a module of the block gave out, or its part of the joined projection; None
        where that cannot be read."""
        if self._same(r) is not None:
            return True
        wanted = self._rows(r)
        if wanted is None:
            return None
        sources = list(self._sources(wanted.shape[1], letter))
        joined = any(tap.endswith(".qkv_proj") for tap in self.taps)
        return any(np.array_equal(x, wanted) for _, x in sources) if sources and joined else None

    def _same(self, r: Record) -> Record | None:
        """What an earlier module of the block gave out that is ``r``."""
        for tap, records in self.taps.items():
            for x in records if tap != r.tap else ():
                made = x.role.startswith(("output.", "inplace."))
                if made and x.seq < r.seq and x.hash == r.hash is not None and x.dtype == r.dtype:
                    return x
        return None

    def _rope(self, role: str, tap: str, heads: tuple[int, ...] = ()) -> list[RoleRule]:
        model = self.path.rpartition("layers.")[0].rpartition(".")[0]
        return rope(role, tap, self.path, model, self.golden_heads or heads)

    @cached_property
    def golden_heads(self) -> tuple[int, ...]:
        """`Derived.heads` of the one form that gives golden's attention its probabilities; () where that is not known.
        They are a softmax of the queries' and keys' products, times a scale."""
        golden, size = self.golden, self._size()
        if golden is None or not size:
            return ()
        made = [[t for t in self._made_by(role) if t in golden.taps][:1] for role in _TURNED]
        places = [(tap, OUTPUT) for taps in made for tap in taps]
        places += [(self.path, f"input.position_embeddings.{k}") for k in (0, 1)] + [(self.path, "output.1")]
        has = {(r.tap, r.role): r for records in golden.taps.values() for r in records}
        rows = [found for place in places if place in has and (found := golden._rows(has[place])) is not None]
        if len(rows) < 5 or any(len(x) != len(rows[0]) for x in rows):
            return ()
        query, key, cos, sin, shares = rows
        n, heads, groups = len(query), query.shape[1] // size, key.shape[1] // size
        fits = heads and groups and not heads % groups and not shares.shape[1] % heads and cos.shape[1] <= size
        if not fits or cos.shape != sin.shape or cos.shape[1] % 2 or shares.shape[1] // heads < n:
            return ()
        shares = shares.reshape(n, heads, -1)[:, :, :n]
        seen = shares > 0
        left = []
        for pairs in (0, 1):
            q, k = (derived.rope(x[:, : m * size], cos, sin, size, pairs).reshape(n, m, size)
                    for x, m in ((query, heads), (key, groups)))  # fmt: skip
            scores = np.einsum("ihd,jhd->ihj", q, np.repeat(k, heads // groups, axis=1))
            logs = np.log(np.where(seen, shares, 1.0))
            x, y = (_centred(v.astype(np.float64), seen) for v in (scores, logs))
            left.append(1.0 - (x * y).sum() ** 2 / max((x * x).sum() * (y * y).sum(), 1e-300))
        return (size, int(np.argmin(left))) if min(left) <= _FITS and max(left) >= _APART else ()

    def _size(self) -> int:
        """Of a head of mine's attention; 0 where that is not known."""
        attention = f"{self.path}.attn"
        sizes = (m.attrs.get("head_size") for of in self.dump.modules.values() for m in of if m.tap == attention)
        size = next(sizes, None)
        return size if isinstance(size, int) and size > 0 else 0

    def _by_values(self, r: Record, letter: str) -> list[RoleRule]:
        """The one form that gives ``r`` out of what the block has; none where it is not known."""
        wanted = self._rows(r)
        turning = (x for x in self.taps.get(self.path, ()) if x.role.startswith("input.position_embeddings."))
        angles = [rows for x in turning if (rows := self._rows(x)) is not None]
        size = self._size()
        if wanted is None or not size or wanted.shape[1] % size:
            return []
        turn = len(angles) == 2 and angles[0].shape == angles[1].shape and angles[0].shape[1] in range(2, size + 1, 2)
        found: list[list[RoleRule]] = []
        for tap, x in self._sources(wanted.shape[1], letter):
            forms = [(x, [RoleRule(r.role, (Source(tap, OUTPUT),))])]
            if turn and len(angles[0]) == len(x):
                turned = [derived.rope(x, angles[0], angles[1], size, pairs) for pairs in (0, 1)]
                forms += [(turned[pairs], self._rope(r.role, tap, (size, pairs)))
                          for pairs in range(1 if np.array_equal(turned[0], turned[1]) else 2)]  # fmt: skip
            for value, rules in forms:
                if np.linalg.norm(value - wanted) <= _NEAR * np.linalg.norm(wanted):
                    found.append(rules)
        return found[0] if len(found) == 1 else []

    def _sources(self, width: int, letter: str) -> Iterator[tuple[str, np.ndarray]]:
        """(tap of golden, mine's values) of what may be turned: what modules give out, and a part of the joined
        projection."""
        for tap, records in self.taps.items():
            x = next((self._rows(r) for r in records if r.role == OUTPUT), None)
            if x is None or tap.count(".") != self.path.count(".") + 1 or tap.endswith(".attn"):
                continue
            if x.shape[1] == width:
                yield tap, x
            if tap.endswith(".qkv_proj"):
                begin = 0 if letter == "q" else self._query_width()
                yield f"{self.path}.{letter}_proj", x[:, begin : begin + width]

    def _query_width(self) -> int:
        query = next((r for r in self.taps.get(f"{self.path}.attn", ()) if r.role == "input.query"), None)
        return 0 if query is None else math.prod(query.shape) // (query.shape[query.row_dim] or 1)

    def _rows(self, r: Record) -> np.ndarray | None:
        """The first rows: float32 [rows, features]; None where there are no values."""
        if r.payload is None or r.rows is None or not math.prod(r.shape):
            return None
        nbytes = r.payload.nbytes
        if math.prod(r.shape[: r.row_dim]) == 1 and r.row_dim:  # of one sequence
            r = replace(r, shape=r.shape[r.row_dim :], row_dim=0)
        if r.row_dim and nbytes > derived.LARGEST:
            return None
        try:
            bits = self.dump.read(r) if r.row_dim else self.dump.read_rows(r, slice(0, _ROWS))
            value = widen(np.moveaxis(bits, r.row_dim, 0)[:_ROWS], r.dtype).astype(np.float32)
        except (DumpError, OSError):
            return None
        return value.reshape(len(value), -1)


def _centred(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """``values`` less the mean of those that are seen along the last axis; 0 where they are not."""
    values = np.where(seen, values, 0.0)
    mean = values.sum(-1, keepdims=True) / np.maximum(seen.sum(-1, keepdims=True), 1)
    return np.asarray(np.where(seen, values - mean, 0.0))
