"""A dump's tensors for people: the table of all, what the dump lacks, and one tensor with its values.

The problem: a dump has thousands of tensors, and one has millions of numbers, some of them NaN. The idea: pure
functions. One row per record, for the eye or for a csv. Hundreds of operator calls of a step are alike: they have a row
per operator, with its calls, how many kept their tensors, from how many modules, in how many forms (shapes and dtypes
of what went in), the commonest of them, and the range of what came out. One tensor is a header, a histogram over the
finite values, and rows cut in the middle with what is left out counted. Not here: what is chosen and printed
(cli/inspect_dump.py), a prompt (prompt.py), what a finding is (judge/weights, dump/journal).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.journal import Lives, inputs, sentence, tensors
from vllm_accprobe.dump.reader import Dump, row_space
from vllm_accprobe.dump.record_table import ChosenRecords, joined, numbers_of, of_sites, stored_bytes
from vllm_accprobe.dump.schema import OpCall, Record
from vllm_accprobe.judge.weights import event_words, faults_within, side_of
from vllm_accprobe.report.text import count, num, safe, size

COLUMNS = ("index", "step", "rank", "tap", "role", "shape", "dtype", "min", "max", "mean", "std", "NaN", "Inf")
CSV = (*COLUMNS[:-2], "nan", "inf", "class", "call", "rows", "requests", "mutated", "hash", "layout", "bytes", "stored")
OPERATORS = (
    "operator", "calls", "stored", "modules", "forms", "commonest input", "output min", "max", "NaN", "Inf"
)  # fmt: skip
_FINDINGS, _ADAPTERS = 5, 20


def about(dump: Dump, chosen: ChosenRecords) -> list[str]:
    """What the dump holds, what it lacks and why, as lines."""
    records = joined(dump.records, dump.padding)
    tensors = int((numbers_of(records, "step") >= 0).sum())
    steps = len({step for _, step in dump.steps})
    requests = len({(q.id, q.prompt, q.ordinal) for q in dump.requests.values()})
    listed = chosen.ran
    lines = [
        f"{listed:,} of {count(tensors, 'captured tensor')} and {len(chosen) - listed:,} of "
        f"{count(len(records) - tensors, 'parameter')}; {count(len(dump.ranks), 'rank')}, {count(steps, 'step')}, "
        f"{count(requests, 'request')}, {size(stored_bytes(records))} stored"
    ]
    reasons: Counter[str] = Counter()
    example: dict[str, str] = {}
    for s in dump.skips:
        reasons[s.reason] += s.count
        example.setdefault(s.reason, s.tap)
    for reason, n in reasons.most_common():
        at = f", e.g. at {safe(example[reason])}" if example[reason] else ""
        lines.append(f"skipped: {n:,} x {safe(reason)}{at}")
    lines += state_lines(dump)
    lines += weight_lines(getattr(dump, "lives", None))
    lines += [f"note: {safe(p, 400)}" for p in dump.problems]
    if dump.errors:
        first = dump.errors[0]
        what = safe(f"{first.get('where', '')}: {first.get('message', '')}", 300)
        lines.append(f"note: {count(len(dump.errors), 'error')} inside the probe; the first at {what}")
    return lines


def cells(index: int, r: Record) -> list[str]:
    """A row of the table for the eye."""
    s = r.stats
    values = [num(v, 6) for v in (s.min, s.max, s.mean, s.std)] if s else [num(None)] * 4
    bad = [str(s.nan), str(s.inf)] if s else [num(None)] * 2
    role = safe(r.which)
    step = "param" if r.step is None else str(r.step)
    return [str(index), step, str(r.rank), safe(r.tap), role, shape_text(r.shape), r.dtype, *values, *bad]


def csv_rows(dump: Dump, chosen: Sequence[tuple[int, Record]]) -> Iterator[list[Any]]:
    """A row of the csv for each record."""
    for index, r in chosen:
        s = r.stats
        stats: list[Any] = [s.min, s.max, s.mean, s.std, s.nan, s.inf] if s else [None] * 6
        space = row_space(dump, r)
        requests = {dump.requests[key].id for q in (space.segments if space else ())
                    if (key := (r.rank, q.req)) in dump.requests}  # fmt: skip
        shape = shape_text(r.shape)
        yield [index, r.step, r.rank, r.tap, r.role, shape, r.dtype, *stats, r.cls, r.call, r.rows,
               " ".join(sorted(requests)), int(r.mutated), r.hash, r.layout.kind,
               r.payload.nbytes if r.payload else None, int(r.payload is not None)]  # fmt: skip


def operator_table(dump: Dump, calls: Sequence[OpCall]) -> list[list[Any]]:
    """The rows of the table of operators, most calls first."""
    operators = of_sites(dump.records, lambda site: "::" in site.tap)
    kept = {(r.rank, r.step, r.tap, r.call) for r in operators if r.payload is not None}
    by_op: dict[str, list[OpCall]] = {}
    for call in calls:
        by_op.setdefault(call.op, []).append(call)
    rows = []
    for op, mine in sorted(by_op.items(), key=lambda item: (-len(item[1]), item[0])):
        forms = Counter(", ".join(_form(t) for t in inputs(call)) for call in mine)
        out = [t for call in mine for t in tensors(call.outputs)]
        out += [t["after"] for call in mine for t in inputs(call) if t["role"] in call.mutates and t.get("after")]
        lows = [t["min"] for t in out if t.get("min") is not None]
        highs = [t["max"] for t in out if t.get("max") is not None]
        stored = sum((c.rank, c.step, c.tap, c.call) in kept for c in mine)
        rows.append(
            [op, len(mine), stored, len({(c.rank, c.module) for c in mine if c.module}), len(forms),
             forms.most_common(1)[0][0], min(lows, default=None), max(highs, default=None),
             sum(_number(t.get("nan")) for t in out), sum(_number(t.get("inf")) for t in out)]
        )  # fmt: skip
    return rows


def operator_cells(row: Sequence[Any]) -> list[str]:
    op, *counts, form, low, high, nan, inf = row
    return [safe(op), *(f"{n:,}" for n in counts), safe(form, 60), num(low, 4), num(high, 4), str(nan), str(inf)]


def _form(tensor: dict[str, Any]) -> str:
    return f"{tensor['dtype']}[{'x'.join(map(str, tensor['shape']))}]"


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def state_lines(dump: Dump, n: int = 20) -> list[str]:
    """What the run's own ledger of states has found, and checked."""
    found, totals = getattr(dump, "states", []), getattr(dump, "state_totals", {})
    out = [f"the cache, not the kernel: {safe(sentence(one), 1000)}, rank {rank}" for rank, one in found[:n]]
    total = max(sum(one.findings for one in totals.values()), len(found))
    if total > n:
        out.append(f'... {total - n:,} more findings of the ledger of states: the journals\' lines "state"')
    for rank, one in sorted(totals.items()):
        what = count(one.findings, "finding") if one.findings else "nothing wrong"
        out.append(
            f"states, rank {rank}: {what}; {safe(one.mode)}: {one.layers:,} layers, {one.steps:,} steps, "
            f"{one.checked:,} blocks checked, {one.hashed:,} hashed, {one.held:,} numbers of metadata"
        )
        if one.events:
            out.append("  events: " + ", ".join(f"{v:,} x {safe(k)}" for k, v in sorted(one.events.items())))
        out += [f"  not watched: {v:,} x {safe(k)}" for k, v in one.skipped.items()]
    return out


