"""What a class and its instances have, by its source and that of the classes that it derives from.

The problem: half of what capture reads are attributes that some method sets, in a class or in one of its bases, which
may lie in another package. The idea: bases are followed through the sources; methods, class variables, dataclass
fields and every ``self.name`` that is set count. What a method calls counts where the method is still run: not in one
that a derived class has in its place and does not call. A base that is not in the given packages is told, not guessed.
Not here: following names (sources.py), what is needed (holding.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_accprobe.doctor.wheel.sources import Definition, Function, SourceModule, Sources

_DEEP = 40


@dataclass
class Class:
    """A class with all its bases. lineage: itself first. members: name → where it stands. called: attributes of self
    that its methods call, those of replaced methods left out. strangers: bases that are in none of the packages, by the
    package that they come from."""

    node: ast.ClassDef
    module: SourceModule
    lineage: list[Definition] = field(default_factory=list)
    members: dict[str, Definition] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    made_of: dict[str, tuple[ast.AST, SourceModule]] = field(default_factory=dict)
    strangers: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """As it is spelt in its module."""
        return self.node.name

    @property
    def at(self) -> str:
        """``file.py:line``."""
        return Definition(self.node, self.module).at


def class_of(sources: Sources, found: Definition | None) -> Class | None:
    """The class that ``found`` is; None where it is none."""
    if found is None or not isinstance(found.node, ast.ClassDef):
        return None
    made = Class(found.node, found.module)
    _lineage(sources, found, made, set(), _DEEP)
    replaced: set[str] = set()
    for one in made.lineage:
        assert isinstance(one.node, ast.ClassDef)
        for name, node in _members(one.node).items():
            made.members.setdefault(name, Definition(node, one.module))
        methods = {part.name: part for part in one.node.body if isinstance(part, Function)}
        made.called |= _calls(part for part in one.node.body if getattr(part, "name", "") not in replaced)
        replaced |= methods.keys()
        replaced -= _calls_of_bases(one.node, {base.node.name for base in made.lineage})  # type: ignore[attr-defined]
        for node in ast.walk(one.node):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                for target in node.targets:
                    if _of_self(target):
                        made.made_of.setdefault(target.attr, (node.value.func, one.module))  # type: ignore[attr-defined]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and _of_self(node.target):
                made.made_of.setdefault(node.target.attr, (node.value.func, one.module))  # type: ignore[union-attr]
    return made


def attribute_class(sources: Sources, owner: Class, name: str) -> Class | None:
    """The class that ``owner`` makes ``self.name`` of, as far as it is named where it is set."""
    if name not in owner.made_of:
        return None
    expression, module = owner.made_of[name]
    return class_of(sources, sources.resolve(expression, module))


def parameters(node: ast.AST) -> tuple[list[str], set[str], bool] | None:
    """(positional parameters in order without self and cls, all names, whether anything else is taken too)."""
    if not isinstance(node, Function):
        return None
    args = node.args
    ordered = [a.arg for a in (*args.posonlyargs, *args.args)]
    if ordered and ordered[0] in ("self", "cls"):
        ordered = ordered[1:]
    return ordered, {*ordered, *(a.arg for a in args.kwonlyargs)}, args.kwarg is not None


def _lineage(sources: Sources, found: Definition, made: Class, seen: set[int], deep: int) -> None:
    if id(found.node) in seen or deep < 0:
        return
    seen.add(id(found.node))
    made.lineage.append(found)
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        other = sources.resolve(base, found.module)
        if other is not None and isinstance(other.node, ast.ClassDef):
            _lineage(sources, other, made, seen, deep - 1)
        else:
            made.strangers.add(sources.origin(base, found.module))


def _calls(parts: Iterable[ast.AST]) -> set[str]:
    """The attributes of self that are called in these."""
    nodes = (node for part in parts for node in ast.walk(part))
    return {node.func.attr for node in nodes if isinstance(node, ast.Call) and _of_self(node.func)}  # type: ignore[attr-defined]


def _calls_of_bases(node: ast.AST, bases: set[str]) -> set[str]:
    """The methods that are called as ``super().name(`` or ``Base.name(``."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            owner = part.value.func if isinstance(part.value, ast.Call) else part.value
            if isinstance(owner, ast.Name) and owner.id in {"super", *bases}:
                found.add(part.attr)
    return found


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _members(node: ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # A property's setter, or an overload, comes after what it belongs to: the last one is the method.
            found[part.name] = part
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.setdefault(part.target.id, part)
        elif isinstance(part, ast.Assign):
            for target in part.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, part)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _of_self(inner):
            found.setdefault(inner.attr, inner)
    return found
