"""Parameters that a dump does not hold, from the checkpoint on disk.

The problem: some dumps keep only fingerprints of parameters, and some engines pack them into a form that is no matrix
any more. The idea: the checkpoint's tensors under the engine's names: what vLLM fuses is put together from its parts
(q, k and v; gate and up; the experts), paths that differ are rewritten, and of each part a rank has the piece that the
shape of what it had leaves: rows, columns, or rows of key heads that several ranks share. What comes out is a guess
until its fingerprint is that of the record (parameters.py). Only the piece is read. safetensors alone are read, nothing
is unpickled.
Not here: whether the dump's own parameters are right (comparison/measure/params.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class Checkpoint:
    """The safetensors files of one directory. Raises OSError or ValueError where they cannot be read."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            if index.stat().st_size > _MAX_JSON:
                raise ValueError(f"{index} is too large")
            named = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
            for name, file in named.items():
                if "/" not in str(file) and "\\" not in str(file):
                    self._files[str(name)] = directory / str(file)
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
        import torch

        if share is None or not share.shape:
            whole = [self._handle(self._files[name]).get_tensor(name) for name in names]
            return torch.cat(whole) if len(whole) > 1 else whole[0]
        held = [self._handle(self._files[name]).get_slice(name) for name in names]
        cuts = share.cuts([tuple(h.get_shape()) for h in held])
        if cuts is None:
            return None
        parts = [h[cut] if cut else h[:] for h, cut in zip(held, cuts, strict=True)]
        found = torch.cat(parts) if len(parts) > 1 else parts[0]
        if share.shape and found.shape[1:] == share.shape[1:] and len(found) < share.shape[0]:  # a padded vocabulary
            found = torch.cat((found, found.new_zeros(share.shape[0] - len(found), *found.shape[1:])))
        return found if tuple(found.shape) == share.shape else None

    def _experts(self, path: str, kind: str, share: Share | None) -> Any | None:
        import torch

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
            key, odd = divmod(self.shape[0] - query, 2)
            if odd or key <= 0 or wholes[1][0] % key or self.size % (wholes[1][0] // key):
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
    path = directory / "config.json" if directory is not None else None
    try:
        if path is None or not path.is_file() or path.stat().st_size > _MAX_JSON:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
