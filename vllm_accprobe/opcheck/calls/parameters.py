"""A dump's parameters as tensors: the dump's own, or the checkpoint's.

The problem: a parameter is recorded once, perhaps under another path of the same module; a kernel may have packed it
before it could be captured; or only its fingerprint was kept. The idea: `ModuleParameters` gives a module what a
formula needs, from the dump where that is still it, else from the checkpoint: what vLLM fuses is put together from its
parts, paths that differ are rewritten, and of each part a rank has the piece that its shape leaves. A piece is accepted
where the fingerprint of the capture (smallest and largest number, hash of a sample) is the same. After a reload or a
sync a dump's parameters are not those of later calls, until another event brings the first values back
(`WeightsSince`). safetensors alone are read, nothing is unpickled.
Elsewhere: whether an event left the right weights (judge/weights.py), whether the parameters are right
(comparison/measure/measurer.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.dump.decode import decode, load, object_in
from vllm_accprobe.dump.journal import LOADED, NO_LIVES, PACKED, RELOAD, SYNC, WAKE, Lives, is_operator
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.record_table import of_sites
from vllm_accprobe.dump.schema import ADAPTER_ROLE, Module, Record
from vllm_accprobe.opcheck.calls.operator_calls import NotKept
from vllm_accprobe.opcheck.reference import Params

_NAMES = {RELOAD: "a reload", SYNC: "a weight sync", WAKE: "waking up"}


class WeightsSince:
    """lives: of one dump, all ranks."""

    def __init__(self, lives: Lives):
        self._at: dict[tuple[int, str], list[tuple[int, str]]] = {}
        events = {(e.rank, e.number): e for e in lives.events}
        prints: dict[tuple[int, int], dict[tuple[str, str], dict[str, str]]] = {}
        for p in lives.prints:
            if p.form in (LOADED, PACKED):
                prints.setdefault((p.rank, p.life), {}).setdefault((p.tap, p.name), {})[p.form] = p.order
        first: dict[tuple[int, str, str, str], str] = {}
        other: dict[tuple[int, str], set[str]] = {}
        for event in sorted(events.values(), key=lambda e: e.number):
            rank = event.rank
            for (tap, name), forms in prints.get((rank, event.number), {}).items():
                unchanged = {f: first.setdefault((rank, tap, name, f), order) == order for f, order in forms.items()}
                # As it was loaded, where that was seen: packing again may order the same values otherwise.
                same = unchanged[LOADED] if LOADED in unchanged else unchanged[PACKED]
                changed = other.setdefault((rank, tap), set())
                (changed.discard if same else changed.add)(name)
                if event.kind not in _NAMES:
                    continue
                steps = self._at.setdefault((rank, tap), [])
                why = f"{_NAMES[event.kind]} before step {event.step} changed its weights; the dump holds those before"
                if steps and steps[-1][0] == event.step:
                    steps.pop()
                steps.append((event.step, why if changed else ""))

    def why_not(self, rank: int, taps: Iterable[str], step: int | None) -> str:
        """Why the dump's parameters of ``taps`` are not those of a call in ``step``; "" where they are, as far as
        fingerprints were taken."""
        for tap in taps if step is not None and self._at else ():
            steps = self._at.get((rank, tap), [])
            at = bisect_right(steps, step, key=lambda s: s[0]) - 1
            if at >= 0 and steps[at][1]:
                return steps[at][1]
        return ""


_MAX_JSON = 64 << 20
_FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_PATHS: tuple[tuple[str, str], ...] = (
    (r"\.mla_attn\.mla_attn\.", "."),
    (r"\.mla_attn\.", "."),
    (r"\.experts\._shared_experts\._layer\.expert_gate\b", ".shared_expert_gate"),
    (r"\.experts\._shared_experts\._layer\.", ".shared_expert."),
    (r"\.experts\._shared_experts\._layer\.", ".shared_experts."),
    (r"\.experts\.gate\b", ".gate"),
    (r"^language_model\.model\.", "model."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.model\.", "language_model."),
    (r"^language_model\.", ""),
    (r"^visual\.", "model.visual."),
)
_EXPERTS = {"w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")), "w2_weight": (("down_proj",), ("w2",))}


def _transposed(config: Mapping[str, Any], value: Any) -> Any:
    return value.t().contiguous() if value.dim() == 2 else value


def _by_kind(config: Mapping[str, Any], value: Any) -> Any | None:
    """Rows of one group after the other, [groups, queries, key, value] heads, as all queries, all keys, all values."""
    heads = config.get("num_attention_heads", config.get("n_head"))
    groups = heads
    if config.get("new_decoder_architecture"):
        groups = config.get("num_kv_heads") or heads
    elif config.get("multi_query"):
        groups = 1
    if not isinstance(heads, int) or not isinstance(groups, int) or groups < 1 or heads % groups:
        return None
    each = heads // groups
    if value.shape[0] % (groups * (each + 2)):
        return None
    parts = value.reshape(groups, each + 2, -1, *value.shape[1:])
    kinds = parts[:, :each], parts[:, each:-1], parts[:, -1:]
    return torch.cat([kind.reshape(-1, *value.shape[1:]) for kind in kinds])


_ATTENTION = r"\.query_key_value\.(weight|bias)$"
_OTHER_FORMS: dict[str, tuple[tuple[str, Callable[[Mapping[str, Any], Any], Any | None]], ...]] = {
    "gpt2": ((r"\.(c_attn|c_proj|c_fc)\.weight$", _transposed),),  # a layer of transformers that is no Linear
    "bloom": ((_ATTENTION, _by_kind),),
    "falcon": ((_ATTENTION, _by_kind),),
}
"""model_type → (which parameters, what vLLM's loader makes of them) [vllm/model_executor/models]."""


class Checkpoint:
    """The safetensors files of one directory. Raises OSError or ValueError where they cannot be read."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._config: Mapping[str, Any] | None = None
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            named = load(dict[str, Any], index, _MAX_JSON).get("weight_map", {})
            for name, file in decode(dict[str, str], named, f"{index}: weight_map").items():
                if "/" not in file and "\\" not in file:
                    self._files[name] = directory / file
        else:
            for path in sorted(directory.glob("*.safetensors")):
                for name in self._handle(path).keys():  # noqa: SIM118  a handle is no dict
                    self._files[name] = path

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = safe_open(str(path), framework="pt")
        return self._open[path]

    def get(self, tap: str, param: str, share: Share | None = None) -> Any | None:
        """The parameter ``param`` of the engine's module ``tap``, a torch tensor, or None. share: which piece of it,
        None for all."""
        for change in self._other_form(f"{tap}.{param}"):
            whole = self._get(tap, param, None)
            if whole is None or whole.dim() > 2:
                return None
            whole = change(whole)
            if whole is None or share is None or not share.shape:
                return whole
            cuts = share.cuts([tuple(whole.shape)])
            found = None if cuts is None else whole[cuts[0]] if cuts[0] else whole
            return found if found is not None and tuple(found.shape) == share.shape else None
        return self._get(tap, param, share)

    def _other_form(self, path: str) -> Sequence[Callable[[Any], Any | None]]:
        """How vLLM's loaders rewrite this parameter, where they do."""
        if self._config is None:
            self._config = model_config(self.directory)
        forms = _OTHER_FORMS.get(str(self._config.get("model_type")), ())
        return [functools.partial(change, self._config) for pattern, change in forms if re.search(pattern, path)][:1]

    def _get(self, tap: str, param: str, share: Share | None) -> Any | None:
        for path in _spellings(f"{tap}.{param}"):
            names = [path]
            for fused, parts in _FUSED.items():
                if path not in self._files and f".{fused}." in path:
                    names = [path.replace(f".{fused}.", f".{p}.") for p in parts]
            if all(name in self._files for name in names):
                return self._piece(names, share)
            match = re.fullmatch(r"(.*\.experts)\.(?:routed_experts\.)?(w13_weight|w2_weight)", path)
            if match:
                found = self._experts(match[1], match[2], share)
                if found is not None:
                    return found
        return None

    def _piece(self, names: Sequence[str], share: Share | None) -> Any | None:
        """The tensors one below the other, as far as they are the share's; None where that has another shape."""
        if share is None or not share.shape:
            whole = [self._handle(self._files[name]).get_tensor(name) for name in names]
            return torch.cat(whole) if len(whole) > 1 else whole[0]
        handles = [self._handle(self._files[name]).get_slice(name) for name in names]
        cuts = share.cuts([tuple(h.get_shape()) for h in handles])
        if cuts is None:
            return None
        parts = [h[cut] if cut else h[:] for h, cut in zip(handles, cuts, strict=True)]
        found = torch.cat(parts) if len(parts) > 1 else parts[0]
        if share.shape and found.shape[1:] == share.shape[1:] and len(found) < share.shape[0]:  # a padded vocabulary
            found = torch.cat((found, found.new_zeros(share.shape[0] - len(found), *found.shape[1:])))
        return found if tuple(found.shape) == share.shape else None

    def _experts(self, path: str, kind: str, share: Share | None) -> Any | None:
        each = None if share is None else Share(share.shape[1:], share.rank, share.size)
        for parts in _EXPERTS[kind]:
            experts: list[Any] = []
            while all(f"{path}.{len(experts)}.{p}.weight" in self._files for p in parts):
                found = self._piece([f"{path}.{len(experts)}.{p}.weight" for p in parts], each)
                if found is None:
                    return None
                experts.append(found)
            if experts:
                return torch.stack(experts)
        return None


@dataclass(frozen=True)
class Share:
    """What a rank had of a parameter: a tensor of this shape; it was the ``rank``-th of ``size``."""

    shape: tuple[int, ...]
    rank: int = 0
    size: int = 1

    def cuts(self, wholes: Sequence[tuple[int, ...]]) -> list[tuple[slice, ...]] | None:
        """Of each of the checkpoint's tensors, which lie one below the other, the piece that this rank has; () for all
        of it. None where none fits."""
        if not self.shape or any(len(w) != len(self.shape) for w in wholes):
            return None
        rows, alike = sum(w[0] for w in wholes), all(w[1:] == self.shape[1:] for w in wholes)
        if alike and rows == self.shape[0]:
            return [() for _ in wholes]
        if alike and rows == self.shape[0] * self.size and all(w[0] % self.size == 0 for w in wholes):
            return [_rows(w[0] // self.size, self.rank) for w in wholes]
        if alike and len(wholes) == 1:  # a vocabulary, which is padded
            n, first = self.shape[0], self.rank * self.shape[0]
            return [(slice(min(first, rows), min(first + n, rows)),)] if n * self.size >= rows else None
        if alike and len(wholes) == 3 and wholes[1][0] == wholes[2][0]:  # fewer key heads than ranks
            query = wholes[0][0] // self.size
            key, rest = divmod(self.shape[0] - query, 2)
            if rest or key <= 0 or wholes[1][0] % key or self.size % (wholes[1][0] // key):
                return None
            at = self.rank // (self.size // (wholes[1][0] // key))
            return [_rows(query, self.rank), _rows(key, at), _rows(key, at)]
        columns = len(self.shape) > 1 and all(w[1] == self.shape[1] * self.size for w in wholes)
        if columns and rows == self.shape[0]:
            n = self.shape[1]
            return [(slice(None), slice(self.rank * n, (self.rank + 1) * n)) for _ in wholes]
        return None


def _rows(n: int, at: int) -> tuple[slice, ...]:
    return (slice(at * n, (at + 1) * n),)


def _spellings(name: str) -> Iterator[str]:
    """The name itself, then what each rewriting of its path makes of it and of one another's results."""
    seen = [name]
    for pattern, new in _PATHS:
        seen += [s for s in (re.sub(pattern, new, old) for old in list(seen)) if s not in seen]
    yield from seen


def model_config(directory: Path | None) -> Mapping[str, Any]:
    """config.json of a model directory, {} where there is none that can be read."""
    return object_in(directory and directory / "config.json", _MAX_JSON)


_ALIAS = "another name of a captured module"
_PARAMETERS_EXPERTS = ".routed_experts.quant_method"
_SAMPLE = 4096
"""Elements of a fingerprint's sample, as capture/taps/params.py takes them (a test holds the two equal)."""
_EXPERTS_OF_ROW = 8
"""Chosen: experts of a row, where it was not recorded how many there are."""


class ModuleParameters:
    """model: directory of the checkpoint or None; read: a record's tensor. problem: why the checkpoint cannot be
    read, "" otherwise."""

    def __init__(
        self, dump: Dump, model: Path | None, modules: Mapping[int, Mapping[str, Module]], read: Callable[[Record], Any]
    ):
        self._modules, self._read = modules, read
        self._records: dict[tuple[int, str], dict[str, Record]] = {}
        parameters = list(of_sites(dump.records, lambda site: site.parameter))
        for r in parameters:
            if not is_operator(r.tap):
                self._records.setdefault((r.rank, r.tap), {})[r.role.removeprefix("param.")] = r
        self._aliases = {s.tap for s in dump.skips if s.reason == _ALIAS}
        numbered = ((place, modules.get(place[0], {}).get(place[1])) for place in self._records)
        self._same = {(rank, m.index, m.cls): tap for (rank, tap), m in numbered if m is not None}
        self._packed = any(r.shape == (0,) for r in parameters)
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
        """Lets go of what was read: one module's parameters are kept at a time."""
        self._known.clear()

    def why_not(self, rank: int, tap: str, step: int | None) -> str:
        """Why a call of ``tap`` in ``step`` had other parameters than the dump's; "" where nothing says so."""
        owners = [self._owner(rank, tap, self._modules.get(rank, {}).get(tap)), f"{tap}.kv_b_proj"]
        if tap.endswith(_PARAMETERS_EXPERTS):  # what chose them goes into the reference, too
            block = tap.removesuffix(_PARAMETERS_EXPERTS)
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
        records = self._records.get((rank, owner), {})
        for name, record in records.items():
            packed = self._packed and name in ("w13_weight", "w2_weight")
            value = None
            if self._checkpoint is not None and (record.payload is None or record.shape == (0,) or packed):
                value, why[name] = self._of_checkpoint(self._checkpoint, tap, owner, name, record, module)
            if value is None and record.payload is not None and not packed:
                value = self._read(record)
            if value is not None:
                found[name] = value
        self._known[rank, tap] = params = Params(found, {n: w for n, w in why.items() if w}, records.keys() - found)
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
            roles = (role for (r, _), handles in self._records.items() if r == rank for role in handles)
            self._adapters[rank] = frozenset(filter(None, map(adapter_of, roles)))
        return self._adapters[rank]

    def lacking(self, rank: int, tap: str, found: Mapping[str, Any]) -> dict[str, Record]:
        """A module's parameters of which only statistics are here: by name, those that are not among ``found``."""
        owner = self._owner(rank, tap, self._modules.get(rank, {}).get(tap))
        records, known = self._records.get((rank, owner), {}), set(found)
        return {n: r for n, r in records.items() if n not in known and r.payload is None and 0 not in r.shape}

    def _owner(self, rank: int, tap: str, module: Module | None) -> str:
        """The path under which a module's parameters were recorded: a module with two names has them under one."""
        if (rank, tap) in self._records:
            return tap
        if tap.endswith(".quant_method"):
            return tap.rpartition(".")[0]
        if module is not None and (same := self._same.get((rank, module.index, module.cls))):
            return same
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
        from vllm_accprobe.dump.journal_writer import digest

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
