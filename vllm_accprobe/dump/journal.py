"""The journal's codec: how each kind of line is written, and how it is read, trusting nothing.

The problem: a journal may come from a killed run, a newer release or a stranger, and analysis wants plain objects whose
numbers it may use as sizes; keys and defaults must not be said twice. The idea: a line's keys are the fields of its
dataclass, each read as its type says; a `LineKind` declares what differs. What does not hold is a ValueError with a
short reason, which the reader counts. Tensors' and operators' lines, thousands per step, are written by hand: what the
tap knows is a `TensorHead`.

An operator's argument is a VALUE, a small closed language of JSON; nothing else is let in:

    null, true, 3, 0.5, "text"     themselves
    {"float": "-inf"}              a number that JSON cannot say: inf, -inf, nan
    {"complex": [re, im]}          a complex number; re and im are numbers or such a "float"
    {"tensor": {"role", "dtype", "shape", "stride", "device", ...}}
                                   a tensor; "count", "min", "max", "mean", "l2", "nan", "inf" and "hash" where it was
                                   read; "fresh": true for memory that was not written yet (an output buffer:
                                   may hold anything); "param": "<tap>/param.<name>" for a parameter of the model;
                                   "blocks": {"ids": "<role>", "by": [["<role>", unit], ...]} for a cache of which the
                                   call touches some blocks: the record holds those, [n, ...], the record of role
                                   "ids" their numbers; arguments "by" hold numbers of blocks times unit; "shape" is
                                   the whole cache's;
                                   "written": true for an argument that the operator may write to; "after": count,
                                   min ... hash of what the call made of it
    {"list": [VALUE, ...]}         a list or a tuple
    {"slice": [1, null, 2]}, {"ellipsis": true}
                                   of an index, in other tools' dumps (formats/); no journal has them
    {"dtype": "bfloat16"}, {"device": "cpu"}, {"layout": "strided"}, {"memory_format": "contiguous_format"}
    {"skipped": "<reason>", ...}   an argument that was not kept; role, dtype, shape, stride, device of a tensor stay

Not here: files (reader.py), most dataclasses (schema.py), lines as text (journal_writer.py), how calls, weights and
states are captured (capture/) and what they mean (judge/).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np

from vllm_accprobe.dump import decode
from vllm_accprobe.dump.decode import Count, Read, Where
from vllm_accprobe.dump.label_files import Label
from vllm_accprobe.dump.schema import (
    DECODE,
    PREFILL,
    REPLICATED,
    Armed,
    End,
    Failure,
    Image,
    Layout,
    Mask,
    Masks,
    Module,
    OpCall,
    Request,
    RowSpace,
    SamplingParameters,
    Segment,
    Skip,
    Stats,
    Step,
    StepGraph,
    Stop,
)
from vllm_accprobe.dump.stats import StatsCell

MAX_DIMS = 32
MAX_INT = 1 << 53

Event = Mapping[str, Any]
Write = Callable[[Any], Any]
"""A field's value → what stands in the line."""


def integer(e: Event, key: str, default: int | None = None) -> int:
    """A whole number from 0 to MAX_INT. Raises ValueError."""
    value = e.get(key, default)
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise ValueError(f"{key} is {short(value)}, not a number from 0 to {MAX_INT}")
    return value


def string(e: Event, key: str, default: str | None = None) -> str:
    """Text, interned: a dump says few things often. Raises ValueError."""
    value = e.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {short(value)}, not a string")
    return sys.intern(value)


def optional_string(e: Event, key: str) -> str | None:
    """Text or None. Raises ValueError."""
    return None if e.get(key) is None else string(e, key)


def short(value: Any) -> str:
    """A value for a sentence, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


SEPARATOR = "::"
"""Between the module's path and the operator in a tap."""
_DEPTH = 6
_WORDS = ("dtype", "device", "layout", "memory_format")
_FLOATS = ("inf", "-inf", "nan")


def is_operator(tap: str) -> bool:
    """Whether a tap is an operator's and not a module's."""
    return SEPARATOR in tap


