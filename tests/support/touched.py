"""The names of vLLM that capture's source touches, by its syntax tree: what the declaration is held against.

The problem: a list of names that is kept by hand is stale after the next change. The idea: in the modules that meet
vLLM, a name counts as vLLM's when it is asked for by string (getattr, hasattr, a wrap), read from an object that has no
type of ours (a parameter of type Any and whatever comes from it), stands in a table of names, is imported from vllm, or
is an attribute that neither this package nor Python, torch or numpy define.
"""

import ast
import builtins
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import sys
import threading
import time
import traceback
import types
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from enum import Enum
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
import xxhash

import vllm_accprobe

HOME = Path(vllm_accprobe.__file__).parent
FILES = (
    *sorted((HOME / "capture" / "vllm").glob("*.py")),
    *sorted((HOME / "capture" / "weights").glob("*.py")),
    *sorted((HOME / "capture" / "states").glob("*.py")),
    *(HOME / "capture" / one for one in (
        "teacher_forcing.py", "arming.py", "core/layout.py", "ops/dispatch.py", "errcheck/observer.py",
        "graphs/placement.py", "taps/hooks.py",
    )),
    HOME / "plugin.py",
)  # fmt: skip
"""The modules that meet vLLM's objects."""
PARTS = {
    "dispatch.py": {"of_runner", "of_model", "_watch", "_offloads", "_caches"},
    "placement.py": {"Sighting", "Sightings", "_Call", "_Watch", "watching", "_sort", "_inputs"},
    "hooks.py": {
        "argument_names", "_signature", "_ATTRIBUTES", "_IMPL", "_ROUTER", "attributes", "_add_routing", "_plain",
        "Inputs", "outputs", "flatten", "TapOwner", "Taps", "_is_head",
    },
    "names_by_release.py": {
        "Mode", "_parallel", "_pieces", "_flash", "_several", "SHARDED", "VERIFIED", "MODES", "refused", "unsampled",
        "unplaced", "in_graphs",
    },
}  # fmt: skip
"""Of modules that meet torch as well: the definitions that meet vLLM."""

_KNOWN = (
    str, bytes, int, float, list, dict, set, tuple, type, object, Counter, deque, Path, BaseException, OSError,
    SystemExit, Enum, re.Pattern, os.stat_result, BaseProcess, threading.Event, threading.Thread, types.FunctionType,
    types.MethodType, contextlib.ExitStack, inspect.Signature, inspect.Parameter, traceback.FrameSummary, np.ndarray,
    torch.Tensor, torch.nn.Module, torch.device, torch.Size, torch.compiler, torch.nn, torch, contextlib, dataclasses,
    inspect, json, math, os, os.path, sys, time, builtins, np, ctypes, ctypes.c_char, functools, xxhash, xxhash.xxh3_64,
    torch.cuda.Event, torch._C.FunctionSchema, torch._C.Argument,
)  # fmt: skip
_BY_STRING = {"getattr", "hasattr", "setattr", "_wrap", "override", "wrap_method"}
_NAME = re.compile(r"[A-Za-z_*][A-Za-z0-9_*]+")


@functools.cache
def touched(files: tuple[Path, ...] = FILES, more: str = "") -> dict[str, set[str]]:
    """Name → the places ``file:line`` where it is touched. more: source of one more module."""
    ours, library = _ours(), set().union(*map(dir, _KNOWN))
    found: dict[str, set[str]] = defaultdict(set)
    sources = [(path.name, path.read_text()) for path in files] + [("more", more)]
    for name, source in sources:
        tree = ast.parse(source)
        if name in PARTS:
            tree.body = [n for n in tree.body if _defined(n) in PARTS[name]]
        for touch, line, sure in _touches(tree):
            if not _NAME.fullmatch(touch) or touch.lower().startswith(("accprobe", "_accprobe", "vllm_accprobe")):
                continue
            if (sure or touch not in ours) and (sure == 2 or touch not in library):
                found[touch].add(f"{name}:{line}")
    return dict(found)


