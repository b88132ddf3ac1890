"""``accprobe inspect DUMP TAP``: one tensor in detail; all states, all weights; with --prompt, a request's prompt.

The problem: after a report has named a tap, a person wants to see its numbers, of which a tensor has millions, some of
them NaN; it also names a request, and the prompt is a user's text, which no report repeats. The idea: all records of
the tap as a small table, then the first of them (or the only one that the options leave) as lines: a header, a
histogram over the finite values, rows cut in the middle with what is left out counted. A prompt is printed from the ids
next to the stored rows, with the positions that no stored row computed and what to set so that they are. Ids become
text by a tokenizer.json that the user names; nothing is downloaded or stored.

Not here: the list of tensors (inspect_list.py), what a finding is (judge/weights, dump/journal).
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from vllm_accprobe.cli import places
from vllm_accprobe.cli.endings import CommandError, NothingThere
from vllm_accprobe.cli.options import SelectionOptions, ranges
from vllm_accprobe.cli.output import answer, say_written
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.dump.decode import object_at
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.journal import Lives, sentence
from vllm_accprobe.dump.reader import Dump, Ranges, names_request, row_space, rows_of
from vllm_accprobe.dump.schema import Record, Request, hash_tokens
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.io import containers
from vllm_accprobe.judge.weights import event_words, faults_within, side_of
from vllm_accprobe.report.html.data import tokenizer_at
from vllm_accprobe.report.text import count, num, safe

_FINDINGS, _ADAPTERS = 5, 20


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


_LISTED = 20
STATES, WEIGHTS = "states", "weights"
"""What TAP says for all findings of the ledger of states, where the run kept one; for the weights over their life."""


def is_tap(dump: Dump, name: str) -> bool:
    """Whether ``name`` is shown in detail: a tap or a record; or else what is neither a glob, nor a file to write to,
    nor a class or an operator, so that the nearest names are of use."""
    if any(name in (r.tap, r.name, f"{r.tap}/{r.role}") for r in dump.records):
        return True
    if any(c in name for c in "*?[!,") or name.endswith((".txt", ".csv")):
        return False
    operators = (word for c in getattr(dump, "ops", ()) for word in (c.op, c.op.rpartition(".")[0]))
    return not any(name == r.cls for r in dump.records) and name not in operators


def show(dump: Path, opened: Dump | None, tap: str, chosen: SelectionOptions, how: Any) -> None:
    """opened: the dump where it is open already; how: inspect.TensorOptions. Raises CommandError, NothingThere."""
    save, request = how.save, chosen.requests
    if how.prompt or how.tokenizer is not None:
        others = tap or chosen.roles or chosen.steps or how.calls or chosen.ranks or how.rows or how.positions
        if others or save is not None or not how.prompt:
            raise CommandError("--prompt takes --requests and --tokenizer alone: inspect DUMP --requests ID --prompt")
        lines = prompt_lines(open_dump(dump), request, how.tokenizer)
        answer(dump=dump, lines=lines)
        print_lines(lines)
        return
    if not tap:
        raise CommandError("name a TAP (`accprobe inspect DUMP` lists them), or --requests ID --prompt")
    if how.rows and (request or how.positions):
        raise CommandError(
            "--rows counts rows of the tensor, --requests and --positions name them: use one or the other"
        )
    if save is not None and save.suffix not in (".npy", ".safetensors"):
        raise CommandError(f"--save: {save} must end in .npy or .safetensors")
    if save is not None and save.exists():
        raise CommandError(f"--save: {save} exists: nothing is overwritten; choose another name")
    if save is not None:
        places.check_place(save, [dump], "--save")
        places.writable(save.parent, "--save")
    wanted_rows, positions = ranges(how.rows, "--rows"), ranges(how.positions, "--positions")
    opened = open_dump(dump) if opened is None else opened
    lines = []
    if tap == STATES and getattr(opened, "state_totals", None):
        lines = state_lines(opened, len(opened.states))
    elif tap == WEIGHTS:
        lines = weight_lines(getattr(opened, "lives", None), whole=True)
    if lines:
        answer(dump=dump, lines=lines)
        print_lines(lines)
        return
    name = _resolve(opened, tap)
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in name)
    found = [r for _, r in chosen.selection([escaped], how.calls).apply(opened, padding=True)]
    if positions:  # the steps that computed one of them
        found = [r for r in found if rows_of(opened, r, request, positions).size]
    if not found:
        raise NothingThere(f"{safe(name)} is in {dump}, but {_what_there_is(opened, name)}")
    if save is not None and len(found) > 1:
        raise CommandError(f"--save: {count(len(found), 'tensor')} match, e.g. {', '.join(map(_brief, found[:4]))}: "
                           "narrow down with --roles, --steps, --calls or --ranks")  # fmt: skip
    if len(found) > 1:
        for r in found[:_LISTED]:
            typer.echo(_brief(r) + "  " + stats_line(r))
        if len(found) > _LISTED:
            typer.echo(f"... {len(found) - _LISTED:,} more: narrow down with --roles, --steps, --calls or --ranks")
        typer.echo("")
        typer.echo("the first of them:")
    record = found[0]
    answer(dump=dump, matches=found, tensor=record, values=None)
    print_lines(header(opened, record))
    if record.payload is None:
        typer.echo("only its statistics were stored, no values")
        if save is not None:
            raise CommandError(f"--save: {safe(record.name)} has no values in this dump")
        return
    array = opened.read(record)
    indices = choose(opened, record, wanted_rows, request, positions)
    answer(values=as_json(record, array, indices))
    print_lines([*histogram(array, record.dtype), *rows(opened, record, array, indices)])
    if save is not None:
        array = array if indices is None else array.take(indices, axis=record.row_dim)
        if save.suffix == ".npy":
            containers.save_npy(save, array, record.dtype)
        else:
            containers.save_safetensors(save, record.name, array, record.dtype)
        say_written(save)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _resolve(dump: Dump, tap: str) -> str:
    """``tap`` as it was typed where it names a tap or a record; raises CommandError with the nearest names."""
    taps = sorted({r.tap for r in dump.records} | {m.tap for ms in dump.modules.values() for m in ms})
    if tap in {r.tap for r in dump.records} or any(
        tap in (r.name, f"{r.tap}/{r.role}") for r in (*dump.records, *dump.padding)
    ):
        return tap
    if tap in taps:
        reasons = sorted({s.reason for s in dump.skips if s.tap == tap})
        why = f" ({', '.join(map(safe, reasons))})" if reasons else ""
        raise CommandError(f"{safe(tap)} is a module of the model, but nothing of it was captured{why}")
    near = difflib.get_close_matches(tap, taps, n=3, cutoff=0.5)
    near += [t for t in taps if tap in t and t not in near][: 5 - len(near)]
    hint = f"; nearest: {', '.join(map(safe, near))}" if near else f"; `accprobe inspect {dump.path}` lists all"
    raise CommandError(f"no tap {safe(tap)} in {dump.path}{hint}")


def _what_there_is(dump: Dump, name: str) -> str:
    records = [r for r in (*dump.records, *dump.padding) if name in (r.tap, f"{r.tap}/{r.role}", r.name)]
    roles = sorted({r.role for r in records})
    steps = sorted({r.step for r in records if r.step is not None})
    at = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    ranks = ", ".join(map(str, sorted({r.rank for r in records})))
    return f"nothing matches the options: it has {safe(', '.join(roles), 300)} at {at}, rank {ranks}"


def _brief(r: Record) -> str:
    step = "parameter" if r.step is None else f"step {r.step}"
    return f"{safe(r.which)} ({step}, rank {r.rank})"


# --- values as lines ---

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


def choose(dump: Dump, r: Record, wanted: Ranges, requests: Sequence[str], positions: Ranges) -> np.ndarray | None:
    """Indices along dimension ``row_dim`` of the chosen rows; None where none were chosen. Raises CommandError."""
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


def as_json(r: Record, array: np.ndarray, indices: np.ndarray | None) -> dict[str, Any]:
    """``{"row": [values]}`` of the chosen rows, at most 64 of them; {} where none were chosen: --save has all."""
    if indices is None:
        return {}
    moved = np.moveaxis(array, r.row_dim, 0)
    rows = {int(i): widen(np.ascontiguousarray(moved[i]), r.dtype).reshape(-1) for i in indices[:_MAX_ROWS]}
    return {str(i): [str(x) if row.dtype.kind == "c" else x for x in row.tolist()] for i, row in rows.items()}


# --- a prompt ---

_A_LINE = 16
_SPANS = 10
_MOST = 1 << 22
"""Tokens of a prompt that are printed: more is no model's context."""


