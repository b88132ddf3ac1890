"""What a patch file may say, and the patches that come with the package.

The problem: a patch puts code into a running model, and a file from anywhere must not be able to do more than read a
value. The idea: TOML with a fixed set of keys; statements are anchors that are compared and never run; the value is a
path of names, attributes and constant subscripts (``self.scale``, ``out[0]``, ``d["k"].x``), parsed and rebuilt here;
everything else is refused with one line.

Not here: whether the source has such a place (source.py), what is put there (install.py).
"""

from __future__ import annotations

import ast
import difflib
import keyword
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import fits

AFTER, BEFORE, ENTRY, RETURN = "after", "before", "entry", "return"
RESULT = "result"
"""Root of a value path at ``return``: what the function returns."""
SIDES = ("pta", "acl")
_MAX_BYTES = 1 << 20
_MAX_ITEMS = 200
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class PatchError(ValueError):
    """A patch file is wrong. One line: which file, what, what would be right."""


@dataclass(frozen=True)
class TapSpec:
    """One value at one place.

    name: of the tap, after ``::``. value: path expression. at: after, before, entry or return. anchors: statements of
    the function, of which the first that is there counts (for after and before). like: tap (relative to the module)
    and role whose tensor-parallel layout the value has. label: "pta" or "acl" and an id, where the value is one side
    of a labelled pair instead of a record.
    """

    name: str
    value: str
    at: str
    anchors: tuple[str, ...] = ()
    like: tuple[str, str] | None = None
    label: tuple[str, str] | None = None

    @property
    def expression(self) -> ast.expr:
        """The value as a syntax tree of names, attributes and constants only."""
        return parse_path(self.value)


@dataclass(frozen=True)
class Target:
    """A function and its taps. versions: "" or a range such as ">=0.23,<0.33" of the package that the module belongs
    to; outside of it the target does not apply. optional: a module or function that is not there is no refusal.
    place: the module path of taps where nothing that runs has one. hashes: of the function's syntax tree (see
    source.fingerprint); if given, one of them must be the installed one's."""

    module: str
    function: str
    taps: tuple[TapSpec, ...]
    versions: str = ""
    optional: bool = False
    place: str = ""
    hashes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}"


@dataclass(frozen=True)
class Patch:
    """One file. checked: versions of vLLM whose source it was seen to fit, for people."""

    name: str
    about: str
    targets: tuple[Target, ...]
    file: Path
    checked: tuple[str, ...] = ()


