"""One description of each kind of journal line: how it is written, and how it is read, trusting nothing.

The problem: keys, defaults and what is left out of a line were said where it is written and again where it is read. The
idea: a line's keys are the fields of its dataclass (schema.py), and each is read as its type says. A `LineKind` tells
only what differs: which keys must be there, what else a value must be, which values are no key. ``to_line`` makes the
dict, whole and once; ``from_line`` raises ValueError with a short reason, and the reader counts these.
Not here: tensors' and operators' lines, of which there are thousands (tensor_lines.py, opcalls.py). JSON
(recorder/lines.py). The first line, of which only the writer knows more than the reader asks (recorder/writer.py).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vllm_accprobe.dump.journal.events import MAX_INT, Event, integer, optional_integer, optional_string, short, string
from vllm_accprobe.dump.label_files import Label
from vllm_accprobe.dump.schema import (
    DECODE,
    PREFILL,
    Armed,
    End,
    Failure,
    Image,
    Mask,
    Masks,
    Module,
    Request,
    RowSpace,
    SamplingParameters,
    Segment,
    Skip,
    Step,
    StepGraph,
    Stop,
)

MAX_ROWS = 1 << 26
"""Stored rows of one row space, and elements along any dimension of a vision item: more is no step of a model."""
LABEL_ENDINGS = ("bin", "npy", "npz", "pt", "pth", "safetensors")
"""Kinds of files that labels may name."""
MAX_NUMBER = 1e9
"""Of a sampling parameter: more than any sampler takes."""
MAX_LISTED = 1 << 16
"""Tokens of one list of a request's sampling parameters: more than any vocabulary's part that capture writes down."""
_WORD = 200
"""Characters of a word that says what masked logits: it stands in sentences."""
_EMPTY: dict[str, Any] = {"int": 0, "str": ""}
Reader = Callable[[Event, str], Any]


@dataclasses.dataclass(frozen=True)
class LineKind:
    """One kind of line, or of an object within a line.

    event: its name, "" for an object within a line; type: its dataclass, whose field ``cls`` is the key ``class``.
    needs: keys that must be there; others have their field's default, or 0 and "". given: fields that no line has.
    readers, writers: of fields of which the type does not say enough. left_out: values that are no key. order: the
    fields' in a line, where it is another one. whole: reads a line whose keys depend on each other, in place of these.
    """

    event: str
    type: Callable[..., Any]
    needs: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    readers: Mapping[str, Reader] = dataclasses.field(default_factory=dict)
    writers: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    left_out: tuple[Any, ...] = (None, ())
    order: tuple[str, ...] = ()
    whole: Callable[[Event], Any] | None = None

    def to_line(self, value: Any, *unknown: str) -> dict[str, Any]:
        """The line of ``value``; the dataclasses in it are plain dicts, too. unknown: keys of which nobody can say
        here whether they have a value."""
        keys, values, odd = self._written
        line: dict[str, Any] = {"event": self.event} if self.event else {}
        line.update(zip(keys, values(value), strict=True))
        for key, write in odd:
            if line[key] in self.left_out:
                del line[key]
            else:
                line[key] = write(line[key])
        for key in unknown:
            del line[key]
        return line

    def from_line(self, e: Event, **given: Any) -> Any:
        """The value of a line. given: the fields that no line has. Raises ValueError."""
        if self.whole is not None:
            return self.whole(e)
        return self.type(**{name: read(e, key) for name, key, read in self._read}, **given)

    @functools.cached_property
    def _fields(self) -> list[dataclasses.Field[Any]]:
        return [f for f in dataclasses.fields(self.type) if f.name not in self.given]  # type: ignore[arg-type]

    @functools.cached_property
    def _written(self) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], list[tuple[str, Callable[[Any], Any]]]]:
        """Keys, what gives their values, and (key, writer) of those whose value is not always written as it is."""
        types = {f.name: str(f.type) for f in self._fields}
        names = self.order or tuple(types)
        as_it_is = {"int", "float", "str"} - {type(no).__name__ for no in self.left_out}
        odd = [n for n in names if n in self.writers or types[n] not in as_it_is]
        return (
            [_key(n) for n in names],
            operator.attrgetter(*names),
            [(_key(n), self.writers.get(n, _plain)) for n in odd],
        )

    @functools.cached_property
    def _read(self) -> list[tuple[str, str, Reader]]:
        """(field, key, what reads it)."""
        return [(f.name, _key(f.name), self.readers.get(f.name) or self._reader(f)) for f in self._fields]

    def _reader(self, f: dataclasses.Field[Any]) -> Reader:
        if f.type == "int | None":
            return optional_integer
        if f.type == "str | None":
            return optional_string
        if str(f.type).startswith("Mapping"):
            return _mapping
        default = f.default if f.default is not dataclasses.MISSING else _EMPTY[str(f.type)]
        read = integer if f.type == "int" else string
        return functools.partial(read, default=None if _key(f.name) in self.needs else default)


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


def _mapping(e: Event, key: str) -> dict[str, Any]:
    value = e.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {short(value)}")
    return value


def _counts(e: Event, key: str) -> dict[str, int]:
    value = _mapping(e, key)
    if not all(type(v) is int for v in value.values()):
        raise ValueError(f"{key} is {short(value)}")
    return value


def _time(e: Event, key: str) -> float:
    value = e.get(key, 0.0)
    return float(value) if type(value) in (int, float) else 0.0


def _step_graph(e: Event, key: str) -> StepGraph | None:
    value = _mapping(e, key)
    return STEP_GRAPH.from_line(value) if value else None


def _phase(e: Event, key: str) -> str:
    phase = string(e, key, PREFILL)
    if phase not in (PREFILL, DECODE):
        raise ValueError(f"{key} is {short(phase)}")
    return phase


def _ending(e: Event, key: str) -> str:
    ending = string(e, key, "")
    if e.get("file") is not None and ending not in LABEL_ENDINGS:
        raise ValueError(f"{key} is {short(ending)}")
    return ending


def _dicts(e: Event, key: str) -> list[dict[str, Any]]:
    value = e.get(key) or []
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{key} is {short(value)}")
    return value


def _request_images(e: Event, key: str) -> tuple[Image, ...]:
    return tuple(IMAGE.from_line(i) for i in _dicts(e, key))


def _number(e: Event, key: str, default: float) -> float:
    value = e.get(key, default)
    if type(value) not in (int, float) or not abs(value) < MAX_NUMBER:
        raise ValueError(f"{key} is {short(value)}, not a number")
    return float(value)


def _tokens(value: Any, key: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(v) is int and 0 <= v <= MAX_INT for v in value)
    if not whole or len(value) > MAX_LISTED:
        raise ValueError(f"{key} is {short(value)}, not a list of tokens")
    return tuple(value)


def _bias(value: Any, key: str) -> tuple[tuple[int, float], ...]:
    pairs = isinstance(value, list) and all(type(v) is list and len(v) == 2 for v in value)
    if not pairs or len(value) > MAX_LISTED:
        raise ValueError(f"{key} is {short(value)}, not a list of pairs")
    return tuple((integer({"token": t}, "token"), _number({"bias": b}, "bias", 0.0)) for t, b in value)


def _words(value: Any, key: str) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list) or len(value) > MAX_LISTED:
        raise ValueError(f"{key} is {short(value)}, not a list")
    return tuple(_tokens(v, key) for v in value if v)


def _sampling(e: Event, key: str) -> SamplingParameters | None:
    """Of keys that are not there the defaults hold."""
    line = e.get(key)
    if line is None:
        return None
    if not isinstance(line, dict):
        raise ValueError(f"{key} is {short(line)}")
    usual, values = SamplingParameters(), dict[str, Any]()
    for f in dataclasses.fields(SamplingParameters):
        value, default = line.get(f.name), getattr(usual, f.name)
        if value is None:
            values[f.name] = default
        elif f.name in _SAMPLING_LISTS:
            values[f.name] = _SAMPLING_LISTS[f.name](value, f.name)
        elif f.type == "float":
            values[f.name] = _number(line, f.name, default)
        elif f.type == "str":
            values[f.name] = string(line, f.name)[:_WORD]
        elif type(value) is not int or abs(value) > 1 << 64:  # a seed may be any
            raise ValueError(f"{f.name} is {short(value)}, not a whole number")
        else:
            values[f.name] = value
    return SamplingParameters(**values)


def _sampling_words(sampling: SamplingParameters) -> dict[str, Any]:
    usual = SamplingParameters()
    values = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    return {name: _plain(value) for name, value in values.items() if value != getattr(usual, name)}


def _row_space(e: Event) -> RowSpace:
    segments = tuple(SEGMENT.from_line(s) for s in _dicts(e, "segments"))
    padding = _ROWS(e, "padding") if e.get("padding") is not None else None
    total = sum(s.n for s in segments) + (padding or 0)
    if total > MAX_ROWS:
        raise ValueError(f"{total} rows in one step")
    ids = e.get("ids") or []
    if not isinstance(ids, list) or not all(type(i) is int and abs(i) <= MAX_INT for i in ids):
        raise ValueError("ids is not a list of token ids")
    if ids and len(ids) != total:
        raise ValueError(f"{len(ids)} token ids for {total} rows")
    return RowSpace(
        integer(e, "step"), string(e, "space"), integer(e, "src_rows", total), segments, tuple(ids), padding
    )


def _masked(e: Event, key: str) -> dict[int, Mask]:
    return {integer(m, "req"): MASK.from_line(m) for m in _dicts(e, key)}


def _masked_words(masked: Mapping[int, Mask]) -> list[dict[str, Any]]:
    return [{"req": req, **MASK.to_line(mask)} for req, mask in masked.items()]


def _masked_by(e: Event, key: str) -> tuple[str, ...]:
    by = e.get(key) or []
    if not isinstance(by, list) or not all(isinstance(word, str) for word in by):
        raise ValueError(f"{key} is {short(by)}")
    return tuple(sys.intern(w[:_WORD]) for w in by)


_SAMPLING_LISTS: dict[str, Callable[[Any, str], Any]] = {
    "bias": _bias, "allowed": _tokens, "stop": _tokens, "bad_words": _words, "prompt": _tokens,
    "also": lambda value, key: _masked_by({key: value}, key),
}  # fmt: skip
_ROWS = functools.partial(integer, top=MAX_ROWS)
IMAGE = LineKind("", Image, readers={"n": functools.partial(_ROWS, default=0)})
SEGMENT = LineKind("", Segment, needs=("req", "pos"), readers={"n": _ROWS, "phase": _phase})
MASK = LineKind("", Mask, readers={"by": _masked_by}, left_out=(None,))
REQUEST = LineKind(
    "request", Request, needs=("req", "id"), readers={"images": _request_images, "sampling": _sampling},
    writers={"sampling": _sampling_words},
)  # fmt: skip
ROWS = LineKind("rows", RowSpace, order=("step", "space", "src_rows", "ids", "segments", "padding"), whole=_row_space)
STEP_GRAPH = LineKind("", StepGraph, needs=("mode", "size"), readers={"size": _ROWS})
STEP = LineKind("step", Step, needs=("step",), readers={"time": _time, "graph": _step_graph})
MODULE = LineKind("module", Module, needs=("tap",))
MASKS = LineKind("masks", Masks, needs=("step",), readers={"masked": _masked}, writers={"masked": _masked_words})
SKIP = LineKind("skip", Skip, needs=("reason",), order=("tap", "reason", "step", "count", "role"))
ARMED = LineKind("armed", Armed, needs=("step", "on"), left_out=(None,))
STOP = LineKind("stop", Stop, needs=("reason",), left_out=())
ERROR = LineKind("error", Failure, left_out=())
END = LineKind("end", End, readers={"skipped": _counts})
LABEL = LineKind(
    "label", Label, needs=("step", "tap", "role", "path"), given=("rank",), readers={"ending": _ending},
    left_out=(None, ""),
)  # fmt: skip
KINDS = {kind.event: kind for kind in (REQUEST, ROWS, STEP, MODULE, MASKS, SKIP, ARMED, STOP, END, LABEL)}
"""Besides ``start``, ``tensor``, ``param``, ``op``, and ``error``, which is read as it is, whatever else it says."""
_WITHIN: dict[Any, LineKind] = {Image: IMAGE, Segment: SEGMENT, StepGraph: STEP_GRAPH}
