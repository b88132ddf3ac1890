"""What the rows of a parameter are called: q, k and v, gate and up, of each expert.

The problem: "rows 256 to 319 were not written" says little; "k was not" says where to look. The idea: the sizes that a
parallel layer carries (core/tp_slices.py) name ranges of rows; fused experts are blocks of rows, each with the same
ranges. A layer whose sizes do not fit the tensor has no names. Not here: fingerprints (prints.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_accprobe.capture.core import tp_slices
from vllm_accprobe.dump.weights.weight_life import Range, row_count

_GATED = ("gate", "up")


def named_rows(module: Any, path: str, name: str, shape: tuple[int, ...]) -> tuple[int, tuple[Range, ...]]:
    """(rows of a block, 0 without blocks; names of the rows in a block)."""
    try:
        if name.startswith(("w13_", "w2_")) and hasattr(module, "local_num_experts") and shape:
            return _expert(name, shape)
        return 0, _linear(module, path, row_count(shape))
    except (TypeError, ValueError, AttributeError):  # a vendor's layer that says it otherwise
        return 0, ()


def _expert(name: str, shape: tuple[int, ...]) -> tuple[int, tuple[Range, ...]]:
    block = row_count(shape) // shape[0] if shape[0] else 0
    if name.startswith("w13_") and block > 1 and block % 2 == 0:
        return block, _ranges(_GATED, (block // 2, block // 2))
    return block, ()


def _linear(module: Any, path: str, rows: int) -> tuple[Range, ...]:
    sizes: Sequence[int]
    if hasattr(module, "num_kv_head_replicas"):
        names: Sequence[str] = ("q", "k", "v")
        sizes = tp_slices.qkv_sizes(module)
    else:
        sizes = [int(n) for n in getattr(module, "output_partition_sizes", None) or ()]
        gated = len(sizes) == 2 and "gate" in path.rpartition(".")[2]
        names = _GATED if gated else [f"part {i}" for i in range(len(sizes))]
    if len(sizes) < 2:
        return ()
    if rows == sum(sizes):
        return _ranges(names, sizes)
    return _ranges(names, [1] * len(sizes)) if rows == len(sizes) else ()  # a scale for each


def _ranges(names: Sequence[str], sizes: Sequence[int]) -> tuple[Range, ...]:
    found, first = [], 0
    for name, size in zip(names, sizes, strict=True):
        found.append((name, first, first + size))
        first += size
    return tuple(found)
