"""Parameters that loading did not write: what they hold is how their module was made, or what the memory held.

The problem: a loader that passes over a tensor raises nothing where the module has filled it (ones, zeros), and the
model computes with it. The idea: loading is watched (capture/weights/history.py). Memory that was made empty and was
not written is wrong whatever it is; memory that the module filled is wrong where the same parameter of another layer
was written. What is computed, and a constant that no layer's loading writes, is none.
Not here: whether a checkpoint has such a tensor (opcheck/run/own_findings.py), reloads (weights.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vllm_accprobe.dump.journal import WeightPrint

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
Place = tuple[int, str, str]


def form(tap: str, name: str) -> str:
    """The same parameter in any layer."""
    return f"{_NUMBER.sub('*', tap)}.{name}"


def unwritten(
    states: Mapping[Place, Any], computed: Any, times: Any
) -> Iterator[tuple[Place, WeightPrint, np.ndarray, str]]:
    """(place, print, the rows that nothing wrote, why that is wrong) after loading. states: judge.weights.State by
    place; computed: whether a name is that of a table; times: of a print, how often each row was written."""
    written: dict[str, int] = defaultdict(int)
    found: list[tuple[Place, WeightPrint, np.ndarray]] = []
    for place, state in states.items():
        p = state.given or state.lies
        seen = None if p is None or computed(place[-1]) or not p.count else times(p)
        if p is None or seen is None:
            continue
        if seen.any():
            written[form(*place[1:])] += 1
        if not seen.all():
            found.append((place, p, np.flatnonzero(seen == 0)))
    if not written:  # loading by other means than torch's calls: nothing was seen of any
        return
    for place, p, rows in found:
        whole = len(rows) == p.count
        if p.raw:
            yield place, p, rows, "it holds what the memory held before"
        elif whole and written[form(*place[1:])]:
            yield place, p, rows, "as initialised, while loading wrote that of other layers"
