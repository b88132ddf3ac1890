"""What a block's own code makes of its inputs and of its parts' outputs, as formulas.

The problem: a layer adds, scales and hands on between its parts, where nothing is captured, and each family does it in
its own way. The idea: the source of a module's forward is followed symbolically, once a module, before it is tapped:
the module's own numbers and switches are known, its children are calls, and every path through the code gives an
expression of each output: ``{"output.0": "hidden_states + attn[0] + mlp[0]"}``. Words: an input's name; ``path[k]``,
output k of the child at that path; ``own.name``, a parameter; numbers; + - * /; ``view(w)``, all of w in another
shape; ``without_batch(w)``, all of w if it is a batch of one; ``a if w else b``, where w says whether the input or
output w is there. ``output`` alone names the child all of whose outputs are handed on, ``inside.path/name`` is the
input of that name of the child at that path, ``own_code`` children whose inputs are not followed. What is not followed
(functions, slices, a child called twice) has no formula.
Not here: what a formula makes of tensors (opcheck/references).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import itertools
import operator
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

_MOST_PATHS = 32
"""Chosen: paths through one forward; the most of vLLM 0.32's decoder layers has 8."""
_MOST_LETTERS = 2000
"""Of a formula, and of all that it is made from: each statement may double its variables."""
_BINARY: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub), ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}  # fmt: skip
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_MOST_TURNS = 2048
"""Chosen: of all loops of one forward that are followed turn by turn, on all its paths."""
_BUILTINS: dict[str, Any] = {
    "isinstance": isinstance,
    "tuple": tuple,
    "len": len,
    "enumerate": enumerate,
    "range": range,
}
_PLAIN = (bool, int, float, str, type(None), dict, list)
_FACTS = ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "requires_grad")
"""Attributes and methods of a tensor that give none of its elements."""
_SHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
_SAME = ("contiguous", "clone", "detach", *_SHAPES)
"""Methods of a tensor that leave its numbers and their order as they are; `_SHAPES`: in another shape."""
_NO_BATCH = "without_batch"
_MAY_COPY = ("contiguous", "reshape", "flatten", "reshape_as")
_PASSING = (torch.nn.Identity, torch.nn.modules.dropout._DropoutNd)
"""Modules that give their input itself where nothing is dropped."""
_NEUTRAL = torch.no_grad()(lambda: None).__code__.co_filename
"""Where torch's own decorators (no_grad, inference_mode) are written."""


class _Lost(Exception):
    """This code is not followed."""


@dataclass
class _Cell:
    """A tensor: what it is, None where that is not known. optional: it may be None instead; layers: it comes out of a
    loop over modules; viewed: the word for its other shape; copied: some of its names may have memory of their own."""

    text: str | None
    optional: bool = False
    layers: bool = False
    viewed: str = ""
    copied: bool = False
    base: Any = field(default=None, compare=False)
    """The tensor whose memory it may be."""


@dataclass
class _Child:
    """All that one call of a child gave. lost: it may have been changed since; added: what it was called with behind
    its first argument, which a fused addition and norm writes into; passed: what it may give back as it is."""

    path: str
    lost: bool = False
    added: tuple[Any, ...] = field(default=(), compare=False)
    passed: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class _Known:
    """An object of the model's code: a number, a switch, a module, a function."""

    value: Any


class _Bound(ast.stmt):
    """A loop's variable gets its next value."""

    def __init__(self, target: ast.expr, value: Any):
        super().__init__()
        self.target, self.value = target, value


@dataclass(frozen=True)
class _There:
    """Whether a tensor is there."""

    text: str
    negated: bool = False


@dataclass(frozen=True)
class _Length:
    """How many outputs a child gave."""

    path: str


_OTHER = _Known(object())
"""Anything else."""


