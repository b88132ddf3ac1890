"""A function's code with taps in it, put into the live function and taken out again.

The problem: the function shall do exactly what it did, at the same lines of its file, also when a tap fails; and by the
time a model is loaded, its methods are bound in many places. The idea: after (before) an anchor a call of one global
name is inserted, in a ``try`` whose handler calls the same object; the whole is compiled in its place in its module.
The function stays and gets another ``__code__``. The source is checked twice: its statements, and that the function in
memory is what the source says, so that two tools do not undo each other. Engines of one process share one hook; the
last one to leave restores the function. No file is written. `check` does the same to a source without running any of
it: which patches fit must be known before a server starts.

Not here: where anchors are (source.py), what the hook does with a value (capture/taps/patches.py).
"""

from __future__ import annotations
import __future__

import ast
import copy
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from vllm_accprobe.patching.schema import (
    AFTER,
    BEFORE,
    ENTRY,
    RESULT,
    RETURN,
    Patch,
    TapSpec,
    Target,
    in_range,
    numbers,
)
from vllm_accprobe.patching.source import (
    Function,
    NotThere,
    find_function,
    find_statement,
    fingerprint,
    parse_file,
    statements,
)

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
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
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


_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag
_MISSING = object()


@dataclass
class Changed:
    """A function with taps: the code it had, and what each listener requested."""

    function: FunctionType
    original: CodeType
    wanted: dict[int, list[Insertion]] = field(default_factory=dict)


class Hook:
    """What tapped functions of one module call. ``listeners`` get (key, self, value) and errors while reading it."""

    def __init__(self, is_compiling: Callable[[], bool]) -> None:
        self.listeners: list[Any] = []
        self.changed: dict[str, Changed] = {}
        self._is_compiling = is_compiling

    def __call__(self, key: str, owner: Any, value: Any) -> None:
        if self._is_compiling():  # torch.compile traces this call: nothing may be left of it
            return
        for listener in self.listeners:
            listener.value(key, owner, value)

    def failed(self, key: str, error: BaseException) -> None:
        for listener in self.listeners:
            listener.failed(key, error)


def install(
    module: ModuleType,
    name: str,
    insertions: Sequence[Insertion],
    listener: Any,
    is_compiling: Callable[[], bool],
    hashes: Sequence[str] = (),
) -> None:
    """Taps function ``name`` of ``module`` for ``listener``. Raises NotThere, and then nothing has changed."""
    function, file = find_live(module, name)
    hook = module.__dict__.get(HOOK)
    known = hook.changed.get(name) if isinstance(hook, Hook) else None
    if known is not None and known.function is not function:
        known = None
    original = known.original if known is not None else function.__code__
    tree = parse_file(file)
    node, classes = find_function(tree, name)
    if hashes and fingerprint(node) not in hashes:
        raise NotThere(f"its source has changed (it is {fingerprint(node)} now)")
    flags = original.co_flags & _FUTURES
    if not _same(compiled(tree, node, node, classes, str(file), flags), original):
        raise NotThere("the function in memory is not what its source says; does something else patch it, too?")
    mine = list(insertions)
    before = known.wanted if known is not None else {}
    others = [i for key, items in before.items() if key != id(listener) for i in items]
    union = list({i.key: i for i in [*others, *mine]}.values())
    code = compiled(tree, node, tapped(node, union), classes, str(file), flags)
    if code.co_freevars != original.co_freevars:
        raise NotThere("a tap would change what the function closes over")
    if not isinstance(hook, Hook):
        hook = module.__dict__[HOOK] = Hook(is_compiling)
    changed = hook.changed.setdefault(name, Changed(function, original))
    changed.wanted[id(listener)] = mine
    if listener not in hook.listeners:
        hook.listeners.append(listener)
    function.__code__ = code


def remove(module: ModuleType, listener: Any) -> None:
    """Ends what ``listener`` requested in ``module``; a function nobody listens to any more is as it was."""
    hook = module.__dict__.get(HOOK)
    if not isinstance(hook, Hook):
        return
    hook.listeners = [one for one in hook.listeners if one is not listener]
    for name, changed in list(hook.changed.items()):
        changed.wanted.pop(id(listener), None)
        if not changed.wanted:
            changed.function.__code__ = changed.original
            del hook.changed[name]
    if not hook.changed:
        del module.__dict__[HOOK]


