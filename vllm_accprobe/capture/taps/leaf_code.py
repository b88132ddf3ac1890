"""What the source of a norm or a rotary embedding shows of its formula, as words.

The problem: a class's name does not say its formula: T5's ``T5LayerNorm`` takes no mean off, and half of the RMS norms
weigh with 1 + w. The idea: the forward is read, not run: names of the functions that it calls, and the few operations
that decide between formulas (``- mean``, ``1 + weight``, ``gate first``). A function that the module itself chooses,
of a table (``ACT2FN[self.activation]``) or as an attribute, has the name that this instance gives.
Not here: which reference they choose (opcheck/references/norms.py, rotary.py); blocks with parts (formulas.py).
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from vllm_accprobe.dump.block_code import GATE_FIRST, MINUS_MEAN, ONE_PLUS_WEIGHT

_READ = ("Norm", "Rotary", "Rope")
_LONGEST = 80
"""Characters of a name."""


def leaf_code(module: torch.nn.Module) -> list[str]:
    """Words, sorted; [] for torch's own modules, for one that dispatches to another function, and where there is no
    source. Runs no code of the model; never raises."""
    cls = type(module)
    replaced = "forward" in module.__dict__ or "_forward_method" in module.__dict__
    if module._modules or replaced or not any(w in cls.__name__ for w in _READ) or cls.__module__.startswith("torch."):
        return []
    try:
        words = {_chosen(module, word) for word in _words(cls)}  # type: ignore[arg-type]  # a class can be hashed
        return sorted(words - {""})
    except Exception:  # a model's source may be anything
        return []


_OF_TABLE = "self."
"""Before the attribute by which a function of a table is chosen."""


def _chosen(module: torch.nn.Module, word: str) -> str:
    if word.startswith(_OF_TABLE):
        key = module.__dict__.get(word.removeprefix(_OF_TABLE))
        return key.lower() if isinstance(key, str) and len(key) <= _LONGEST else ""
    return str(getattr(module.__dict__.get(word), "__name__", word))[:_LONGEST]


@functools.lru_cache(maxsize=512)
def _words(cls: type) -> frozenset[str]:
    todo, seen, found = ["forward"], set[str](), set[str]()
    while todo:
        name = todo.pop()
        inherited = name != "forward" and hasattr(torch.nn.Module, name)
        if name in seen or inherited or not inspect.isfunction(method := getattr(cls, name, None)):
            continue
        seen.add(name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method)))).body[0]
        calls = {_called(n) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        found |= {*calls, *_operations(tree)}
        todo += calls
    return frozenset(found - {""})


def _called(node: ast.Call) -> str:
    f: Any = node.func
    if isinstance(f, ast.Subscript):
        key: Any = f.slice
        if isinstance(key, ast.Attribute) and getattr(key.value, "id", None) == "self":
            return _OF_TABLE + key.attr
        f = f.value
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def _operations(tree: ast.AST) -> Iterator[str]:
    means = {t.id for n in ast.walk(tree) if isinstance(n, ast.Assign) and _is_mean(n.value)
             for t in n.targets if isinstance(t, ast.Name)}  # fmt: skip
    squares = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n) == "mean"]
    for n in (n for n in ast.walk(tree) if isinstance(n, ast.BinOp)):
        sides = (n.left, n.right)
        if isinstance(n.op, ast.Sub) and (_is_mean(n.right) or getattr(n.right, "id", None) in means):
            yield MINUS_MEAN
        one = isinstance(n.op, ast.Add) and any(isinstance(s, ast.Constant) and s.value == 1 for s in sides)
        if one and any(isinstance(a, ast.Attribute) and a.attr == "weight" for a in ast.walk(n)):
            yield ONE_PLUS_WEIGHT
        gated = isinstance(n.op, ast.Mult) and any(isinstance(a, ast.Name) and a.id == "gate" for a in ast.walk(n))
        if gated and squares and n.lineno < min(squares):
            yield GATE_FIRST


def _is_mean(node: ast.expr) -> bool:
    """Of the numbers themselves: not of their squares."""
    calls = [_called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    powers = any(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Pow, ast.Mult)) for n in ast.walk(node))
    return "mean" in calls and not powers and not {"pow", "square"} & {*calls}