def prompt_lines(dump: Dump, globs: Sequence[str], tokenizer: Path | None) -> list[str]:
    """The lines for the one request that ``globs`` name. Raises CommandError, and NothingThere where there is none or
    none of its prompt is recorded."""
    request, keys = _chosen(dump, globs)
    ids = _ids(dump, keys, min(request.prompt_len, _MOST))
    what = f"request {safe(request.id, 80)}: a prompt of {count(request.prompt_len, 'token')}"
    missing = [p for p in range(min(request.prompt_len, _MOST)) if p not in ids]
    if not ids:
        raise NothingThere(f"{what}, and no id of it is recorded: {_why(dump.run)}")
    texts = None if tokenizer is None else load_tokenizer(tokenizer)
    lines = [what + ("" if not missing else f", of which {len(ids):,} are recorded") + _same(request, ids, missing)]
    for first, last in _stretches(sorted(ids)):
        for start in range(first, last + 1, _A_LINE):
            here = range(start, min(start + _A_LINE, last + 1))
            lines.append(f"  {start:>6}  {' '.join(str(ids[p]) for p in here)}")
    if missing:
        spans = [f"{a}-{b}" if b > a else str(a) for a, b in _stretches(missing)]
        more = f" and {len(spans) - _SPANS:,} more stretches" if len(spans) > _SPANS else ""
        lines.append(f"missing: positions {', '.join(spans[:_SPANS])}{more}: {_why(dump.run)}")
    if texts is None:
        lines.append("as text: --tokenizer DIR, the model's directory with its tokenizer.json")
    else:
        for first, last in _stretches(sorted(ids)):
            text = "".join(texts([ids[p] for p in range(first, last + 1)]))
            lines.append(f"text, positions {first}-{last}: {safe(text, len(text) + 1)}")
    return lines


