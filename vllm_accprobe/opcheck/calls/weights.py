"""Parameters that a dump does not hold, from the checkpoint on disk.

The problem: some dumps keep only fingerprints of parameters, and some engines pack them into a form that is no matrix
any more. The idea: the checkpoint's tensors under the engine's names: what vLLM fuses is put together from its parts
(q, k and v; gate and up; the experts), and paths that differ are rewritten. Only for unsharded modules: a rank's part
cannot be told from here. safetensors alone are read, nothing is unpickled.
Not here: whether the dump's own parameters are right (comparison/measure/params.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
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

    def get(self, tap: str, param: str) -> Any | None:
        """The parameter ``param`` of the engine's module ``tap``, a torch tensor, or None."""
        import torch

        for path in _spellings(f"{tap}.{param}"):
            found = self._one(path)
            if found is not None:
                return found
            for fused, parts in _FUSED.items():
                if f".{fused}." in path:
                    split = [self._one(path.replace(f".{fused}.", f".{p}.")) for p in parts]
                    if all(s is not None for s in split):
                        return torch.cat(split)
            match = re.fullmatch(r"(.*\.experts)\.(?:routed_experts\.)?(w13_weight|w2_weight)", path)
            if match:
                found = self._experts(match[1], match[2])
                if found is not None:
                    return found
        return None

    def _one(self, name: str) -> Any | None:
        path = self._files.get(name)
        return None if path is None else self._handle(path).get_tensor(name)

    def _experts(self, path: str, kind: str) -> Any | None:
        import torch

        for parts in _EXPERTS[kind]:
            experts: list[Any] = []
            while all(f"{path}.{len(experts)}.{p}.weight" in self._files for p in parts):
                experts.append(torch.cat([self._one(f"{path}.{len(experts)}.{p}.weight") for p in parts]))
            if experts:
                return torch.stack(experts)
        return None


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
