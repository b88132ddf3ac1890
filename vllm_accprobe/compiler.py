"""Loops over numbers, written in Python, as LLVM's instructions: as much of a compiler as our own loops need.

The problem: numba takes 4 to 6 s of CPU to translate the loops of this package, of which LLVM's share is half a second
(measured), and a tenth of a second to be imported. The idea: the loops use few words of Python on numbers whose types
are known, so each word is an instruction, or two, and LLVM does the rest.

Words: assignments, ``for`` in range, ``while``, ``if``, ``return``, arithmetic, comparisons, conditions (of ``a if b
else c`` both sides are computed), tuples, calls. What is called is a function of the same kind, translated for the
types of its arguments (its result is annotated: int, float, bool, tuple), one of numpy's types, a name of _BUILT_IN, or
an `emitted` function, which writes instructions itself. Numbers: numpy's dtypes; a variable keeps its first one; a
constant takes the other side's; integers are never widened to more than the wider of two; ``//`` and ``%`` are of
numbers that are not negative. Arrays have one dimension and no bounds: an index is not checked. Sums may be
reordered (that is what vector code does); NaN and infinity keep their meaning.
Not here: where machine code is kept and how it is called (machine_code.py).
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from llvmlite import ir

FLAGS = ("reassoc", "contract", "nsz")
_INT, _FLOAT, _BOOL = np.dtype(np.int64), np.dtype(np.float64), np.dtype(bool)
_WORD, _BIT = ir.IntType(64), ir.IntType(1)


class Number(NamedTuple):
    value: Any
    kind: np.dtype


class ArrayView(NamedTuple):
    """``size`` numbers of ``kind`` from the pointer ``at`` on."""

    at: Any
    size: Number
    kind: np.dtype


class _Variable(NamedTuple):
    place: Any
    kind: np.dtype


class _Several(NamedTuple):
    """A tuple's name: its numbers have names of their own."""

    names: list[str]


def emitted(function: Any) -> Any:
    """Of a function (translator, *arguments) that returns its result: Number, ArrayView, tuple, or None."""
    function.emitted = True
    return function


def module_of(functions: Sequence[Any]) -> tuple[str, dict[str, str]]:
    """(LLVM's module as text; of each function a letter for its result and each argument: ``v`` nothing, ``i`` int64,
    ``f`` float64, ``a`` an array, which is a pointer and an int64). Parameters are annotated: int, float, or an array
    type of numpy.typing."""
    module = ir.Module("accprobe")
    made: dict[Any, Any] = {}
    words = {}
    for function in functions:
        hints = inspect.get_annotations(function, eval_str=True)
        result = hints.pop("return", None)
        types: list[Any] = []
        for hint in hints.values():
            types += [_type(hint)] if hint in (int, float) else [_type(_element(hint)).as_pointer(), _WORD]
        typed = ir.FunctionType(_type(result), types)
        body = _Body(module, made, ir.Function(module, typed, function.__name__), function, result)
        flat = iter(body.into.args)
        given = [Number(next(flat), np.dtype(hint)) if hint in (int, float)
                 else ArrayView(next(flat), Number(next(flat), _INT), _element(hint))
                 for hint in hints.values()]  # fmt: skip
        body.translate(given)
        letters = {int: "i", float: "f", None: "v"}
        words[function.__name__] = "".join([letters[result], *(letters.get(hint, "a") for hint in hints.values())])
    return str(module), words


def _element(hint: Any) -> np.dtype:
    """Of NDArray[np.uint8]: uint8."""
    return np.dtype(get_args(get_args(hint)[1])[0])


def _type(kind: Any) -> Any:
    if kind is None:
        return ir.VoidType()
    if parts := get_args(kind):
        return ir.LiteralStructType([_type(part) for part in parts])
    kind = np.dtype(kind)
    if kind.kind == "f":
        return ir.DoubleType() if kind.itemsize == 8 else ir.FloatType()
    return _BIT if kind == _BOOL else ir.IntType(8 * kind.itemsize)


