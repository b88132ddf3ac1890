"""Whether an engine is eager: how it is made so, and how it is seen afterwards.

The problem: compiled and captured graphs run no Python, and a tap is Python. ``enforce_eager`` is not enough: from vLLM
0.11 to 0.15 a compilation level or mode that somebody names wins over it (0.11 config/__init__.py: 336, 0.13
config/vllm.py: 652), the model is compiled, and the configuration still says eager. The idea: ask for eager in every
word that a release has, and afterwards believe the modules, not the wish. Not here: who patches the engine's arguments
(plugin.py), what is said and skipped then (runner.py).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any

_NAMES = ("level", "mode", "cudagraph_mode")
"""Of vLLM's CompilationConfig: ``level`` to 0.11, ``mode`` from 0.12 on, and the graphs that are captured."""
_STOCK = 1
"""Level or mode in which the runner compiles the whole model, after it has been loaded (``model.compile()``)."""
PIECES = 3
"""Level or mode in which vLLM compiles the model itself, cut into pieces."""


def make_eager(args: Any) -> list[str]:
    """Changes vLLM's EngineArgs ``args`` so that the engine is eager; what was otherwise, in words.

    The compilation configuration is replaced by a copy, since it may be its owner's who builds another engine with it.
    """
    changed = []
    if not getattr(args, "enforce_eager", True):
        args.enforce_eager = True
        changed.append("enforce_eager")
    config = getattr(args, "compilation_config", None)
    for name in _NAMES:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is None or not _number(value):
            continue
        if config is getattr(args, "compilation_config", None):
            config = copy.copy(config)
        none = type(value)(0) if isinstance(value, (int, enum.Enum)) else 0
        if isinstance(config, dict):
            config[name] = none
        else:
            setattr(config, name, none)
        changed.append(f"{name} {getattr(value, 'name', value)}")
    if changed and config is not None:
        args.compilation_config = config
    return changed


def compiles(vllm_config: Any, model: Any) -> bool:
    """Whether the built engine compiles or captures graphs, whatever it was asked for: what is inside runs no Python.

    ``model``: its modules know (vLLM's ``support_torch_compile`` sets ``do_not_compile`` on each).
    """
    config = vllm_config.compilation_config
    number = level(config)
    if compiled_modules(model) or number == _STOCK:
        return True
    if getattr(vllm_config.model_config, "enforce_eager", False):  # then no release captures a graph
        return False
    return bool(number) or bool(_number(getattr(config, "cudagraph_mode", None)))


def compiled_modules(model: Any) -> list[str]:
    """Paths of the modules that are compiled."""
    return [
        path
        for path, module in model.named_modules()
        if getattr(module, "do_not_compile", None) is False or getattr(module, "_compiled_call_impl", None) is not None
    ]


def facts(vllm_config: Any, model: Any) -> dict[str, Any]:
    """What run.json says of it: ``eager`` as it is, beside what the engine was asked for."""
    config = vllm_config.compilation_config
    graphs = getattr(config, "cudagraph_mode", None)
    return {
        "eager": not compiles(vllm_config, model),
        "enforce_eager": bool(getattr(vllm_config.model_config, "enforce_eager", False)),
        "compilation_mode": level(config),
        "cudagraph_mode": getattr(graphs, "name", None),
    }


def level(config: Any) -> int:
    """0 none, 1 torch.compile of the whole model, 2 dynamo once, 3 vLLM's own; the same numbers in all releases."""
    mode = getattr(config, "mode", None)
    return int((mode if mode is not None else getattr(config, "level", None)) or 0)


def _number(value: Any) -> Any:
    """A mode's value: 0 is none; some of CUDAGraphMode's are pairs."""
    return getattr(value, "value", value)