def find_live(module: ModuleType, name: str) -> tuple[FunctionType, Path]:
    """The function object called ``name`` and the file of its source. Raises NotThere."""
    found: Any = module
    for part in name.split("."):
        inside = getattr(found, "__dict__", {})
        value = inside.get(part, _MISSING)
        if value is _MISSING:
            raise NotThere(f"{module.__name__} has no {name} of its own")
        found = value
    function = _unwrapped(found, name.rpartition(".")[2])
    if function is None:
        raise NotThere(f"{name} is a {type(found).__name__}, not a function that is written in Python")
    if function.__globals__ is not module.__dict__:
        raise NotThere(f"{name} comes from {function.__module__}: name that module")
    return function, Path(function.__code__.co_filename)


def _unwrapped(found: Any, name: str) -> FunctionType | None:
    """Through staticmethod, classmethod, property and decorators that say what they wrap."""
    for _ in range(20):
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        elif getattr(found, "__wrapped__", None) is not None:
            found = found.__wrapped__
        else:
            break
    return found if isinstance(found, FunctionType) and found.__code__.co_name == name else None


def _same(a: CodeType, b: CodeType) -> bool:
    fields = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(a, f) != getattr(b, f) for f in fields) or len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else type(x) is type(y) and x == y
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def loaded(module: str) -> ModuleType | None:
    """The module, if somebody has imported it already. A patch imports nothing: what is not loaded does not run."""
    return sys.modules.get(module)


# --- whether a patch fits a source that is installed, or lies unpacked in a directory ---

FITS, ABSENT, OTHER, REFUSED = "fits", "absent", "other version", "refused"
"""absent: an optional target that this source does not have; other version: outside of the target's ``versions``."""
_VERSION = re.compile(r"^(?:__version__|version)\b.*?['\"](\d+\.\d+[^'\"]*)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    target: Target
    status: str
    why: str = ""


def check(patch: Patch, roots: Mapping[str, Path] | None = None) -> list[Outcome]:
    """What becomes of each target. roots: directories of packages by name, instead of the installed ones."""
    return [check_target(patch, target, roots or {}) for target in patch.targets]


def check_target(patch: Patch, target: Target, roots: Mapping[str, Path]) -> Outcome:
    package = target.module.partition(".")[0]
    root = roots.get(package) or package_root(package)
    if root is None:
        return Outcome(target, ABSENT if target.optional else REFUSED, f"{package} is not installed")
    version = package_version(root, package)
    if not in_range(numbers(version), target.versions):
        return Outcome(target, OTHER, f"{package} {version or 'of unknown version'} is not {target.versions}")
    path = module_file(root, target.module)
    try:
        if path is None:
            raise NotThere(f"no module {target.module}")
        tree = parse_file(path)
        found = find_function(tree, target.function)
    except NotThere as error:
        return Outcome(target, ABSENT if target.optional else REFUSED, str(error))
    try:
        function, classes = found
        if target.hashes and fingerprint(function) not in target.hashes:
            raise NotThere(f"its source has changed (it is {fingerprint(function)} now)")
        compiled(tree, function, tapped(function, insertions(patch, target)), classes, str(path), 0)
    except NotThere as error:
        return Outcome(target, REFUSED, str(error))
    except (SyntaxError, ValueError) as error:
        return Outcome(target, REFUSED, f"it could not be compiled: {error}")
    return Outcome(target, FITS)


def insertions(patch: Patch, target: Target) -> list[Insertion]:
    """The taps with keys that are unique in a process."""
    return [
        Insertion(f"{patch.name}|{target.name}|{tap.name}{'|' + tap.label[0] if tap.label else ''}", tap)
        for tap in target.taps
    ]


def package_root(package: str) -> Path | None:
    """Where an installed package lies; it is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def module_file(root: Path, module: str) -> Path | None:
    """The source of ``module``, whose package (or single file) is ``root``."""
    if root.is_file():
        return root if "." not in module else None
    base = root.joinpath(*module.split(".")[1:])
    for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def package_version(root: Path, package: str) -> str:
    """By its ``_version.py`` or ``version.py``, else by the installed metadata; "" if neither knows."""
    for name in ("_version.py", "version.py", "__init__.py"):
        try:
            text = (root / name).read_text(errors="replace")[:20_000]
        except OSError:
            continue
        match = _VERSION.search(text)
        if match:
            return match[1]
    from importlib import metadata

    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):
        return ""