class _Body:
    """One function for one list of arguments. made: the functions translated so far; into: LLVM's function."""

    def __init__(self, module: Any, made: dict[Any, Any], into: Any, function: Any, result: Any):
        self.module, self.made, self.into, self.function, self.result = module, made, into, function, result
        into.attributes.add("nounwind")
        self.entry = into.append_basic_block()
        self.builder = ir.IRBuilder(into.append_basic_block())
        self.names: dict[str, Any] = {}
        self.again: list[Any] = []

    def translate(self, given: Sequence[Any]) -> None:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body[0]
        first = self.builder.block
        for parameter, value in zip(tree.args.args, given, strict=True):
            if isinstance(value, tuple):  # Number and ArrayView are tuples, too
                self.assign(parameter.arg, value)
            else:
                self.names[parameter.arg] = value
        self.body(tree.body)
        if not self.builder.block.is_terminated:
            assert self.result is None
            self.builder.ret_void()
        ir.IRBuilder(self.entry).branch(first)

    # --- statements ---

    def body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if self.builder.block.is_terminated:
                return
            getattr(self, f"do_{type(statement).__name__}")(statement)

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # the docstring
            self.of(node.value)

    def do_Assign(self, node: ast.Assign) -> None:
        value = self.of(node.value)
        for target in node.targets:
            self.store(target, value)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        assert node.value is not None
        self.store(node.target, self.of(node.value))

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        self.store(node.target, self.arithmetic(node.op, self.of(node.target), self.of(node.value)))

    def store(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Tuple):
            for one, of_it in zip(target.elts, value, strict=True):
                self.store(one, of_it)
        elif isinstance(target, ast.Subscript):
            view, at = self.element(target)
            self.builder.store(self.as_kind(value, view.kind).value, at)
        else:
            assert isinstance(target, ast.Name)
            self.assign(target.id, value)

    def assign(self, name: str, value: Any) -> None:
        """A view is what it is where it is assigned; numbers, and tuples of them, vary."""
        if isinstance(value, ArrayView):
            self.names[name] = value
        elif isinstance(value, tuple) and not isinstance(value, Number):
            self.names[name] = _Several([f"{name}.{i}" for i in range(len(value))])
            for one, of_it in zip(self.names[name].names, value, strict=True):
                self.assign(one, of_it)
        else:
            value = self.number(value)
            known = self.names.get(name)
            if known is None:
                known = self.names[name] = _Variable(self.room(_type(value.kind)), value.kind)
            self.builder.store(self.as_kind(value, known.kind).value, known.place)

    def room(self, kind: Any, size: int | None = None) -> Any:
        """A place on the stack, made once per call."""
        return ir.IRBuilder(self.entry).alloca(kind, size)

    def do_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.builder.ret_void()
            return
        value = self.of(node.value)
        if not get_args(self.result):
            self.builder.ret(self.as_kind(value, np.dtype(self.result)).value)
            return
        out = ir.Constant(self.into.return_value.type, ir.Undefined)
        for i, (one, kind) in enumerate(zip(value, get_args(self.result), strict=True)):
            out = self.builder.insert_value(out, self.as_kind(one, np.dtype(kind)).value, i)
        self.builder.ret(out)

    def do_If(self, node: ast.If) -> None:
        condition = self.truth(self.of(node.test))
        then, other, after = (self.into.append_basic_block() for _ in range(3))
        self.builder.cbranch(condition, then, other)
        for block, statements in ((then, node.body), (other, node.orelse)):
            self.builder.position_at_end(block)
            self.body(statements)
            if not self.builder.block.is_terminated:
                self.builder.branch(after)
        self.builder.position_at_end(after)
        if not any(True for block in self.into.blocks if after in _targets(block)):
            self.builder.unreachable()

    def do_For(self, node: ast.For) -> None:
        assert isinstance(node.iter, ast.Call)
        bounds = [self.as_kind(self.of(x), _INT).value for x in node.iter.args]
        start, stop, *step = [ir.Constant(_WORD, 0), *bounds] if len(bounds) == 1 else bounds
        place = self.room(_WORD)
        self.builder.store(start, place)

        def condition() -> Any:
            at = self.builder.load(place)
            inside = self.builder.icmp_signed("<", at, stop)
            return at, inside

        def before(at: Any) -> None:
            self.store(node.target, Number(at, _INT))

        def following() -> None:
            by = step[0] if step else ir.Constant(_WORD, 1)
            self.builder.store(self.builder.add(self.builder.load(place), by, flags=["nsw"]), place)

        self.loop(condition, before, node.body, following)

    def do_While(self, node: ast.While) -> None:
        self.loop(lambda: (None, self.truth(self.of(node.test))), lambda at: None, node.body, lambda: None)

    def loop(self, condition: Any, before: Any, statements: Sequence[ast.stmt], following: Any) -> None:
        again, inside, onward, after = (self.into.append_basic_block() for _ in range(4))
        self.builder.branch(again)
        self.builder.position_at_end(again)
        at, goes_on = condition()
        self.builder.cbranch(goes_on, inside, after)
        self.builder.position_at_end(inside)
        before(at)
        self.again.append(onward)
        self.body(statements)
        self.again.pop()
        if not self.builder.block.is_terminated:
            self.builder.branch(onward)
        self.builder.position_at_end(onward)
        following()
        self.builder.branch(again)
        self.builder.position_at_end(after)

    def do_Continue(self, node: ast.Continue) -> None:
        self.builder.branch(self.again[-1])

    # --- expressions: Number, ArrayView, a tuple of them, or what Python has by then (a constant, a function) ---

    def of(self, node: ast.expr) -> Any:
        return getattr(self, f"of_{type(node).__name__}")(node)

    def of_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def of_Name(self, node: ast.Name) -> Any:
        return self.named(node.id)

    def named(self, name: str) -> Any:
        known = self.names.get(name)
        if isinstance(known, _Variable):
            return Number(self.builder.load(known.place), known.kind)
        if isinstance(known, _Several):
            return tuple(map(self.named, known.names))
        if known is not None:
            return known
        return self.function.__globals__.get(name, _BUILT_IN_NAMES.get(name))

    def of_Attribute(self, node: ast.Attribute) -> Any:
        return getattr(self.of(node.value), node.attr)

    def of_Tuple(self, node: ast.Tuple) -> Any:
        return tuple(map(self.of, node.elts))

    def of_Subscript(self, node: ast.Subscript) -> Any:
        view, at = self.element(node)
        return Number(self.builder.load(at), view.kind)

    def element(self, node: ast.Subscript) -> tuple[ArrayView, Any]:
        view, index = self.of(node.value), self.number(self.of(node.slice))
        # Widened as it is: an index is never negative, and one of 8 bits has no sign.
        return view, self.builder.gep(view.at, [self.as_kind(index, _INT).value], inbounds=True)

    def of_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.of(node.operand)
        if isinstance(node.op, ast.Not):
            return Number(self.builder.not_(self.truth(value)), _BOOL)
        assert isinstance(node.op, ast.USub)
        return -value if not isinstance(value, Number) else self.arithmetic(ast.Sub(), 0, value)

    def of_BinOp(self, node: ast.BinOp) -> Any:
        return self.arithmetic(node.op, self.of(node.left), self.of(node.right))

    def arithmetic(self, op: ast.operator, a: Any, b: Any) -> Any:
        word = type(op).__name__
        if not isinstance(a, Number) and not isinstance(b, Number):
            return _FOLDED[word](a, b)
        a, b = self.alike(a, b)
        if word == "Div" and a.kind.kind != "f":
            a, b = self.as_kind(a, _FLOAT), self.as_kind(b, _FLOAT)
        if a.kind.kind == "f":
            return Number(getattr(self.builder, _FLOATS[word])(a.value, b.value, flags=FLAGS), a.kind)
        which = 1 if a.kind.kind == "u" else 0
        return Number(getattr(self.builder, _INTEGERS[word][which])(a.value, b.value), a.kind)

    def of_Compare(self, node: ast.Compare) -> Number:
        assert len(node.ops) == 1
        return self.compared(_COMPARED[type(node.ops[0]).__name__], self.of(node.left), self.of(node.comparators[0]))

    def compared(self, word: str, a: Any, b: Any) -> Number:
        a, b = self.alike(a, b)
        if a.kind.kind == "f":
            how = self.builder.fcmp_unordered if word == "!=" else self.builder.fcmp_ordered
        else:
            how = self.builder.icmp_signed if a.kind.kind == "i" else self.builder.icmp_unsigned
        return Number(how(word, a.value, b.value), _BOOL)

    def of_BoolOp(self, node: ast.BoolOp) -> Number:
        """Only as many as decide are computed."""
        place, after = self.room(_BIT), self.into.append_basic_block()
        for i, value in enumerate(node.values):
            found = self.truth(self.of(value))
            self.builder.store(found, place)
            if i + 1 == len(node.values):
                self.builder.branch(after)
            else:
                onward = self.into.append_basic_block()
                ways = (onward, after) if isinstance(node.op, ast.And) else (after, onward)
                self.builder.cbranch(found, *ways)
                self.builder.position_at_end(onward)
        self.builder.position_at_end(after)
        return Number(self.builder.load(place), _BOOL)

    def of_IfExp(self, node: ast.IfExp) -> Number:
        condition = self.truth(self.of(node.test))
        a, b = self.alike(self.of(node.body), self.of(node.orelse))
        return Number(self.builder.select(condition, a.value, b.value), a.kind)

    def of_Call(self, node: ast.Call) -> Any:
        called, arguments = self.of(node.func), [self.of(x) for x in node.args]
        if isinstance(called, type) and issubclass(called, np.generic):
            return self.as_kind(arguments[0], np.dtype(called))
        if called in _BUILT_IN:
            return _BUILT_IN[called](self, *arguments)
        if getattr(called, "emitted", False):
            return called(self, *arguments)
        return self.call(called, arguments)

    def call(self, called: Any, arguments: Sequence[Any]) -> Any:
        """Of the same kind; a constant argument is a constant in it, too."""
        result = inspect.get_annotations(called, eval_str=True).get("return")
        flat = [x for argument in arguments for x in _flat(argument)]
        key = called, tuple(_described(argument) for argument in arguments)
        if key not in self.made:
            typed = ir.FunctionType(_type(result), [x.type for x in flat])
            into = ir.Function(self.module, typed, self.module.get_unique_name(called.__name__))
            into.linkage = "internal"
            into.attributes.add("noinline")  # joined, LLVM takes half as long again, and makes slower code of factors
            body = self.made[key] = _Body(self.module, self.made, into, called, result)
            own = iter(into.args)
            body.translate([_rebuilt(argument, own) for argument in arguments])
        value = self.builder.call(self.made[key].into, flat)
        if result is None:
            return None
        if not get_args(result):
            return Number(value, np.dtype(result))
        return tuple(Number(self.builder.extract_value(value, i), np.dtype(k)) for i, k in enumerate(get_args(result)))

    # --- kinds ---

    def number(self, value: Any) -> Number:
        if isinstance(value, Number):
            return value
        return Number(ir.Constant(_type(type(value)), value), np.dtype(type(value)))

    def truth(self, value: Any) -> Any:
        value = self.number(value)
        return value.value if value.kind == _BOOL else self.compared("!=", value, 0).value

    def alike(self, a: Any, b: Any) -> tuple[Number, Number]:
        """Both of one kind."""
        if not isinstance(a, Number) and not isinstance(b, Number):
            a, b = self.number(a), self.number(b)
        if not isinstance(a, Number):
            b, a = self.alike(b, a)
            return a, b
        if not isinstance(b, Number):
            kind = _FLOAT if isinstance(b, float) and a.kind.kind != "f" else a.kind
        else:
            floats = [x.kind for x in (a, b) if x.kind.kind == "f"]
            if floats and len(floats) == 1:
                kind = _FLOAT
            else:
                kind = max(a.kind, b.kind, key=lambda k: k.itemsize)
        return self.as_kind(a, kind), self.as_kind(b, kind)

    def as_kind(self, x: Any, kind: np.dtype) -> Number:
        if not isinstance(x, Number):
            return Number(ir.Constant(_type(kind), kind.type(x).item() if kind.kind == "f" else int(x)), kind)
        if x.kind == kind:
            return x
        if kind == _BOOL:
            return Number(self.truth(x), kind)
        before, after, to = x.kind.kind, kind.kind, _type(kind)
        if before == "f":
            if after == "f":
                how = self.builder.fpext if kind.itemsize > x.kind.itemsize else self.builder.fptrunc
            else:
                how = self.builder.fptosi if after == "i" else self.builder.fptoui
        elif after == "f":
            how = self.builder.sitofp if before == "i" else self.builder.uitofp
        elif kind.itemsize > x.kind.itemsize or before == "b":
            how = self.builder.sext if before == "i" else self.builder.zext
        elif kind.itemsize == x.kind.itemsize:
            return Number(x.value, kind)
        else:
            how = self.builder.trunc
        return Number(how(x.value, to), kind)

    def intrinsic(self, name: str, *values: Number, fast: Sequence[str] = FLAGS) -> Number:
        """One of LLVM's functions of floating point."""
        kind = values[0].kind
        typed = ir.FunctionType(_type(kind), [_type(kind)] * len(values))
        function = self.module.declare_intrinsic(f"llvm.{name}", [_type(kind)], typed)
        return Number(self.builder.call(function, [v.value for v in values], fastmath=tuple(fast)), kind)


