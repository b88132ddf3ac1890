"""A dump's parameters as tensors: the dump's own, or the checkpoint's.

The problem: a parameter is recorded once, perhaps under another path of the same module; a kernel may have packed it
before it could be captured; or only its fingerprint was kept. The idea: a module asks by its path and gets what a
formula needs, from the dump where that is still it, else from the checkpoint, as its rank had it: that is believed
where the fingerprint that the capture left (smallest and largest number, hash of a sample) is the same. Not here: calls
(records.py), how a checkpoint's tensors are put together (weights.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.dump.opcalls import is_operator
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ADAPTER_ROLE, Module, Record
from vllm_accprobe.dump.weights.weight_life import NO_LIVES
from vllm_accprobe.opcheck.calls.operator_calls import NotKept
from vllm_accprobe.opcheck.calls.weights import Checkpoint, Share
from vllm_accprobe.opcheck.calls.weights_since import WeightsSince
from vllm_accprobe.opcheck.reference import Params

_ALIAS = "another name of a captured module"
_EXPERTS = ".routed_experts.quant_method"
_SAMPLE = 4096
"""Elements of a fingerprint's sample, as capture/taps/params.py takes them (a test holds the two equal)."""
_EXPERTS_OF_ROW = 8
"""Chosen: experts of a row, where nobody recorded how many there are."""


