"""Each name that a script, the laboratory, a benchmark or an example imports from this tree exists.

They run by hand or for hours, so that a name that moved would be noticed late. Sources are read, nothing is imported.
Not here: the package (mypy), the tests (pytest collects them).
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("scripts", "lab", "benchmarks", "examples")
SIBLINGS = ("scripts", "tests", "tests/platform")
"""Folders that these files put on the path, beside the root."""


def _source(module: str) -> Path | None:
    """The file of one of our modules; None where it is none of ours."""
    for folder in ("", *SIBLINGS):
        at = ROOT / folder / module.replace(".", "/")
        for path in (at.with_suffix(".py"), at / "__init__.py"):
            if path.exists():
                return path
        if at.is_dir():
            return at
    return None


@cache
def _names(path: Path) -> frozenset[str] | None:
    """What a module binds anywhere in its source; None where it makes names itself (`__getattr__`)."""
    if path.is_dir():
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return None if "__getattr__" in found else frozenset(found)


def _missing(path: Path) -> list[str]:
    bad = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        source = _source(node.module)
        if source is None:
            if node.module.split(".")[0] in ("vllm_accprobe", "lab", "support"):
                bad.append(f"line {node.lineno}: {node.module}")
            continue
        names = _names(source)
        for alias in node.names:
            if names is not None and alias.name not in names and _source(f"{node.module}.{alias.name}") is None:
                bad.append(f"line {node.lineno}: {node.module}.{alias.name}")
    return bad


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_imported_name_exists(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(f.relative_to(ROOT)): bad for f in files if (bad := _missing(f))} == {}


def test_a_name_that_moved_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from lab.judging import Pair, never_there\nfrom lab.nowhere import x\nimport os\n")
    assert _missing(script) == ["line 1: lab.judging.never_there", "line 2: lab.nowhere"]
