"""A tensor's values as lines of text.

The problem: a person sees a few hundred numbers at once, a tensor has millions, some of them NaN. The idea: pure
functions that return lines: a header, a histogram over the finite values, rows cut in the middle with what is left out
counted. Not here: which tensor (show.py). numpy is imported by each function: this module belongs to the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.cli.common.options import CommandError

if TYPE_CHECKING:
    import numpy as np

    from vllm_accprobe.dump.reader import Dump
    from vllm_accprobe.dump.schema import Record
    from vllm_accprobe.dump.select import Ranges

BINS = 16
_BAR = 40
_ENDS = 6
"""Values printed from either end of a row."""
_MAX_ROWS = 64
_CHUNK = 1 << 20


def shape_text(shape: tuple[int, ...]) -> str:
    """``8x64``, or ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def stats_line(r: Record) -> str:
    """Extremes, mean and deviation, and NaN and Inf where there are any, in one line."""
    from vllm_accprobe.report.text import num

    s = r.stats
    if s is None:
        return "no statistics"
    bad = f", NaN {s.nan:,}, Inf {s.inf:,}" if s.nan or s.inf else ""
    return f"min {num(s.min, 6)}, max {num(s.max, 6)}, mean {num(s.mean, 6)}, std {num(s.std, 6)}{bad}"


def header(dump: Dump, r: Record) -> list[str]:
    """What is said of one tensor before its values."""
    from vllm_accprobe.report.text import num, safe

    step = "parameter" if r.step is None else f"step {r.step}"
    what = f"{r.dtype} {shape_text(r.shape)}"
    lines = [f"{safe(r.name)}  {safe(r.cls)}  {step}, rank {r.rank}", f"  {what}, {stats_line(r)}"]
    if r.stats is not None:
        lines[-1] += f", l2 {num(r.stats.l2, 6)}"
    layout = r.layout
    if layout.kind != "replicated":
        cut = f" along dim {layout.dim}" if layout.dim is not None else ""
        lines.append(f"  {safe(layout.kind)}{cut}, {safe(layout.group)} {layout.index} of {layout.size}")
    if r.mutated:
        lines.append("  the module changed this input in place; these are the values before")
    if r.hash:
        lines.append(f"  xxh3-128 {safe(r.hash)}")
    return lines


