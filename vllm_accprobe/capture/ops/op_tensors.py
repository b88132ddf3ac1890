"""What is stored of an operator's arguments and results: tensors, values, and the blocks of a cache that it touches.

The problem: arguments are tensors, lists, scalars, dtypes, devices and handles of libraries, and whoever replays the
call has only words; activations are in the dump already, weights are the same in every step, a cache has gigabytes of
other people's tokens, and some memory was never written. The idea: one walk gives each argument's VALUE and every
tensor with its role. The memory that a tensor lies in says what it is: activations are stored like all tensors, a
weight's bytes once per run, the rest is skipped by name. Of a cache those blocks are gathered that the call's block
tables, slot mappings or state indices name, behind block 0, which stands for none; the line says by which argument, in
which unit. On a device nothing is counted or sorted, which would wait for it.

Not here: the language of VALUES (dump/journal.py), when a call is taken (dispatch.py), replaying it (opcheck/calls/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from vllm_accprobe.capture.core.session import (
    OPERATOR,
    CellTicket,
    Session,
    Sites,
    StepState,
    Ticket,
    address,
    is_plain,
)
from vllm_accprobe.dump.journal import about_bytes
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.dump.stats import StatsCell

MOST_ITEMS = 1024
"""A longer list of an argument is not written."""
_DEPTH = 4

Found = list[tuple[str, torch.Tensor, dict[str, Any]]]
"""Role, tensor and the dict in its VALUE, in order."""

_words: dict[Any, str] = {}


def word(thing: Any) -> str:
    """``torch.bfloat16`` → ``bfloat16``; devices as they print. Remembered: printing costs a microsecond."""
    text = _words.get(thing)
    if text is None:
        text = _words[thing] = str(thing).replace("torch.", "")
    return text


def describe(role: str, tensor: torch.Tensor) -> dict[str, Any]:
    """What is written of every tensor, whatever becomes of its values."""
    strided = tensor.layout is torch.strided
    return {
        "role": role,
        "dtype": word(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()) if strided else [],
        "device": word(tensor.device),
    }


def inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Found) -> tuple[list[Any], dict[str, Any]]:
    """The VALUES of a call's arguments; their tensors are appended to ``found``."""
    values = [value(f"input.{i}", arg, found) for i, arg in enumerate(args)]
    named = {name: value(f"input.{name}", arg, found) for name, arg in kwargs.items()}
    return values, named


def outputs(result: Any, found: Found) -> list[Any]:
    """The VALUES of what came out: one for each thing returned."""
    if result is None:
        return []
    if isinstance(result, tuple):
        return [value(f"output.{i}", item, found) for i, item in enumerate(result)]
    return [value("output.0", result, found)]


def value(role: str, arg: Any, found: Found, depth: int = 0) -> Any:
    """The VALUE of one argument."""
    if isinstance(arg, torch.Tensor):
        about = describe(role, arg)
        found.append((role, arg, about))
        return {"tensor": about}
    kind = type(arg)
    if arg is None or kind is bool or kind is str:
        return arg
    if kind is int:
        return arg if abs(arg) < 1 << 53 else {"skipped": f"an integer of {arg.bit_length()} bits"}
    if kind is float:
        return _number(arg)
    if kind is complex:
        return {"complex": [_number(arg.real), _number(arg.imag)]}
    if isinstance(arg, (list, tuple)):
        if len(arg) > MOST_ITEMS or depth >= _DEPTH:
            return {"skipped": f"a list of {len(arg)} items"}
        return {"list": [value(f"{role}.{i}", item, found, depth + 1) for i, item in enumerate(arg)]}
    if kind is torch.dtype:
        return {"dtype": word(arg)}
    if kind is torch.device:
        return {"device": word(arg)}
    if kind is torch.layout:
        return {"layout": word(arg)}
    if kind is torch.memory_format:
        return {"memory_format": word(arg)}
    if kind is torch.SymInt or kind is torch.SymFloat or kind is torch.SymBool:
        return {"skipped": "a symbolic number"}
    if kind.__name__ == "LayerName" and isinstance(name := getattr(arg, "value", None), str):
        return name  # vLLM's wrapper of a module's path
    return {"skipped": f"a {kind.__name__}"}


def _number(number: float) -> Any:
    return number if math.isfinite(number) else {"float": repr(number)}


