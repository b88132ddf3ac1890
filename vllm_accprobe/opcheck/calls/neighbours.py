"""What other records of a dump tell about a call: its ranks, what lies inside it, what it looks back at.

The problem: some outputs do not follow from a call's own inputs: a sum over ranks, a block's children, logits that
another module made, keys and values of earlier steps. The idea: `Neighbours` is asked once per call and gives it all by
name, for `Call.extra`; what is not in the dump is not there, and the reference says so.
Not here: what a reference makes of it (references/), the cache itself (history.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.align.sampled_rows import SampledHistory
from vllm_accprobe.dump.schema import ADAPTER_ANEW, ROOT_TAP, Module, Record
from vllm_accprobe.opcheck.calls.history import Past
from vllm_accprobe.opcheck.calls.module_index import ModuleIndex
from vllm_accprobe.opcheck.calls.parameters import adapter_of
from vllm_accprobe.opcheck.calls.prefix import Prefix, prefixes
from vllm_accprobe.opcheck.calls.sampler_calls import facts_of
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.lora import PACKED, RowAdapters

_PAST = {
    "Attention": ("key", "value"),
    "EncoderOnlyAttention": ("key", "value"),
    "MLAAttention": ("kv_c_normed", "k_pe"),
}
SAMPLER = "sampler"
"""The tap of every engine's sampler, whatever its class."""
_QUIET = (
    "a container, never called", "another name of a captured module", "never called in a captured step",
)  # fmt: skip
"""Why a module has no records that did nothing of its own in the captured steps."""
_NOT = ("not selected by VLLM_ACCPROBE_MODULES",)
_FACTOR = "routed_scaling_factor"
SUMMED = ("RowParallelLinear", "VocabParallelEmbedding")
_OVER_RANKS = tuple(
    f"{name}Operation" for name in ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "LinearParallel")
)
"""ATB's, which need all ranks' calls."""
_SUMMED_INSIDE = ("MoERunner", "FusedMoE", "SharedFusedMoE")