def histogram(array: np.ndarray, dtype: str, bins: int = BINS) -> list[str]:
    """Counts of the finite values between their minimum and maximum, as bars; real parts of complex numbers."""
    import numpy as np

    from vllm_accprobe.dump.dtypes import widen

    flat = array.reshape(-1)

    def chunks() -> Any:
        for start in range(0, flat.size, _CHUNK):
            x = widen(flat[start : start + _CHUNK], dtype, as_float=True)
            x = x.real if np.iscomplexobj(x) else x
            x = x[np.isfinite(x)].astype(np.float64)
            if x.size:
                yield x

    ends = [(float(x.min()), float(x.max())) for x in chunks()]
    if not ends:
        return ["no finite values"] if flat.size else ["no values"]
    low, high = min(e[0] for e in ends), max(e[1] for e in ends)
    if low == high:
        return [f"all finite values are {low:.6g}"]
    # Halved, since the width of float64's whole range is no float64.
    edges = 2 * np.linspace(low / 2, high / 2, bins + 1)
    edges[0], edges[-1] = low, high
    counts = np.zeros(bins, np.int64)
    for x in chunks():
        at = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
        counts += np.bincount(at, minlength=bins)
    top = int(counts.max())
    lines = []
    for i in range(bins):
        bar = "#" * -(-_BAR * int(counts[i]) // top)  # rounded up: one value is seen, too
        lines.append(f"{edges[i]:>12.5g} .. {edges[i + 1]:>12.5g}  {counts[i]:>{len(f'{top:,}')},}  {bar}".rstrip())
    return lines


def choose(dump: Dump, r: Record, wanted: Ranges, requests: Sequence[str], positions: Ranges) -> np.ndarray | None:
    """Indices along dimension ``row_dim`` of the rows asked for; None where none were. Raises CommandError."""
    import numpy as np

    from vllm_accprobe.dump.select import row_space, rows_of

    if not wanted and not requests and not positions:
        return None
    if not r.shape:
        raise CommandError(f"{r.name} is a scalar and has no rows")
    n = r.shape[r.row_dim]
    if wanted:
        past = [high for _, high in wanted if high >= n]
        if past:
            raise CommandError(f"--rows: {r.name} has rows 0 to {n - 1}, not {past[0]}")
        return np.concatenate([np.arange(low, high + 1) for low, high in wanted])
    if row_space(dump, r) is None:
        raise CommandError(f"{r.name} has no row map: choose with --rows")
    found = rows_of(dump, r, requests, positions)
    if not found.size:
        raise CommandError(f"{r.name} has no row of that request and position in this step")
    return found


def rows(dump: Dump, r: Record, array: np.ndarray, indices: np.ndarray | None) -> list[str]:
    """The chosen rows, or, where none were chosen, everything if it is no more than a few numbers."""
    import numpy as np

    from vllm_accprobe.dump.dtypes import widen

    if indices is None:
        if array.size > 2 * _ENDS:
            return []
        return ["  " + _numbers(widen(array, r.dtype).reshape(-1))]
    lines = []
    moved = np.moveaxis(array, r.row_dim, 0)
    for index in indices[:_MAX_ROWS]:
        row = widen(np.ascontiguousarray(moved[index]), r.dtype).reshape(-1)
        lines.append(f"row {index}{_row_name(dump, r, int(index))}")
        lines.append("  " + _numbers(row))
    if len(indices) > _MAX_ROWS:
        lines.append(f"... {len(indices) - _MAX_ROWS:,} more rows: --save FILE writes them all")
    return lines


def _numbers(row: np.ndarray) -> str:
    def text(x: Any) -> str:
        return f"{x:.6g}" if row.dtype.kind != "i" else str(x)

    if row.size <= 2 * _ENDS:
        return " ".join(map(text, row))
    left = f" ... {row.size - 2 * _ENDS:,} more ... "
    return " ".join(map(text, row[:_ENDS])) + left + " ".join(map(text, row[-_ENDS:]))


def _row_name(dump: Dump, r: Record, index: int) -> str:
    from vllm_accprobe.dump.select import row_space
    from vllm_accprobe.report.text import safe

    space = row_space(dump, r)
    start = 0
    for s in space.segments if space else ():
        if index < start + s.n:
            request = dump.requests.get((r.rank, s.req))
            name = safe(request.id) if request else f"#{s.req}"
            image = "" if s.image is None else f", image {s.image}"
            token = f", token {space.ids[index]}" if space and space.ids else ""
            return f"  (request {name}{image}, position {s.pos + index - start}{token}, {s.phase})"
        start += s.n
    return ""


def as_json(r: Record, array: np.ndarray, indices: np.ndarray | None) -> dict[str, Any]:
    """``{"row": [values]}`` of the chosen rows, at most 64 of them; {} where none were chosen: --save has all."""
    import numpy as np

    from vllm_accprobe.dump.dtypes import widen

    if indices is None:
        return {}
    moved = np.moveaxis(array, r.row_dim, 0)
    rows = {int(i): widen(np.ascontiguousarray(moved[i]), r.dtype).reshape(-1) for i in indices[:_MAX_ROWS]}
    return {str(i): [str(x) if row.dtype.kind == "c" else x for x in row.tolist()] for i, row in rows.items()}


def save(path: Path, r: Record, array: np.ndarray) -> None:
    """Stored bits as .npy (bfloat16 and 8-bit floats as float32) or .safetensors (as they are)."""
    from vllm_accprobe.formats.write import containers

    if path.suffix == ".npy":
        containers.save_npy(path, array, r.dtype)
    else:
        containers.save_safetensors(path, r.name, array, r.dtype)