SMALL = 1 << 18
"""Bytes of a view into a cache that is taken as any other tensor (chosen)."""
TOO_MANY = "the KV cache, of which it touches more than VLLM_ACCPROBE_OPS_MAX_MB"
_TABLES = frozenset(("block_table", "block_tables", "page_table", "page_tables", "blocktable", "block_tables_lst"))
_SLOTS = frozenset(("slot_mapping", "slots", "slot_indices", "slot_mappings"))
_STATES = frozenset((
    "state_batch_indices", "dst_state_batch_indices", "conv_state_indices", "cache_indices", "initial_state_indices",
    "spec_state_indices", "ssm_state_indices", "state_indices", "block_mapping",
))  # fmt: skip
_LENGTHS = ("seq_lens", "context_lens", "seqused_k", "cache_seqlens", "actual_seq_lengths_kv", "context_lens_tensor")
_ATEN = {"aten.index_put_.": "indices.0", "aten.index.Tensor": "indices.0", "aten.index_copy_.": "index",
         "aten.index_select.": "index", "aten._index_put_impl_.": "indices.0"}  # fmt: skip
_BLOCK_DIM = {"_C.cpu_": 2, "_C_cache_ops.reshape_and_cache.": 3, "_C.paged_attention": 3, "_rocm_C.paged": 3}
"""By operator, where a block's slots are counted in the shape of (the last of) its caches; dimension 1 else."""
_OWN = {"_C.flash_mla_with_kvcache_cpu.": {
    "window_cache_2d": ("window_slots", "window_block_size"),
    "compressed_cache_2d": ("compressed_slots", "compressed_block_size"),
}}  # fmt: skip
"""By operator, where each cache has slots of its own: which argument names them, and which how many a block has."""
_UNSAID = ("_C.chunk_gated_delta_rule_cpu.", "_C.causal_conv1d_fwd_cpu.")
"""Operators that write to a cache although their schema says that they do not."""
_INTEGERS = (torch.int32, torch.int64)

Tensors = Sequence[tuple[str, torch.Tensor]]


@dataclass(slots=True)
class Touched:
    """The blocks ``ids`` of the cache ``source``. by: (role of an argument, unit) whose numbers name them."""

    source: torch.Tensor
    ids: torch.Tensor
    by: list[list[Any]]

    def now(self) -> torch.Tensor:
        """The blocks as they are, [blocks, ...]."""
        return self.source.index_select(0, self.ids)

    def is_it(self, other: torch.Tensor) -> bool:
        """Whether ``other`` is the cache that these blocks were taken from."""
        return other.data_ptr() == self.source.data_ptr() and other.shape == self.source.shape


def writes_unsaid(op: str) -> bool:
    """Whether ``op`` writes to its caches, though its schema is silent."""
    return op.startswith(_UNSAID)


def touched(
    op: str, named: Mapping[str, str], tensors: Tensors, caches: Tensors, most: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Touched | None]:  # fmt: skip
    """By role, what ``op`` touches of its caches; None where that is more than ``most`` bytes; no entry where nothing
    tells. named: the arguments' names by role (those of a list with its number behind a dot); tensors: all that went
    in, caches: those of them that lie in one; sizes: its integers, by name."""
    of_cache = {role for role, _ in caches}
    by_name = {
        named[role]: (role, t) for role, t in tensors if role in named and role not in of_cache and t.dtype in _INTEGERS
    }
    found: dict[str, Touched | None] = {}
    dim = next((d for prefix, d in _BLOCK_DIM.items() if op.startswith(prefix)), 1)
    # a cache of two dimensions has blocks of bytes: nothing tells how many slots they are
    slots = next((c.shape[dim] for _, c in reversed(caches) if c.dim() > max(dim, 2)), 0)
    own = next((by for prefix, by in _OWN.items() if op.startswith(prefix)), {})
    gathered: dict[int, tuple[torch.Tensor, list[list[Any]]] | None] = {}
    for role, cache in caches:
        if not cache.dim() or not cache.numel():
            continue
        if own:
            ids = _own_ids(own.get(named.get(role, "")), by_name, sizes, cache.shape[0])
        else:
            if cache.shape[0] not in gathered:
                gathered[cache.shape[0]] = _ids(op, by_name, cache.shape[0], slots)
            ids = gathered[cache.shape[0]]
        if ids is None:
            continue
        row = cache.element_size() * math.prod(cache.shape[1:])
        found[role] = Touched(cache, *ids) if len(ids[0]) * row <= most else None
    return found


