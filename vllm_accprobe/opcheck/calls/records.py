"""From a dump's records to calls that can be run again.

The problem: a call is scattered over a dump: its inputs and outputs are records of a step, its parameters lie
elsewhere, perhaps under another path, what it looked back at was written by earlier steps, what its ranks added up by
other ranks. The idea: `Calls` indexes the dump once and builds one `Captured` at a time, tap by tap in the order of the
model and within a tap step by step, so that a cache can be filled on the way. Everything becomes a torch tensor of the
captured dtype, or of the coarser one whose numbers it holds (grid.py). Not here: a module's parameters
(parameters.py), what is done with a call (replay.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from vllm_accprobe.dump.opcalls import SEPARATOR, is_operator
from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import ROOT_TAP, OpCall, Record
from vllm_accprobe.opcheck.calls import grid
from vllm_accprobe.opcheck.calls.history import Past
from vllm_accprobe.opcheck.calls.operator_calls import STATISTICS, NotKept, op_call
from vllm_accprobe.opcheck.calls.parameters import ModuleParameters
from vllm_accprobe.opcheck.calls.prefix import Prefix, prefixes
from vllm_accprobe.opcheck.calls.weights import model_config
from vllm_accprobe.opcheck.floors.chance import RATE, Budget
from vllm_accprobe.opcheck.reference import Call

_PAST = {
    "Attention": ("key", "value"),
    "EncoderOnlyAttention": ("key", "value"),
    "MLAAttention": ("kv_c_normed", "k_pe"),
}
_SUMMED = ("RowParallelLinear", "VocabParallelEmbedding")
_SUMMED_INSIDE = ("MoERunner", "FusedMoE", "SharedFusedMoE")
_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Captured:
    """One call: where it stands in the dump, the call itself, and its records by role. missing: why it cannot be
    run; seq: its place in the order of execution where it has no record; crashed: missing tells of a crash."""

    tap: str
    rank: int
    step: int | None
    call: int
    what: Call
    records: Mapping[str, Record]
    missing: str = ""
    seq: int = 0
    crashed: bool = False


UNREAD = "a payload of it cannot be read"


def to_torch(array: np.ndarray, dtype: str) -> Any:
    """Stored bits of torch dtype ``dtype`` as a tensor that shares their memory. Raises ValueError for one that this
    torch does not have."""
    target = getattr(torch, dtype, None)
    if not isinstance(target, torch.dtype):
        raise ValueError(f"this torch has no dtype {dtype}")
    array = np.ascontiguousarray(array)
    if dtype in ("bool", "complex64", "complex128"):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_BITS[array.dtype.itemsize])).view(target)


class Calls:
    """The module calls of ``dump``. model: directory with config.json and, if any, the checkpoint; None: nothing of it.

    problems: sentences on what was asked for and is not there."""

    def __init__(self, dump: Dump, model: Path | None):
        self.dump = dump
        self.problems: list[str] = []
        self.modules = {rank: {m.tap: m for m in modules} for rank, modules in dump.modules.items()}
        self._calls: dict[tuple[int, str], dict[tuple[int, int], dict[str, Record]]] = {}
        self._ops: dict[tuple[int, str], list[OpCall]] = {}
        self._op_records: dict[tuple[int, str], dict[tuple[int | None, int], dict[str, Record]]] = {}
        for op in dump.ops:
            self._ops.setdefault((op.rank, op.tap), []).append(op)
        for r in dump.records:
            if is_operator(r.tap) or (r.rank, r.tap) in self._ops:
                self._op_records.setdefault((r.rank, r.tap), {}).setdefault((r.step, r.call), {})[r.role] = r
            elif r.step is not None:
                self._calls.setdefault((r.rank, r.tap), {}).setdefault((r.step, r.call), {})[r.role] = r
        self._children: dict[tuple[int, str], list[str]] = {}
        for rank, tap in self._calls:
            parent = tap
            if tap != ROOT_TAP:
                self._children.setdefault((rank, ROOT_TAP), []).append(tap)
            while "." in parent:
                parent = parent.rpartition(".")[0]
                self._children.setdefault((rank, parent), []).append(tap)
        self._common: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._keeps: Mapping[str, str] | None = None
        self.config = model_config(model)
        self.parameters = ModuleParameters(dump, model, self.modules, self.read)
        if self.parameters.problem:
            self.problems.append(self.parameters.problem)
        self._shared: dict[int, Mapping[int, Prefix]] = {}

    def budget(self, rate: float = RATE) -> Budget:
        """The rate divided over what the dump holds: outputs of calls, and of taps."""
        outputs, taps = 0, set()
        for r in self.dump.records:
            if r.step is not None and r.role.startswith(("output", "inplace")):
                outputs += 1
                taps.add((r.rank, r.tap, r.role))
        return Budget(rate, max(outputs, 1), max(len(taps), 1))

    def taps(self) -> list[tuple[int, str, str]]:
        """(rank, tap, class) of everything that was called, ranks after one another, in the order of the model."""
        order = {(rank, tap): m.index for rank, named in self.modules.items() for tap, m in named.items()}
        found = [(rank, tap, next(iter(next(iter(c.values())).values())).cls) for (rank, tap), c in self._calls.items()]
        found += [(rank, tap, ops[0].op) for (rank, tap), ops in self._ops.items()]

        def place(f: tuple[int, str, str]) -> tuple[int, int, int]:
            module, _, op = f[1].partition(SEPARATOR)
            return f[0], order.get((f[0], module), 1 << 40), len(op) > 0

        return sorted(found, key=place)

    def of(
        self, rank: int, tap: str, *, begins: Callable[[int | None, int], object] = lambda step, call: None,
        crashed: Mapping[tuple[int | None, int], str] = MappingProxyType({}),
    ) -> Iterator[Captured]:  # fmt: skip
        """The calls of one tap, step by step. Records without payload make a call that says what it misses.

        begins: told step and ordinal of each call before anything of it is read; crashed: calls that are not to be
        touched, with the reason."""
        if (rank, tap) in self._ops:
            yield from self._of_operator(rank, tap, begins, crashed)
            return
        calls = self._calls[rank, tap]
        cls = next(iter(next(iter(calls.values())).values())).cls
        names = _PAST.get(cls)
        past = Past(names, self._prefixes(rank)) if names else None
        self.parameters.forget()
        for (step, n), records in sorted(calls.items()):
            begins(step, n)
            if (step, n) in crashed:
                yield Captured(tap, rank, step, n, Call(tap, cls), records, crashed[step, n], crashed=True)
                continue
            absent = [role for role, r in records.items() if r.payload is None]
            if absent:
                empty = Call(tap, cls)
                yield Captured(tap, rank, step, n, empty, records, STATISTICS)
                continue
            try:
                what = self.call(rank, tap, cls, records, self.read)
                extra = self._extra(what, rank, tap, step, n)
            except DumpError as why:  # one payload of it, or of what it needs, cannot be read
                yield Captured(tap, rank, step, n, Call(tap, cls), records, f"{UNREAD} ({why})")
                continue
            if past is not None:
                extra |= self._cache(past, what, rank, step, records)
            what = grid.settled(replace(what, extra=extra), self.keeps)
            yield Captured(tap, rank, step, n, what, records)

    def _of_operator(
        self, rank: int, tap: str, begins: Callable[[int | None, int], object],
        crashed: Mapping[tuple[int | None, int], str],
    ) -> Iterator[Captured]:  # fmt: skip
        self.parameters.forget()
        held = self._op_records.get((rank, tap), {})
        for op in self._ops[rank, tap]:
            records = held.get((op.step, op.call), {})
            begins(op.step, op.call)
            if (op.step, op.call) in crashed:
                why = crashed[op.step, op.call]
                yield Captured(tap, rank, op.step, op.call, Call(tap, op.op), records, why, op.seq, True)
                continue
            try:
                what = op_call(op, records, self.read, partial(self.parameters.record, rank))
            except (NotKept, DumpError) as why:
                missing = f"{UNREAD} ({why})" if isinstance(why, DumpError) else str(why)
                yield Captured(tap, rank, op.step, op.call, Call(tap, op.op), records, missing, op.seq)
                continue
            if is_operator(op.tap) and not op.op.startswith("aten.") and op.module is not None:
                what = replace(what, params=self.parameters.of(rank, op.module))
            missing = "" if what.outputs else "nothing came out of it that was captured"
            yield Captured(tap, rank, op.step, op.call, grid.settled(what, self.keeps), records, missing, op.seq)

    def operator(self, captured: Captured) -> OpCall | None:
        """The journal's line of an operator's call; None for a module's."""
        ops = self._ops.get((captured.rank, captured.tap), ())
        return next((o for o in ops if (o.step, o.call) == (captured.step, captured.call)), None)

    def keeps(self) -> Mapping[str, str]:
        """Container → the coarser dtype whose numbers this dump keeps in it (grid.kept); reads some calls once."""
        if self._keeps is None:
            self._keeps = grid.kept(self._looked_at(), {r.dtype for r in self.dump.records})
        return self._keeps

    def _looked_at(self) -> Iterator[grid.Sight]:
        for rank, tap, cls in grid.spread(self.taps()):
            try:
                yield from grid.sights(tap, self._bare(rank, tap, cls))
            except (NotKept, ValueError, DumpError):
                continue

    def _bare(self, rank: int, tap: str, cls: str) -> Call:
        """The first call of a tap, what goes in and what comes out. Raises NotKept, ValueError, DumpError."""
        if (rank, tap) in self._ops:
            op = self._ops[rank, tap][0]
            records = self._op_records.get((rank, tap), {}).get((op.step, op.call), {})
        else:
            op, (_, records) = None, min(self._calls[rank, tap].items(), key=lambda c: c[0])
        if any(r.payload is None or math.prod(r.shape) > grid.LARGEST for r in records.values()):
            raise NotKept("not looked at")
        if op is not None:
            return op_call(op, records, self.read, partial(self.parameters.record, rank))
        read = {role: self.read(r) for role, r in records.items()}
        inputs = {role: t for role, t in read.items() if role.startswith("input.")}
        return Call(tap, cls, inputs, outputs={role: t for role, t in read.items() if role not in inputs})

    def read(self, record: Record) -> Any:
        return to_torch(self.dump.read(record), record.dtype)

    def call(
        self, rank: int, tap: str, cls: str, records: Mapping[str, Record], read: Callable[[Record], Any]
    ) -> Call:  # fmt: skip
        """A module's call from its records. read: gives a record's tensor."""
        module = self.modules.get(rank, {}).get(tap)
        parent = self.modules.get(rank, {}).get(tap.rpartition(".")[0])
        inputs = {r.removeprefix("input."): read(x) for r, x in records.items() if r.startswith("input.")}
        outputs = {r: read(x) for r, x in records.items() if r.startswith(("output.", "inplace."))}
        return Call(
            name=tap,
            cls=cls,
            inputs=inputs,
            params=self.parameters.of(rank, tap),
            attrs=dict(module.attrs) if module else {},
            parent=dict(parent.attrs) if parent else {},
            config=self._config(tap),
            outputs=outputs,
        )

    def _config(self, tap: str) -> Mapping[str, Any]:
        part = "vision_config" if tap.startswith(("visual", "vision", "model.visual")) else "text_config"
        inner = self.config.get(part)
        return {**self.config, **inner} if isinstance(inner, dict) else self.config

    # --- what other records tell -------------------------------------------------------------------------------

    def _prefixes(self, rank: int) -> Mapping[int, Prefix]:
        if rank not in self._shared:
            self._shared[rank] = prefixes(self.dump, rank)
        return self._shared[rank]

    def _cache(self, past: Past, what: Call, rank: int, step: int, records: Mapping[str, Record]) -> dict[str, Any]:
        record = next((r for role, r in records.items() if role == f"input.{past.names[0]}"), None)
        space = self.dump.rows.get((rank, step, record.rows)) if record is not None and record.rows else None
        if space is None or any(n not in what.inputs for n in past.names):
            return {}
        if any(len(what.inputs[n]) != space.n for n in past.names):
            return {}
        past.write(space, what.inputs)
        return {"cache": past.view(space)}

    def _extra(self, what: Call, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        extra: dict[str, Any] = {"usual": self._usual(rank, what.cls)}
        if what.cls in _SUMMED and "tp_size" not in what.attrs:  # another tool's dump: is its output a summand?
            extra["apart"] = len(self.dump.ranks) > 1
        elif what.cls in _SUMMED and int(what.attrs["tp_size"]) > 1:
            extra["ranks"] = self._ranks(what, tap, step, n)
        if what.cls == "LogitsProcessor":
            head = tap.rpartition("logits_processor")[0] + "lm_head"
            extra |= self._gathered("lm_head", rank, head, step, n)
        if what.cls == "Sampler":
            for other in ("logits_processor", "language_model.logits_processor"):
                extra |= self._other("logits", rank, other, step, n, "output.0")
        if what.cls == "MLAAttention":
            weight = self.parameters.of(rank, f"{tap}.kv_b_proj")
            extra |= {"kv_b_proj": weight["weight"]} if weight.get("weight") is not None else {}
        if tap.endswith(".routed_experts.quant_method"):
            block = tap.removesuffix(".routed_experts.quant_method")
            extra |= self._other("router_logits", rank, f"{block}.gate", step, n, "output.0")
            extra |= self._other("router_logits", rank, f"{block.rpartition('.')[0]}.gate", step, n, "output.0")
            gates = (f"{block}.gate", f"{block.rpartition('.')[0]}.gate")
            extra["gate"] = {n: t for g in gates for n, t in self._bias(rank, g).items()}
        extra |= self._inside(rank, tap, step)
        if what.cls in _SUMMED_INSIDE and len(self.dump.ranks) > 1:
            extra |= self._parts(what, rank, tap, step, n, extra)
        return extra

    def _inside(self, rank: int, tap: str, step: int) -> dict[str, Any]:
        children = self._children.get((rank, tap))
        return {"children": self._within(rank, tap, children, step), "read": self.read} if children else {}

    def _parts(self, what: Call, rank: int, tap: str, step: int, n: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The other ranks' calls of a block whose parts each have a share of the sum: how many, and they."""
        mine = self._calls[rank, tap][step, n].get("output.0")
        inner = [r for _, role, r in extra.get("children", ()) if role == "output.0" and r.layout.kind == "partial"]
        if mine is None or mine.layout.kind == "partial" or not inner:
            return {}
        ranks = []
        for other in self.dump.ranks:
            records = self._calls.get((other, tap), {}).get((step, n))
            if records and all(r.payload is not None for r in records.values()):
                part = self.call(other, tap, what.cls, records, self.read)
                ranks.append(replace(part, extra=self._inside(other, tap, step)))
        return {"partial": inner[-1].layout.size, "ranks": ranks}

    def _other(self, name: str, rank: int, tap: str, step: int, n: int, role: str) -> dict[str, Any]:
        record = self._calls.get((rank, tap), {}).get((step, n), {}).get(role)
        return {name: self.read(record)} if record is not None and record.payload is not None else {}

    def _gathered(self, name: str, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """``output.0`` of a tap, its ranks' parts one after the other where it is cut along its columns."""
        record = self._calls.get((rank, tap), {}).get((step, n), {}).get("output.0")
        if record is None or record.layout.kind != "shard" or record.layout.dim != -1:
            return self._other(name, rank, tap, step, n, "output.0")
        parts = [self._calls.get((r, tap), {}).get((step, n), {}).get("output.0") for r in self.dump.ranks]
        held = sorted((p for p in parts if p is not None and p.payload is not None), key=lambda p: p.layout.index)
        if [p.layout.index for p in held] != list(range(record.layout.size)):
            return {}
        return {name: torch.cat([self.read(p) for p in held], -1)}

    def _usual(self, rank: int, cls: str) -> Mapping[str, Any]:
        """The commonest value of each number among the attributes of a class's modules."""
        if (rank, cls) not in self._common:
            values: dict[str, Counter[Any]] = {}
            for m in self.modules.get(rank, {}).values():
                for key, value in m.attrs.items() if m.cls == cls else ():
                    if isinstance(value, (int, float)):
                        values.setdefault(key, Counter())[value] += 1
            self._common[rank, cls] = {key: c.most_common(1)[0][0] for key, c in values.items()}
        return self._common[rank, cls]

    def _bias(self, rank: int, gate: str) -> dict[str, Any]:
        """The correction that a router adds before it chooses, where there is one."""
        name = "e_score_correction_bias"
        record = self.parameters.record(rank, f"{gate}/param.{name}")
        return {name: self.read(record)} if record is not None and record.payload is not None else {}

    def _ranks(self, what: Call, tap: str, step: int, n: int) -> list[Call]:
        calls = []
        for rank in self.dump.ranks:
            records = self._calls.get((rank, tap), {}).get((step, n))
            if records and all(r.payload is not None for r in records.values()):
                calls.append(self.call(rank, tap, what.cls, records, self.read))
        return sorted(calls, key=lambda c: int(c.attrs.get("tp_rank", 0)))

    def _within(self, rank: int, tap: str, children: list[str], step: int) -> list[tuple[str, str, Record]]:
        """(path below the tap, role, record) of outputs inside, in the order of execution."""
        found = []
        start = 0 if tap == ROOT_TAP else len(tap) + 1
        for child in children:
            for (s, _), records in self._calls[rank, child].items():
                if s == step:
                    found += [(child[start:], role, r) for role, r in records.items() if not role.startswith("input.")]
        return sorted(found, key=lambda f: f[2].seq)


def as_numbers(tensor: Any) -> np.ndarray:
    """A tensor as numpy numbers that hold its values exactly: float64, or int64 for integers and bool."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return np.asarray((tensor.double() if floating else tensor.long()).numpy())
