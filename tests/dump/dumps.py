"""Makes dumps for these tests through the real writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.journal_writer import TensorTemplate, digest
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
    return put_event(writer, array, tensor_event(tap, array, dtype, **more), cell)


def put_event(
    writer: RankWriter, array: np.ndarray, event: Mapping[str, Any], cell: StatsCell | None = None
) -> Payload | None:
    """Writes the tensor's line ``event`` and its bytes. Without a cell, hash and statistics are the event's where it
    has such keys, else the bytes'. None where nothing is written any more."""
    if cell is None:
        wanted = "stats" not in event and event["dtype"] in DTYPES
        hash = event.get("hash") or digest(parts(array))
        cell = StatsCell(event.get("stats"), hash, event["dtype"] if wanted else None)
    front = {k: v for k, v in event.items() if k not in ("step", "call", "seq", "dtype", "shape", "hash", "stats")}
    template = TensorTemplate(front, event["dtype"], tuple(event["shape"]), array.nbytes)
    line = (template, event.get("step"), event.get("call", 0), event.get("seq", 0), cell)
    writer.tensor(line, array.ctypes.data)
    return cell.payload


def writer(root: Path, rank: int = 0, **options: Any) -> RankWriter:
    options.setdefault("budget_bytes", 1 << 30)
    options.setdefault("block_bytes", 1 << 16)
    write_run_json(root, {"model": "tests"})
    return RankWriter(root, rank, {"test": True}, **options)


def bits(rng: np.random.Generator, nbytes: int) -> np.ndarray:
    return rng.integers(0, 256, nbytes, dtype=np.uint8)