def _ids(
    op: str, by_name: Mapping[str, tuple[str, torch.Tensor]], blocks: int, slots: int
) -> tuple[torch.Tensor, list[list[Any]]] | None:
    """The numbers of the touched blocks, and by which arguments; None where none tells."""
    parts, by = [], []
    wanted = next((name for prefix, name in _ATEN.items() if op.startswith(prefix)), None)
    for name, (role, t) in by_name.items():
        if op.startswith("aten."):
            unit = 1 if name == wanted else 0
        else:
            unit = 1 if name in _TABLES or name in _STATES else slots if name in _SLOTS else 0
        if not unit:
            continue
        numbers = _within(t, by_name, slots) if name in _TABLES else t.reshape(-1)
        parts.append(numbers if unit == 1 else numbers.div(unit, rounding_mode="floor"))
        by.append([role, unit])
    return _gathered(parts, by, blocks) if parts else None


def _own_ids(
    arguments: tuple[str, str] | None,
    by_name: Mapping[str, tuple[str, torch.Tensor]],
    sizes: Mapping[str, int],
    blocks: int,
) -> tuple[torch.Tensor, list[list[Any]]] | None:
    """The same where an operator's cache has slots of its own."""
    slots, size = arguments or ("", "")
    if slots not in by_name or sizes.get(size, 0) < 1:
        return None
    role, t = by_name[slots]
    return _gathered([t.reshape(-1).div(sizes[size], rounding_mode="floor")], [[role, sizes[size]]], blocks)


def _gathered(
    parts: Sequence[torch.Tensor], by: list[list[Any]], blocks: int
) -> tuple[torch.Tensor, list[list[Any]]]:
    ids = torch.cat([p.long() for p in parts])
    if ids.device.type == "cpu":
        ids = ids[(ids > 0) & (ids < blocks)].unique()
    else:
        ids = ids.clamp(0, blocks - 1)
    return torch.cat((ids.new_zeros(1), ids)), by


def _within(table: torch.Tensor, by_name: Mapping[str, tuple[str, torch.Tensor]], slots: int) -> torch.Tensor:
    """The entries of a block table [requests, blocks] that the sequences' lengths reach; all where they are unknown."""
    lengths = next((by_name[name][1] for name in _LENGTHS if name in by_name), None)
    if lengths is None or table.device.type != "cpu" or table.dim() != 2 or not slots:
        return table.reshape(-1)
    reached = torch.arange(table.shape[1]) * slots < lengths.reshape(-1)[: len(table), None]
    return table[: len(reached)][reached]


CACHE = "the KV cache"
FINGERPRINT = "a parameter, kept as a fingerprint"
_SMALL = 1 << 18
"""Weights of so many bytes are hashed as often as they are seen: that is quicker than a sample."""
_ALIKE = 32
"""How many calls of an operator in one module and step are distinguished when it comes to what is known of them."""