class Neighbours:
    """Of the calls of ``index``."""

    def __init__(self, index: ModuleIndex):
        self._index = index
        self._common: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._shared: dict[int, Mapping[int, Prefix]] = {}
        self._sampled: dict[int, SampledHistory] = {}
        self._scaling: dict[int, list[Module]] = {}
        self._below: dict[int, dict[str, frozenset[str]]] = {}

    def past(self, rank: int, cls: str) -> Past | None:
        """An empty cache for the calls of one tap, which come step by step; None for a class that has none."""
        if cls not in _PAST:
            return None
        if rank not in self._shared:
            self._shared[rank] = prefixes(self._index.dump, rank)
        return Past(_PAST[cls], self._shared[rank])

    def cache(self, past: Past, what: Call, rank: int, step: int, records: Mapping[str, Record]) -> dict[str, Any]:
        """``cache``, what this call looks back at, itself included."""
        record = next((r for role, r in records.items() if role == f"input.{past.names[0]}"), None)
        space = self._index.dump.rows.get((rank, step, record.rows)) if record is not None and record.rows else None
        if space is None or any(n not in what.inputs for n in past.names):
            return {}
        if any(len(what.inputs[n]) != space.n for n in past.names):
            return {}
        past.write(space, what.inputs)
        return {"cache": past.view(space)}

    def extra(self, what: Call, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """All but the cache. Raises DumpError."""
        extra: dict[str, Any] = {"usual": self._usual(rank, what.cls)}
        dump, parameters = self._index.dump, self._index.parameters
        if what.cls in SUMMED and "tp_size" not in what.attrs:  # another tool's dump: is its output a summand?
            extra["apart"] = len(dump.ranks) > 1
        elif what.cls in SUMMED and int(what.attrs["tp_size"]) > 1:
            ranks = self._calls_of_all_ranks(what.cls, tap, step, n)
            extra["ranks"] = sorted(ranks.values(), key=lambda c: int(c.attrs.get("tp_rank", 0)))
        if what.cls in _OVER_RANKS:
            extra["ranks"] = list(self._calls_of_all_ranks(what.cls, tap, step, n).values())
        if what.cls == "LogitsProcessor":
            head = tap.rpartition("logits_processor")[0] + "lm_head"
            extra |= self._gathered("lm_head", rank, head, step, n)
        if tap == SAMPLER:
            for other in ("logits_processor", "language_model.logits_processor"):
                extra |= self._output("logits", rank, other, step, n)
            rows = self._sampled.setdefault(rank, SampledHistory(dump, rank))
            extra |= facts_of(dump, rank, step, replace(what, extra=extra), rows)
        if what.cls == "MLAAttention":
            weight = parameters.of(rank, f"{tap}.kv_b_proj")
            extra |= {"kv_b_proj": weight["weight"]} if weight.get("weight") is not None else {}
        if tap.endswith(".quant_method"):
            block = tap.removesuffix(".quant_method").removesuffix(".routed_experts")
            gates = (f"{block}.gate", f"{block.rpartition('.')[0]}.gate")
            for gate in gates:
                extra |= self._output("router_logits", rank, gate, step, n)
            extra["gate"] = {n: t for g in gates for n, t in self._bias(rank, g).items()}
            holder = self._index.modules.get(rank, {}).get(block)
            found = (holder.attrs if holder is not None else {}).items()
            extra["router"] = {k.removeprefix("router."): v for k, v in found if k.startswith("router.")}
        if (what.config or {}).get("routed_scaling_factor") or "routed_scaling_factor" in what.attrs:
            extra["factors"] = self._factors(rank, tap)
        if what.cls.endswith("LoRA"):
            extra |= self._adapters(rank, tap, step, n)
        extra |= self._inside(rank, tap, step)
        if what.cls in _SUMMED_INSIDE and len(dump.ranks) > 1:
            extra |= self._parts(what, rank, tap, step, n, extra)
        return extra

    def _inside(self, rank: int, tap: str, step: int) -> dict[str, Any]:
        children = self._index.children.get((rank, tap))
        read = self._index.read
        if not children:
            return {}
        within = self._within(rank, tap, children, step)
        seen = {path.partition(".")[0] for path, _, _ in within}
        unseen = tuple(sorted(self._parts_of(rank, tap) - seen))
        return {"children": within, "read": read, "unseen": unseen}

    def _parts_of(self, rank: int, tap: str) -> frozenset[str]:
        """Names of the modules right below ``tap`` that run, as far as the dump knows them: it names those that were
        not selected, too."""
        if rank not in self._below:
            quiet = {s.tap for s in self._index.dump.skips if s.reason in _QUIET}
            known = {*self._index.modules.get(rank, {}), *(s.tap for s in self._index.dump.skips if s.reason in _NOT)}
            below: dict[str, set[str]] = {}
            for path in known - quiet - {ROOT_TAP}:
                while path:
                    path, _, name = path.rpartition(".")
                    below.setdefault(path or ROOT_TAP, set()).add(name)
            self._below[rank] = {path: frozenset(names) for path, names in below.items()}
        return self._below[rank].get(tap, frozenset())

    def _factors(self, rank: int, tap: str) -> dict[str, float]:
        """Routed scaling factors of what lies below ``tap``, by its path, each object once."""
        if rank not in self._scaling:
            self._scaling[rank] = [m for m in self._index.modules.get(rank, {}).values() if _FACTOR in m.attrs]
        inner = {m.index: m for m in self._scaling[rank] if m.tap.startswith(f"{tap}.")}
        return {m.tap.removeprefix(f"{tap}."): float(m.attrs[_FACTOR]) for m in inner.values()}

    def _parts(self, what: Call, rank: int, tap: str, step: int, n: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The other ranks' calls of a block whose parts each have a share of the sum: how many, and they."""
        mine = self._index.records_of(rank, tap, step, n).get("output.0")
        inner = [r for _, role, r in extra.get("children", ()) if role == "output.0" and r.layout.kind == "partial"]
        if mine is None or mine.layout.kind == "partial" or not inner:
            return {}
        calls = self._calls_of_all_ranks(what.cls, tap, step, n)
        ranks = [replace(part, extra=self._inside(other, tap, step)) for other, part in calls.items()]
        return {"partial": inner[-1].layout.size, "ranks": ranks}

    def _calls_of_all_ranks(self, cls: str, tap: str, step: int, n: int) -> dict[int, Call]:
        """The same call by rank, where the dump has all of it."""
        held = {rank: self._index.records_of(rank, tap, step, n) for rank in self._index.dump.ranks}
        return {
            rank: self._index.call(rank, tap, cls, records)
            for rank, records in held.items() if records and all(r.payload is not None for r in records.values())
        }  # fmt: skip

    def _output(self, name: str, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """``output.0`` of another tap in the same step."""
        return self._held(name, self._index.records_of(rank, tap, step, n).get("output.0"))

    def _held(self, name: str, record: Record | None) -> dict[str, Any]:
        return {name: self._index.read(record)} if record is not None and record.payload is not None else {}

    def _gathered(self, name: str, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """`_output`, its ranks' parts one after the other where it is cut along its columns."""
        record = self._index.records_of(rank, tap, step, n).get("output.0")
        if record is None or record.layout.kind != "shard" or record.layout.dim != -1:
            return self._held(name, record)
        parts = [self._index.records_of(r, tap, step, n).get("output.0") for r in self._index.dump.ranks]
        held = sorted((p for p in parts if p is not None and p.payload is not None), key=lambda p: p.layout.index)
        if [p.layout.index for p in held] != list(range(record.layout.size)):
            return {}
        return {name: torch.cat([self._index.read(p) for p in held], -1)}

    def _usual(self, rank: int, cls: str) -> Mapping[str, Any]:
        """The commonest value of each number among the attributes of a class's modules."""
        if (rank, cls) not in self._common:
            values: dict[str, Counter[Any]] = {}
            for m in self._index.modules.get(rank, {}).values():
                for key, value in m.attrs.items() if m.cls == cls else ():
                    if isinstance(value, (int, float)):
                        values.setdefault(key, Counter())[value] += 1
            self._common[rank, cls] = {key: c.most_common(1)[0][0] for key, c in values.items()}
        return self._common[rank, cls]

    def _bias(self, rank: int, gate: str) -> dict[str, Any]:
        """The correction that a router adds before it chooses, where there is one."""
        name = "e_score_correction_bias"
        return self._held(name, self._index.parameters.record(rank, None, f"{gate}/param.{name}"))

    def _adapters(self, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """The adapter of each row, and what they add to this layer or to the parts that are packed in it."""
        index, dump = self._index, self._index.dump
        held = index.records_of(rank, tap, step, n)
        space = next((dump.rows.get((rank, step, r.rows)) for r in held.values() if r.rows), None)
        if space is None:
            return {}
        requests = [(dump.requests.get((rank, s.req)), s.n) for s in space.segments]
        of_row = [None if r is None else r.adapter for r, rows in requests for _ in range(rows)]
        above, _, last = tap.rpartition(".")
        places = {"": tap} | {part: f"{above}.{part}" for part in PACKED.get(last, ())}
        weights: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in index.parameters.adapters(rank)}
        for part, path in places.items():
            found = index.parameters.of(rank, path)
            for role, tensor in found.items():
                if name := adapter_of(role):
                    weights.setdefault(name, {}).setdefault(part, {})[role.rpartition(".")[2]] = tensor
            for role in index.parameters.lacking(rank, path, found):
                weights.pop(adapter_of(role), None)  # fingerprints alone
        again = {adapter_of((s.role or "").removeprefix("param.")) for s in dump.skips if s.reason == ADAPTER_ANEW}
        return {"adapters": RowAdapters(tuple(of_row), weights, frozenset(again))}

    def _within(self, rank: int, tap: str, children: list[str], step: int) -> list[tuple[str, str, Record]]:
        """(path below the tap, role, record) of outputs inside, in the order of execution."""
        found = []
        start = 0 if tap == ROOT_TAP else len(tap) + 1
        for child in children:
            for (s, _), records in self._index.by_tap[rank, child].items():
                if s == step:
                    found += [(child[start:], role, r) for role, r in records.items() if not role.startswith("input.")]
        return sorted(found, key=lambda f: f[2].seq)