def _defined(node: ast.stmt) -> str:
    """The name of a definition, or of the constant that an assignment makes; "" for any other statement."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", "")


@functools.cache
def _ours() -> set[str]:
    """Names that this package itself gives to attributes, fields, functions and classes."""
    names: set[str] = set()
    for path in HOME.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                target = node.target
                names.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                names.add(node.attr)
    return names


def _touches(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """(name, line, how sure: 0 an attribute of anything, 1 of an object without a type, 2 asked for by string)."""
    foreign_fields = _foreign_fields(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno, 0
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called in _BY_STRING and len(node.args) > 1:
                yield from _spelt(node.args[1])
        elif isinstance(node, ast.Subscript):
            yield from _spelt(node.slice)
        elif isinstance(node, ast.comprehension):
            yield from _strings(node.iter)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from ((one.name, node.lineno, 2) for one in node.names)
        elif isinstance(node, ast.FunctionDef):
            yield from _of_foreign(node, foreign_fields)
            for part in ast.walk(node):
                if isinstance(part, ast.For):
                    yield from _strings(part.iter)
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            yield from _strings(node.value)
            if isinstance(node.value, (ast.Constant, ast.BinOp, ast.JoinedStr)):
                yield from _spelt(node.value)


def _spelt(node: ast.AST) -> Iterator[tuple[str, int, int]]:
    """A name as a string; ``*`` stands for what is put together."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, node.lineno, 2
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        yield text, node.lineno, 2
    elif isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and isinstance(node.right.value, str):
        yield f"*{node.right.value}", node.lineno, 2


def _strings(node: ast.AST) -> Iterator[tuple[str, int, int]]:
    """A table of names: the strings of a tuple, or of one of tuples."""
    if isinstance(node, ast.Tuple):
        for part in node.elts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value, part.lineno, 2
            yield from _strings(part)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, key.lineno, 2


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_any(annotation: ast.AST | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def _from_vllm(tree: ast.AST) -> set[str]:
    """Local names of what is imported from vllm."""
    return {
        one.asname or one.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for one in node.names
    }


def _foreign_fields(tree: ast.Module) -> set[str]:
    """Fields of our classes that hold an object without a type: ``self._runner = runner``."""
    fields = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            free = {a.arg for a in (*node.args.args, *node.args.kwonlyargs) if _is_any(a.annotation)}
            for part in ast.walk(node):
                if isinstance(part, ast.AnnAssign) and _is_any(part.annotation):
                    fields |= {part.target.attr} if isinstance(part.target, ast.Attribute) else set()
                elif isinstance(part, ast.Assign) and isinstance(part.value, ast.Name) and part.value.id in free:
                    fields |= {t.attr for t in part.targets if isinstance(t, ast.Attribute)}
    return fields | {"runner"}  # RunnerAdapter's, which others read


def _of_foreign(function: ast.FunctionDef, fields: set[str]) -> Iterator[tuple[str, int, int]]:
    every = (*function.args.args, *function.args.kwonlyargs)
    free = {a.arg for a in every if _is_any(a.annotation)} | _from_vllm(function)

    def foreign(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in free
        if isinstance(node, ast.Attribute):
            return foreign(node.value) or node.attr in fields
        if isinstance(node, ast.Subscript):
            return foreign(node.value)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "getattr":
                return foreign(node.args[0])
            return isinstance(node.func, ast.Attribute) and foreign(node.func.value)
        return isinstance(node, ast.BoolOp) and any(map(foreign, node.values))

    for _ in range(3):  # names are given one after the other
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and foreign(node.value):
                free |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, (ast.For, ast.comprehension)) and foreign(node.iter):
                free |= {node.target.id} if isinstance(node.target, ast.Name) else set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and foreign(node.value):
            yield node.attr, node.lineno, 1
