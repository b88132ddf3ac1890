"""The tensors of a safetensors checkpoint under a transformers model's own names, some at a time.

The problem: a checkpoint of hundreds of gigabytes is read a layer at a time, and transformers names and joins its
tensors otherwise than the files do (experts are stacked, projections fused). The idea: the shards' headers say where
each tensor is; transformers' own rules, which `from_pretrained` uses, say which tensors make a parameter. They are
applied to one layer's tensors, or to one expert's, in the wanted dtype.

Files may be hostile: safetensors only, no pickle, no code of the checkpoint. Not here: when what is read (stream.py).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_accprobe.dump.decode import object_at
from vllm_accprobe.refusals import CommandError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
          "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip
"""Bytes of the dtypes that are read; others are those of quantised checkpoints."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
"""Behind the name of a tensor in fp8: what each of its numbers is multiplied by."""
_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "output_scale")
"""Names of scales of activations and caches, which are not quantised here."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Chosen: of each shard, evenly spread from its first byte to its last; read in milliseconds."""
_MAPPED = 1 << 27
"""Chosen: bytes of a shard that are read until it is closed and opened again."""
_MOST_NAME = 40
"""Characters of what a stranger's file says, in a message."""
_DO = "name a checkpoint in bfloat16, float16 or float32"


@dataclass(frozen=True)
class ShardTensor:
    """Where a tensor lies. scale: of one in fp8, the name of its scale; else empty."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    scale: str = ""

    @property
    def nbytes(self) -> int:
        return _SIZES[self.dtype] * math.prod(self.shape)


def block_of(quantization: Any) -> tuple[int, int] | None:
    """Rows and columns of the blocks that share a scale, by a config's quantization_config; None where each tensor or
    each row has its own. Raises CommandError for what is no fp8 of weights."""
    found = quantization if isinstance(quantization, Mapping) else getattr(quantization, "__dict__", {})
    method = str(getattr(found.get("quant_method"), "value", found.get("quant_method")))
    if method == "fp8":
        block = found.get("weight_block_size")
    elif method == "compressed-tensors" and found.get("format") == "float-quantized":
        groups = found.get("config_groups")
        weights = [object_at(g, "weights") or {} for g in groups.values()] if isinstance(groups, Mapping) else []
        if any((w.get("type"), w.get("num_bits")) != ("float", 8) for w in weights):
            raise CommandError("its weights are compressed otherwise than to 8 bits of float")
        blocks = [w["block_structure"] for w in weights if w.get("block_structure")]
        if found.get("transform_config") or any(other != blocks[0] for other in blocks):
            raise CommandError("its weights are rotated, or have blocks of several sizes")
        block = blocks[0] if blocks else None
    else:
        raise CommandError(f"{method} {found.get('format') or ''}".rstrip()[:_MOST_NAME])
    if block is None:
        return None
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise CommandError(f"blocks of {str(block)[:_MOST_NAME]}")
    return block[0], block[1]


def dequantised(stored: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """What a tensor in fp8 stands for, in the scale's dtype: each number times the scale of its tensor, its row, or its
    block [DeepSeek-V3 technical report, 2024, 3.3.2; compressed-tensors: quantization/lifecycle/forward.py,
    _dequantize; transformers: integrations/finegrained_fp8.py]. stored: [..., rows, columns]. Raises ValueError."""
    if scale.numel() == 1:
        return stored.to(scale.dtype) * scale.reshape(())
    if scale.shape == stored.shape[: scale.dim()]:  # of each row [n], or of each expert [n]
        scale = scale.reshape(*scale.shape, *[1] * (stored.dim() - scale.dim()))
    if scale.dim() != stored.dim() or scale.dim() < 2:
        raise ValueError(f"{list(scale.shape)} scales of {list(stored.shape)} numbers")
    for dim in (-2, -1):
        size, n = stored.shape[dim], scale.shape[dim]
        if n in (1, size):
            continue
        if block is None or n != -(-size // block[dim]):
            raise ValueError(f"{list(scale.shape)} scales of {list(stored.shape)} numbers, blocks of {block}")
        scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, size)
    return stored.to(scale.dtype) * scale


def shards_of(model: Path) -> list[Path]:
    """The checkpoint's files. Raises CommandError."""
    index, single = model / INDEX, model / _SINGLE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            if any(not isinstance(name, str) or Path(name).name != name for name in names):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CommandError(f"{index} is no index of safetensors files; download it again") from None
        found = [model / name for name in names]
    else:
        found = [single] if single.is_file() else []
    if missing := next((path for path in found if not path.is_file()), None):
        raise CommandError(f"{missing} is missing, which {INDEX} names; download it")
    if not found:
        other = next(iter(sorted(model.glob("*.bin")) + sorted(model.glob("*.pt*"))), None)
        why = f"{other.name} is a pickle, which may run code" if other else f"it has no {_SINGLE} and no {INDEX}"
        raise CommandError(f"{model}: {why}; name a folder with safetensors files")
    return found


