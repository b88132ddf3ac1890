"""Reading a pickle that may only say what a tensor is.

The problem: torch saves tensors as pickles, and a pickle is a program that calls whatever it names. The idea: an
interpreter of our own for the opcodes that data needs, whose only functions are those that its caller gives it by name:
nothing is imported, nothing else is called, and what is not on the list ends in one line that says its name. Keys of
dicts and sets must be plain values (a tuple of tuples of tuples ... costs ages to hash), and every length is
held against the bytes that are there.
Not here: which names are given (torchfile.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from vllm_accprobe.formats.io.plain_file import FileProblem

MAX_STACK = 10_000_000
"""Values that a pickle may hold at a time."""
_PLAIN = (str, int, float, bool, bytes, type(None))


class PickleError(FileProblem):
    """What is wrong with the pickle."""


class KnownFunction:
    """What a global of the pickle stands for. call: takes the arguments; None where it can only be handed on."""

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[..., Any] | None = None):
        self.name, self.call = name, call


Find = Callable[[str, str], Any]
"""(module, name) → a KnownFunction or a plain value; raises PickleError for what is not on the list."""


def load(data: bytes | memoryview, find: Find, persistent: Callable[[Any], Any], start: int = 0) -> tuple[Any, int]:
    """(value, offset behind it) of the pickle at ``start``. Raises PickleError for anything but plain data."""
    machine = _Machine(memoryview(data), find, persistent, start)
    try:
        return machine.run(), machine.at
    except PickleError:
        raise
    except (IndexError, struct.error):
        raise PickleError("a pickle in it ends too early or is damaged") from None
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError, UnicodeDecodeError):
        raise PickleError("a pickle in it is damaged") from None


class _Machine:
    def __init__(self, data: memoryview, find: Find, persistent: Callable[[Any], Any], start: int):
        self.data, self.at, self.find, self.persistent = data, start, find, persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.count = 0

    def run(self) -> Any:
        while True:
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            step = _CODES.get(code)
            if step is None:
                raise PickleError(f"a pickle in it uses opcode 0x{code:02x}, which data does not need")
            step(self)
            self.count += 1
            if self.count > MAX_STACK:
                raise PickleError(f"a pickle in it has more than {MAX_STACK:,} steps")

    # --- bytes ---------------------------------------------------------------------------------------------------

    def take(self, n: int) -> memoryview:
        if n < 0 or self.at + n > len(self.data):
            raise PickleError("a pickle in it ends too early or is damaged")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, form: str) -> Any:
        packer = _FORMS[form]
        return packer.unpack(self.take(packer.size))[0]

    def line(self) -> str:
        end = self.at
        while self.data[end] != 10:
            end += 1
            if end - self.at > 10_000:
                raise PickleError("a pickle in it is damaged")
        text = str(self.take(end - self.at), "ascii")
        self.at += 1
        return text

    # --- values --------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def marked(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def tuple_of(self, n: int) -> None:
        items = tuple(self.stack[len(self.stack) - n :])
        if len(items) < n:
            raise IndexError
        del self.stack[len(self.stack) - n :]
        self.push(items)

    def look_up(self, module: str, name: str) -> None:
        self.push(self.find(module, name))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, KnownFunction) or function.call is None or not isinstance(arguments, tuple):
            raise PickleError("a pickle in it calls what is no function")
        try:
            self.push(function.call(*arguments))
        except (TypeError, ValueError, AttributeError):
            raise PickleError(f"a pickle in it calls {function.name} with arguments that do not fit") from None

    def build(self) -> None:
        """State of an object. Containers have none that matters (a state dict's version numbers); tensors neither."""
        self.stack.pop()
        self.stack[-1]

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise PickleError("a pickle in it is damaged")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[plain(key)] = value

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(plain(i) for i in items)
        else:
            raise PickleError("a pickle in it is damaged")

    def unmarked(self) -> list[Any]:
        return [self.stack.pop()]

    def unmarked_pair(self) -> list[Any]:
        value = self.stack.pop()
        return [self.stack.pop(), value]

    def long(self, n: int) -> None:
        if n > 64:
            raise PickleError("a pickle in it has a number of more than 512 bits")
        self.push(int.from_bytes(self.take(n), "little", signed=True))

    def named_by_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("a pickle in it is damaged")
        self.look_up(module, name)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def text(self, form: str) -> None:
        self.push(str(self.take(self.number(form)), "utf-8", "surrogatepass"))

    def raw(self, form: str) -> None:
        self.push(bytes(self.take(self.number(form))))

    def decimal(self) -> None:
        text = self.line()
        self.push({"00": False, "01": True}.get(text) if text in ("00", "01") else int(text[:200].rstrip("L")))


def plain(key: Any) -> Any:
    """``key`` if it is a plain value or a tuple of such. Raises PickleError."""
    if isinstance(key, _PLAIN) or (isinstance(key, tuple) and all(isinstance(k, _PLAIN) for k in key)):
        return key
    raise PickleError("a pickle in it has a key that is no plain value")


_FORMS = {form: struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d")}
_STOP = ord(".")


def _frame(m: _Machine) -> None:
    m.number("<Q")


def _protocol(m: _Machine) -> None:
    if m.number("<B") > 5:
        raise PickleError("a pickle in it has a protocol of the future")


_CODES: Mapping[int, Callable[[_Machine], Any]] = {
    0x80: _protocol,
    0x95: _frame,
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("I"): _Machine.decimal,
    ord("L"): _Machine.decimal,
    0x8A: lambda m: m.long(m.number("<B")),
    0x8B: lambda m: m.long(m.number("<i")),
    ord("G"): lambda m: m.push(m.number(">d")),
    ord("X"): lambda m: m.text("<I"),
    0x8C: lambda m: m.text("<B"),
    0x8D: lambda m: m.text("<Q"),
    ord("U"): lambda m: m.text("<B"),  # a string of Python 2: torch's old files have ASCII there
    ord("T"): lambda m: m.text("<i"),
    ord("C"): lambda m: m.raw("<B"),
    ord("B"): lambda m: m.raw("<I"),
    0x8E: lambda m: m.raw("<Q"),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.push(tuple(m.marked())),
    ord("]"): lambda m: m.push([]),
    ord("l"): lambda m: m.push(m.marked()),
    ord("}"): lambda m: m.push({}),
    0x8F: lambda m: m.push(set()),
    ord("a"): lambda m: m.append(m.unmarked()),
    ord("e"): lambda m: m.append(m.marked()),
    0x90: lambda m: m.append(m.marked()),
    0x91: lambda m: m.push(frozenset(plain(i) for i in m.marked())),
    ord("s"): lambda m: m.set_items(m.unmarked_pair()),
    ord("u"): lambda m: m.set_items(m.marked()),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): _Machine.marked,
    ord("2"): lambda m: m.push(m.stack[-1]),
    ord("q"): lambda m: m.memo.__setitem__(m.number("<B"), m.stack[-1]),
    ord("r"): lambda m: m.memo.__setitem__(m.number("<I"), m.stack[-1]),
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    ord("h"): lambda m: m.push(m.memo[m.number("<B")]),
    ord("j"): lambda m: m.push(m.memo[m.number("<I")]),
    ord("c"): lambda m: m.look_up(m.line(), m.line()),
    0x93: _Machine.named_by_stack,
    ord("R"): _Machine.reduce,
    0x81: _Machine.reduce,
    ord("b"): _Machine.build,
    ord("Q"): lambda m: m.push(m.persistent(m.stack.pop())),
}
