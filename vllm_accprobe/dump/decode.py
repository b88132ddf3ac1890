"""JSON that anybody may have written, as typed values or one line that says what is wrong and where.

The problem: a file of a stranger may hold anything at any place, and a check by hand at each place is long and forgets
some. The idea: the schema is the annotation of a dataclass. `decode` reads a value as its type says and raises
`DecodeError` with the JSON path: ``blamed[3].times is 'x', not a number``. `parse` and `load` begin with text and with
a file. Nothing is converted but what JSON cannot say: lists become tuples or frozensets, numbers that are keys are text
or stand in pairs, and a mapping with tuples as keys is a list of pairs. Fields without a default must be there; a key
that is no field is refused. `Annotated` adds conditions (`between`, `words` and others). Not here: a journal's lines
(journal.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
_NOTHING: Mapping[str, Any] = {}
Where = str | tuple["Where", str | int | None]
Read = Callable[[Any, Where], Any]
"""(value, its path in the JSON) → what it means."""
Condition = Callable[[Any], str]
"""Of a value: "" where it holds, else what the value is not."""


class DecodeError(ValueError):
    """One line: where, what is there, and what it is not."""


def between(low: float, high: float = math.inf) -> Condition:
    """A number from ``low`` to ``high``; without ``high`` a finite one."""
    wanted = f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else "")
    if high < math.inf:
        return lambda value: "" if low <= value <= high else wanted
    return lambda value: "" if low <= value and math.isfinite(value) else wanted


def words(most: int) -> Condition:
    """Printable text of at most ``most`` characters."""
    return lambda text: "" if len(text) <= most and text.isprintable() else f"printable text of {most} characters"


def at_most(n: int) -> Condition:
    """So many entries."""
    return lambda value: "" if len(value) <= n else f"at most {n} entries"


def exactly(n: int) -> Condition:
    """So many entries."""
    return lambda value: "" if len(value) == n else f"{n} entries"


def keys(*names: str) -> Condition:
    """These, and no others."""
    return lambda value: "" if set(value) == set(names) else f"an object with {', '.join(names)}"


def one_of(known: Collection[str]) -> Condition:
    return lambda value: "" if value in known else f"one of {', '.join(known)}"


Count = Annotated[int, between(0, 1 << 53)]
Size = Annotated[float, between(0.0)]
Text = Annotated[str, lambda text: "" if text else "a text that is not empty"]
TokenId = Annotated[int, between(0, (1 << 31) - 1)]


def decode(kind: type[T], value: Any, where: Where = "") -> T:
    """``value``, of json.loads, as ``kind``. where: its path, for the sentence. Raises DecodeError."""
    kind_of_value: Any = kind
    found: T = reader(kind_of_value)(value, where)
    return found


def parse(kind: type[T], text: str | bytes, most: int, head: Mapping[str, Any] = _NOTHING) -> T:
    """JSON of at most ``most`` characters. head: keys besides the fields, and what they must be. Raises DecodeError."""
    if len(text) > most:
        raise DecodeError(f"it is too large: more than {most >> 10} KiB")
    try:
        value = json.loads(text)
    except RecursionError:
        raise DecodeError("it is nested too deep") from None
    except ValueError as error:
        raise DecodeError(f"it is not JSON ({error})") from None
    for key, wanted in head.items():
        found = value.pop(key, None) if isinstance(value, dict) else value
        if found != wanted or isinstance(found, bool):
            raise refused(found, key, f"{wanted!r}: another version, or none of ours")
    return decode(kind, value)


def load(kind: type[T], path: Path, most: int, head: Mapping[str, Any] = _NOTHING) -> T:
    """A file of at most ``most`` bytes. Raises OSError, and DecodeError with the file's name."""
    with path.open("rb") as file:
        text = file.read(most + 1)
    try:
        return parse(kind, text, most, head)
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from None


def object_in(path: Path | None, most: int) -> dict[str, Any]:
    """The object of JSON in a plain file; {} where there is none that can be read."""
    try:
        return load(dict[str, Any], path, most) if path is not None and path.is_file() else {}
    except (OSError, DecodeError):
        return {}