def load(path: Path, name: str | None = None) -> Patch:
    """The patch in a TOML file; ``name`` is by default the file's. Raises PatchError."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise PatchError(f"{path}: {error.strerror or error}") from None
    if len(data) > _MAX_BYTES:
        raise PatchError(f"{path}: a patch of more than {_MAX_BYTES:,} bytes")
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PatchError(f"{path}: not a TOML file: {' '.join(str(error).split())[:200]}") from None
    return parse(table, path, name or path.stem)


def parse(table: Mapping[str, Any], file: Path, name: str) -> Patch:
    """The patch of a TOML table. Raises PatchError."""
    try:
        _only(table, {"about", "checked", "target"})
        targets = tuple(_target(t) for t in _tables(table, "target"))
        if not targets:
            raise ValueError("it has no [[target]]")
        return Patch(name, _text(table, "about", ""), targets, file, _texts(table, "checked"))
    except ValueError as error:
        raise PatchError(f"{file}: {error}") from None


def _target(table: Mapping[str, Any]) -> Target:
    _only(table, {"module", "function", "versions", "optional", "place", "hash", "tap"})
    module, function = _text(table, "module"), _text(table, "function")
    for what in (module, function):
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in what.split(".")):
            raise ValueError(f"{what[:80]!r} is no dotted name")
    versions = _text(table, "versions", "")
    in_range((0,), versions)
    taps = tuple(_tap(t) for t in _tables(table, "tap"))
    if not taps:
        raise ValueError(f"{function} has no [[target.tap]]")
    if len({(t.name, t.label) for t in taps}) != len(taps):
        raise ValueError(f"{function} has two taps of one name")
    optional = table.get("optional", False)
    if not isinstance(optional, bool):
        raise ValueError("optional is neither true nor false")
    return Target(module, function, taps, versions, optional, _text(table, "place", ""), _texts(table, "hash"))


def _tap(table: Mapping[str, Any]) -> TapSpec:
    _only(table, {"name", "value", "at", AFTER, BEFORE, "like", "label", "id"})
    name = _text(table, "name", "") or _text(table, "id")
    if not _NAME.fullmatch(name):
        raise ValueError(f"tap name {name[:80]!r} is not of letters, digits and _.-")
    places = [k for k in ("at", AFTER, BEFORE) if k in table]
    if len(places) != 1:
        raise ValueError(f'tap {name}: give one of after, before, and at = "entry" or "return"')
    anchors: tuple[str, ...] = ()
    if places[0] == "at":
        at = _text(table, "at")
        if at not in (ENTRY, RETURN):
            raise ValueError(f"tap {name}: at is {at[:40]!r}, not entry or return")
    else:
        at, anchors = places[0], _texts(table, places[0])
        if not anchors:
            raise ValueError(f"tap {name}: {at} names no statement")
    value = _text(table, "value")
    root = parse_path(value)
    while not isinstance(root, ast.Name):
        root = root.value  # type: ignore[attr-defined]
    if at == RETURN and root.id != RESULT:
        raise ValueError(f"tap {name}: at return a value begins with {RESULT}, {value[:80]!r} does not")
    like = _text(table, "like", "").split()
    if like and len(like) != 2:
        raise ValueError(f'tap {name}: like is a tap and a role, for example "attn input.query"')
    label = None
    if "label" in table:
        side = _text(table, "label")
        if side not in SIDES:
            raise ValueError(f"tap {name}: label is {side[:40]!r}, not pta or acl")
        label = (side, _text(table, "id"))
    return TapSpec(name, value, at, anchors, (like[0], like[1]) if like else None, label)


def parse_path(text: str) -> ast.expr:
    """The syntax tree of a path of names, attributes and constant subscripts, rebuilt. Raises ValueError."""
    refusal = f"value {text[:80]!r} is not a path of names, attributes and constant subscripts such as out[0].x"
    if len(text) > 500:
        raise ValueError(refusal)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(refusal) from None
    rebuilt = _rebuild(tree)
    if rebuilt is None:
        raise ValueError(refusal)
    return rebuilt


def _rebuild(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    if isinstance(node, ast.Attribute):
        value = _rebuild(node.value)
        return None if value is None else ast.Attribute(value, node.attr, ast.Load())
    if isinstance(node, ast.Subscript):
        value, index = _rebuild(node.value), _index(node.slice)
        return None if value is None or index is None else ast.Subscript(value, ast.Constant(index), ast.Load())
    return None


def _index(node: ast.expr) -> int | str | None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, str):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        return -number if type(number) is int else None
    return None


_CLAUSE = re.compile(r"(>=|<=|==|>|<)\s*(\d+(?:\.\d+)*)")


def in_range(version: Sequence[int], text: str) -> bool:
    """Whether a version, as numbers, lies in ``">=0.23,<0.33"``; "" is every version. Raises ValueError."""
    for clause in filter(None, (part.strip() for part in text.split(","))):
        match = _CLAUSE.fullmatch(clause)
        if not match:
            raise ValueError(f"versions {text[:80]!r} is not of the form >=0.23,<0.33")
        bound = [int(n) for n in match[2].split(".")]
        width = max(len(bound), len(version))
        a, b = [*version, *[0] * (width - len(version))], [*bound, *[0] * (width - len(bound))]
        if not {">=": a >= b, "<=": a <= b, "==": a == b, ">": a > b, "<": a < b}[match[1]]:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """``0.32.0+cpu`` → (0, 32, 0). Empty where it does not begin with numbers."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in match[0].split(".")) if match else ()


def _only(table: Mapping[str, Any], known: set[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{str(key)[:40]!r} is not a key of a patch{hint}")


def _tables(table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = table.get(key, [])
    if not fits(list[dict[str, Any]], value) or len(value) > _MAX_ITEMS:
        raise ValueError(f"{key} is not written as [[{key}]], or too often")
    return value


def _text(table: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or (default is None and not value.strip()) or len(value) > 10_000:
        raise ValueError(f"{key} is missing or no text")
    return value.strip()


def _texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    items = [value] if isinstance(value, str) else value
    if not fits(list[str], items) or len(items) > _MAX_ITEMS or not all(map(str.strip, items)):
        raise ValueError(f"{key} is no text and no list of texts")
    return tuple(v.strip() for v in items)


ROOT = Path(__file__).parent / "shipped"
"""Package data, one directory per kind; the repository's ``patches/`` points here."""
ALL = "all"


def names() -> dict[str, Path]:
    """Shipped patches by name: ``qwen2-attention`` is shipped/vllm/qwen2-attention.toml."""
    return {path.stem: path for path in sorted(ROOT.glob("*/*.toml"))}


def choose(wanted: Sequence[str]) -> list[Patch]:
    """The patches that a setting names: shipped names, paths of files, or ``all`` for every shipped one.

    Raises PatchError for a name that is none, with the nearest one, and for a file that is wrong.
    """
    known = names()
    paths: dict[str, Path] = {}
    for item in wanted:
        if item == ALL:
            paths |= known
        elif item in known:
            paths[item] = known[item]
        elif item.endswith(".toml") or "/" in item:
            path = Path(item).expanduser()
            if path.stem in paths and os.path.realpath(paths[path.stem]) != os.path.realpath(path):
                raise PatchError(f"{item}: there is already a patch called {path.stem}; rename the file")
            paths[path.stem] = path
        else:
            near = difflib.get_close_matches(item, [*known, ALL], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise PatchError(f"{item!r} is no shipped patch and no .toml file{hint}; see `accprobe patches list`")
    return [load(path, name) for name, path in paths.items()]
