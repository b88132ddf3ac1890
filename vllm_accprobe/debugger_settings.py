"""What the arguments of ``PrecisionDebugger`` come to: torch_xray's, msprobe's, and msprobe's config.json.

The problem: two tools' arguments, some of which we do not capture by. The idea: each becomes a field of ProbeConfig, a
note in one line (no effect here), or a refusal in one line (asks for something else, and what to run instead).
Not here: steps and capture (debugger.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.config import RUN_ID, ConfigError, ProbeConfig, default_dir, parse_ranges
from vllm_accprobe.config_values import nearest

_TASKS = {"tensor": "tensor", "statistics": "stats", "stats": "stats"}
_INSTEAD = {
    "acc_check": "capture a dump and run `accprobe opcheck DUMP`",
    "nan_check": "run `accprobe errcheck -- CMD`",
    "overflow_check": "run `accprobe errcheck -- CMD`",
    "diff_check": "compare two dumps with `accprobe compare`",
    "structure": "every dump holds the module tree",
}
_KEYS = {"task", "level", "rank", "step", "dump_path"}
_LEVELS = {"L0": False, "L1": True, "mix": True}
"""msprobe's levels that exist here: whether operator calls are captured too."""
_NO_EFFECT = (
    "extra_info", "async_dump", "precision", "risk_level", "custom_op_namespaces", "dump_enable", "enable_dataloader",
    "is_regex", "seed", "is_deterministic",
)  # fmt: skip
_KEYS |= {*_NO_EFFECT, *_TASKS, *_INSTEAD}
_SENDS = (
    "the debugger sends nothing; `accprobe online send DUMP --follow --config FILE` does, beside it, or run `accprobe "
    "opcheck DUMP` after it"
)
_IN_BLOCK = {
    "scope": "choose modules with list, or VLLM_ACCPROBE_MODULES",
    "tensor_list": "in a capture of statistics no tensor is kept; capture again with task tensor and these in list",
    "slice": "whole tensors are kept; `accprobe inspect DUMP TAP --rows` prints a part of one",
    "bench_path": "compare two dumps with `accprobe compare`",
    "file_format": "payloads are safetensors; `accprobe convert` writes other formats",
    "backward_input": "backward is not captured: serving has none",
    "stat_cal_mode": "statistics are taken where the tensor lies",
    "device": "statistics are taken where the tensor lies",
    **dict.fromkeys(("online_run_ut", "online_run_ut_recompute", "is_online", "nfs_path", "host", "port", "tls_path",
                     "rank_list"), _SENDS),
}  # fmt: skip
"""msprobe's keys of a task's block that do nothing here → what to do instead."""
_BLOCK = ("list", "data_mode", "summary_mode", "request_id")
_SIDES = ("all", "input", "output", "forward", "backward")
_MODES = ("statistics", "md5", "xor")
"""Of msprobe's statistics: every dump has statistics and hashes."""


@dataclass(frozen=True)
class Settings:
    """What the arguments come to. first: number of the first step; explicit: only ``step()`` ends a step."""

    probe: ProbeConfig
    steps: tuple[tuple[int, int], ...]
    first: int
    explicit: bool
    notes: tuple[str, ...]


def read_settings(
    config_path: str | os.PathLike[str] | None = None,
    task: str | None = None,
    dump_path: str | os.PathLike[str] | None = None,
    level: str | None = None,
    model: Any = None,
    step: Any = None,
    *,
    rank: Any = None,
    hook_name: str | None = None,
    dump_torch_api: bool | None = None,
    **unknown: Any,
) -> Settings:
    """Raises ConfigError."""
    if unknown:
        raise ConfigError(
            f"PrecisionDebugger has no argument {sorted(unknown)[0]!r}; known are config_path, task, dump_path, level, "
            "model, step, rank, hook_name, dump_torch_api"
        )
    file: dict[str, Any] = {}
    if config_path is not None and not str(config_path).endswith(".json"):
        dump_path, config_path = dump_path or config_path, None
    if config_path is not None:
        file = _read(Path(config_path))
    if hook_name not in (None, "dump"):
        raise ConfigError(f"hook_name={hook_name}: only 'dump' exists here")
    of_msprobe = config_path is not None or task is not None or level is not None
    notes: list[str] = []
    values: dict[str, Any] = {"dir": _directory(dump_path or file.get("dump_path"))}
    kind = task or file.get("task")
    if kind and kind not in _TASKS:
        raise ConfigError(f"task={kind}: {_INSTEAD.get(str(kind), 'known are tensor and statistics')}")
    if kind:
        values["task"] = _TASKS[kind]
    depth = str(level or file.get("level") or "L0")
    if depth not in _LEVELS:
        raise ConfigError(f"level={depth}: known are L0, L1 and mix; single tensors are labelled with set_label")
    if dump_torch_api or _LEVELS[depth]:
        values["ops"] = True
    if (hook_name is not None or dump_torch_api is not None) and not of_msprobe:
        values["export"] = os.environ.get("VLLM_ACCPROBE_EXPORT") or "h5"  # what torch_xray leaves
    ranks = _numbers("rank", rank if rank is not None else file.get("rank"))
    if ranks:
        values["ranks"] = ranks
    steps = _numbers("step", step if step is not None else file.get("step"))
    block = str(kind or "tensor")
    _of_task(block, file.get(block), values, notes)
    ignored = sorted(key for key in file if key in _NO_EFFECT)
    odd = sorted(key for key in file if key not in _KEYS)
    notes += [f"{', '.join(ignored)} of the config file: no effect here"] if ignored else []
    notes += [f"{key} of the config file is not known here{nearest(key, tuple(_KEYS))}: ignored" for key in odd]
    given = ProbeConfig.from_kwargs(**values)
    # What the script leaves open is the environment's, where it has the probe on (`accprobe run -- python script.py`).
    # Inside vLLM those settings are the plugin's: its globs name modules of the whole model, not of the one given here.
    base = ProbeConfig.from_env()
    ours = base.enabled and not os.environ.get(RUN_ID)
    config = replace(base, **{name: getattr(given, name) for name in values}) if ours else given
    return Settings(config, steps, 0 if of_msprobe else 1, of_msprobe, tuple(notes))