def op_line(
    tap: str,
    call: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Any],
    mutates: Sequence[str],
    *,
    step: int | None,
    op: str,
    seq: int,
    module: str | None,
    module_call: int | None,
    slot: int | None,
    inside: str | None = None,
) -> dict[str, Any]:
    """An ``op`` event, see `OpCall`. inside: the operator whose Python kernel made the call."""
    line: dict[str, Any] = {
        "event": "op", "step": step, "tap": tap, "op": op, "call": call, "seq": seq, "module": module, "args": args,
        "kwargs": kwargs, "mutates": mutates,
    }  # fmt: skip
    if module_call is not None:
        line["module_call"] = module_call
    if inside is not None:
        line["inside"] = inside
    if slot is not None:
        line["slot"] = slot
    line["outputs"] = outputs
    return line


def about_bytes(cell: StatsCell) -> dict[str, Any]:
    """What a tensor's description says where the tensor's values were read: those keys that its bytes tell."""
    stats = cell.value
    about = {} if stats is None else {name: getattr(stats, name) for name in Stats.__slots__}
    return about if cell.hash is None else about | {"hash": cell.hash}


def tensors(values: Sequence[Any] | Any) -> Iterator[dict[str, Any]]:
    """The contents of all ``{"tensor": ...}`` in some VALUES (a list or tuple of them, or one), in order."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, dict):
            if "tensor" in value:
                yield value["tensor"]
            elif "list" in value:
                yield from tensors(value["list"])


def inputs(call: OpCall) -> Iterator[dict[str, Any]]:
    """All tensors that went in, positional ones first."""
    yield from tensors(call.args)
    yield from tensors(list(call.kwargs.values()))


def superseded(ops: Sequence[OpCall]) -> set[tuple[int | None, str, int]]:
    """(step, tap, call) of the calls whose place in a random sample (``slot``) was taken by a later call."""
    last: dict[tuple[str, int], OpCall] = {}
    gone: set[tuple[int | None, str, int]] = set()
    for call in ops:
        if call.slot is not None:
            old = last.get((call.op, call.slot))
            if old is not None:
                gone.add((old.step, old.tap, old.call))
            last[call.op, call.slot] = call
    return gone


def _values(values: Any, where: Where) -> tuple[Any, ...]:
    found: tuple[Any, ...] = decode.reader(tuple[Any, ...])(values, where)
    for value in found:
        _check(value)
    return found


def _named_values(values: Any, where: Where) -> dict[str, Any]:
    found: dict[str, Any] = decode.reader(dict[str, Any])(values, where)
    for value in found.values():
        _check(value)
    return found


def _check(value: Any, depth: int = 0) -> None:
    if value is None or isinstance(value, (str, bool, int, float)):
        return
    if not isinstance(value, dict) or depth > _DEPTH:
        raise ValueError(f"an argument is {short(value)}")
    if "skipped" in value:
        string(value, "skipped")
        if "role" in value:
            _check_tensor(value)
    elif "tensor" in value:
        _check_tensor(value["tensor"])
    elif "list" in value:
        if not isinstance(value["list"], list):
            raise ValueError(f"an argument is {short(value)}")
        for item in value["list"]:
            _check(item, depth + 1)
    elif "float" in value:
        if value["float"] not in _FLOATS:
            raise ValueError(f"an argument is {short(value)}")
    elif "complex" in value:
        parts = value["complex"]
        if not isinstance(parts, list) or len(parts) != 2 or any(type(p) not in (int, float, dict) for p in parts):
            raise ValueError(f"an argument is {short(value)}")
        for part in parts:
            _check(part, depth + 1)
    elif len(value) != 1 or not all(key in _WORDS and isinstance(word, str) for key, word in value.items()):
        raise ValueError(f"an argument is {short(value)}")


def _check_tensor(t: Any) -> None:
    if not isinstance(t, dict):
        raise ValueError(f"a tensor is {short(t)}")
    string(t, "role")
    string(t, "dtype")
    string(t, "device", "")
    optional_string(t, "hash")
    for key in ("shape", "stride"):
        sizes = t.get(key, [])  # thousands of tensors a step: no function is called for each number
        whole = isinstance(sizes, list) and len(sizes) <= MAX_DIMS
        if not whole or not all(type(n) is int and 0 <= n <= MAX_INT for n in sizes):
            raise ValueError(f"{key} of {t['role'][:60]} is {short(sizes)}")
    blocks = t.get("blocks")
    if blocks is not None:
        where = f"blocks of {t['role'][:60]}"
        string(decode.reader(dict[str, Any])(blocks, where), "ids")
        _units(blocks.get("by"), where)
    after = t.get("after")
    if after is not None and not isinstance(after, dict):
        raise ValueError(f"after of {t['role'][:60]} is {short(after)}")
    for found in (t, after or {}):
        for key in ("min", "max", "mean", "l2"):
            if found.get(key) is not None and type(found[key]) not in (int, float):
                raise ValueError(f"{key} of {t['role'][:60]} is {short(found[key])}")


LOADED, PACKED, GIVEN, SLOT = "loaded", "packed", "given", "slot"
"""Forms of a parameter: as the checkpoint or a sync gave it; as it lies after packing; an adapter's tensor, and the
slot that holds it. Older dumps have ``columns`` and ``kernel`` too, which nothing reads."""
LOAD, RELOAD, SYNC, WAKE, LORA = "load", "reload", "sync", "wake", "lora"
"""Kinds of events. load: the first; reload: vLLM's reload_weights; sync: load_weights on the live model, or a session
of vLLM's weight transfer; wake: after sleep; lora: an adapter is put into a slot."""
MAX_WEIGHT_ROWS = 1 << 18
"""Rows of a tensor that are distinguished; of one with more there are the sums only."""
Range = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class WeightEvent:
    """``{"event": "life"}``: what happened to the weights. number: 0 for loading, then in order. step: the first that
    computes with what it left. name: an adapter's; slot: where it was put. seconds: what the prints cost; nbytes: of
    how many bytes. partly: only some tensors were to be written (an adapter, or less than half of a model's)."""

    rank: int
    number: int
    kind: str
    step: int
    name: str = ""
    slot: int | None = None
    seconds: float = 0.0
    nbytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WeightPrint:
    """``{"event": "weight"}``: one tensor in one form after the event ``life``.

    order, bag: the sums with and without order, 16 hex digits. zeros: elements whose bits are all 0; nan: those that
    are not numbers, None where not counted. undone: which packing was taken off before the print was made: ``""`` none,
    ``unknown`` for an order that cannot be undone here. block: rows of one expert, 0 without experts. parts: (name,
    first, end) of the rows of each block that have names of their own. written: (first row, end, times) of what was
    seen to be written, None where it was not observed. raw: memory that was not filled before. rows: 32 bits for
    each row, base64 of little-endian; None where there are too many, or they are those of the event before."""

    rank: int
    life: int
    tap: str
    cls: str
    name: str
    form: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    bag: str
    zeros: int = 0
    nan: int | None = None
    undone: str = ""
    block: int = 0
    parts: tuple[Range, ...] = ()
    raw: bool = False
    written: tuple[tuple[int, int, int], ...] | None = None
    rows: str | None = None

    @property
    def parameter(self) -> str:
        """``model.layers.0.mlp.down_proj.weight``."""
        return f"{self.tap}.{self.name}"

    @property
    def count(self) -> int:
        """How many rows it has: a tensor of one dimension has a row for each element."""
        return row_count(self.shape)

    def sums(self) -> np.ndarray | None:
        """The rows' own 32 bits, uint32 [count], or None."""
        return None if self.rows is None else unpack_rows(self.rows, self.count)


