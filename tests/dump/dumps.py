"""Makes dumps for these tests through the real writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.schema import Payload
from vllm_accprobe.dump.writer import RankWriter, StatsCell, write_run_json


def parts(array: np.ndarray) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.nbytes)]


def tensor_event(
    tap: str, array: np.ndarray, dtype: str, shape: tuple[int, ...] | None = None, **more: Any
) -> dict[str, Any]:
    event = {
        "event": "tensor", "step": 0, "tap": tap, "class": "Linear", "role": "output.0", "call": 0, "seq": 0,
        "dtype": dtype, "shape": list(array.shape if shape is None else shape),
    }  # fmt: skip
    return event | more


def put(
    writer: RankWriter, tap: str, array: np.ndarray, dtype: str, cell: StatsCell | None = None, **more: Any
) -> Payload | None:
    return writer.put(parts(array), tensor_event(tap, array, dtype, **more), cell)


def writer(root: Path, rank: int = 0, **options: Any) -> RankWriter:
    options.setdefault("budget_bytes", 1 << 30)
    options.setdefault("block_bytes", 1 << 16)
    write_run_json(root, {"model": "tests"})
    return RankWriter(root, rank, {"test": True}, **options)


def bits(rng: np.random.Generator, nbytes: int) -> np.ndarray:
    return rng.integers(0, 256, nbytes, dtype=np.uint8)