def _directory(named: Any) -> str:
    """Absolute: it is what tells one debugger from another."""
    if named:
        return os.path.abspath(os.path.expanduser(str(named)))
    return os.path.abspath(os.environ.get("VLLM_ACCPROBE_DIR", "") or _default())


def _default() -> str:
    """One default directory per process: a debugger that is made in every step must find itself again."""
    if not _defaults:
        _defaults.append(os.path.abspath(default_dir()))
    return _defaults[0]


_defaults: list[str] = []


def _numbers(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    try:
        return parse_ranges([] if value is None else value if isinstance(value, (list, tuple)) else [value])
    except ValueError as error:
        raise ConfigError(f"{name}={value}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as f:
            table = json.loads(f.read(1 << 20))
    except OSError as error:
        raise ConfigError(f"config_path={path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"config_path={path}: not a JSON file; it should be msprobe's config.json") from None
    if not isinstance(table, dict):
        raise ConfigError(f"config_path={path}: not a JSON object; it should be msprobe's config.json")
    return table


def _of_task(name: str, block: Any, values: dict[str, Any], notes: list[str]) -> None:
    """msprobe's settings of one task: which modules, which side of them, whose requests. Raises ConfigError for a
    value of these that cannot be; whatever else stands there is one note each."""
    if block is None:
        return
    if not isinstance(block, Mapping):
        what = f"{name} of the config file is {str(block)[:40]!r}"
        raise ConfigError(f"{what}, not a JSON object with list and data_mode")
    wanted = _texts(f"{name}.list", block.get("list"))
    if wanted:
        values["modules"] = [_module(word) for word in wanted]
    requests = _texts(f"{name}.request_id", block.get("request_id"))
    if requests:
        values["requests"] = requests
    modes = _texts(f"{name}.data_mode", block.get("data_mode")) or ["all"]
    for mode in modes:
        if mode not in _SIDES:
            raise ConfigError(f"{name}.data_mode={mode}: known are {', '.join(_SIDES)}{nearest(mode, _SIDES)}")
    if "backward" in modes:
        notes.append("backward is not captured: serving has none")
    sides = [mode for mode in ("input", "output") if mode in modes]
    if sides and "all" not in modes:
        values["parts"] = sides
    if block.get("summary_mode", "statistics") not in _MODES:
        held = "every dump has min, max, mean, l2 norm and hashes"
        notes.append(f"summary_mode of the config file's {name} block is ignored: {held}")
    for key, value in block.items():
        if key in _BLOCK or (key in _IN_BLOCK and value in (None, [], {}, "", False)):  # a template's empty places
            continue
        known = _IN_BLOCK.get(str(key))
        about = f"{str(key)[:40]} of the config file's {name} block"
        if known is None:
            notes.append(f"{about} is not known here{nearest(str(key), (*_BLOCK, *_IN_BLOCK))}: ignored")
        else:
            notes.append(f"{about} is ignored: {known}")


def _texts(name: str, value: Any) -> list[str]:
    """A text, or a list of texts; [] of nothing. Raises ConfigError."""
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(v, str) for v in found):
        raise ConfigError(f"{name}={str(value)[:60]}: a list of names is expected")
    return [v for v in found if v]


def _module(name: str) -> str:
    """``Module.model.layers.0.mlp.Qwen2MLP.forward.0`` is the module's path, anything else a part of one."""
    if name.startswith("name-regex("):
        raise ConfigError(f"list: {name[:60]}: no regular expressions here; give a part of the name, or a glob")
    words = name.split(".")
    if words[0] in ("Module", "Cell") and len(words) > 3 and words[-2] in ("forward", "backward"):
        return ".".join(words[1:-3])
    return f"*{name}*"
