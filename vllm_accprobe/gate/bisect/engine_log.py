"""What an engine says of itself at its start, so that settings that make no difference need no trial.

The problem: what a command leaves to vLLM's defaults (asynchronous scheduling, custom operators) is decided by
platform and model, and is often the plain value already. The idea: vLLM prints its configuration, and with
VLLM_LOGGING_LEVEL=DEBUG the custom operators of the model; a setting that two logs tell alike is none. What a log
does not tell stays an axis. Not here: starting engines (trials.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_CONFIG = "with config: "
MAX_BYTES = 4 << 20
"""Chosen: of a log, from its beginning; the configuration stands within the first 100 KB."""
_FACTS = {
    "eager": r"\benforce_eager=(\w+)",
    "prefix": r"\benable_prefix_caching=(\w+)",
    "KV cache dtype": r"\bkv_cache_dtype='?([\w.]+)",
    "custom operators": r"'custom_ops': (\[[^\]]*\])",
    "IR operators": r"\bir_op_priority=(IrOpPriorityConfig\([^)]*\))",
}
"""Of the line with the configuration, by the name in `ServerSetting.fact`."""
_LINES = {"async": r"Asynchronous scheduling is (enabled|disabled)", "chunks": r"Chunked prefill is enabled with (\S+)"}
_USED = re.compile(r"(enabled|disabled) custom ops: Counter\(\{([^}]*)\}\)")


def read(path: Path | None) -> str:
    """The beginning of a log, "" where there is none."""
    try:
        with open(path or "", "rb") as f:
            return f.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def facts(text: str) -> dict[str, str]:
    """By `ServerSetting.fact`, what is told and nothing else."""
    found = {}
    config = next((line for line in text.splitlines() if _CONFIG in line), "")
    for source, patterns in ((config, _FACTS), (text, _LINES)):
        for name, pattern in patterns.items():
            if match := re.search(pattern, source):
                found[name] = match[1]
    return found


def used(text: str) -> dict[str, bool] | None:
    """The custom operators of the model: whether each is enabled. None where the log does not tell."""
    found: dict[str, bool] = {}
    told = False
    for what, names in _USED.findall(text):
        told = True
        for name in re.findall(r"'([a-z0-9_]+)'", names):
            found[name] = found.get(name, False) or what == "enabled"
    return found if told else None


def same(name: str, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether both tell ``name``, and alike."""
    return bool(name) and name in one and one[name] == other.get(name)
