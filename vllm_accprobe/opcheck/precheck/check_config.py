"""msprobe's config.json or config.yaml, as its pre-check takes it with ``-config``.

The problem: a user has a file whose keys are split between capture, pre-check and online pre-check, and one that is
ignored without a word changes what is checked. The idea: each key is taken, or one line says what to use instead; what
cannot be both ignored and right (an online run, a list that is none) is refused. Sources: msprobe's documents of
config.yaml and of the blocks ``run_ut`` and ``acc_check`` of config.json. Not here: what a list chooses
(chosen_apis.py), online runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASKS = ("acc_check", "run_ut")
_MOST = 1 << 20
_LIST = ("white_list", "black_list")
_ONLINE = ("nfs_path", "host", "port", "rank_list", "tls_path", "is_benchmark_device", "online_run_ut")
_CAPTURE = ("dump_path", "rank", "step", "level", "async_dump", "extra_info", "tensor", "statistics", "overflow_check",
            "seed", "is_deterministic", "enable_dataloader", "free_benchmark", "grad_probe", "structure")  # fmt: skip
DIGITS = 14
"""msprobe's default of ``precision``."""


class CheckConfigError(ValueError):
    """One line: which file, which key, what is wrong. Exit code 2."""


@dataclass(frozen=True)
class CheckConfig:
    """white_list, black_list: API names that alone are checked, and that are not; error_data_path: under which failed
    calls are saved; precision: decimal places of a number in msprobe's csv files; notes: a line for each key that has
    no effect."""

    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    error_data_path: str = "./"
    precision: int = DIGITS
    notes: tuple[str, ...] = ()


def read(path: Path) -> CheckConfig:
    """The file's settings. Raises CheckConfigError."""
    tree = _tree(path)
    task = tree.get("task")
    blocks = [t for t in TASKS if isinstance(tree.get(t), Mapping)]
    notes = []
    if task is not None and task not in TASKS:
        if not blocks:
            raise CheckConfigError(f"{path}: task is {str(task)[:40]!r}, which captures; a pre-check's is acc_check")
        notes.append(f"task {str(task)[:40]!r} captures: only the block {blocks[0]} is read")
    block = dict(tree[task if task in blocks else blocks[0]]) if blocks else {}
    block |= {k: v for k, v in tree.items() if k not in (*TASKS, "task") and k not in block}
    if block.get("is_online") or block.get("online_run_ut"):
        raise CheckConfigError(f"{path}: is_online is set: `accprobe online serve -config {path}` checks calls as they "
                               "come; without is_online a dump is checked")  # fmt: skip
    found: dict[str, Any] = {}
    for key, value in block.items():
        if key in _LIST:
            found[key] = _names(path, key, value)
        elif key == "error_data_path":
            if not isinstance(value, str) or not value or "\0" in value:
                raise CheckConfigError(f"{path}: error_data_path is no path")
            found[key] = value
        elif key == "precision":
            if type(value) is not int or not 0 <= value <= 20:
                raise CheckConfigError(f"{path}: precision is {str(value)[:20]!r}: decimal places, from 0 to 20")
            found[key] = value
        else:
            notes.append(_note(key))
    return CheckConfig(**found, notes=tuple(n for n in notes if n))


def _note(key: str) -> str:
    key = str(key)[:60]
    if key == "is_online":
        return ""  # false, which is what it is here
    if key in _ONLINE:
        return f"{key}: of an online pre-check, without effect here; see `accprobe online`"
    if key in _CAPTURE:
        return f"{key}: of capture, without effect here; PrecisionDebugger takes it"
    if key == "quantization_api_list":
        return "quantization_api_list: msprobe 26.2's own list holds here, whatever the file says"
    return f"{key}: not known here, without effect"


def _names(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise CheckConfigError(f'{path}: {key} is no list of API names; for example ["conv1d", "linear"]')
    return tuple(value)


def _tree(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST:
            raise CheckConfigError(f"{path}: larger than a configuration is")
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix in (".yaml", ".yml"):
            tree = _yaml(path, text)
        else:
            tree = json.loads(text)
    except OSError as e:
        raise CheckConfigError(f"-config {path}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        if isinstance(e, CheckConfigError):
            raise
        raise CheckConfigError(f"{path} is no JSON: {str(e)[:100]}") from None
    if not isinstance(tree, dict):
        raise CheckConfigError(f"{path}: not the settings of a pre-check, which are a JSON object")
    return tree


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise CheckConfigError(f"{path}: no YAML reader is installed (PyYAML); write the same keys as JSON") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as e:
        raise CheckConfigError(f"{path} is no YAML: {' '.join(str(e).split())[:100]}") from None
