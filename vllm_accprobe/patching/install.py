"""Puts a tapped code object into a live function, and takes it out again.

The problem: by the time a model is loaded, its methods are bound in many places; replacing the function object would
miss those. The idea: the function stays and gets another ``__code__``, which reaches everybody. The source is checked
twice: its statements, and that the function in memory really is what the source says, so that two tools that change
one function do not undo each other unawares. Several listeners (engines of one process) share one hook; what is in a
function is the union of what they asked for, and the last one to leave restores it. Nothing is written to a file.
Not here: what the hook does with a value (capture/taps/patches.py).
"""

from __future__ import annotations
import __future__

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from vllm_accprobe.patching.source import NotThere, find_function, fingerprint, parse_file
from vllm_accprobe.patching.transform import HOOK, Insertion, compiled, tapped

_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag
_MISSING = object()


@dataclass
class Changed:
    """A function with taps: the code it had, and what each listener asked for."""

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
    """Ends what ``listener`` asked for in ``module``; a function nobody listens to any more is as it was."""
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