def _flat(argument: Any) -> list[Any]:
    if isinstance(argument, Number):
        return [argument.value]
    if isinstance(argument, ArrayView):
        return [argument.at, argument.size.value]
    return [x for one in argument for x in _flat(one)] if isinstance(argument, tuple) else []


def _described(argument: Any) -> Any:
    if isinstance(argument, (Number, ArrayView)):
        return type(argument), argument.kind
    return tuple(map(_described, argument)) if isinstance(argument, tuple) else (type(argument), argument)


def _rebuilt(argument: Any, flat: Any) -> Any:
    if isinstance(argument, Number):
        return Number(next(flat), argument.kind)
    if isinstance(argument, ArrayView):
        return ArrayView(next(flat), Number(next(flat), _INT), argument.kind)
    return tuple(_rebuilt(one, flat) for one in argument) if isinstance(argument, tuple) else argument


def _targets(block: Any) -> Sequence[Any]:
    return [x for x in getattr(block.terminator, "operands", ()) if isinstance(x, ir.Block)]


_FOLDED = {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv,
           "FloorDiv": operator.floordiv, "Pow": operator.pow, "LShift": operator.lshift}  # fmt: skip
_FLOATS = {"Add": "fadd", "Sub": "fsub", "Mult": "fmul", "Div": "fdiv"}
_INTEGERS = {
    "Add": ("add", "add"), "Sub": ("sub", "sub"), "Mult": ("mul", "mul"), "FloorDiv": ("sdiv", "udiv"),
    "Mod": ("srem", "urem"), "BitAnd": ("and_", "and_"), "BitOr": ("or_", "or_"), "BitXor": ("xor", "xor"),
    "LShift": ("shl", "shl"), "RShift": ("ashr", "lshr"),
}  # fmt: skip
_COMPARED = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!="}


