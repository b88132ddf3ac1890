"""What a replay says of origins that lie in a gap between two taps.

The problem: a comparison cannot tell which operator of a gap made an error; a replay that had one's reads can. The
idea: where it proves one that lies in the gap, or the operator at its end, to be wrong, that one is the origin and the
gap is none any more; where it saw one to be right in all rows, that one is taken out of what the gap contains.
Not here: the gap (comparison/verdict/gaps.py), who is proved and what else a proof does (decide.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from vllm_accprobe.comparison.result import Comparison


def narrowed(result: Comparison, wrong: Collection[str], right: Collection[str]) -> Comparison:
    """``result`` with its gaps as a replay leaves them. wrong: modules that it proved; right: those whose every row it
    saw to be right for its own inputs."""
    if not any(o.get("gap") for o in result.origins):
        return result
    origins = [_narrowed(o, right) for o in result.origins if not _found_in(o, wrong)]
    return replace(result, origins=origins)


def _found_in(origin: Mapping[str, Any], wrong: Collection[str]) -> bool:
    gap = origin.get("gap")
    return gap is not None and any(m in wrong for m in (*gap["contains"], gap["before"]))


def _narrowed(origin: dict[str, Any], right: Collection[str]) -> dict[str, Any]:
    gap = origin.get("gap")
    if not gap:
        return origin
    ends = [str(end).partition("/")[0] for end in (gap["after"] or "", gap["before"])]

    def cleared(module: str) -> bool:
        # A module around one of the ends is in the gap by its own code, which no replay of its output checks alone.
        return module in right and not any(end.startswith(f"{module}.") for end in ends)

    return origin | {"gap": gap | {"contains": [m for m in gap["contains"] if not cleared(m)]}}
