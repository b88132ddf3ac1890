"""Lives made up for the judge's tests: prints of real numbers, in the words of a dump."""

from typing import Any

import numpy as np

from vllm_accprobe.dump import weight_sums as mixing
from vllm_accprobe.dump.journal import Lives, WeightEvent, WeightPrint, pack_rows

ALL = -1


def weight(seed: int, rows: int = 6, width: int = 4) -> np.ndarray:
    """int64 [rows, width]: bits of a weight."""
    return np.random.default_rng(seed).integers(1, 1 << 15, (rows, width))


def made(
    life: int,
    bits: np.ndarray,
    form: str = "loaded",
    tap: str = "l.0",
    name: str = "weight",
    times: int = ALL,
    **more: Any,
) -> WeightPrint:
    """A print of ``bits``. times: the first so many rows were written, ALL of them unless told."""
    with np.errstate(over="ignore"):
        mixed = mixing.mix(bits.astype(np.int64).view(np.uint64))
        rows, without = (mixed * mixing.factors(bits.shape[1])).sum(1, dtype=np.uint64), mixed.sum(1, dtype=np.uint64)
    order, bag = mixing.in_order(rows), int(without.sum(dtype=np.uint64))
    n = len(bits) if times == ALL else times
    values: dict[str, Any] = {
        "written": ((0, n, 1),) if n else (),
        "rows": pack_rows(mixing.short(rows)),
    }
    return WeightPrint(
        0, life, tap, "Linear", name, form, "bfloat16", bits.shape, f"{order:016x}", f"{bag:016x}",
        int((bits == 0).sum()), **(values | more),
    )  # fmt: skip


def lives(prints: list[WeightPrint], *kinds: str) -> Lives:
    """With loading and then an event of each of ``kinds``."""
    return Lives([WeightEvent(0, i, kind, i) for i, kind in enumerate(("load", *kinds))], prints)
