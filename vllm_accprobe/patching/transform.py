"""From a function's syntax tree and taps to a code object that looks at the values on its way.

The problem: the function shall do exactly what it did, at the same lines of its file (for tracebacks), also when the
look goes wrong. The idea: after (before) the anchor a call of one global name is inserted, in a ``try`` whose handler
tells the same object; the whole is compiled in its place in its module, so that ``super()``, private names and calls of
imported modules are compiled as they were. Not here: where anchors are (source.py), who gets the code (install.py).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

from vllm_accprobe.patching.schema import AFTER, BEFORE, ENTRY, RESULT, RETURN, TapSpec
from vllm_accprobe.patching.source import Function, NotThere, find_statement, statements

HOOK = "__accprobe_tap__"
"""The global of the patched module that tapped functions call: hook(key, self, value), and hook.failed(key, error)."""
_VALUE = "__accprobe_value__"


@dataclass(frozen=True)
class Insertion:
    """A tap and the key with which the hook is called."""

    key: str
    tap: TapSpec


def tapped(function: Function, insertions: Sequence[Insertion]) -> Function:
    """A copy of ``function`` with its taps. Raises NotThere for an anchor that is not there."""
    new = copy.deepcopy(function)
    first = new.args.posonlyargs + new.args.args
    me = first[0].arg if first and first[0].arg in ("self", "cls") else None
    # Places are found before anything is inserted, so that taps at one anchor keep their order.
    befores: list[tuple[ast.stmt, ast.stmt]] = []
    afters: list[tuple[ast.stmt, ast.stmt]] = []
    returns = [i for i in insertions if i.tap.at == RETURN]
    for item in insertions:
        if item.tap.at in (AFTER, BEFORE):
            anchor = find_statement(new, item.tap.anchors).statement
            if item.tap.at == AFTER and isinstance(anchor, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
                raise NotThere(f'nothing runs after `{ast.unparse(anchor)}`: use before, or at = "return"')
            call = _call(item, me, item.tap.expression, anchor)
            (afters if item.tap.at == AFTER else befores).append((anchor, call))
    result = [p.statement for p in statements(new) if isinstance(p.statement, ast.Return)]
    if returns and not result:
        raise NotThere("the function has no return statement")
    for anchor, call in befores:
        block, index = _where(new, anchor)
        block.insert(index, call)
    for anchor, call in reversed(afters):
        block, index = _where(new, anchor)
        block.insert(index + 1, call)
    for statement in result if returns else ():
        assert isinstance(statement, ast.Return)
        value = statement.value or ast.Constant(None)
        keep = ast.Assign([ast.Name(_VALUE, ast.Store())], value)
        calls = [_call(i, me, _rooted(i.tap.expression), statement) for i in returns]
        block, index = _where(new, statement)
        back = ast.Return(ast.Name(_VALUE, ast.Load()))
        block[index : index + 1] = [_at(keep, statement), *calls, _at(back, statement)]
    entry = [_call(i, me, i.tap.expression, new.body[0]) for i in insertions if i.tap.at == ENTRY]
    skip = 1 if ast.get_docstring(new, clean=False) is not None else 0
    new.body[skip:skip] = entry
    return ast.fix_missing_locations(new)


def compiled(
    tree: ast.Module, function: Function, new: Function, classes: Sequence[ast.ClassDef], filename: str, flags: int
) -> CodeType:
    """The code object of ``new`` in the place of ``function`` in its module's ``tree``, which is changed back.

    The whole module is compiled: what is imported at its top decides how calls in the function are compiled.
    flags: ``__future__`` features of the module. Raises NotThere.
    """
    block, index = _block_of(tree, function)
    block[index] = new
    try:
        code = compile(tree, filename, "exec", flags, dont_inherit=True)
    finally:
        block[index] = function
    for outer in classes:
        code = _inner(code, outer.name, _first_line(outer))
    return _inner(code, function.name, _first_line(function))


def _inner(code: CodeType, name: str, line: int) -> CodeType:
    found = [c for c in code.co_consts if isinstance(c, CodeType) and (c.co_name, c.co_firstlineno) == (name, line)]
    if len(found) != 1:
        raise NotThere(f"{name} was not found again after compiling its module")
    return found[0]


def _first_line(node: Function | ast.ClassDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def _block_of(tree: ast.Module, function: Function) -> tuple[list[ast.stmt], int]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and any(one is function for one in block):
                return block, next(i for i, one in enumerate(block) if one is function)
    raise NotThere(f"{function.name} is not in its module")


def _call(item: Insertion, me: str | None, value: ast.expr, where: ast.stmt) -> ast.stmt:
    owner: ast.expr = ast.Name(me, ast.Load()) if me else ast.Constant(None)
    hook = ast.Name(HOOK, ast.Load())
    look = ast.Expr(ast.Call(hook, [ast.Constant(item.key), owner, value], []))
    error = "__accprobe_error__"
    tell = ast.Expr(
        ast.Call(
            ast.Attribute(ast.Name(HOOK, ast.Load()), "failed", ast.Load()),
            [ast.Constant(item.key), ast.Name(error, ast.Load())],
            [],
        )
    )
    handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), error, [tell])
    return _at(ast.Try([look], [handler], [], []), where)


def _rooted(value: ast.expr) -> ast.expr:
    """The path with ``result`` replaced by the local that holds what is returned."""
    value = copy.deepcopy(value)
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and node.id == RESULT:
            node.id = _VALUE
    return value


def _at(node: ast.stmt, where: ast.stmt) -> ast.stmt:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.stmt, ast.expr, ast.excepthandler)) and not hasattr(inner, "lineno"):
            ast.copy_location(inner, where)
    return node


def _where(function: Function, statement: ast.stmt) -> tuple[list[ast.stmt], int]:
    place = next(p for p in statements(function) if p.statement is statement)
    return place.block, place.index