def weight_lines(lives: Lives | None, whole: bool = False) -> list[str]:
    """[] of a dump that tells nothing of its weights. whole: all findings and events."""
    if lives is None or not lives.events:
        return []
    side = side_of(lives)
    found = faults_within(side, "")
    shown = found if whole else found[:_FINDINGS]
    out = [f"the weights, not the kernel: {safe(f.says, 1000)}, rank {f.rank}" for f in shown]
    if len(shown) < len(found):
        out.append(f"... {len(found) - len(shown):,} more findings about weights: `inspect DUMP weights` has all")
    prints = Counter((p.rank, p.life) for p in lives.prints)
    for rank, events in sorted(side.events.items()):
        wrong = Counter(f.number for f in found if f.rank == rank)
        names = [safe(event_words(e, events), 200) for e in events]
        if not whole:
            more = f" and {len(names) - _ADAPTERS:,} more" if len(names) > _ADAPTERS else ""
            what = count(sum(wrong.values()), "finding") if wrong else "nothing wrong by this dump alone"
            out.append(f"weights, rank {rank}: {what}; {', '.join(names[:_ADAPTERS])}{more}")
            continue
        for e, name in zip(events, names, strict=True):
            forms = count(prints[rank, e.number], "fingerprint")
            line = f"weights, rank {rank}: {name}, before step {e.step}: {forms} of {e.nbytes:,} bytes"
            line += f" in {e.seconds:.3f} s"
            line += f"; {count(wrong[e.number], 'finding')}" if wrong[e.number] else ""
            out.append(line + (f"; {safe(e.detail)}" if e.detail else ""))
    return out


def brief(r: Record) -> str:
    step = "parameter" if r.step is None else f"step {r.step}"
    return f"{safe(r.which)} ({step}, rank {r.rank})"


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
    s = r.stats
    if s is None:
        return "no statistics"
    bad = f", NaN {s.nan:,}, Inf {s.inf:,}" if s.nan or s.inf else ""
    return f"min {num(s.min, 6)}, max {num(s.max, 6)}, mean {num(s.mean, 6)}, std {num(s.std, 6)}{bad}"


def header(dump: Dump, r: Record) -> list[str]:
    """A tensor without its values."""
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


def row_lines(dump: Dump, r: Record, array: np.ndarray, indices: np.ndarray | None) -> list[str]:
    """The chosen rows, or, where none were chosen, everything if it is no more than a few numbers."""
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
    space = row_space(dump, r)
    for s, rows in space.stretches() if space else ():
        if index < rows.stop:
            request = dump.requests.get((r.rank, s.req))
            name = safe(request.id) if request else f"#{s.req}"
            image = "" if s.image is None else f", image {s.image}"
            token = f", token {space.ids[index]}" if space and space.ids else ""
            return f"  (request {name}{image}, position {s.pos + index - rows.start}{token}, {s.phase})"
    return ""


def rows_json(r: Record, array: np.ndarray, indices: np.ndarray | None) -> dict[str, Any]:
    """``{"row": [values]}`` of the chosen rows, at most 64 of them; {} where none were chosen: --save has all."""
    if indices is None:
        return {}
    moved = np.moveaxis(array, r.row_dim, 0)
    rows = {int(i): widen(np.ascontiguousarray(moved[i]), r.dtype).reshape(-1) for i in indices[:_MAX_ROWS]}
    return {str(i): [str(x) if row.dtype.kind == "c" else x for x in row.tolist()] for i, row in rows.items()}