@dataclass
class _Path:
    """One path through the code. names: local variables; there: tensors known to be there or not; called: children."""

    names: dict[str, Any]
    there: dict[str, bool] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)

    def copy(self) -> _Path:
        memo: dict[int, Any] = {}
        return _Path({k: _copied(v, memo) for k, v in self.names.items()}, dict(self.there), set(self.called))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Tensors anew, the same ones for the same names; all else as it is."""
    if isinstance(value, (_Cell, _Child)):
        if id(value) not in memo:
            memo[id(value)] = new = copy.copy(value)
            if isinstance(new, _Cell):
                new.base = _copied(new.base, memo)
            else:
                new.added, new.passed = _copied(new.added, memo), _copied(new.passed, memo)
        return memo[id(value)]
    if isinstance(value, tuple):
        return tuple(_copied(v, memo) for v in value)
    return value


ArgumentNames = Callable[[Callable[..., Any]], tuple[list[str], str]]


def formulas(module: torch.nn.Module, named: ArgumentNames | None = None) -> dict[str, str]:
    """Role → formula of each output of ``module`` that its code tells, and of what its children receive; {} for a
    module without parts. named: the names of a forward's positional arguments; without it what children receive
    is not followed. Runs no code of the model but properties of its modules; never raises."""
    if not module._modules:
        return {}
    try:
        forward = module.__dict__.get("forward") or type(module).forward
        if "forward" in module.__dict__ and not hasattr(forward, "__self__"):
            return {}  # a closure
        function = getattr(forward, "__func__", forward)
        while hasattr(function, "__wrapped__"):
            if function.__code__.co_filename != _NEUTRAL:
                return {}  # any other decorator may compute more
            function = function.__wrapped__
        if set(function.__code__.co_freevars) - {"__class__"}:
            return {}
        body, arguments = _parsed(function)
        with contextlib.suppress(_Lost, RecursionError):
            return _Follower(module, function, named, unroll=True).outputs(body, arguments)
        return _Follower(module, function, named, unroll=False).outputs(body, arguments)
    except (Exception, SystemExit):  # a model's source may be anything, and what it says may divide by 0
        return {}


@functools.lru_cache(maxsize=512)
def _parsed(function: Any) -> tuple[tuple[ast.stmt, ...], tuple[str, ...]]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise _Lost
    a = tree.args
    return tuple(tree.body), tuple(x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs))


class _Follower:
    def __init__(
        self, module: torch.nn.Module, function: Any, named: ArgumentNames | None, unroll: bool,
        several: dict[int, bool] | None = None,
    ):  # fmt: skip
        """several: by a module's id: of those whose code was read for it (`_gives_several`)."""
        self._module, self._globals, self._named = module, getattr(function, "__globals__", {}), named
        self._unroll, self._several = unroll, {} if several is None else several
        self._received: dict[str, str | None] = {}
        self.returned: list[Any] = []
        self._paths = {id(m): name for name, m in module.named_modules() if name}
        self._left, self._turns_left = _MOST_PATHS, _MOST_TURNS
        self._blind, self._written = set[str](), set[str]()

    def outputs(self, body: Sequence[ast.stmt], arguments: Sequence[str]) -> dict[str, str]:
        names: dict[str, Any] = {name: _Cell(name, optional=True) for name in arguments[1:]}
        self._written = _written(body, self._module)
        result = self._run(body, _Path({arguments[0]: _Known(self._module), **names}))
        inside = {role: text for role, text in self._received.items() if text is not None}
        if isinstance(result, _Child) and not result.lost:
            own = {"own_code": result.path} if result.path in self._blind else {}
            return {"output": result.path, **inside, **own}
        if isinstance(result, dict):
            found = {f"output.{k}": v for k, v in result.items()}
            found["output.0"] = next(iter(result.values()), None)  # where a tuple is made of them
        else:
            values = result if isinstance(result, tuple) else (result,)
            found = {f"output.{k}": v for k, v in enumerate(values)}
        texts = {role: _text(v) for role, v in found.items()}
        kept = {role: text for role, text in texts.items() if text is not None and len(text) < _MOST_LETTERS}
        blind = sorted(path for path in self._blind if any(f"{path}[" in text for text in kept.values()))
        return {**kept, **inside, **({"own_code": ", ".join(blind)} if blind else {})}

    # --- statements ---

    def _run(self, body: Sequence[ast.stmt], path: _Path) -> Any:
        """What is returned; None where the end is reached without, or an error is raised."""
        todo = [*reversed(body)]
        while todo:
            s = todo.pop()
            if isinstance(s, ast.Return):
                self.returned.append(self._value(s.value, path) if s.value is not None else None)
                return self.returned[-1]
            if isinstance(s, ast.Raise):
                return None
            if isinstance(s, ast.If):
                test = self._value(s.test, path)
                decided = self._decided(test, path)
                if decided is None:
                    return self._branch(s, test, todo[::-1], path)
                todo += reversed(s.body if decided else s.orelse)
            elif isinstance(s, ast.With):
                todo += reversed(s.body)
            elif isinstance(s, ast.For) and (turns := self._turns(s, path)) is not None:
                todo += reversed([t for turn in turns for t in (_Bound(s.target, turn), *s.body)])
            elif isinstance(s, _Bound):
                self._bind(s.target, s.value, path)
            elif isinstance(s, (ast.For, ast.While)):
                self._loop(s, path)
            elif isinstance(s, ast.Assign):
                value = self._value(s.value, path)
                for target in s.targets:
                    self._bind(target, value, path)
            elif isinstance(s, ast.AnnAssign):
                if s.value is not None:
                    self._bind(s.target, self._value(s.value, path), path)
            elif isinstance(s, ast.AugAssign):
                self._in_place(s, path)
            elif isinstance(s, ast.Expr):
                self._value(s.value, path)
            elif not isinstance(s, (ast.Assert, ast.Pass, ast.Delete, ast.Import, ast.ImportFrom)):
                raise _Lost
        return None

    def _branch(self, s: ast.If, test: Any, rest: Sequence[ast.stmt], path: _Path) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _Lost
        yes, no = path.copy(), path.copy()
        if isinstance(test, _There):
            yes.there[test.text], no.there[test.text] = not test.negated, test.negated
        a, b = self._run([*s.body, *rest], yes), self._run([*s.orelse, *rest], no)
        if isinstance(test, _There) and test.negated:
            a, b = b, a
        return _either(test.text if isinstance(test, _There) else None, a, b)

    def _decided(self, test: Any, path: _Path) -> bool | None:
        if isinstance(test, _There):
            there = path.there.get(test.text)
            return None if there is None else there != test.negated
        if isinstance(test, _Known) and isinstance(test.value, _PLAIN):
            return bool(test.value)
        return None

    def _turns(self, s: ast.For, path: _Path) -> Sequence[Any] | None:
        """What a loop over known modules or numbers goes through; None where it is not followed turn by turn."""
        left = s.orelse or any(isinstance(n, (ast.Break, ast.Continue)) for b in s.body for n in ast.walk(b))
        turns = self._items(s.iter, path) if self._unroll and not left else None
        self._turns_left -= len(turns or ())
        if self._turns_left < 0:
            raise _Lost
        return turns

    def _items(self, node: ast.expr, path: _Path) -> Sequence[Any] | None:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            whole, cut = self._items(node.value, path), node.slice
            parts = [_Known(None) if e is None else self._value(e, path) for e in (cut.lower, cut.upper, cut.step)]
            if whole is None or not all(isinstance(p, _Known) and isinstance(p.value, int | None) for p in parts):
                return None
            return whole[slice(*(p.value for p in parts))]
        if not isinstance(node, ast.Call):
            value = self._value(node, path)
            of_modules = isinstance(value, _Known) and isinstance(value.value, torch.nn.ModuleList)
            return [_Known(m) for m in value.value] if of_modules and len(value.value) <= _MOST_TURNS else None
        function = getattr(self._value(node.func, path), "value", None)
        if function is enumerate and len(node.args) == 1 and not node.keywords:
            items = self._items(node.args[0], path)
            return None if items is None else [(_Known(k), item) for k, item in enumerate(items)]
        ends = [self._value(a, path) for a in node.args[function is itertools.islice :]]
        plain = all(isinstance(e, _Known) and isinstance(e.value, int | None) for e in ends) and not node.keywords
        numbers: list[Any] = [e.value for e in ends] if plain else []
        if function is itertools.islice and numbers:
            items = self._items(node.args[0], path)
            return None if items is None else list(itertools.islice(items, *numbers))
        if function is range and numbers and None not in numbers and len(range(*numbers)) <= _MOST_TURNS:
            return [_Known(k) for k in range(*numbers)]
        return None

    def _loop(self, s: ast.For | ast.While, path: _Path) -> None:
        for node in ast.walk(s):
            if isinstance(node, ast.Return):
                raise _Lost
            if isinstance(node, ast.Name):
                _lose(path.names.get(node.id))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                path.names[node.id] = _Cell(None, layers=self._over_modules(s))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = getattr(self._module, node.attr, None)
                if isinstance(module, torch.nn.Module):  # whatever of it runs here ran before what comes behind
                    path.called |= {p for p in self._paths.values() if f"{p}.".startswith(f"{node.attr}.")}

    def _over_modules(self, s: ast.For | ast.While) -> bool:
        """Whether a loop calls one module after the other, which are judged by themselves."""
        names = [n.attr for n in ast.walk(getattr(s, "iter", s)) if isinstance(n, ast.Attribute)]
        return any(isinstance(getattr(self._module, name, None), torch.nn.ModuleList) for name in names)

    def _bind(self, target: ast.expr, value: Any, path: _Path) -> None:
        if isinstance(target, ast.Name):
            path.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            if isinstance(value, _Child):
                _lose(value.added)
                value = tuple(_part(value, k) for k in range(len(target.elts)))
            whole = isinstance(value, tuple) and len(value) == len(target.elts)
            for k, one in enumerate(target.elts):
                one = one.value if isinstance(one, ast.Starred) else one
                self._bind(one, value[k] if whole else _Cell(None), path)
        elif isinstance(target, ast.Subscript):  # a part of it is another from now on
            _lose(self._value(target.value, path))
        elif isinstance(target, ast.Attribute):  # it has a name that is not followed
            _lose((self._value(target.value, path), value))

    def _in_place(self, s: ast.AugAssign, path: _Path) -> None:
        if not isinstance(s.target, ast.Name):
            _lose(self._value(getattr(s.target, "value", s.target), path))
            return
        old = path.names.get(s.target.id)
        if isinstance(old, _Child):
            child, old = old, _part(old, 0)
            child.lost = True  # under its other names
        new = self._arithmetic(s.op, old, self._value(s.value, path))
        if isinstance(old, _Cell) and isinstance(new, _Cell):
            _lose(old.base)
            old.text, old.optional = None if old.copied else new.text, False  # its other names see it, too
            new = old
        path.names[s.target.id] = new

    # --- expressions ---

    def _value(self, node: ast.expr, path: _Path) -> Any:
        if isinstance(node, ast.Constant):
            return _Known(node.value)
        if isinstance(node, ast.Name):
            return path.names[node.id] if node.id in path.names else self._global(node.id)
        if isinstance(node, (ast.Tuple, ast.List)):
            if any(isinstance(e, ast.Starred) for e in node.elts):
                raise _Lost  # how many there are is not known
            return tuple(self._value(e, path) for e in node.elts)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value, path), node.attr)
        if isinstance(node, ast.Subscript):
            return self._subscript(self._value(node.value, path), self._value(node.slice, path))
        if isinstance(node, ast.Call):
            return self._call(node, path)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node.op, self._value(node.left, path), self._value(node.right, path))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node, path)
        if isinstance(node, ast.Compare):
            return self._comparison(node, path)
        if isinstance(node, ast.BoolOp):
            return self._logic(node, path)
        if isinstance(node, ast.IfExp):
            test = self._value(node.test, path)
            decided = self._decided(test, path)
            if decided is not None:
                return self._value(node.body if decided else node.orelse, path)
            a, b = self._value(node.body, path), self._value(node.orelse, path)
            if isinstance(test, _There) and test.negated:
                a, b = b, a
            return _either(test.text if isinstance(test, _There) else None, a, b)
        if isinstance(node, ast.JoinedStr):
            return _OTHER
        for n in ast.walk(node):  # comprehensions, containers, :=
            if isinstance(n, ast.Name):
                _lose(path.names.get(n.id))
        return _Cell(None)

    def _attribute(self, owner: Any, name: str) -> Any:
        """An attribute of ``owner``; one that this forward assigns has no known value."""
        if isinstance(owner, _Known) and name in self._written:
            return _Cell(None)
        found = _attribute(owner, name)
        own = isinstance(owner, _Known) and owner.value is self._module and isinstance(found, _Cell)
        return _Cell(f"own.{name}") if own else found

    def _global(self, name: str) -> Any:
        if name in _BUILTINS:
            return _Known(_BUILTINS[name])
        return _Known(self._globals[name]) if name in self._globals else _OTHER

    def _unary(self, node: ast.UnaryOp, path: _Path) -> Any:
        value = self._value(node.operand, path)
        if isinstance(node.op, ast.Not):
            if isinstance(value, _There):
                return _There(value.text, not value.negated)
            decided = self._decided(value, path)
            return _OTHER if decided is None else _Known(not decided)
        if isinstance(node.op, ast.USub) and isinstance(value, _Known) and isinstance(value.value, (int, float)):
            return _Known(-value.value)
        return _Cell(None)

    def _comparison(self, node: ast.Compare, path: _Path) -> Any:
        values = [self._value(v, path) for v in (node.left, *node.comparators)]
        compare = _COMPARE.get(type(node.ops[0]))
        if len(values) != 2 or compare is None:
            return _OTHER
        a, b = values
        if isinstance(a, _Length) and isinstance(node.ops[0], ast.Eq) and b == _Known(2):
            return _There(f"{a.path}[1]")
        none = isinstance(b, _Known) and b.value is None and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        if none and isinstance(a, (_Cell, _Child)):
            cell = _part(a, 0) if isinstance(a, _Child) else a
            negated = isinstance(node.ops[0], ast.Is)
            if cell.text is None or not cell.optional:
                return _OTHER if cell.text is None else _Known(not negated)
            return _There(cell.text, negated)
        if all(isinstance(v, _Known) and v is not _OTHER and not isinstance(v.value, torch.Tensor) for v in (a, b)):
            return _Known(bool(compare(a.value, b.value)))
        return _OTHER

    def _logic(self, node: ast.BoolOp, path: _Path) -> Any:
        """and, or: decided where one side alone decides; what is left, where it is one."""
        decisive, open_ = isinstance(node.op, ast.Or), []
        for part in node.values:
            value = self._value(part, path)
            decided = self._decided(value, path)
            if decided is decisive:
                return _Known(decisive)
            if decided is None:
                open_.append(value)
        same = open_ and all(value == open_[0] for value in open_)
        return _Known(not decisive) if not open_ else open_[0] if same else _OTHER

    def _call(self, node: ast.Call, path: _Path) -> Any:
        owner = self._value(node.func.value, path) if isinstance(node.func, ast.Attribute) else None
        function = (self._attribute(owner, node.func.attr) if isinstance(node.func, ast.Attribute)
                    else self._value(node.func, path))  # fmt: skip
        arguments = [self._value(a.value if isinstance(a, ast.Starred) else a, path) for a in node.args]
        named = {k.arg: self._value(k.value, path) for k in node.keywords}
        value = function.value if isinstance(function, _Known) else None
        direct = isinstance(node.func, ast.Attribute) and node.func.attr == "forward"
        if direct and isinstance(owner, _Known):
            value = owner.value  # a tap may already be in place of it
        if isinstance(owner, tuple):  # a list, which has more or other items from now on
            path.names |= {n: _Cell(None) for n, v in path.names.items() if v == owner}
        if isinstance(value, torch.nn.Module):
            name = self._paths.get(id(value))
            if name is None or name in path.called:
                self._receives(name, value, None, named)
                return _Cell(None)
            path.called.add(name)
            unknown = any(isinstance(a, ast.Starred) for a in node.args) or (value._forward_pre_hooks and not direct)
            self._receives(name, value, None if unknown else arguments, named)
            if any(_is_blind(v) for v in (*arguments, *named.values())):
                self._blind.add(name)
            if getattr(value, "inplace", False) is True:
                _lose((*arguments, *named.values()))
            added = (*arguments[1:], *(v for k, v in named.items() if "residual" in str(k)))
            passed = arguments[0] if isinstance(value, _PASSING) and arguments else None
            return _Child(name, bool(value._forward_hooks) and not direct, added, passed)
        method = node.func.attr if isinstance(function, _Cell) and isinstance(node.func, ast.Attribute) else ""
        if method in _SAME:
            same: Any = _part(owner, 0) if isinstance(owner, _Child) else owner
            if method == "view" and ("dtype" in named or any(map(_is_dtype, arguments, node.args))):
                return _Cell(None, base=same)
            if method == "clone":
                return _Cell(same.text, same.optional, same.layers, same.viewed)
            same.viewed = same.viewed or ("view" if method in _SHAPES else "")
            same.copied = same.copied or method in _MAY_COPY
            return same
        if str(getattr(value, "__module__", "")).startswith("vllm.distributed") and callable(value):
            return self._of_ranks(value, arguments)
        if value is isinstance and len(arguments) == 2 and isinstance(arguments[1], _Known):
            return _kind(arguments[0], arguments[1].value)
        if value is len and len(arguments) == 1 and isinstance(arguments[0], _Child):
            return _Length(arguments[0].path)
        if value is len and isinstance(modules := getattr(arguments[0], "value", None), torch.nn.ModuleList):
            return _Known(len(modules))
        numbers = not named and all(_is_number(v) for v in arguments)
        if numbers and callable(value) and getattr(value, "__module__", None) == "math":
            return _Known(value(*(v.value for v in arguments)))
        if isinstance(value, type) and named and not arguments and all(n is not None for n in named):
            return {str(n): v for n, v in named.items()}  # a record of outputs by name
        for v in (*arguments, *named.values()):
            _lose(v)
        if isinstance(owner, (_Cell, _Child)) and isinstance(node.func, ast.Attribute):
            if node.func.attr.endswith("_"):
                _lose(owner)
            return _OTHER if node.func.attr in _FACTS else _Cell(None, base=owner)
        return _Cell(None)

    def _receives(
        self, path: str | None, child: torch.nn.Module, args: Sequence[Any] | None, kwargs: Mapping[Any, Any]
    ) -> None:  # fmt: skip
        """Notes what goes into a child; what differs between two paths, or two calls, is not known. args: None where
        they are not known."""
        if self._named is None or path is None:
            return
        names, roles = self._named(child.forward)[0], f"inside.{path}/"
        if args is None:
            self._received |= dict.fromkeys([*(f"{roles}{n}" for n in names), *(f"{roles}{n}" for n in kwargs)])
            return
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            role, text = f"{roles}{name}", _text(value)
            kept = text is not None and len(text) < _MOST_LETTERS and self._received.get(role, text) == text
            self._received[role] = text if kept else None

    def _of_ranks(self, function: Any, arguments: list[Any]) -> Any:
        """A question about the ranks; a sum over one rank."""
        if not arguments and function.__name__.startswith("get_"):
            return _Known(function())
        from vllm.distributed import get_tensor_model_parallel_world_size

        alone = function.__name__ == "tensor_model_parallel_all_reduce" and get_tensor_model_parallel_world_size() == 1
        return arguments[0] if alone and len(arguments) == 1 else _Cell(None)

    def _subscript(self, owner: Any, at: Any) -> Any:
        if isinstance(at, tuple) and len(at) == 2 and at[0] in (_Known(0), _Known(None)) and at[1] == _Known(...):
            cell = _part(owner, 0) if isinstance(owner, _Child) else owner
            if at[0] == _Known(0) and isinstance(cell, _Cell):
                cell.viewed = _NO_BATCH
            return cell  # of one batch, or as one
        k = at.value if isinstance(at, _Known) else None
        if isinstance(k, int) and isinstance(owner, _Child) and k >= 0:
            several = _gives_several(self._module.get_submodule(owner.path), self._several)
            return _part(owner, k) if several else _Cell(None, base=owner)
        if isinstance(k, int) and isinstance(owner, tuple) and -len(owner) <= k < len(owner):
            return owner[k]
        if isinstance(owner, _Known) and isinstance(owner.value, torch.nn.ModuleList) and isinstance(k, int):
            return _Known(owner.value[k])
        return _Cell(None, base=owner if isinstance(owner, (_Cell, _Child)) else None)

    def _arithmetic(self, op: ast.operator, a: Any, b: Any) -> Any:
        if isinstance(a, tuple) and isinstance(op, ast.Add):
            more = b if isinstance(b, tuple) else ()  # else the first outputs, whatever comes behind them
            return a + more if len(a) + len(more) < _MOST_LETTERS else _Cell(None)
        sign, compute = _BINARY.get(type(op), ("", None))
        values: list[Any] = [_part(v, 0) if isinstance(v, _Child) else v for v in (a, b)]
        numbers = [v.value for v in values if _is_number(v)]
        if compute is None:
            return _Cell(None)
        if len(numbers) == 2:
            ints = [n for n in numbers if isinstance(n, int)]
            return _Known(compute(*numbers)) if all(n.bit_length() < _MOST_LETTERS for n in ints) else _OTHER
        texts = [_operand(v) if isinstance(v, _Cell) else repr(float(numbers[0])) if numbers else None for v in values]
        whole = all(t is not None for t in texts) and any(isinstance(v, _Cell) for v in values)
        return _bounded(f"({texts[0]} {sign} {texts[1]})" if whole else None)