def _chosen(dump: Dump, globs: Sequence[str]) -> tuple[Request, list[tuple[int, int]]]:
    """The request, and its (rank, number) on all ranks."""
    by_name: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for key, request in dump.requests.items():
        if not globs or names_request(globs, request):
            by_name.setdefault((request.id, request.prompt), []).append(key)
    if len(by_name) == 1:
        (keys,) = by_name.values()
        return dump.requests[keys[0]], keys
    known = [name for name, _ in by_name] or list(dict.fromkeys(r.id for r in dump.requests.values()))
    names = ", ".join(safe(name, 80) for name in known[:_SPANS])
    names += f" and {len(known) - _SPANS:,} more" if len(known) > _SPANS else ""
    if not by_name:
        there = f"it has {names}" if known else "it names no requests"
        raise NothingThere(f"no request of {dump.path} matches {safe(' '.join(globs), 80) or 'anything'}: {there}")
    raise CommandError(f"--prompt shows one request, and {len(by_name):,} match ({names}): name one with --requests")


def _ids(dump: Dump, keys: Sequence[tuple[int, int]], length: int) -> dict[int, int]:
    """Position → token id, of the stored rows of the prompt."""
    wanted = set(keys)
    found: dict[int, int] = {}
    for (rank, _, _), space in dump.rows.items():
        for s, rows in space.stretches():
            if (rank, s.req) in wanted and s.image is None and len(space.ids) >= rows.stop:
                found.update((s.pos + k, space.ids[rows.start + k]) for k in range(min(s.n, max(length - s.pos, 0))))
    return found


def _same(request: Request, ids: Mapping[int, int], missing: Sequence[int]) -> str:
    if missing or len(ids) != request.prompt_len:
        return ""
    try:
        alike = hash_tokens(ids[p] for p in range(len(ids))) == request.prompt
    except OverflowError:  # no int32
        alike = False
    return "" if alike else "; the dump's hash of the prompt is another: it came as embeddings, or a tool rewrote it"


def _why(run: Mapping[str, Any]) -> str:
    """Why ids are missing, and what to set."""
    probe = object_at(run, "probe")
    if run.get("tool") != "accprobe" or not probe:
        return "a row map holds them only in a capture of accprobe (VLLM_ACCPROBE=1)"
    if probe.get("tokens") and not _first(probe["tokens"]):
        return "the capture kept generated tokens only; leave VLLM_ACCPROBE_TOKENS unset, or name 0 in it (0-4)"
    if probe.get("steps"):
        return "the capture kept some steps only; leave VLLM_ACCPROBE_STEPS unset"
    return (
        "no step of this capture computed them (a prefix cache had them, or it was armed later); start the server with "
        "--no-enable-prefix-caching, and capture from the request's first step on"
    )


def _first(tokens: Any) -> bool:
    """Whether a capture's VLLM_ACCPROBE_TOKENS, as run.json keeps it, names 0."""
    try:
        return any(int(low) <= 0 for low, *_ in tokens)
    except (TypeError, ValueError):
        return True


def _stretches(positions: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each stretch of sorted ``positions``."""
    out: list[tuple[int, int]] = []
    for p in positions:
        if out and out[-1][1] == p - 1:
            out[-1] = out[-1][0], p
        else:
            out.append((p, p))
    return out


_PART = "\ufffd"
"""What decoding gives for bytes that are no whole character."""
_LONGEST = 8
"""Tokens of which one character can be made; UTF-8 has at most four bytes, and some tokenizers add empty ones."""


def load_tokenizer(path: str | Path) -> Callable[[Sequence[int]], list[str]]:
    """What turns ids into their texts, one for each; joined they are the whole text. ``path``: a directory with a
    tokenizer.json, or that file. Raises CommandError, one line."""
    try:
        tokenizer = tokenizer_at(Path(path))
    except CompareError as why:
        raise CommandError(str(why)) from None
    size = tokenizer.get_vocab_size(with_added_tokens=True)

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return lambda ids: _each(ids, decoded, size)


def _each(ids: Sequence[int], decode: Callable[[Sequence[int]], str], size: int) -> list[str]:
    """The text that each token adds to those before it: many tokenizers begin a text without the blank that the token
    has. An id that is not in the vocabulary is shown as its number."""
    out: list[str] = []
    last = 0  # where the text that is shown begins
    for i, token in enumerate(ids):
        if not 0 <= token < size:
            if last < i:  # parts of a character that nobody ends
                out[-1] = decode(ids[last:i])
            out.append(f"<{token}>")
            last = i + 1
            continue
        start = last - 1 if last and 0 <= ids[last - 1] < size else last
        before, whole = decode(ids[start:last]) if start < last else "", decode(ids[start : i + 1])
        text = whole[len(before) :] if whole.startswith(before) else decode([token])
        if text.endswith(_PART) and i + 1 - last < _LONGEST and i + 1 < len(ids):
            out.append("")
            continue
        out.append(text)
        last = i + 1
    return out
