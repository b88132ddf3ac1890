"""Proof that code was only moved: python scripts/same_trees.py OLD NEW [--package vllm_accprobe] [--names]

The problem: a change that merges modules touches thousands of lines, and nobody can see in its diff that no statement
changed. The idea: of every module of two revisions (of git), each top-level statement becomes a tree without
docstrings, imports and names: names are numbered in the order in which they occur, and ``module.name`` of our own
modules counts as ``name``. What was only moved or renamed has an equal tree on the other side. What has none is listed;
with --names what was renamed is, too: names of two equal trees stand in the same order, and files hold them.
Not here: whether imports are right (mypy, the tests).
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator


def sources(revision: str, package: str) -> dict[str, str]:
    """Path to text of each Python file of the package in a revision; "." is the working tree."""
    listing = ["git", "ls-files", "-co", "--exclude-standard"] if revision == "." else [
        "git", "ls-tree", "-r", "--name-only", revision,
    ]  # fmt: skip
    names = subprocess.run([*listing, "--", package], capture_output=True, text=True, check=True).stdout.split()
    out = {}
    for name in sorted({n for n in names if n.endswith(".py")}):
        if revision == ".":
            try:
                with open(name, encoding="utf-8") as file:
                    out[name] = file.read()
            except FileNotFoundError:
                continue
        else:
            show = ["git", "show", f"{revision}:{name}"]
            out[name] = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    return out


class _Nameless(ast.NodeTransformer):
    """Drops imports and docstrings; ``module.name`` becomes ``name``; every identifier becomes a number."""

    def __init__(self, modules: set[str]):
        self.modules = modules
        self.numbers: dict[str, int] = {}

    def number(self, name: str) -> str:
        return f"n{self.numbers.setdefault(name, len(self.numbers))}"

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return ast.Name(self.number(node.attr), node.ctx)
        node.value = self.visit(node.value)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.number(node.id)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not _left_out(n)]  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.name = self.number(node.name)
        return super().generic_visit(node)


def _left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return True
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)


def _modules(tree: ast.Module, known: set[str]) -> set[str]:
    """What our own modules are called in a file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name for a in node.names if f"{node.module}.{a.name}" in known}
    return found


def trees(files: dict[str, str]) -> Iterator[tuple[str, str, str, list[str]]]:
    """(file, what the statement is called, its nameless tree, the names in their order)."""
    known = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    for name, text in files.items():
        tree = ast.parse(text)
        modules = _modules(tree, known)
        for node in tree.body:
            if _left_out(node) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                continue
            label = getattr(node, "name", None) or ast.unparse(node).split("\n")[0][:60]
            nameless = _Nameless(modules)
            yield name, label, ast.dump(nameless.visit(node)), list(nameless.numbers)


def renamed(old: list[tuple[str, str, str, list[str]]], new: list[tuple[str, str, str, list[str]]]) -> Iterator[str]:
    """Lines ``old -> new``: files that hold most of another's statements, then classes and functions. A tree that
    several statements of a side share shows nothing."""
    alone = [{t: s for s in side for t in (s[2],) if counts[t] == 1}
             for side in (old, new) for counts in (Counter(s[2] for s in side),)]  # fmt: skip
    pairs = [(s, alone[1][t]) for t, s in alone[0].items() if t in alone[1]]
    files, whole = Counter((a[0], b[0]) for a, b in pairs), Counter(a[0] for a, _ in pairs)
    yield from (f"{a} -> {b}" for (a, b), n in sorted(files.items()) if a != b and 2 * n > whole[a])
    gone, come = ({s[1] for s in side if s[1].isidentifier()} for side in (old, new))
    gone, come = gone - come, come - gone
    names = {(a, b) for x, y in pairs for a, b in zip(x[3], y[3], strict=True) if a == x[1] or a[:1].isupper()}
    yield from (f"{a} -> {b}" for a, b in sorted(names) if a in gone and b in come)


def main() -> int:
    """Prints what has no equal; 1 where anything has none."""
    parser = argparse.ArgumentParser(description="Which code of two revisions differs by more than names.")
    parser.add_argument("old")
    parser.add_argument("new", help='a revision, or "." for the working tree')
    parser.add_argument("--package", default="vllm_accprobe")
    parser.add_argument("--names", action="store_true", help="list what was renamed instead")
    asked = parser.parse_args()
    sides = [list(trees(sources(r, asked.package))) for r in (asked.old, asked.new)]
    if asked.names:
        print("\n".join(renamed(*sides)))
        return 0
    counts = [Counter(tree for _, _, tree, _ in side) for side in sides]
    different = 0
    for side, other, word in ((0, 1, "only old"), (1, 0, "only new")):
        left = counts[side] - counts[other]
        lines = defaultdict(list)
        for name, label, tree, _ in sides[side]:
            if left[tree] > 0:
                left[tree] -= 1
                lines[name].append(label)
        for name, labels in lines.items():
            different += len(labels)
            print(f"{word}  {name}: {', '.join(labels)}")
    equal = sum((counts[0] & counts[1]).values())
    print(f"{equal} statements are equal but for names, {different} are on one side alone")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