class Memory:
    """Whose memory a tensor lies in, by the address of its storage. ``refresh`` is called once per step.

    named: gives (module path, name, tensor) of all parameters and buffers. caches: gives the KV cache's tensors.
    keep_parameters: whether payloads of parameters are kept.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, str, torch.Tensor]]] = tuple,
        caches: Callable[[], Iterable[torch.Tensor]] = tuple,
        keep_parameters: bool = True,
    ):
        self._named = named
        self._caches = caches
        self.keep_parameters = keep_parameters
        self.parameters: dict[int, str] = {}
        self.cached: set[int] = set()
        self.fresh: set[int] = set()
        """Storages that were allocated in this step and that no operator has written to since."""

    def refresh(self) -> None:
        """Reads the addresses anew: weights and caches may have moved (sleep mode, reloading)."""
        self.fresh.clear()
        self.cached = {address(t) for t in self._caches()} - {0}
        self.parameters = {
            where: f"{path or ROOT_TAP}/param.{name}"
            for path, name, tensor in self._named()
            if (where := address(tensor)) and where not in self.cached
        }


class TakenTensor(CellTicket):
    """A tensor that was taken."""

    __slots__ = ()

    def add_to(self, about: dict[str, Any]) -> None:
        """Adds what is known by now to the tensor's description in the call's line."""
        if self.cell is not None:
            about |= about_bytes(self.cell)


class Takes:
    """Stores tensors of operator calls in ``session``. ``max_bytes``: larger ones are refused, weights excepted."""

    def __init__(self, session: Session, memory: Memory, max_bytes: int):
        self._session = session
        self._sink = session.sink
        self._memory = memory
        self.max_bytes = max_bytes
        self._weights: dict[tuple[Any, ...], tuple[str, TakenTensor]] = {}
        self._sites: dict[tuple[str, int], Sites] = {}

    def forget_weights(self) -> None:
        """After weights were loaded anew."""
        self._weights.clear()

    def refuses(self, tensor: torch.Tensor, where: int) -> str | None:
        """Why a tensor's values are not read, or None. where: its storage's address."""
        if not is_plain(tensor):
            return f"not a plain tensor ({tensor.layout}, {tensor.dtype})".replace("torch.", "")
        if tensor.is_meta:
            return "without values (meta)"
        if where in self._memory.cached:
            return CACHE
        if tensor.nbytes > self.max_bytes and where not in self._memory.parameters:
            return f"larger than {self.max_bytes / 1e6:g} MB"
        if not self._memory.keep_parameters and where in self._memory.parameters:
            return FINGERPRINT
        return None

    def take(
        self, state: StepState, tap: str, op: str, role: str, call: int, tensor: torch.Tensor, keep: bool, weight: bool
    ) -> TakenTensor:
        """Takes ``tensor`` as it is now. keep: with its payload, else only hash and statistics. weight: it lies in a
        parameter, and nothing writes to it."""
        if weight and tensor.nbytes > _SMALL:
            return self._weight(state, tap, op, role, call, tensor, keep)
        last = self._last if weight and keep else None  # what is not kept has no bytes that later lines could name
        return self._take(state, tap, op, role, call, tensor, keep, TakenTensor(last))

    def take_changed(
        self, state: StepState, tap: str, op: str, role: str, call: int, tensor: torch.Tensor, keep: bool,
        before: Ticket, changed: Callable[[], None],
    ) -> TakenTensor:  # fmt: skip
        """Takes ``tensor`` after the call in role ``inplace.<role>`` if it is no longer what ``before`` saw, and then
        calls ``changed``."""
        role = f"inplace.{role}"
        if not keep:
            taken = TakenTensor(lambda cell: changed() if cell.hash != before.digest else None)
            return self._take(state, tap, op, role, call, tensor, False, taken)
        taken, sites = TakenTensor(), self._sites_of(tap, call)
        self._session.take(
            state, sites, tap, op, role, call, tensor, OPERATOR, taken, before,
            lambda different: changed() if different else None,
        )  # fmt: skip
        return taken

    def _take(
        self, state: StepState, tap: str, op: str, role: str, call: int, tensor: torch.Tensor, keep: bool,
        taken: TakenTensor,
    ) -> TakenTensor:  # fmt: skip
        sites = self._sites_of(tap, call)
        self._session.take(state, sites, tap, op, role, call, tensor, OPERATOR, taken, line=keep)
        return taken

    def _last(self, cell: StatsCell) -> None:
        """The same bytes will come again in later steps."""
        self._sink.lasting[f"{cell.hash}{cell.dtype}"] = cell

    def _sites_of(self, tap: str, call: int) -> Sites:
        """What is known of the tensors of this call: one module's calls of an operator differ, steps are alike."""
        key = tap, call % _ALIKE
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = {}
        return found

    def _weight(
        self, state: StepState, tap: str, op: str, role: str, call: int, tensor: torch.Tensor, keep: bool
    ) -> TakenTensor:
        """A large weight: what is known of it, while it is the same memory and a sample of it the same bytes."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), keep)
        sample = _sample(tensor)
        known = self._weights.get(key)
        if known is None or known[0] != sample:
            taken = self._take(state, tap, op, role, call, tensor, keep, TakenTensor(self._last if keep else None))
            self._weights[key] = sample, taken
            return taken
        taken = known[1]
        if keep:
            site = self._session.site(state, self._sites_of(tap, call), tap, op, role, tensor, OPERATOR)
            if site is not None:
                self._sink.again(site.template, state, call, taken)
        return taken


def _sample(tensor: torch.Tensor) -> str:
    """A fixed sample of a host tensor's elements, as bytes; "" where the tensor is on a device, which would wait."""
    if tensor.device.type != "cpu":
        return ""
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return flat[:: max(1, flat.numel() // 1024)].contiguous().view(torch.uint8).numpy().tobytes().hex()
