"""A function in a source file, and a statement in a function, found as they are written, whatever the layout.

The problem: an anchor is a statement that somebody copied from a source; the installed source may break its lines
elsewhere, or have changed. The idea: both are parsed and written out again by ast.unparse, so that only what they mean
is compared; of a compound statement (if, for, with) the head counts. What is not found is answered with the statement
that is most like it, and its line. Nothing is imported or run. Not here: what is put there (install.py).
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Found = tuple[Function, list[ast.ClassDef]]
"""A function and the classes that enclose it, outermost first."""
_MAX_BYTES = 16 << 20


class NotThere(ValueError):
    """A function or statement that the source does not have. One line, with the nearest that it has."""


@dataclass(frozen=True)
class Place:
    """A statement's place: ``block[index]`` is the statement; the block is a list of the function's tree."""

    block: list[ast.stmt]
    index: int

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.index]


def parse_file(path: Path) -> ast.Module:
    """Raises NotThere for a file that cannot be read or is no Python."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise NotThere(f"{path.name}: larger than any source")
        return ast.parse(data)
    except OSError as error:
        raise NotThere(f"{path}: {error.strerror or error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, NotThere):
            raise
        raise NotThere(f"{path}: not Python that this Python reads") from None


def find_function(tree: ast.Module, name: str) -> Found:
    """The function called ``name`` (``Class.method`` or ``function``) and the classes that enclose it. Raises
    NotThere."""
    found = dict(functions(tree))
    if name not in found:
        near = difflib.get_close_matches(name, list(found), n=1, cutoff=0.5)
        raise NotThere(f"no function {name}" + (f"; nearest: {near[0]}" if near else ""))
    return found[name]


def functions(tree: ast.Module) -> Iterator[tuple[str, Found]]:
    """All functions of a module and methods of its classes, by qualified name; the last of one name counts."""

    def walk(body: list[ast.stmt], classes: list[ast.ClassDef]) -> Iterator[tuple[str, Found]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ".".join([*(c.name for c in classes), node.name]), (node, list(classes))
            elif isinstance(node, ast.ClassDef):
                yield from walk(node.body, [*classes, node])
            elif isinstance(node, (ast.If, ast.Try)):  # definitions by platform or version
                for block in (node.body, node.orelse, getattr(node, "finalbody", [])):
                    yield from walk(block, classes)
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body, classes)

    yield from walk(tree.body, [])


def find_statement(function: Function, anchors: tuple[str, ...]) -> Place:
    """The place of the first anchor that the function has, exactly once. Raises NotThere with the nearest statement."""
    places = list(statements(function))
    for anchor in anchors:
        wanted = normal(anchor)
        hits = [p for p in places if head(p.statement) == wanted]
        if len(hits) == 1:
            return hits[0]
        if hits:
            lines = ", ".join(str(p.statement.lineno) for p in hits)
            raise NotThere(f"`{_short(wanted)}` stands {len(hits)} times (lines {lines}): it names no place")
    wanted = normal(anchors[0])
    texts = [head(p.statement) for p in places]
    near = difflib.get_close_matches(wanted, texts, n=1, cutoff=0.3)
    if not near:
        raise NotThere(f"no statement `{_short(wanted)}`, and none like it")
    line = places[texts.index(near[0])].statement.lineno
    raise NotThere(f"no statement `{_short(wanted)}`; nearest, line {line}: `{_short(near[0])}`")


def statements(function: Function) -> Iterator[Place]:
    """All statements of a function in the order of the source, without those of functions and classes inside."""

    def walk(block: list[ast.stmt]) -> Iterator[Place]:
        for index, node in enumerate(block):
            yield Place(block, index)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            for inner in _blocks(node):
                yield from walk(inner)

    yield from walk(function.body)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield block
    for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield part.body


def normal(anchor: str) -> str:
    """An anchor as ``head`` writes statements. Raises NotThere where it is no statement."""
    for text in (anchor, anchor + "\n    pass", anchor + " pass"):
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if len(body) == 1:
            return head(body[0])
    raise NotThere(f"`{_short(anchor)}` is not one statement")


def head(node: ast.stmt) -> str:
    """A statement written out again; of a compound one its first line, of a definition its name."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return f"def {node.name}"
    text = ast.unparse(node)
    return text.split("\n", 1)[0] if any(True for _ in _blocks(node)) else text


def fingerprint(function: Function) -> str:
    """32 hex digits over the function's syntax tree: layout, comments and its docstring do not count."""
    body = function.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    text = "\n".join([ast.dump(function.args), *(ast.dump(node) for node in body)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."
