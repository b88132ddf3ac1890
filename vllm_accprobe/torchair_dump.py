"""``get_ge_dump_config`` and ``get_fx_dump_config``: a torchair CompilerConfig that writes what ``compare`` reads.

    from vllm_accprobe import torchair_dump            # was: from ait_llm.dump import torchair_dump
    config = torchair_dump.get_ge_dump_config(dump_path="dump")
    npu_backend = torchair.get_npu_backend(compiler_config=config)
    model = torch.compile(model, backend=npu_backend, dynamic=True)

The problem: torchair's two graphs are dumped by settings in three places, which have moved between releases. The idea:
the functions of ait and msit under their names set these and nothing else, and say in one line what is wrong. Names and
settings: torchair's ``configs/`` (dump_config.py, debug_config.py, fusion_config.py). Not here: what is written
(formats/torchair.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.config import ConfigError

MODES = ("input", "output", "all")
_LAYER = re.compile(r'[0-9a-zA-Z_"/\\.]+', re.ASCII)
_MOST = 1 << 20
_SWITCHES = 'write {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}'


def get_ge_dump_config(
    dump_path: str | os.PathLike[str] = ".",
    dump_mode: str = "all",
    fusion_switch_file: str | os.PathLike[str] | None = None,
    dump_token: Sequence[int] | None = None,
    dump_layer: Sequence[str] | None = None,
    compiler_config: Any = None,
) -> Any:
    """A CompilerConfig with which the graph engine (GE) writes into ``dump_path``/dump_<date>_<time>.

    dump_mode: input, output, all; fusion_switch_file: GE's json that switches fusions, e.g. off; dump_token and
    dump_layer: only these executions (from 0) and operators; compiler_config: one to set up further, else a new one.
    Next to the tensors lies the graph as text, by which they are paired with FX's. Raises ConfigError: torchair is not
    installed, or an argument is wrong; nothing has been written then.
    """
    config = _config(compiler_config)
    if dump_mode not in MODES:
        raise ConfigError(f"dump_mode={dump_mode}: write one of {', '.join(MODES)}")
    steps = _steps(dump_token)
    layers = _layers(dump_layer)
    switches = None if fusion_switch_file is None else _switches(Path(fusion_switch_file))
    where = _directory(Path(dump_path) / time.strftime("dump_%Y%m%d_%H%M%S"), "dump_path")
    config.debug.graph_dump.type = "txt"
    _set_path(config.debug.graph_dump, where)
    if switches is not None:
        config.fusion_config.fusion_switch_file = switches
    config.dump_config.enable_dump = True
    config.dump_config.dump_mode = dump_mode
    config.dump_config.dump_path = where
    if steps:
        config.dump_config.dump_step = steps
    if layers:
        config.dump_config.dump_layer = layers
    return config


def get_fx_dump_config(dump_path: str | os.PathLike[str] | None = None, compiler_config: Any = None) -> Any:
    """A CompilerConfig with which torchair runs the FX graph node by node and writes each node's tensors, in
    gm_<time>_dump below the current directory, or below ``dump_path`` where the release of torchair knows one.

    compiler_config: one to set up further, else a new one. Raises ConfigError: torchair is not installed, or
    ``dump_path`` cannot be made."""
    config = _config(compiler_config)
    if dump_path is not None:
        if not any(hasattr(config.debug.data_dump, name) for name in ("_path", "path")):
            raise ConfigError("dump_path: this torchair writes into the current directory; leave dump_path away")
        where = _directory(Path(dump_path), "dump_path")
        _set_path(config.debug.data_dump, where)
    config.debug.data_dump.type = "npy"
    return config


def _config(value: Any) -> Any:
    if value is not None:
        missing = [name for name in ("debug", "dump_config", "fusion_config") if not hasattr(value, name)]
        if missing:
            kind = type(value).__name__
            raise ConfigError(f"compiler_config={kind} has no {missing[0]}: give torchair's CompilerConfig")
        return value
    try:
        if "torchair" not in sys.modules and importlib.util.find_spec("torchair") is None:
            import torch_npu  # noqa: F401  # brings torchair under that name
        from torchair.configs.compiler_config import CompilerConfig
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"torchair is not installed here ({error}): it comes with torch_npu, on a machine with Ascend's CANN"
        ) from None
    return CompilerConfig()


def _set_path(place: Any, where: str) -> None:
    """Releases before and after CANN 8.0.RC1 call it ``path`` and ``_path``; later ones have both."""
    if isinstance(getattr(type(place), "path", None), property) or not hasattr(place, "_path"):
        place.path = where
    else:
        place._path = where


def _directory(path: Path, name: str) -> str:
    """Made, absolute: torchair takes only what is there."""
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{name}={path.parent}: nothing can be written there ({e.strerror or e})") from None
    return str(path.absolute())


def _steps(tokens: Sequence[int] | None) -> str:
    if tokens is None:
        return ""
    if isinstance(tokens, (str, bytes)) or not all(type(n) is int and n >= 0 for n in tokens):
        raise ConfigError(f"dump_token={tokens!r}: write a list of executions, for example [1, 2, 5]")
    return "|".join(map(str, tokens))


def _layers(names: Sequence[str] | None) -> str:
    if names is None:
        return ""
    if isinstance(names, (str, bytes)) or not all(isinstance(n, str) and _LAYER.fullmatch(n) for n in names):
        raise ConfigError(f'dump_layer={names!r}: write a list of operators\' names, for example ["Add", "Conv_1"]')
    return " ".join(names)


def _switches(path: Path) -> str:
    """The file's absolute path. Raises ConfigError where GE would not find a switch in it."""
    try:
        with path.open("rb") as f:
            text = f.read(_MOST)
        switch = json.loads(text)["Switch"]
        if not isinstance(switch, dict) or not switch:
            raise TypeError
    except OSError as e:
        raise ConfigError(f"fusion_switch_file={path}: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"fusion_switch_file={path}: {_SWITCHES}") from None
    return str(path.absolute())
