"""A dump of ATB operators, made by hand: its bins, its parameters, and what opcheck finds in it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opcheck.samples.definitions import attend
from opcheck.samples.sample import faulty, wide
from support.opchecked import rows_of

from vllm_accprobe.opcheck.run.result_row import CheckResult

__all__ = ["MadeCall", "attend", "bits", "faulty", "judged", "normal", "rows_of", "wide", "write_bin", "write_call"]
CODES = {
    torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.int64: 9, torch.float64: 11,
    torch.bool: 12, torch.bfloat16: 27,
}  # fmt: skip


@dataclass
class MadeCall:
    """kind: the operator's type; inputs, outputs: in order; inplace: inputs as they are behind it, by number."""

    kind: str
    param: Mapping[str, Any] | None
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor] = ()
    inplace: Mapping[int, torch.Tensor] = field(default_factory=dict)


def write_bin(path: Path, t: torch.Tensor) -> None:
    data = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
    lines = ["$Version=1.0", "$Object.Count=1", f"$Object.Length={len(data)}", "format=2", f"dtype={CODES[t.dtype]}"]
    lines += [f"dims={','.join(map(str, t.shape))}", f"$Object.data=0,{len(data)}", "$End=1"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode() + data)


def write_call(
    root: Path, made: MadeCall, number: int = 0, *, process: str = "0_7", token: int = 0, above: str = "",
    after: bool = False,
) -> Path:  # fmt: skip
    """Writes a call into a dump; after: inputs as they are behind it, as ``-time 1`` keeps them. Gives its folder."""
    where = root / f"tensors/{process}/{token}" / above / f"{number}_{made.kind}"
    for k, t in enumerate(made.inputs):
        write_bin(where / ("after" if after else "before") / f"intensor{k}.bin", made.inplace.get(k, t) if after else t)
    for k, t in made.inplace.items():
        write_bin(where / f"after/intensor{k}.bin", t)
    for k, t in enumerate(made.outputs):
        write_bin(where / f"after/outtensor{k}.bin", t)
    if made.param is not None:
        (where / "op_param.json").write_text(json.dumps(made.param))
    return where


def judged(root: Path, made: MadeCall, **more: Any) -> dict[str, CheckResult]:
    """The rows of one call by role."""
    write_call(root, made, **more)
    return {row.role: row for row in rows_of(root)}


def bits(x: Any, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """numpy's float64 or integers rounded once to ``dtype``."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return bits(rng.standard_normal(shape), dtype)
