"""Which modules are captured: globs over module paths, class names, and presets for the kinds people ask for.

Not here: which requests and tokens (rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_accprobe.config import ProbeConfig, matches
from vllm_accprobe.dump.schema import ROOT_TAP

_PRESETS: dict[str, Callable[[str, str], bool]] = {
    "all": lambda path, cls: True,
    "vision": lambda path, cls: any(
        word in path.split(".") for word in ("visual", "vision_tower", "vision_model", "vision")
    ),
    "layers": lambda path, cls: bool(path) and path.rpartition(".")[2].isdigit(),
    "attention": lambda path, cls: any(
        part in ("attn", "self_attn", "attention", "cross_attn", "mla_attn") for part in path.split(".")
    ),
    "mlp": lambda path, cls: any(
        part in ("mlp", "feed_forward", "ffn", "experts", "block_sparse_moe") for part in path.split(".")
    ),
    "norm": lambda path, cls: "norm" in path.rpartition(".")[2].lower() or "norm" in cls.lower(),
    "linear": lambda path, cls: "linear" in cls.lower() or cls.endswith("LMHead"),
    "logits": lambda path, cls: path.rpartition(".")[2] in ("lm_head", "logits_processor", "sampler"),
}


def chooses(config: ProbeConfig, path: str, cls: str) -> bool:
    """Whether VLLM_ACCPROBE_MODULES (globs over paths, presets, class names) selects the module at ``path``."""
    return not config.modules_left or picks(config.modules, path, cls)


def picks(words: Sequence[str], path: str, cls: str) -> bool:
    """Whether such globs, presets and class names choose the module at ``path``."""
    globs: list[str] = []
    name = path or ROOT_TAP
    for glob in words:
        mark = "!" if glob.startswith("!") else ""
        word = glob.lstrip("!")
        if word in _PRESETS:
            globs.append(mark + ("*" if _PRESETS[word](path, cls) else "\0"))
        elif word == cls:
            globs.append(mark + "*")
        else:
            globs.append(glob)
    return matches(tuple(globs), (name,))
