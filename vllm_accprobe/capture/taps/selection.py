"""Which modules are captured: globs over module paths, class names, and presets for the kinds people ask for.

Not here: which requests and tokens (rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.config_values import words_choose
from vllm_accprobe.dump.schema import ROOT_TAP


def chooses(config: ProbeConfig, path: str, cls: str) -> bool:
    """Whether VLLM_ACCPROBE_MODULES (globs over paths, presets, class names) selects the module at ``path``."""
    return not config.modules_left or picks(config.modules, path, cls)


def picks(words: Sequence[str], path: str, cls: str) -> bool:
    """Whether such globs, presets and class names choose the module at ``path``."""
    return words_choose(words, path or ROOT_TAP, path, cls)
