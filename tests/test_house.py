"""The house as docs/development.md describes it: no cycle of imports, no name twice.

Read from the source, so that imports inside functions and under TYPE_CHECKING count as well.
"""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "vllm_accprobe"
FILES = sorted(PACKAGE.rglob("*.py"))
CROSSING = ("e2e", "freeze", "lab", "platform", "scripts")
"""Folders of tests that mirror no room: engines, every output, the fault laboratory, captured graphs, scripts."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports() -> dict[str, set[str]]:
    names = {name_of(f) for f in FILES}
    found: dict[str, set[str]] = {name: set() for name in names}
    for file in FILES:
        own = name_of(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            wanted: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted = [f"{node.module}.{a.name}" for a in node.names]
                wanted = [w if w in names else node.module for w in wanted]
            elif isinstance(node, ast.Import):
                wanted = [a.name for a in node.names]
            found[own] |= {w for w in wanted if w in names} - {own}
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module [R. Tarjan, SIAM J. Comput. 1 (1972) 146]."""
    low: dict[str, int] = {}
    number: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(v: str) -> None:
        number[v] = low[v] = len(number)
        stack.append(v)
        for w in sorted(graph[v]):
            if w not in number:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], number[w])
        if low[v] == number[v]:
            group = stack[stack.index(v) :]
            del stack[stack.index(v) :]
            if len(group) > 1:
                found.append(sorted(group))

    for v in sorted(graph):
        if v not in number:
            visit(v)
    return found


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_cycle_of_imports() -> None:
    assert len(FILES) > 300
    assert cycles(imports()) == []


def test_no_class_is_declared_twice() -> None:
    classes = defaultdict(list)
    for file in FILES:
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            classes[name].append(name_of(file))
    assert {name: where for name, where in classes.items() if len(where) > 1} == {}


def test_no_name_of_a_module_is_in_more_than_two_rooms() -> None:
    """But for other tools: each has its formats, its standards, and its words for opcheck."""
    rooms = [{f.name for f in (PACKAGE / room).glob("*.py")} for room in ("standards", "formats")]
    tools = rooms[0] & rooms[1]
    named = Counter(f.name for f in FILES if f.name not in {"__init__.py", *tools})
    assert [name for name, n in named.items() if n > 2] == []


def test_tests_lie_where_their_modules_lie() -> None:
    """A test is found by its module's name. What crosses modules has a name that no module has."""
    tests = PACKAGE.parent / "tests"
    modules = defaultdict(set)
    for file in FILES:
        modules[f"test_{file.name}"].add(file.relative_to(PACKAGE).parent)
    found = [t.relative_to(tests) for t in tests.rglob("test_*.py")]
    assert len(found) > 200
    stray = {t for t in found if modules[t.name] and t.parent not in modules[t.name] and str(t.parent) not in CROSSING}
    assert {str(t) for t in stray} == set()
    rooms = {file.relative_to(PACKAGE).parent for file in FILES} | {Path(room) for room in CROSSING}
    assert {str(t) for t in found if t.parent not in rooms} == set()
