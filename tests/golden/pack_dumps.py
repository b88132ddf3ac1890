"""Dumps of the synthetic model, and packs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synthetic_model import capture, write

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.golden.estimated import compared_sides
from vllm_accprobe.golden.pack import pack


def dump(root: Path, **how: Any) -> Path:
    return write(capture(**how), root)


def packed(root: Path, name: str = "x.golden", max_bytes: int | None = None, **how: Any) -> Path:
    out = root / name
    pack(dump(root / f"{name}-dump", **how), out, max_bytes=max_bytes)
    return out


def judged(golden: Path, mine: Path, **how: Any) -> Comparison:
    """As the command does it, without a replay. how: standard, floors."""
    with compared_sides(golden, mine) as sides:
        return sides.judged(compare(sides.golden, sides.mine, **how), **how)
