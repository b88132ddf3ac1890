"""The attribute under which a dump has the formulas of a block's own forward; generated tests carry a copy."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

FORWARD = "forward"
"""Attribute of modules with parts: role → formula of what the module's own code makes of its inputs and its parts'
outputs (capture/taps/formulas.py); {} where that was not followed. Also the name of the reference that evaluates it."""

INSIDE = "inside."
"""Before the names of what lies inside a block: what its parts received, what a mixer keeps."""

CODE = "code"
"""Attribute of norms and rotary embeddings without parts: what their source shows (capture/taps/leaf_code.py): the
functions that it calls, and the words below."""
MINUS_MEAN, ONE_PLUS_WEIGHT, GATE_FIRST = "- mean", "1 + weight", "gate first"


_LONGEST, _DEEPEST = 4000, 200
"""Chosen: characters, and levels, of a formula that is read; a dump may hold anything."""
_NUMBERED = re.compile(r"(?<=\.)(\d+)(?=[.\[])|(?<![\w.])(\d+)(?=\.[A-Za-z_])")
_WAS_NUMBERED = re.compile(r"\b_i(\d+)")


def parsed(formula: object) -> ast.expr | None:
    """The syntax tree of a formula, in which ``layers.2``, no name of Python's, is ``layers._i2``, not to be changed;
    None for what is none."""
    return _tree(formula) if isinstance(formula, str) and len(formula) <= _LONGEST else None


@lru_cache(1024)
def _tree(formula: str) -> ast.expr | None:
    try:
        tree = ast.parse(_NUMBERED.sub(lambda m: f"_i{m[1] or m[2]}", formula), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return None if level else tree


def path_of(node: ast.expr) -> str:
    """The name, or the path of a part, that a node of such a tree stands for; "" where it is something else."""
    if isinstance(node, ast.Attribute):
        above = path_of(node.value)
        return above and f"{above}.{_without_sign(node.attr)}"
    return _without_sign(node.id) if isinstance(node, ast.Name) else ""


def _without_sign(name: str) -> str:
    return _WAS_NUMBERED.sub(r"\1", name)


def output_of(node: ast.expr | None) -> tuple[str, int] | None:
    """(path of a part, number of its output) where that is all that a formula says."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return None
    path, number = path_of(node.value), node.slice.value
    return (path, number) if path and isinstance(number, int) else None


def scaled(node: ast.expr | None) -> ast.expr | None:
    """What a formula multiplies by a number; None where it is something else."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for factor, other in ((node.right, node.left), (node.left, node.right)):
        number = factor.operand if isinstance(factor, ast.UnaryOp) and isinstance(factor.op, ast.USub) else factor
        if isinstance(number, ast.Constant) and isinstance(number.value, (int, float)):
            return other
    return None


def same(one: ast.expr | None, other: ast.expr | None) -> bool:
    return one is not None and other is not None and ast.dump(one) == ast.dump(other)


def terms(node: ast.expr | None) -> list[ast.expr]:
    """What the additions of a formula add."""
    sums = [x for x in ast.walk(node or ast.Constant(0)) if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Add)]
    return [term for x in sums for term in (x.left, x.right)]


def reads(node: ast.expr | None) -> set[str]:
    """Names that a formula reads: of inputs, and of parts or the first word of their paths."""
    return {x.id for x in ast.walk(node or ast.Constant(0)) if isinstance(x, ast.Name)}