def value_at(value: Any, *names: str) -> Any:
    """The value under ``names`` in somebody's JSON (``model``, ``path`` of run.json); None where there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def object_at(value: Any, *names: str) -> Mapping[str, Any] | None:
    """`value_at`, where that is an object."""
    found = value_at(value, *names)
    return found if isinstance(found, Mapping) else None


def fits(kind: Any, value: Any) -> bool:
    """Whether `decode` reads ``value`` as ``kind``, for who has a sentence of its own for what is refused. kind: a
    constant, whose reader is kept."""
    try:
        reader(kind)(value, "")
    except DecodeError:
        return False
    return True


def refused(value: Any, where: Where, wanted: str) -> DecodeError:
    return DecodeError(f"{path_of(where) or 'it'} is {reprlib.repr(value)}, not {wanted}")


def path_of(where: Where) -> str:
    """``blamed[3].times``. A path is pairs of what is around and a key or an index: few are ever read as text."""
    if isinstance(where, str):
        return where
    above, part = path_of(where[0]), where[1]
    if part is None:
        return f"a key of {above or 'it'}"
    if isinstance(part, int):
        return f"{above}[{part}]"
    name = part[:60] if part.isprintable() else repr(part[:60])
    return f"{above}.{name}" if above else name


_PLAIN: dict[Any, tuple[type, str]] = {
    str: (str, "text"), int: (int, "a whole number"), bool: (bool, "true or false"), type(None): (type(None), "null"),
}  # fmt: skip


@cache
def reader(kind: Any) -> Read:
    """What reads a value as ``kind``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _as_it_is
    if origin is Annotated:
        return _annotated(reader(args[0]), args[1:])
    if origin in (typing.Union, types.UnionType):
        return _union([reader(a) for a in args])
    if origin in (dict, Mapping):
        return _mapping(*args)
    if origin is tuple and args[-1] is not ...:
        return _fixed([reader(a) for a in args], tuple)
    if origin in (list, tuple, frozenset, Sequence):
        return _many(reader(args[0]), origin if origin in (list, frozenset) else tuple)
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return _fields(kind)
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind, include_extras=True)
        return _fixed([reader(hints[name]) for name in kind._fields], lambda values: kind(*values))
    if kind is float:
        return _number
    return _exact(*_PLAIN.get(kind, (kind, f"a {kind.__name__}")))  # of another class: what is one already


def _number(value: Any, where: Where) -> float:
    try:
        return float(value if type(value) in (int, float) else "none")
    except (ValueError, OverflowError):
        raise refused(value, where, "a number") from None


def _exact(exact: type, wanted: str) -> Read:
    def read(value: Any, where: Where) -> Any:
        if type(value) is not exact:
            raise refused(value, where, wanted)
        return value

    return read


def _annotated(inner: Read, conditions: Sequence[Condition]) -> Read:
    def read(value: Any, where: Where) -> Any:
        found = inner(value, where)
        for condition in conditions:
            if wanted := condition(found):
                raise refused(value, where, wanted)
        return found

    return read


def _union(readers: Sequence[Read]) -> Read:
    def read(value: Any, where: Where) -> Any:
        why: DecodeError | None = None
        for one in readers:
            try:
                return one(value, where)
            except DecodeError as error:
                why = why or error  # the first is what it is, the others are instead of it
        raise why or refused(value, where, "anything")

    return read


def _listed(value: Any, where: Where) -> list[Any]:
    if not isinstance(value, list):
        raise refused(value, where, "a list")
    return value


def _as_it_is(value: Any, where: Where) -> Any:
    return value


def _many(item: Read, into: Callable[[Any], Any]) -> Read:
    if item is _as_it_is:
        return lambda value, where: into(_listed(value, where))
    return lambda value, where: into([item(v, (where, i)) for i, v in enumerate(_listed(value, where))])


def _fixed(items: Sequence[Read], into: Callable[[Any], Any]) -> Read:
    def read(value: Any, where: Where) -> Any:
        if len(_listed(value, where)) != len(items):
            raise refused(value, where, f"a list of {len(items)}")
        return into([item(v, (where, i)) for i, (item, v) in enumerate(zip(items, value, strict=True))])

    return read


def _mapping(key: Any, item: Any) -> Read:
    key_of, value_of = reader(key), reader(item)
    pairs = _many(_fixed([key_of, value_of], tuple), list)
    if typing.get_origin(key) is not None and typing.get_origin(key) is not Annotated:
        return lambda value, where: dict(pairs(value, where))
    key_of = _whole if key is int else key_of

    def read(value: Any, where: Where) -> Any:
        if key is int and isinstance(value, list):
            return dict(pairs(value, where))
        if not isinstance(value, dict):
            raise refused(value, where, "an object")
        if key is str and value_of is _as_it_is:
            return value
        return {key_of(k, (where, None)): value_of(v, (where, k)) for k, v in value.items()}

    return read


def _whole(key: str, where: Where) -> int:
    """A number that is a key."""
    if not key.removeprefix("-").isdecimal() or len(key) > 20:
        raise refused(key, where, "a whole number")
    return int(key)


def _fields(kind: Any) -> Read:
    """Of a dataclass or a TypedDict. A class that is written otherwise has ``of_plain``, which raises DecodeError."""
    if hasattr(kind, "of_plain"):
        return lambda value, where: kind.of_plain(value, where)
    schema = cache(lambda: _schema(kind))  # not before it is needed: a class may name itself

    def read(value: Any, where: Where) -> Any:
        readers, needs = schema()
        if not isinstance(value, dict):
            raise refused(value, where, "an object")
        if lacking := [name for name in needs if name not in value]:
            raise DecodeError(f"{path_of(where) or 'it'} has no {lacking[0]}")
        if unknown := value.keys() - readers.keys():
            raise DecodeError(f"{path_of((where, min(unknown)))} is not known here")
        return kind(**{name: readers[name](v, (where, name)) for name, v in value.items()})

    return read


def _schema(kind: Any) -> tuple[dict[str, Read], list[str]]:
    """(what reads each field, those that must be there)."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        fields, none = dataclasses.fields(kind), dataclasses.MISSING
        hints = {f.name: hints[f.name] for f in fields}
        needs = [f.name for f in fields if f.default is none and f.default_factory is none]
    else:
        needs = sorted(kind.__required_keys__)
    return {name: reader(hint) for name, hint in hints.items()}, needs
