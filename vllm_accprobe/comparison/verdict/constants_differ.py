"""Modules that were built with other numbers: an epsilon, a softmax scale, a window.

The problem: a constant that is wrong in mine's module is right for mine's own replay, which reads it there. The idea:
what both dumps recorded of the same module is laid side by side. Sizes differ honestly (ranks, packing), so only
numbers that go into a formula count, by their names.
Not here: whether the difference does harm (judging.py), what was recorded (capture/).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from vllm_accprobe.dump.reader import Dump

_FORMULA = re.compile(r"(^|[._])(eps|epsilon|scale|scaling|scaling_factor|base|theta|soft_?cap|sliding_window|window|"
                      r"alpha|beta|limit|mscale|top_?k|renormalize|has_sink|is_neox_style)($|_)")  # fmt: skip
_OF_CACHES = ("_k_scale_float", "_v_scale_float")
"""Scales of an 8-bit cache: numbers of a formula only beside another cache of that format."""
_DIGITS = 1e-6
"""Chosen: relative; a float32 and a float64 of the same constant are nearer."""


def differing(golden: Dump, mine: Dump) -> dict[str, str]:
    """Tap → ``variance_epsilon is 0.02, golden has 1e-06``, of the modules that both dumps know."""
    theirs, own = _attributes(golden), _attributes(mine)
    out = {}
    for tap, attrs in own.items():
        said = [
            f"{name} is {value}, golden has {theirs[tap][name]}"
            for name, value in attrs.items()
            if _FORMULA.search(name)
            and name in theirs.get(tap, {})
            and _differ(theirs[tap][name], value)
            and not (name in _OF_CACHES and theirs[tap].get("kv_cache_dtype") != attrs.get("kv_cache_dtype"))
        ]
        if said:
            out[tap] = "; ".join(said)
    return out


def _attributes(dump: Dump) -> dict[str, Mapping[str, Any]]:
    return {m.tap: m.attrs for modules in dump.modules.values() for m in modules}


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return type(a) is type(b) and isinstance(a, (bool, str)) and a != b
    if not (math.isfinite(a) and math.isfinite(b)):
        return a != b and not (a != a and b != b)
    return abs(a - b) > _DIGITS * max(abs(a), abs(b))