def _gives_several(module: torch.nn.Module, known: dict[int, bool]) -> bool:
    """Whether a module gives a tuple or a record on each path through its code; False where that is not known: item 0
    of one tensor is its first row. known: of modules by id; each path of each caller asks again."""
    if id(module) not in known:
        known[id(module)] = False
        known[id(module)] = _returns_several(module, known)
    return known[id(module)]


def _returns_several(module: torch.nn.Module, known: dict[int, bool]) -> bool:
    try:
        function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
        if re.fullmatch(r"(typing\.)?tuple\[.*\]", str(inspect.get_annotations(function).get("return")), re.IGNORECASE):
            return True  # a union with anything else is not known
        body, arguments = _parsed(function)
        follower = _Follower(module, function, None, unroll=False, several=known)
        follower.outputs(body, arguments)
    except (Exception, SystemExit):  # as in `formulas`
        return False
    each = [_gives_several(module.get_submodule(v.path), known) if isinstance(v, _Child)
            else isinstance(v, (tuple, dict)) for v in follower.returned]  # fmt: skip
    return bool(each) and all(each)


def _is_blind(v: Any) -> bool:
    if isinstance(v, tuple):
        return any(map(_is_blind, v))
    return (isinstance(v, _Cell) and v.text is None and not v.layers) or (isinstance(v, _Child) and v.lost)


