"""What modules of one or several packages define, by syntax tree: names, classes, functions, imports.

The problem: a class is where its name is bound, which may be an import of another package's, and a vendor's class
derives from vLLM's. The idea: modules are parsed when somebody asks for them; a name is followed through imports, from
the vendor's package into vLLM's, to the class or function that it is. Nothing is imported or run. Not here: archives
(archive.py), what instances of a class have (classes.py).
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_accprobe.doctor.wheel.archive import Package, WheelError

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEEP = 40
"""chosen: imports that a name is followed through."""


@dataclass
class SourceModule:
    """name: dotted. file: its path in the package. bound: what is defined at its top, also under if and try; imports:
    local name → (module, name there or "" for the module itself); stars: modules whose names it has all."""

    name: str
    file: str
    package: Package
    tree: ast.Module = field(repr=False)
    bound: dict[str, ast.AST] = field(default_factory=dict, repr=False)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    stars: list[str] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Definition:
    """A definition: its node and the module that it stands in."""

    node: ast.AST
    module: SourceModule

    @property
    def at(self) -> str:
        """``file.py:line``."""
        return f"{self.module.file}:{getattr(self.node, 'lineno', 1)}"


class Sources:
    """The modules of ``packages``; where two have the same module, the first counts."""

    def __init__(self, packages: Sequence[Package]):
        self.packages = packages
        self._modules: dict[str, SourceModule | None] = {}

    def module(self, name: str) -> SourceModule | None:
        """The module of that dotted name, or None. Raises WheelError where it is no Python."""
        if name not in self._modules:
            self._modules[name] = None
            base = name.replace(".", "/")
            for package in self.packages:
                for file in (f"{base}.py", f"{base}/__init__.py"):
                    if file in package.files:
                        self._modules[name] = _parsed(name, file, package)
                        return self._modules[name]
        return self._modules[name]

    def modules(self, package: Package, word: str) -> Iterator[SourceModule]:
        """The modules of ``package`` in whose text ``word`` stands."""
        needle = word.encode()
        for file, data in sorted(package.files.items()):
            if needle in data:
                found = self.module(_dotted(file))
                if found is not None and found.package is package:
                    yield found

    def find(self, module: str, name: str, deep: int = _DEEP) -> Definition | None:
        """What ``name`` is in ``module``: followed through imports; a SourceModule's own node for a module."""
        where = self.module(module)
        if where is None or deep < 0:
            return None
        if name in where.bound:
            return Definition(where.bound[name], where)
        if name in where.imports:
            source, there = where.imports[name]
            if there:
                found = self.find(source, there, deep - 1)
                if found is not None:
                    return found
                whole = self.module(f"{source}.{there}")
            else:
                whole = self.module(source)
            return None if whole is None else Definition(whole.tree, whole)
        for star in where.stars:
            found = self.find(star, name, deep - 1)
            if found is not None:
                return found
        return None

    def has(self, module: SourceModule, name: str) -> bool:
        """Whether ``module`` has the name at all, also as an import of a package that is not here."""
        return name in module.bound or name in module.imports or self.find(module.name, name) is not None

    def resolve(self, expression: ast.AST, module: SourceModule) -> Definition | None:
        """What a name, or a dotted one, is in ``module``."""
        if isinstance(expression, ast.Subscript):  # Generic[T]
            return self.resolve(expression.value, module)
        if isinstance(expression, ast.Name):
            return self.find(module.name, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.resolve(expression.value, module)
            if owner is not None and isinstance(owner.node, ast.Module):
                return self.find(owner.module.name, expression.attr)
            dotted = _spelt(expression.value)
            return self.find(dotted, expression.attr) if dotted else None
        return None

    def origin(self, expression: ast.AST, module: SourceModule) -> str:
        """The top package that a name comes from, as its import says; "" for one of the module's own."""
        while isinstance(expression, (ast.Attribute, ast.Subscript)):
            expression = expression.value
        if isinstance(expression, ast.Name) and expression.id in module.imports:
            return module.imports[expression.id][0].partition(".")[0]
        return ""


def _dotted(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _spelt(expression: ast.AST) -> str:
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        return f"{_spelt(expression.value)}.{expression.attr}"
    return ""


def _parsed(name: str, file: str, package: Package) -> SourceModule:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(package.files[file])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise WheelError(f"{package.path}: {file}{line} cannot be parsed ({type(error).__name__})") from None
    module = SourceModule(name, file, package, tree)
    try:
        _bind(module, tree.body)
    except RecursionError:
        raise WheelError(f"{package.path}: {file} cannot be parsed (too deep)") from None
    return module


def _bind(module: SourceModule, body: Sequence[ast.stmt]) -> None:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            module.bound[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        module.bound.setdefault(part.id, node)
        elif isinstance(node, ast.Import):
            for one in node.names:
                module.imports.setdefault(one.asname or one.name.partition(".")[0],
                                          (one.name if one.asname else one.name.partition(".")[0], ""))  # fmt: skip
        elif isinstance(node, ast.ImportFrom):
            _import_from(module, node)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for inner in ("body", "orelse", "finalbody"):
                _bind(module, getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                _bind(module, handler.body)


def _import_from(module: SourceModule, node: ast.ImportFrom) -> None:
    source = node.module or ""
    if node.level:
        parts = module.name.split(".")
        drop = node.level - (1 if module.file.endswith("__init__.py") else 0)
        source = ".".join([*parts[: len(parts) - drop], *([source] if source else [])])
    for one in node.names:
        if one.name == "*":
            module.stars.append(source)
        else:
            module.imports.setdefault(one.asname or one.name, (source, one.name))
