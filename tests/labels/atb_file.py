"""Writes a tensor as ATB's ``.bin``: header lines up to ``$End=1``, then the bytes."""

from pathlib import Path

import numpy as np

FLOAT, HALF, BFLOAT16 = 0, 1, 27


def write(path: Path, bits: np.ndarray, dtype: int) -> None:
    """``bits`` in the storage of ATB's dtype number ``dtype`` (bfloat16 as uint16)."""
    data = np.ascontiguousarray(bits).tobytes()
    dims = ",".join(map(str, bits.shape))
    lines = ["$Version=1.0", "$Object.Count=1", f"$Object.Length={len(data)}", "format=2", f"dtype={dtype}"]
    lines += [f"dims={dims}", f"$Object.data=0,{len(data)}", "$End=1"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode() + data)