def identity(model: Path, shards: Iterable[Path]) -> str:
    """A hash of config.json, the index, and of each shard its name, its size and samples of its bytes: a checkpoint of
    equal sizes is another one. Raises OSError."""
    made = hashlib.sha256()
    for path in (model / "config.json", model / INDEX):
        made.update(path.read_bytes() if path.is_file() else b"-")
    for path in shards:
        size = path.stat().st_size
        made.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            for n in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * n // (_SAMPLES - 1))
                made.update(file.read(_SAMPLE_BYTES))
    return made.hexdigest()


class CheckpointTensors:
    """Gives parameters of ``model``, a transformers model whose parameters have no memory. ``read_bytes`` counts what
    was read. Raises CommandError where the files are not those of the model."""

    def __init__(self, folder: Path, model: Any, dtype: torch.dtype, block: tuple[int, int] | None = None):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.read_bytes = 0
        self._model, self._dtype, self._block = model, dtype, block
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._names = model.state_dict()
        self.tensors: dict[str, ShardTensor] = {}
        for shard in shards_of(folder):
            self._list(shard)
        self._scales = self._take_scales()
        self._target = {key: self._renamed(key) for key in self.tensors}
        self._keys: dict[str, list[str]] = {}
        for key, (name, _) in self._target.items():
            self._keys.setdefault(name, []).append(key)

    def _list(self, shard: Path) -> None:
        try:
            with safe_open(shard, "pt") as file:
                for key in file.keys():  # noqa: SIM118  # it has no iterator
                    piece = file.get_slice(key)
                    dtype = str(piece.get_dtype())
                    if dtype not in _SIZES:
                        raise CommandError(f"{shard}: {key} is {dtype}, of a quantised model; {_DO}")
                    self.tensors[key] = ShardTensor(shard, dtype, tuple(piece.get_shape()))
        except (SafetensorError, OSError) as e:
            raise CommandError(f"{shard} cannot be read: {e}; download it again") from None

    def _take_scales(self) -> dict[str, ShardTensor]:
        """Name → place of the scales, which are no parameters of the model. Raises CommandError."""
        names = [key for key, tensor in self.tensors.items() if tensor.dtype in _FP8]
        for key in names:
            tensor = self.tensors[key]
            scale = next((key + end for end in _SCALES if key + end in self.tensors), None)
            if scale is None:
                raise CommandError(f"{tensor.shard}: {key} is {tensor.dtype} and has no scale; {_DO}")
            if (dtype := self.tensors[scale].dtype) not in (*_FLOATS, "F8_E8M0"):
                raise CommandError(f"{tensor.shard}: {scale} is {dtype}, no scale; {_DO}")
            self.tensors[key] = replace(tensor, scale=scale)
        scales = {tensor.scale for tensor in self.tensors.values() if tensor.scale}
        unused = [key for key in self.tensors if names and key.rpartition(".")[2] in _UNUSED]
        found = {key: self.tensors.pop(key) for key in {*scales, *unused}}
        return {key: place for key, place in found.items() if key in scales}

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """The parameter of a tensor of the files, and the pattern of the rule that makes it; as transformers does."""
        from transformers.core_model_loading import rename_source_key

        prefix, names = self._model.base_model_prefix, self._names
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        return name, pattern

    def sources(self, block: str, without: Collection[str] = ()) -> list[str]:
        """Tensors of the files that make the parameters and buffers of the module ``block``, but not ``without``."""
        names = (name for name in self._keys if name.startswith(f"{block}.") and name not in without)
        return [key for name in names for key in self._keys[name]]

    def of(self, name: str) -> list[str]:
        """Tensors of the files that make one parameter or buffer."""
        return self._keys.get(name, [])

    def stored_bytes(self, keys: Iterable[str]) -> int:
        """Of those of ``keys`` that make parameters of the model."""
        return sum(self.tensors[key].nbytes for key in keys if self._target[key][0] in self._names)

    def read(self, keys: Iterable[str], expert: int | None = None) -> dict[str, torch.Tensor]:
        """Parameter → its tensor, of those that ``keys`` make. expert: of tensors that hold all experts only this
        one's part, [1, ...]; ``keys`` then are those of this expert and of all. Raises CommandError."""
        from transformers.core_model_loading import WeightRenaming, dot_natural_key

        found: dict[str, Any] = {}
        by_shard: dict[tuple[Path, int], list[str]] = {}
        opened: dict[Path, int] = {}
        for key in keys:
            shard = self.tensors[key].shard
            opened[shard] = opened.get(shard, 0) + self.tensors[key].nbytes
            by_shard.setdefault((shard, opened[shard] // _MAPPED), []).append(key)
        loaded: dict[str, torch.Tensor] = {}
        try:
            for (shard, _), inside in by_shard.items():
                with safe_open(shard, "pt") as file:  # closed again: mapped pages count as this process's memory
                    for key in inside:
                        tensor = self._part(file, key, expert)
                        float_ = tensor.is_floating_point()
                        if scale := self.tensors[key].scale:
                            loaded[key] = self._dequantised(key, tensor, self._scale(scale, expert))
                        else:
                            loaded[key] = tensor.to(self._dtype, copy=True) if float_ else tensor.clone()
        except (SafetensorError, OSError, RuntimeError, ValueError) as e:
            raise CommandError(f"{shard} cannot be read: {e}; download it again") from None
        for key in sorted(loaded, key=dot_natural_key):
            name, pattern = self._target[key]
            if pattern is None:
                rule = found.setdefault(name, WeightRenaming(key, name))
            else:
                rule = found.get(name) or found.setdefault(name, copy.deepcopy(self._by_pattern[pattern]))
            rule.add_tensor(name, key, pattern or key, loaded.pop(key))
        made: dict[str, torch.Tensor] = {}
        for name, rule in found.items():
            for target, value in rule.convert(name, model=self._model, config=self._model.config).items():
                made[target] = value[0] if isinstance(value, list) else value
        return made

    def rows(self, key: str, first: int, after: int) -> torch.Tensor:
        """Some rows of a tensor of the files, which is a parameter as it is."""
        try:
            with safe_open(self.tensors[key].shard, "pt") as file:
                found = file.get_slice(key)[first:after]
        except (SafetensorError, OSError) as e:
            raise CommandError(f"{self.tensors[key].shard} cannot be read: {e}; download it again") from None
        self.read_bytes += found.nbytes
        return found.to(self._dtype, copy=True)

    def plain(self, name: str) -> str:
        """The tensor of the files that a parameter is, without a rule or a scale; "" where there is none."""
        keys = self.of(name)
        if len(keys) != 1 or name not in self._names or self._target[keys[0]][1] is not None:
            return ""
        tensor = self.tensors[keys[0]]
        return keys[0] if tensor.dtype in _FLOATS and tensor.shape == tuple(self._names[name].shape) else ""

    def _part(self, file: Any, key: str, expert: int | None) -> torch.Tensor:
        piece = file.get_slice(key)
        if expert is None or _per_expert(key) or piece.get_shape() in ([], [1]):
            tensor = piece[:]
        else:
            tensor = piece[expert : expert + 1]
        self.read_bytes += tensor.nbytes
        return tensor

    def _dequantised(self, key: str, tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        try:
            return dequantised(tensor, scale, self._block)
        except ValueError as e:
            raise CommandError(f"{key} does not fit its scale: {e}; {_DO}") from None

    def _scale(self, key: str, expert: int | None) -> torch.Tensor:
        with safe_open(self._scales[key].shard, "pt") as file:
            return self._part(file, key, expert).to(self._dtype)


def _per_expert(key: str) -> bool:
    """Whether a tensor of the files is one expert's."""
    return expert_of(key) is not None


def expert_of(key: str) -> int | None:
    """The expert whose tensor it is, by the name: ``mlp.experts.7.up_proj.weight``."""
    _, found, after = key.rpartition(".experts.")
    number = after.partition(".")[0]
    return int(number) if found and number.isdecimal() else None


_ROWS = 1 << 13
"""Chosen: rows of a wide matrix that are in memory at a time; 134 MB at a width of 4,096."""


class StreamedRows:
    """Stands for a matrix [rows, width] of an embedding or a head: an embedding reads the rows of its tokens, a linear
    map is computed for `_ROWS` of them at a time, each read when it is used and freed after."""

    def __init__(self, checkpoint: CheckpointTensors, name: str, key: str, shape: torch.Size, dtype: torch.dtype):
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cpu")
        self._checkpoint, self._name, self._key = checkpoint, name, key

    def rows(self, first: int, after: int) -> torch.Tensor:
        return self._checkpoint.rows(self._key, first, after)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        input_, weight, *more = args
        if func is torch.nn.functional.embedding:  # max_norm and scale_grad_by_freq are of training
            distinct, place = input_.unique(return_inverse=True)
            return torch.cat([weight.rows(i, i + 1) for i in distinct.tolist()])[place]
        if func is torch.nn.functional.linear:
            bias = more[0] if more else (kwargs or {}).get("bias")
            out = input_.new_empty((*input_.shape[:-1], weight.shape[0]))
            for first in range(0, weight.shape[0], _ROWS):
                some = slice(first, min(first + _ROWS, weight.shape[0]))
                rows = weight.rows(some.start, some.stop)
                out[..., some] = torch.nn.functional.linear(input_, rows, None if bias is None else bias[some])
            return out
        raise CommandError(f"{weight._name} is read by rows, which {func} cannot: give this process more memory")


class StreamedExperts:
    """Stands for a parameter [experts, ...] of which ``experts[i]`` is read when it is used, and freed after."""

    def __init__(self, checkpoint: CheckpointTensors, name: str, shape: torch.Size, dtype: torch.dtype):
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cpu")
        self._checkpoint, self._name = checkpoint, name
        self._keys: dict[int | None, list[str]] = {}
        for key in checkpoint.of(name):
            self._keys.setdefault(expert_of(key), []).append(key)

    def __getitem__(self, index: Any) -> torch.Tensor:
        number = int(index)
        keys = [*self._keys.get(number, ()), *self._keys.get(None, ())]
        return self._checkpoint.read(keys, number)[self._name][0]


def assign(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts tensors in the place of parameters and buffers of ``model``. Raises CommandError where a shape differs."""
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        before = module._parameters.get(leaf, module._buffers.get(leaf))
        if before is None or before.shape != tensor.shape:
            wanted = "not there" if before is None else list(before.shape)
            raise CommandError(f"{name} is {list(tensor.shape)} in the files and {wanted} by config.json: name a model "
                               "whose files belong together")  # fmt: skip
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor


