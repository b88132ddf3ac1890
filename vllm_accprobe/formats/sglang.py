"""Dumps of SGLang's dumper: one .pt per tensor and rank, whose file name is a row of ``key=value``.

The problem: a tensor's ranks lie in separate files, and how they make a whole is a note in the dumper's own language.
The idea: the file name is the tensor's name, step, rank and place in the order of execution; the note becomes a layout,
and ranks that are cut along several dimensions are joined here, when they are read. The note has one word per
dimension, in brackets the parallel groups that cut it, each with ``partial`` (add instead of joining) or ``zigzag``
(two chunks per rank, from both ends); after ``#`` the groups that hold copies: ``t num_heads[tp] head_dim``, ``t
h[tp:partial]``, ``t h # tp:replicated``.

Not here: .pt files (io/torchfile.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Layout
from vllm_accprobe.formats.common.foreign import UNKNOWN, ForeignDump, Tensor
from vllm_accprobe.formats.io import plain_file, torchfile
from vllm_accprobe.formats.io.torchfile import TorchTensor

_DIM = re.compile(r"(?:([A-Za-z_]\w*|1)|\(([^()]+)\))(?:\[([^\]]+)\])?")


@dataclass(frozen=True, slots=True)
class Cut:
    """One parallel group in a note. dim: which dimension of the tensor; kind: ``join``, ``partial``."""

    group: str
    dim: int
    kind: str
    zigzag: bool = False


@dataclass(frozen=True, slots=True)
class Dims:
    """A note. cuts: innermost first, the order in which they are undone."""

    dims: int
    cuts: tuple[Cut, ...]
    copies: frozenset[str]


def parse_dims(note: str) -> Dims:
    """Raises ValueError for what is no such note."""
    shape, _, rest = note.partition("#")
    cuts: list[Cut] = []
    dim = 0
    for word in re.sub(r"\s*\*\s*", "*", shape).split():
        match = _DIM.fullmatch(word)
        if match is None:
            raise ValueError(word)
        own = []
        for modifier in (match[3] or "").split(","):
            if not modifier.strip():
                continue
            group, _, how = modifier.strip().partition(":")
            kinds = {h.strip() for h in how.split("+") if h.strip()}
            if not kinds <= {"partial", "zigzag", "natural"}:
                raise ValueError(modifier)
            own.append(Cut(group, dim, "partial" if "partial" in kinds else "join", "zigzag" in kinds))
        cuts += reversed(own)
        dim += 1
    copies = frozenset(w.removesuffix(":replicated") for w in rest.split() if w.endswith(":replicated"))
    return Dims(dim, tuple(cuts), copies)


def put_together(
    pieces: Mapping[tuple[int, ...], TorchTensor], cuts: Sequence[Cut], sizes: Sequence[int]
) -> np.ndarray:
    """The whole, of pieces by their places along ``cuts``, which are undone one after the other: the bits, or float32
    where one of them is partial. sizes: pieces along each cut."""
    numbers = any(c.kind == "partial" for c in cuts)
    values = {at: widen(t.read(), t.dtype).astype(np.float32) if numbers else t.read() for at, t in pieces.items()}
    for c, n in zip(cuts, sizes, strict=True):
        merged = {}
        for rest in sorted({at[1:] for at in values}):
            parts = [values[(i, *rest)] for i in range(n)]
            if c.kind == "partial":
                merged[rest] = np.sum([p.astype(np.float64) for p in parts], axis=0).astype(parts[0].dtype)
            else:
                whole = np.concatenate(parts, axis=c.dim)
                merged[rest] = unzigzag(whole, c.dim, n) if c.zigzag else whole
        values = merged
    return values[()]


def unzigzag(whole: np.ndarray, dim: int, ranks: int) -> np.ndarray:
    """The natural order of a sequence of which rank i has chunks i and 2 * ranks - 1 - i, one behind the other."""
    chunks = np.array_split(whole, 2 * ranks, axis=dim)
    order = [0] * (2 * ranks)
    for i in range(ranks):
        order[i], order[2 * ranks - 1 - i] = 2 * i, 2 * i + 1
    return np.concatenate([chunks[k] for k in order], axis=dim)


NAME = "sglang"
HOW = "a directory of step=<s>___rank=<r>___dump_index=<i>___name=<name>*.pt (SGLang's dumper)"
ORDER = 30
_PREFIX = re.compile(r"step=.+?___rank=.+?___dump_index=.+?___name=.+\.pt")
_NO_PLACE = {"step", "rank", "dump_index", "name", "recompute_status", "layer_id"}
_RANKS = {"pp_rank", "tp_rank", "cp_rank", "ep_rank", "etp_rank", "dp_rank"}
_HOOKED = re.compile(r"non_intrusive__(?:(.*)\.)?(inputs\.[^.]+|output)(?:\.(.+))?")
UNKNOWN_NOTE = "dims note that is not understood"


@dataclass(frozen=True, slots=True)
class _File:
    found: plain_file.FoundFile
    tags: Mapping[str, str]
    meta: Mapping[str, Any]
    key: str
    tensor: TorchTensor

    @property
    def label(self) -> str:
        return f"{self.found.name}:{self.key}" if self.key else self.found.name


def parse_name(name: str) -> dict[str, str]:
    """``key=value`` parts of a file name without its ending."""
    return {k: v for k, sign, v in (p.partition("=") for p in name.removesuffix(".pt").split("___")) if sign}


def place_of(tags: Mapping[str, str]) -> tuple[str, str]:
    """(tap, role): ``layers.1.attn_out`` with ``output.0``; of hooked modules their path; of weights ``param.x``."""
    name = tags["name"]
    layer = tags.get("layer_id", "")
    more = [f"{k}={v}" for k, v in tags.items() if k not in _NO_PLACE and k not in _RANKS]
    grad = name.startswith("grad__")
    plain = name.removeprefix("grad__")
    kind = "grad.0" if grad else "output.0"
    if hooked := _HOOKED.fullmatch(plain):
        tap = hooked[1] or "<root>"
        direction, _, which = hooked[2].partition(".")
        role = f"input.{which}" if direction == "inputs" else "output"
        role += f".{hooked[3]}" if hooked[3] else ("" if direction == "inputs" else ".0")
        return ".".join([tap, *more]), ("grad." + role if grad else role)
    if plain.startswith("param__") and not grad:
        tap, _, own = plain.removeprefix("param__").rpartition(".")
        return tap or "<root>", f"param.{own}"
    return ".".join([*([f"layers.{layer}"] if layer.isdecimal() else []), plain, *more]), kind


def recognise(path: Path) -> bool:
    return plain_file.probe(path, lambda parts: _PREFIX.fullmatch(parts[-1]) is not None, depth=6)


def open(path: Path) -> ForeignDump:
    """Opens such a dump; reads the pickles of the .pt files, which hold the notes, and no payload. Raises DumpError."""
    passed = plain_file.Passed()
    dump = ForeignDump(path, NAME)
    listed = list(plain_file.files(path, lambda n: _PREFIX.fullmatch(n) is not None, passed))
    heads = {f.parts[:-1] for f in listed}
    if len(heads) > 1 and len({_identity(f) for f in listed}) < len(listed):
        names = sorted("/".join(h) or "." for h in heads)
        raise DumpError(f"{path} holds {len(heads)} dumps ({', '.join(names[:3])}): name one of them")
    groups: dict[tuple[Any, ...], dict[int, list[_File]]] = defaultdict(lambda: defaultdict(list))
    for f in sorted(listed, key=lambda f: _identity(f)):
        for own in _load(dump, f):
            tags = own.tags
            key = (_number(tags["step"]), *place_of(tags), own.key)
            groups[key][_number(tags["rank"])].append(own)
    for key, ranks in groups.items():
        for call in range(max(len(v) for v in ranks.values())):
            members = {r: v[call] for r, v in ranks.items() if call < len(v)}
            _add(dump, key, call, members)
    passed.report(dump)
    return dump


def _identity(f: plain_file.FoundFile) -> tuple[Any, ...]:
    tags = parse_name(f.parts[-1])
    order = tuple(_number(tags.get(k, "")) for k in ("step", "rank", "dump_index"))
    return (*order, tuple(sorted(tags.items())))


def _number(text: Any) -> int:
    plain = str(text)
    return int(plain) if plain.isascii() and plain.isdecimal() and len(plain) < 16 else 0


def _load(dump: ForeignDump, f: plain_file.FoundFile) -> list[_File]:
    tags = parse_name(f.parts[-1])
    tap, role = place_of(tags)
    try:
        tree = torchfile.load(f.path)
        meta: Mapping[str, Any] = {}
        if isinstance(tree, dict) and "value" in tree:
            meta = tree["meta"] if isinstance(tree.get("meta"), dict) else {}
            tree = tree["value"]
        found = torchfile.tensors(tree, f.path)
    except DumpError as e:
        dump.unreadable(e, tap, _number(tags["step"]), role)
        return []
    if not found:
        dump.skip(tap, "value that is no tensor", _number(tags["step"]), role)
    return [_File(f, tags, meta, key, t) for key, t in found]


def _axes(meta: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Parallel group → (this rank's place, size), of the groups with more than one rank."""
    out: dict[str, tuple[int, int]] = {}
    for info in meta.values():
        if isinstance(info, Mapping):
            for key, size in info.items():
                name = str(key).removesuffix("_size")
                rank = info.get(f"{name}_rank")
                if not str(key).endswith("_size") or not isinstance(size, int) or not isinstance(rank, int):
                    continue
                if 0 <= rank < size and 1 < size <= 1 << 16:
                    out[name] = (rank, size)
    for short, long in (("cp", "attn_cp"), ("ep", "moe_ep"), ("dp", "attn_dp")):
        if short not in out and long in out:
            out[short] = out[long]
    return out


def _add(dump: ForeignDump, key: tuple[Any, ...], call: int, members: Mapping[int, _File]) -> None:
    step, tap, role, inner = key
    role = f"{role}.{inner}" if inner else role
    notes = {str(m.meta["dims"]) for m in members.values() if "dims" in m.meta}
    dims: Dims | None = None
    if len(notes) == 1:
        try:
            dims = parse_dims(next(iter(notes)))
        except ValueError as e:
            dump.problem(f"{UNKNOWN_NOTE}: {str(e)[:60]!r} of {tap}")
    axes = {r: _axes(m.meta) for r, m in members.items()}
    groups = {c.group for c in dims.cuts} if dims is not None else set()
    if len(groups) == 1 and len(members) > 1 and not any(axes.values()):
        # Outside of its runtime the dumper knows ranks and no groups; then the one that is cut is all of them.
        axes = {r: {next(iter(groups)): (i, len(members))} for i, r in enumerate(sorted(members))}
    plans = {r: _layout(m, axes[r], dims, len(members)) for r, m in members.items()}
    joined = None
    if dims is not None and any(p is None for p in plans.values()):
        joined = _joined(members, axes, dims)
    for rank, m in members.items():
        layout = plans[rank] or UNKNOWN
        read, shape, dtype = m.tensor.read, m.tensor.shape, m.tensor.dtype
        if joined is not None:
            if rank != min(members):
                continue
            (read, shape, dtype), layout = joined, Layout("replicated")
        dump.add(
            Tensor(m.label, tap, role, dtype, shape, read, step=step, rank=rank, call=call, layout=layout,
                   order=_number(m.tags.get("dump_index", "0")) * 8)
        )  # fmt: skip


def _layout(m: _File, axes: Mapping[str, tuple[int, int]], dims: Dims | None, ranks: int) -> Layout | None:
    """The layout of one rank's piece; None where it takes several groups to say it."""
    if ranks == 1 and not axes:
        return Layout("replicated")
    if dims is None:
        return UNKNOWN
    cuts = [c for c in dims.cuts if c.group in axes]
    if not cuts:
        return Layout("replicated", size=ranks, index=0) if dims.copies else (
            UNKNOWN if ranks > 1 else Layout("replicated"))  # fmt: skip
    if len(cuts) > 1 or cuts[0].zigzag or len(m.tensor.shape) != dims.dims:
        return None
    cut = cuts[0]
    index, size = axes[cut.group]
    if cut.kind == "partial":
        return Layout("partial", cut.group, index, size)
    n = m.tensor.shape[cut.dim]
    return Layout("shard", cut.group, index, size, cut.dim - dims.dims, ((n, 1),))


def _joined(
    members: Mapping[int, _File], axes: Mapping[int, Mapping[str, tuple[int, int]]], dims: Dims
) -> tuple[Any, tuple[int, ...], str] | None:
    """(read, shape, dtype) of the whole, of pieces cut by several groups; None where pieces are missing."""
    cuts = [c for c in dims.cuts if any(c.group in a for a in axes.values())]
    pieces: dict[tuple[int, ...], TorchTensor] = {}
    for rank in sorted(members):
        at = tuple(axes[rank].get(c.group, (0, 1))[0] for c in cuts)
        pieces.setdefault(at, members[rank].tensor)
    sizes = [max(axes[r].get(c.group, (0, 1))[1] for r in members) for c in cuts]
    first = next(iter(pieces.values()))
    wanted = int(np.prod(sizes))
    if len(pieces) != wanted or any(t.dtype != first.dtype or len(t.shape) != dims.dims for t in pieces.values()):
        return None
    summed = any(c.kind == "partial" for c in cuts)
    if summed and DTYPES[first.dtype].kind != "float":
        return None
    shape = list(first.shape)
    for c, n in zip(cuts, sizes, strict=True):
        if c.kind == "join":
            shape[c.dim] *= n
    if any(t.shape != first.shape for t in pieces.values()):
        return None
    return partial(put_together, pieces, cuts, sizes), tuple(shape), "float32" if summed else first.dtype