def row_count(shape: tuple[int, ...]) -> int:
    """Rows of a tensor: all dimensions but the last; each element where there is one dimension; 1 for a number."""
    found = 1
    for n in shape[:-1] if len(shape) > 1 else shape:
        found *= n
    return found


def pack_rows(sums: np.ndarray) -> str:
    """uint32 [n] as base64."""
    return base64.b64encode(np.ascontiguousarray(sums, "<u4").tobytes()).decode()


def unpack_rows(text: str, count: int) -> np.ndarray | None:
    """What `pack_rows` made, None for anything else: a journal may come from a stranger."""
    if len(text) != (count * 4 + 2) // 3 * 4:
        return None
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<u4").astype(np.uint32)
    except (binascii.Error, ValueError):
        return None


@dataclass
class Lives:
    """All that one dump says of its weights: events and prints in the journals' order."""

    events: list[WeightEvent] = field(default_factory=list)
    prints: list[WeightPrint] = field(default_factory=list)


NO_LIVES = Lives()
"""Of dumps that say nothing of their weights. Not to be added to."""


_WORD = 300
_HEX = frozenset("0123456789abcdef")


def _shape(value: Any, where: Where) -> tuple[int, ...]:
    shape: tuple[int, ...] = decode.reader(Annotated[tuple[Count, ...], decode.at_most(MAX_DIMS)])(value, where)
    if row_count(shape) > MAX_INT:
        raise decode.refused(value, where, "the shape of a tensor")
    return shape


