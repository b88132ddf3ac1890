"""A gap between two taps in words: where it is, what lies in it, and the setting that would split it.

The problem: an error that comes up between two taps belongs to no operator that was seen, and a name of one would send
the reader to innocent code. The idea: wherever an origin is named, a gap is named by its two ends; one line says which
modules lie there. Every string returned is already ``safe``. Not here: what lies there (comparison/verdict/gaps.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_accprobe.comparison.verdict.gaps import splitting
from vllm_accprobe.report.text import count, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

SHOWN = 4
"""Modules that a line names."""


def gap_of(origin: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """An origin's gap, where it lies in one."""
    gap = origin.get("gap")
    return gap if isinstance(gap, Mapping) and gap.get("before") else None


def tap_of(origin: Mapping[str, Any]) -> str:
    """The tap whose tensor shows an origin's error: its module, or the end of its gap."""
    gap = gap_of(origin)
    return str(gap["before"] if gap else origin.get("module", "?"))


def where(gap: Mapping[str, Any]) -> str:
    """``between A and B``."""
    before = safe(gap["before"])
    return f"between {safe(gap['after'])} and {before}" if gap.get("after") else f"in front of {before}"


def inside(comparison: Comparison, origin: Mapping[str, Any]) -> str | None:
    """What lies in an origin's gap and how to see it, as one line; None where there is no gap."""
    gap = gap_of(origin)
    if gap is None:
        return None
    before = str(gap["before"])
    ends = [str(gap.get("after") or "").partition("/")[0], before]
    modules = [str(m) for m in gap.get("contains") or () if m != before]
    code = [m for m in modules if any(end.startswith(f"{m}.") for end in ends)]
    operators = [m for m in modules if m not in code]
    said = [safe(m) for m in operators[:SHOWN]]
    said += [count(len(operators) - SHOWN, "more module")] if len(operators) > SHOWN else []
    if code:
        what = ", ".join(safe(m) for m in code[:SHOWN]) + (f" and {len(code) - SHOWN} more" if code[SHOWN:] else "")
        said.append(f"code of {what}")
    if before in gap["contains"]:
        said.append(f"{safe(before)} itself, whose input was not compared")
    text = f"not seen there: {'; '.join(said)}" if said else "no module lies there: the code between the two"
    split = next(filter(None, (splitting(gap, run) for run in (comparison.mine_run, comparison.golden_run))), None)
    if split is None:
        return text
    words = " ".join(f"VLLM_ACCPROBE_{name}={shlex.quote(value)}" for name, value in split.items()
                     if name != "GRAPHS" or len(split) == 1)  # fmt: skip
    return f"{text}. {safe(words, 400)} would split it"