def _extreme(word: str) -> Callable[..., Number]:
    def chosen(body: _Body, a: Any, b: Any) -> Number:
        a, b = body.alike(a, b)
        return Number(body.builder.select(body.compared(word, a, b).value, a.value, b.value), a.kind)

    return chosen


def _finite(body: _Body, x: Number) -> Number:
    return body.compared("<", body.intrinsic("fabs", x, fast=()), float("inf"))


_BUILT_IN_NAMES = {"abs": abs, "max": max, "min": min}
_BUILT_IN: dict[Any, Callable[..., Any]] = {
    abs: lambda body, x: body.intrinsic("fabs", x),
    max: _extreme(">"),
    min: _extreme("<"),
    np.sqrt: lambda body, x: body.intrinsic("sqrt", x, fast=()),
    np.isfinite: _finite,
}


@emitted
def larger(body: _Body, a: Any, b: Any) -> Number:
    """Of two numbers that are no NaN: what LLVM makes vector code of."""
    return body.intrinsic("maxnum", *body.alike(a, b), fast=("nnan", "nsz"))


@emitted
def smaller(body: _Body, a: Any, b: Any) -> Number:
    return body.intrinsic("minnum", *body.alike(a, b), fast=("nnan", "nsz"))


@emitted
def part(body: _Body, array: ArrayView, start: Any, n: Any, kind: Any) -> ArrayView:
    """``n`` numbers of ``kind`` from element ``start`` of an array on."""
    at = body.builder.gep(array.at, [body.as_kind(start, _INT).value], inbounds=True)
    kind = np.dtype(kind)
    return ArrayView(body.builder.bitcast(at, _type(kind).as_pointer()), body.as_kind(n, _INT), kind)


@emitted
def scratch(body: _Body, n: int, kind: Any) -> ArrayView:
    """``n`` numbers of ``kind``, a constant, that live as long as the call."""
    place = body.room(_type(np.dtype(kind)), n)
    place.align = 64
    return ArrayView(place, body.as_kind(n, _INT), np.dtype(kind))