def _runs_of_rows(value: Any, where: Where) -> tuple[tuple[int, ...], ...]:
    return tuple((*run, 0, 0, 0)[:3] for run in decode.reader(tuple[tuple[Count, ...], ...])(value, where))


def _parts(value: Any, where: Where) -> tuple[Range, ...]:
    ranges = decode.reader(tuple[tuple[str, Count, Count], ...])(value, where)
    return tuple((name[:_WORD], first, end) for name, first, end in ranges)


def _hex_sum(value: str) -> str:
    """A condition."""
    return "" if len(value) == 16 and _HEX.issuperset(value) else "16 hex digits"


class TensorHead(NamedTuple):
    """What a tap knows of its tensors, see `Record`. layout: as `Layout.to_event` gives it, None for a whole tensor.
    once: a parameter's, which is of no step. view: stride and storage offset, None for contiguous ones. (No dataclass:
    those that are frozen take five times as long to make.)"""

    tap: str
    cls: str
    role: str
    rows: str | None = None
    row_dim: int = 0
    layout: Mapping[str, Any] | None = None
    mutated: bool = False
    sample: str | None = None
    once: bool = False
    view: tuple[tuple[int, ...], int] | None = None
    rounded: str | None = None

    def line(self) -> dict[str, Any]:
        """What stays in the line of every tensor here, whatever its form, its bytes and its place in a step."""
        line: dict[str, Any] = {
            "event": "param" if self.once else "tensor", "tap": self.tap, "class": self.cls, "role": self.role,
            "rows": self.rows, "row_dim": self.row_dim,
        }  # fmt: skip
        if self.sample is not None:
            line["sample"] = self.sample
        if self.rounded is not None:
            line["rounded"] = self.rounded
        if self.layout is not None:
            line["layout"] = self.layout
        if self.mutated:
            line["mutated"] = True
        if self.view is not None:
            line["stride"], line["offset"] = self.view
        return line