def _written(body: Sequence[ast.stmt], module: torch.nn.Module) -> set[str]:
    """Attributes that a forward assigns, and tensors among them that it, or a method that it calls, may write into."""
    found, own = set[str](), {*module._parameters, *module._buffers}
    for node in (n for s in body for n in ast.walk(s)):
        changed: Any = None
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            changed = node.func.value if name.endswith("_") else None
            if inspect.isfunction(getattr(type(module), name, None)) and not hasattr(torch.nn.Module, name):
                found |= module._buffers.keys()
        found |= {n.attr for n in ast.walk(changed) if isinstance(n, ast.Attribute)} & own if changed else set()
    return found


def _is_dtype(value: Any, node: ast.expr) -> bool:
    named = isinstance(node, ast.Attribute) and node.attr == "dtype"
    return named or (isinstance(value, _Known) and isinstance(value.value, torch.dtype))


def _operand(cell: _Cell) -> str | None:
    return f"{cell.viewed}({cell.text})" if cell.viewed and cell.text is not None else cell.text


def _is_number(value: Any) -> bool:
    return isinstance(value, _Known) and isinstance(value.value, (int, float))


def _kind(value: Any, cls: Any) -> Any:
    """Whether what a child gave is a tuple: it has a second output; or what a pipeline's ranks pass on, which has no
    output 0."""
    if isinstance(value, _Child) and cls is tuple:
        return _There(f"{value.path}[1]")
    if isinstance(value, _Child) and getattr(cls, "__name__", "") == "IntermediateTensors":
        return _Known(False)
    return _OTHER


