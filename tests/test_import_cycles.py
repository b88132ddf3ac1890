"""No module of the package imports itself by way of others, imports inside of functions included."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import vllm_accprobe

HOME = Path(vllm_accprobe.__file__).parent


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name or "") of every import that runs; those for types alone do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, a.name) for a in node.names)
        yield from imported(node)


def test_no_import_leads_back() -> None:
    modules = {}
    for path in HOME.rglob("*.py"):
        name = ".".join(path.relative_to(HOME.parent).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = [*imported(ast.parse(path.read_text(encoding="utf-8")))]
    assert len(modules) > 100
    graph = {
        name: {full if (full := f"{module}.{what}") in modules else module for module, what in found} - {name}
        for name, found in modules.items()
    }
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