def last(line: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The same line with ``keys``, as far as it has them, at its end: some lines have always had another order."""
    return {k: v for k, v in line.items() if k not in keys} | {k: line[k] for k in keys if k in line}


def layout_of(e: Any) -> Layout:
    """The layout that stands in a line. Raises ValueError for what is none."""
    if not e:
        return REPLICATED
    found: Layout = LAYOUT.read(e, "layout")
    if not 0 <= found.index < max(found.size, 1):
        raise ValueError(f"layout is {short(e)}")
    return found


MAX_ROWS = 1 << 26
"""Stored rows of one row space, and elements along any dimension of a vision item: more is no step of a model."""
LABEL_ENDINGS = ("bin", "npy", "npz", "pt", "pth", "safetensors")
"""Kinds of files that labels may name."""
MAX_NUMBER = 1e9
"""Of a sampling parameter: more than any sampler takes."""
MAX_LISTED = 1 << 16
"""Tokens of one list of a request's sampling parameters: more than any vocabulary's part that capture writes down."""
_MASK_WORD = 200
"""Characters of a word that says what masked logits: it stands in sentences."""
_EMPTY: dict[Any, Any] = {int: 0, str: "", float: 0.0}


@dataclasses.dataclass(frozen=True)
class LineKind:
    """One kind of line, or of an object within a line.

    event: its name, "" for an object within a line; type: its dataclass, whose field ``cls`` is the key ``class``.
    needs: keys that must be there; others, and those that are null, have their field's default, or an empty value.
    external: fields that no line has. readers, writers: of fields of which the type does not say enough. left_out:
    values that are no key; sparse: neither are defaults, and left_out holds only where there is one. order: the fields'
    in a line, where it is another one. whole: completes a value whose fields depend on each other, or refuses it.
    """

    event: str
    type: Any
    needs: tuple[str, ...] = ()
    external: tuple[str, ...] = ()
    readers: Mapping[str, Read] = dataclasses.field(default_factory=dict)
    writers: Mapping[str, Write] = dataclasses.field(default_factory=dict)
    left_out: tuple[Any, ...] = (None, ())
    order: tuple[str, ...] = ()
    whole: Callable[[Any], Any] | None = None
    sparse: bool = False

    def to_line(self, value: Any, *unknown: str) -> dict[str, Any]:
        """The line of ``value``; the dataclasses in it are plain dicts, too. unknown: keys of which it is not known
        here whether they have a value."""
        keys, values, irregular = self._written
        line: dict[str, Any] = {"event": self.event} if self.event else {}
        line.update(zip(keys, values(value), strict=True))
        for key, write, left_out in irregular:
            if line[key] in left_out:
                del line[key]
            else:
                line[key] = write(line[key])
        for key in unknown:
            del line[key]
        return line

    def from_line(self, e: Event, **external: Any) -> Any:
        """The value of a line. external: fields that no line has. Raises ValueError, which has the path in the line."""
        return self._value(e, "", external)

    def read(self, e: Any, where: Where) -> Any:
        """The value of an object that stands at ``where`` in a line, for decode.py."""
        return self._value(decode.reader(dict[str, Any])(e, where), where, {})

    def all(self, values: Any, where: Where) -> tuple[Any, ...]:
        """The values of a list of such objects."""
        return tuple(self.read(e, (where, i)) for i, e in enumerate(decode.reader(list[Any])(values, where)))

    def _value(self, e: Event, where: Where, fields: dict[str, Any]) -> Any:
        for name, key, read, default in self._read:
            value = e.get(key)
            if value is not None:
                fields[name] = read(value, (where, key) if where else key)
            elif default is not None:
                fields[name] = default()
            else:
                raise decode.DecodeError(f"{decode.path_of(where) or 'it'} has no {key}")
        found = self.type(**fields)
        return found if self.whole is None else self.whole(found)

    @functools.cached_property
    def _fields(self) -> list[dataclasses.Field[Any]]:
        return [f for f in dataclasses.fields(self.type) if f.name not in self.external]

    @functools.cached_property
    def _written(self) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], list[tuple[str, Write, tuple[Any, ...]]]]:
        """Keys, what gives their values, and (key, writer, values that are no key) of those whose value is not always
        written as it is."""
        fields = {f.name: f for f in self._fields}
        names = self.order or tuple(fields)
        as_it_is = {"int", "float", "str"} - {type(no).__name__ for no in self.left_out}
        irregular = []
        for name in names:
            default, left_out = fields[name].default, self.left_out
            if self.sparse:
                left_out = () if default is dataclasses.MISSING else (*left_out, default)
            if name in self.writers or self.sparse or str(fields[name].type) not in as_it_is:
                irregular.append((_key(name), self.writers.get(name, _plain), left_out))
        return [_key(n) for n in names], operator.attrgetter(*names), irregular

    @functools.cached_property
    def _read(self) -> list[tuple[str, str, Read, Callable[[], Any] | None]]:
        """(field, key, what reads it, what makes it where it is not there; None of one that must be)."""
        hints, found = typing.get_type_hints(self.type), []
        for f in self._fields:
            hint, default = hints[f.name], f.default
            if default is dataclasses.MISSING:
                default = None if type(None) in typing.get_args(hint) else _EMPTY.get(hint, ())
            made: Any = dict if typing.get_origin(hint) is Mapping else (lambda default=default: default)
            read = self.readers.get(f.name) or _reader(hint)
            found.append((f.name, _key(f.name), read, None if _key(f.name) in self.needs else made))
        return found


def _reader(hint: Any) -> Read:
    """What reads a value as a field's type says, which is never null; a line's numbers are from 0 on."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    if hint is str:
        return _text
    return decode.reader({int: Count, Mapping[str, int]: dict[str, Count]}.get(hint, hint))


def _text(value: Any, where: Where) -> str:
    return sys.intern(decode.reader(str)(value, where))


def _key(field: str) -> str:
    return "class" if field == "cls" else field


def _plain(value: Any) -> Any:
    """A field's value in a line."""
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return dict(value)
    within = _WITHIN.get(type(value))
    return value if within is None else within.to_line(value)


def _time(value: Any, where: Where) -> float:
    return float(value) if type(value) in (int, float) else 0.0


def _cut(most: int, entries: int | None = None) -> Read:
    """Text of at most so many characters, or, with entries, that many texts: longer ones are cut."""
    read = decode.reader(str if entries is None else tuple[str, ...])
    if entries is None:
        return lambda value, where: sys.intern(read(value, where)[:most])
    return lambda value, where: tuple(sys.intern(text[:most]) for text in read(value, where)[:entries])


def _masked(values: Any, where: Where) -> dict[int, Mask]:
    lines = decode.reader(list[dict[str, Any]])(values, where)
    return {integer(line, "req"): MASK.read(line, (where, i)) for i, line in enumerate(lines)}


def _token_ids(ids: tuple[Any, ...]) -> str:
    """A condition; ids are many: no function is called for each."""
    return "" if all(type(i) is int and abs(i) <= MAX_INT for i in ids) else "a list of token ids"


def _row_space(space: RowSpace) -> RowSpace:
    total = space.n
    if total > MAX_ROWS:
        raise ValueError(f"{total} rows in one step")
    if space.ids and len(space.ids) != total:
        raise ValueError(f"{len(space.ids)} token ids for {total} rows")
    return space if space.src_rows else dataclasses.replace(space, src_rows=total)


def _label(label: Label) -> Label:
    if label.file is not None and label.ending not in LABEL_ENDINGS:
        raise ValueError(f"ending is {short(label.ending)}")
    return label


_units = decode.reader(tuple[tuple[str, Annotated[int, decode.between(1, MAX_INT)]], ...])
_Number = Annotated[float, decode.between(-MAX_NUMBER, MAX_NUMBER)]
_Whole = Annotated[int, decode.between(-(2.0**64), 2.0**64)]
_Tokens = Annotated[tuple[Count, ...], decode.at_most(MAX_LISTED)]
_Words = Annotated[tuple[_Tokens, ...], decode.at_most(MAX_LISTED)]
_rows = decode.reader(Annotated[int, decode.between(0, MAX_ROWS)])
_phase = decode.reader(Annotated[str, decode.one_of((PREFILL, DECODE))])
LAYOUT = LineKind("", Layout, needs=("kind",), readers={
    "dim": decode.reader(int), "parts": decode.reader(tuple[tuple[Count, Count], ...]),
})  # fmt: skip
IMAGE = LineKind("", Image, readers={"n": _rows})
SEGMENT = LineKind("", Segment, needs=("req", "pos", "n"), readers={"n": _rows, "phase": _phase})
SAMPLING = LineKind(
    "", SamplingParameters, left_out=(), sparse=True,
    readers={
        **{f.name: decode.reader(_Number) for f in dataclasses.fields(SamplingParameters) if f.type == "float"},
        **dict.fromkeys(("top_k", "seed", "min_tokens"), decode.reader(_Whole)),  # a seed may be any number
        **dict.fromkeys(("allowed", "stop", "prompt"), decode.reader(_Tokens)),
        "bias": decode.reader(Annotated[tuple[tuple[Count, _Number], ...], decode.at_most(MAX_LISTED)]),
        "bad_words": lambda value, where: tuple(filter(None, decode.reader(_Words)(value, where))),
        "also": _cut(_MASK_WORD, MAX_LISTED), "digest": _cut(_MASK_WORD),
    },
)  # fmt: skip
MASK = LineKind("", Mask, readers={"by": _cut(_MASK_WORD, MAX_LISTED)}, left_out=(None,))
REQUEST = LineKind(
    "request", Request, needs=("req", "id"), readers={"images": IMAGE.all, "sampling": SAMPLING.read},
)  # fmt: skip
ROWS = LineKind(
    "rows", RowSpace, needs=("step", "space"), order=("step", "space", "src_rows", "ids", "segments", "padding"),
    readers={"segments": SEGMENT.all, "ids": decode.reader(Annotated[tuple[Any, ...], _token_ids]), "padding": _rows},
    whole=_row_space,
)  # fmt: skip
STEP_GRAPH = LineKind("", StepGraph, needs=("mode", "size"), readers={"size": _rows})
STEP = LineKind("step", Step, needs=("step",), readers={"time": _time, "graph": STEP_GRAPH.read})
MODULE = LineKind("module", Module, needs=("tap",))
MASKS = LineKind(
    "masks", Masks, needs=("step",), readers={"masked": _masked},
    writers={"masked": lambda masked: [{"req": req, **MASK.to_line(mask)} for req, mask in masked.items()]},
)  # fmt: skip
SKIP = LineKind("skip", Skip, needs=("reason",), order=("tap", "reason", "step", "count", "role"))
ARMED = LineKind("armed", Armed, needs=("step", "on"), left_out=(None,))
STOP = LineKind("stop", Stop, needs=("reason",), left_out=())
ERROR = LineKind("error", Failure, left_out=())
END = LineKind("end", End)
LABEL = LineKind(
    "label", Label, needs=("step", "tap", "role", "path"), external=("rank",), left_out=(None, ""), whole=_label,
)  # fmt: skip
FREED, STALE, OTHER, LATE, CHANGED, METADATA, STRANGE, FOREIGN, UNWRITTEN = (
    "freed", "stale", "other", "late", "changed", "metadata", "strange", "foreign", "unwritten",
)  # fmt: skip
KINDS_OF_FINDINGS = {
    FREED: "a block freed while it is still read",
    STALE: "a stale slot",
    OTHER: "the state of another request",
    LATE: "a copy that came late",
    CHANGED: "bytes that nobody wrote",
    METADATA: "stale metadata",
    STRANGE: "a prefix hit of other tokens",
    FOREIGN: "a prefix hit of another context",
    UNWRITTEN: "a state that was not written",
}
"""What a finding is, by its word in the journal."""
HITS = (STRANGE, FOREIGN)
"""Kinds that say all that is known in their own words: who reads what of whom."""
MOST_FINDINGS = 200
"""Lines of one rank; further findings are counted."""


@dataclass(frozen=True, slots=True)
class StateFinding:
    """``{"event": "state"}``: what a kernel read, or was called with, is not what the schedule demands.

    kind: of KINDS_OF_FINDINGS; cache: ``kv`` or ``state``. layer: the first in which it was seen, "" where it is
    true of all of a group; layers: in how many. block: of the scheduler, slot: within the cache where a row is meant.
    request: who reads, by its external id; low, high: its positions there, both included, None where not known.
    writer: who wrote last, "" for none known; written: in which step; wrote_low, wrote_high: which positions.
    between: what happened to the block since, a sentence each; how: what is known of the bytes or the numbers.
    part: which state of a recurrent layer; first: the first layer of the group, where ``layer`` is "".
    """

    step: int
    kind: str
    cache: str
    group: int
    layer: str
    layers: int
    block: int
    request: str
    how: str
    slot: int | None = None
    low: int | None = None
    high: int | None = None
    writer: str = ""
    written: int | None = None
    wrote_low: int | None = None
    wrote_high: int | None = None
    between: tuple[str, ...] = ()
    part: str = ""
    first: str = ""


@dataclass(frozen=True, slots=True)
class CachedRows:
    """``n`` positions from ``low`` on whose cached rows request ``owner`` (the journal's number) computed; -1: nobody
    knows who, or a request that the capture does not know."""

    low: int
    n: int
    owner: int


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """``{"event": "cached"}``: request ``req`` begins, or goes on, in ``step`` behind positions that it finds in the
    cache: whose rows they are. why: what is wrong with that, "" for nothing."""

    step: int
    req: int
    runs: tuple[CachedRows, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class StateTotals:
    """``{"event": "states"}``: what a rank's ledger has examined. mode: owners (no bytes), events, sample or full;
    layers: under watch; steps; hashed: blocks of layers hashed after a write; checked: of those, compared again;
    held: numbers of metadata compared with the schedule; findings: in all, of which those beyond MOST_FINDINGS have no
    line. events: how often what happened; skipped: what is not watched, and how many layers or steps that are."""

    mode: str
    layers: int
    steps: int
    hashed: int
    checked: int
    held: int
    findings: int
    events: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)


FINDING = LineKind(
    "state", StateFinding, needs=("step", "kind", "block"), left_out=(None, (), ""),
    readers={"kind": decode.reader(Annotated[str, decode.one_of(KINDS_OF_FINDINGS)]), "between": _cut(200, 8)},
)  # fmt: skip
TOTALS = LineKind("states", StateTotals, needs=("mode",))
RUN = LineKind("", CachedRows, needs=("low", "n", "owner"), readers={
    "owner": decode.reader(Annotated[int, decode.between(-1, MAX_INT)]),
})  # fmt: skip
CACHED = LineKind("cached", CachedPrefix, needs=("step", "req"), left_out=(None, (), ""), readers={"runs": RUN.all})
LIFE = LineKind(
    "life", WeightEvent, needs=("number", "kind"), external=("rank",), left_out=(None, ""),
    readers={**dict.fromkeys(("kind", "name", "detail"), _cut(_WORD)), "seconds": _time},
    writers={"seconds": lambda seconds: round(seconds, 6)},
    order=("number", "kind", "step", "name", "slot", "detail", "seconds", "nbytes"),
)  # fmt: skip
OP = LineKind(
    "op", OpCall, needs=("tap", "op"), external=("rank",),
    readers={"args": _values, "kwargs": _named_values, "outputs": _values},
)  # fmt: skip
"""`op_line` writes it."""
WEIGHT = LineKind(
    "weight", WeightPrint, needs=("life", "tap", "name", "form", "dtype", "shape", "order", "bag"), external=("rank",),
    left_out=(0, ""), sparse=True,
    readers={
        "shape": _shape, "parts": _parts, "written": _runs_of_rows, "raw": decode.reader(bool),
        **dict.fromkeys(("order", "bag"), decode.reader(Annotated[str, _hex_sum])),
    },
)  # fmt: skip
_WITHIN: dict[Any, LineKind] = {
    kind.type: kind for kind in (IMAGE, SEGMENT, STEP_GRAPH, SAMPLING, RUN)
}  # fmt: skip
KINDS = {
    kind.event: kind
    for kind in (
        REQUEST, ROWS, STEP, MODULE, MASKS, SKIP, ARMED, STOP, END, LABEL, FINDING, TOTALS, CACHED, LIFE, OP, WEIGHT,
    )
}  # fmt: skip
"""Besides ``start``, ``tensor`` and ``param``, and ``error``, which is read as it is."""


def where(found: StateFinding) -> str:
    """``layer model.layers.0.self_attn.attn and 3 more, block 7, slot 229``."""
    slot = "" if found.slot is None else f", slot {found.slot}"
    return f"{_layers(found)}, block {found.block}{slot}"


def _layers(found: StateFinding) -> str:
    layers = f" and {found.layers - 1} more" if found.layers > 1 else ""
    whole = f"all {found.layers} layers" if found.layers != 1 else "the one layer"
    part = f" ({found.part})" if found.part else ""
    return f"layer {found.layer}{part}{layers}" if found.layer else f"{whole} of cache group {found.group}"


def sentence(found: StateFinding) -> str:
    """What a finding says, without "the cache, not the kernel"."""
    reads = f"request '{found.request}'" + _positions(found.low, found.high)
    last = "no write there is known"
    if found.writer:
        last = f"written last by request '{found.writer}' in step {found.written}"
        last += _positions(found.wrote_low, found.wrote_high)
    between = "; ".join(found.between) if found.between else "nothing"
    what = KINDS_OF_FINDINGS[found.kind]
    if found.kind in HITS:
        return f"{what}: step {found.step}, {_layers(found)}: {found.how}"
    return f"{what}: step {found.step}, {where(found)}, read by {reads}: {found.how}; {last}; since then: {between}"


def _positions(low: int | None, high: int | None) -> str:
    if low is None or high is None:
        return ""
    return f" (position {low})" if low == high else f" (positions {low} to {high})"