def _text(value: Any) -> str | None:
    if isinstance(value, _Child):
        value = _part(value, 0)
    return value.text if isinstance(value, _Cell) else None


def _bounded(text: str | None) -> _Cell:
    return _Cell(text if text is not None and len(text) < _MOST_LETTERS else None)


def _part(child: _Child, k: int) -> _Cell:
    return _Cell(None if child.lost else f"{child.path}[{k}]", optional=k > 0, base=child)


def _lose(value: Any) -> None:
    """Whoever got this tensor may have written into it."""
    for v in value if isinstance(value, tuple) else (value,):
        if isinstance(v, _Cell):
            v.text = None
            _lose(v.base)
        elif isinstance(v, tuple):
            _lose(v)
        elif isinstance(v, _Child):
            v.lost = True
            _lose(v.passed)


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, _Known) and owner is not _OTHER:
        try:
            value = getattr(owner.value, name)
        except (Exception, SystemExit):  # a property may do anything
            return _OTHER
        return _Cell(None) if isinstance(value, torch.Tensor) else _Known(value)
    if isinstance(owner, (_Cell, _Child)):
        return _OTHER if name in _FACTS else _Cell(None, base=owner)
    return _OTHER


def _either(there: str | None, a: Any, b: Any) -> Any:
    """What two paths return: ``a`` where that tensor is there. there: None where it is not known which path is gone."""
    if a is None or b is None:
        return b if a is None else a
    if a == b:
        return a
    if isinstance(a, dict) and isinstance(b, dict):
        return {k: _either(there, a[k], b[k]) for k in a.keys() & b.keys()}
    if isinstance(a, dict) or isinstance(b, dict):
        return _Cell(None)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_either(there, x, y) for x, y in zip(a, b, strict=True))
    if (isinstance(a, tuple) or isinstance(b, tuple)) and there is not None:
        x, y = (v if isinstance(v, tuple) else (v,) for v in (a, b))
        least = min(len(x), len(y))  # what only one of them has is there in that case alone
        return (*(_either(there, p, q) for p, q in zip(x[:least], y[:least], strict=True)), *x[least:], *y[least:])
    if isinstance(a, tuple) or isinstance(b, tuple):
        return _Cell(None)
    one, other = _text(a), _text(b)
    viewed = max(v.viewed if isinstance(v, _Cell) else "" for v in (a, b))
    if one == other:
        return _Cell(one, viewed=viewed)
    found = _bounded(f"({one} if {there} else {other})" if None not in (there, one, other) else None)
    return replace(found, viewed=viewed)