class ModuleParameters:
    """model: directory of the checkpoint or None; read: a record's tensor. problem: why the checkpoint cannot be
    read, "" otherwise."""

    def __init__(
        self, dump: Dump, model: Path | None, modules: Mapping[int, Mapping[str, Module]], read: Callable[[Record], Any]
    ):
        self._modules, self._read = modules, read
        self._records: dict[tuple[int, str], dict[str, Record]] = {}
        for r in dump.records:
            if r.step is None and not is_operator(r.tap):
                self._records.setdefault((r.rank, r.tap), {})[r.role.removeprefix("param.")] = r
        self._aliases = {s.tap for s in dump.skips if s.reason == _ALIAS}
        self._packed = any(r.shape == (0,) for r in dump.records if r.step is None)
        self._known: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._adapters: dict[int, frozenset[str]] = {}
        self._since = WeightsSince(getattr(dump, "lives", NO_LIVES))
        self._checkpoint: Checkpoint | None = None
        self.problem = ""
        if model is not None and model.is_dir():
            try:
                self._checkpoint = Checkpoint(model)
            except Exception as error:  # safetensors raises errors of its own
                self.problem = f"the checkpoint in {model} cannot be read: {error}"

    def forget(self) -> None:
        """Lets go of what was read: one module's parameters are held at a time."""
        self._known.clear()

    def why_not(self, rank: int, tap: str, step: int | None) -> str:
        """Why a call of ``tap`` in ``step`` had other parameters than the dump's; "" where nothing says so."""
        owners = [self._owner(rank, tap, self._modules.get(rank, {}).get(tap)), f"{tap}.kv_b_proj"]
        if tap.endswith(_EXPERTS):  # what chose them goes into the reference, too
            block = tap.removesuffix(_EXPERTS)
            owners += [f"{block}.gate", f"{block.rpartition('.')[0]}.gate"]
        return self._since.why_not(rank, owners, step)

    def record(self, rank: int, step: int | None, name: str) -> Record | None:
        """The record of ``<tap>/param.<name>``. Raises NotKept where it is not what it was in ``step``."""
        tap, _, role = name.rpartition("/param.")
        if why := self._since.why_not(rank, (tap,), step):
            raise NotKept(why)
        return self._records.get((rank, tap), {}).get(role)

    def of(self, rank: int, tap: str) -> Mapping[str, Any]:
        """A module's tensors: the dump's, and the checkpoint's where those are no longer what a formula needs."""
        if (rank, tap) in self._known:
            return self._known[rank, tap]
        module = self._modules.get(rank, {}).get(tap)
        owner = self._owner(rank, tap, module)
        found, why = {}, {}
        for name, record in self._records.get((rank, owner), {}).items():
            packed = self._packed and name in ("w13_weight", "w2_weight")
            value = None
            if self._checkpoint is not None and (record.payload is None or record.shape == (0,) or packed):
                value, why[name] = self._of_checkpoint(self._checkpoint, tap, owner, name, record, module)
            if value is None and record.payload is not None and not packed:
                value = self._read(record)
            if value is not None:
                found[name] = value
        self._known[rank, tap] = params = Params(found, {n: w for n, w in why.items() if w})
        return params

    def _of_checkpoint(
        self, checkpoint: Checkpoint, tap: str, owner: str, name: str, record: Record, module: Module | None
    ) -> tuple[Any | None, str]:  # fmt: skip
        """(a parameter as this rank had it or None, why it is not believed)."""
        size, rank = (int(module.attrs.get(n, d)) if module else d for n, d in (("tp_size", 1), ("tp_rank", 0)))
        share = None if 0 in record.shape else Share(record.shape, rank, size)
        if share is None and size > 1:
            return None, ""
        for path in dict.fromkeys((tap, owner)):
            value = checkpoint.get(path, name, share)
            if value is not None and share is not None and record.sample is not None:
                value = value.to(getattr(torch, record.dtype, value.dtype))
                if not _same_fingerprint(value, record):
                    return None, f"parameter {name} of the checkpoint is not what was loaded, by its fingerprint"
            if value is not None:
                return value, ""
        return None, ""

    def largest(self, rank: int, tap: str) -> int:
        """Multiplications that a row takes with a module's matrices: their elements, of experts' those of the ones
        that a row goes to."""
        module = self._modules.get(rank, {}).get(tap)
        found = 0
        for r in self._records.get((rank, self._owner(rank, tap, module)), {}).values():
            if len(r.shape) == 2 and not r.role.startswith(f"param.{ADAPTER_ROLE}"):
                found += math.prod(r.shape)
            elif len(r.shape) == 3:
                chosen = int(module.attrs.get("top_k", 0)) if module is not None else 0
                found += math.prod(r.shape[1:]) * min(chosen or _EXPERTS_OF_ROW, r.shape[0])
        return found

    def adapters(self, rank: int) -> frozenset[str]:
        """Names of the LoRA adapters of which the dump has a weight anywhere."""
        if rank not in self._adapters:
            roles = (role for (r, _), held in self._records.items() if r == rank for role in held)
            self._adapters[rank] = frozenset(filter(None, map(adapter_of, roles)))
        return self._adapters[rank]

    def lacking(self, rank: int, tap: str, found: Mapping[str, Any]) -> dict[str, Record]:
        """A module's parameters of which only statistics are here: by name, those that are not among ``found``."""
        owner = self._owner(rank, tap, self._modules.get(rank, {}).get(tap))
        records = self._records.get((rank, owner), {})
        return {n: r for n, r in records.items() if n not in found and r.payload is None and 0 not in r.shape}

    def _owner(self, rank: int, tap: str, module: Module | None) -> str:
        """The path under which a module's parameters were recorded: a module with two names has them under one."""
        if (rank, tap) in self._records:
            return tap
        if tap.endswith(".quant_method"):
            return tap.rpartition(".")[0]
        last = tap.rpartition(".")[2]
        best, length = tap, 0
        for r, other in self._records:
            if r != rank or other not in self._aliases or not other.rpartition(".")[2].endswith(last):
                continue
            named = self._modules.get(rank, {}).get(other)
            if module is None or named is None or (named.cls, named.attrs) != (module.cls, module.attrs):
                continue
            common = _common(tap, other)
            if common > length:
                best, length = other, common
        return best

    def stored(self) -> Iterator[tuple[int, str, str, Record, Any | None]]:
        """(rank, tap, class, record, the checkpoint's tensor or None) of each parameter that the dump holds whole."""
        if self._checkpoint is None:
            return
        for (rank, tap), params in self._records.items():
            module = self._modules.get(rank, {}).get(tap)
            for name, record in params.items():
                if record.payload is not None and record.layout.kind == "replicated" and 0 not in record.shape:
                    value = self._checkpoint.get(tap, name)
                    yield rank, tap, module.cls if module else record.cls, record, value


def _same_fingerprint(value: Any, record: Record) -> bool:
    """Whether a tensor has a record's sample (capture/taps/params.py) and its smallest and largest number."""
    flat, stats = value.contiguous().view(-1), record.stats
    with contextlib.suppress(ImportError):  # who reads dumps need not have xxhash
        from vllm_accprobe.dump.recorder.hashing import digest

        sample = flat[:: max(1, -(-flat.numel() // _SAMPLE))].contiguous()
        if digest([(sample.data_ptr(), sample.nbytes)]) != record.sample:
            return False
    if stats is None or stats.nan or not flat.is_floating_point() or flat.element_size() < 2:
        return True
    low, high = (float(x) for x in flat.aminmax())
    return (low, high) == (stats.min, stats.max)


def adapter_of(role: str) -> str:
    """The adapter whose weight ``lora.<adapter>.lora_a`` (or lora_b, scaling) is; "" for anything else."""
    name, _, what = role.removeprefix(ADAPTER_ROLE).rpartition(".")
    return name if role.startswith(ADAPTER_ROLE) and what in ("lora_a", "lora_b", "scaling") else ""


def _common(a: str, b: str) -> int:
    """How many leading components two paths share."""
    n = 0
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        n += 1
    return n
