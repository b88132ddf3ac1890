"""Rules that say which place of golden a place of mine is: a user's file, or a built-in table.

The problem: two engines build one model from other modules: one projection here is three there. The idea: a rule names
a place of mine by a pattern and says, as templates, of which golden tensors its values are made: one, several joined or
added, transposed. Patterns and templates are strings that are only matched and filled in, never run. Not here: the
built-in rules (engines/), applying rules to dumps (names.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import Text, fits

CAT, SUM, ROPE, HALVES = "cat", "sum", "rope", "halves"
_MAX_FILE = 4 << 20
AIT_FILE = "op_mapping_file.json"
_TYPE = re.compile(r"[A-Za-z0-9_]{1,200}")
_FIELD = re.compile(r"\{(\d{1,3})([+-]\d{1,6})?\}|\*\*|\*")


class MappingError(ValueError):
    """A mapping cannot be used; the message is one line that names the file and the rule."""


@dataclass(frozen=True, slots=True)
class Source:
    """A golden tensor as a template. tap: may hold ``*``, ``**`` and ``{1}`` (also ``{1+2}``: a number with an offset).

    role: None means the role that pairs with mine's (the same, or by order).
    """

    tap: str
    role: str | None = None


@dataclass(frozen=True, slots=True)
class RoleRule:
    """mine: a role, or several with ``+`` between them, whose sum is meant; None: every role. sources: how the golden
    makes it; join: ``cat`` along ``dim`` (params: 0 unless said), ``sum``, or ``rope`` (value, cos, sin). heads: see
    derived.Derived. equal: a template of TAP/ROLE, of which the role may be cut short: what mine has there must
    be to the bit what it has here."""

    mine: str | None
    sources: tuple[Source, ...]
    join: str = CAT
    dim: int | None = None
    transpose: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    equal: str = ""


@dataclass(frozen=True, slots=True)
class TapRule:
    """pattern: over mine's taps; a glob (``*`` within a name, ``**`` across dots) or ``re:`` and a regular expression
    that must match the whole tap. label: how reports call it. alone: a golden tap of mine's own name is another thing,
    whatever parts of it have no rule stay unpaired. needs: a template of a tap, or of TAP/ROLE, that mine must have."""

    pattern: str
    parts: tuple[RoleRule, ...]
    label: str
    alone: bool = False
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Rename:
    """golden taps that match ``pattern`` are called ``target`` first, where mine has something there."""

    pattern: str
    target: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """A whole mapping. origin: the file, or the name of the built-in table. exact: rules for taps of mine by their
    names as they stand. types: ait's op mapping, ATB's operator types → torch's classes (used by
    without_row_maps.py)."""

    origin: str
    renames: tuple[Rename, ...] = ()
    rules: tuple[TapRule, ...] = ()
    exact: Mapping[str, tuple[TapRule, ...]] = field(default_factory=dict)
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        return re.compile(pattern[3:])
    out, last = [], 0
    for m in re.finditer(r"\*\*|\*", pattern):
        out += [re.escape(pattern[last : m.start()]), "(.*)" if m[0] == "**" else r"([^.]*)"]
        last = m.end()
    return re.compile("".join(out) + re.escape(pattern[last:]))


def match(pattern: str, tap: str) -> tuple[str, ...] | None:
    """What the pattern's wildcards or groups stand for in ``tap``, or None. The whole tap must match."""
    found = _compile(pattern).fullmatch(tap)
    return None if found is None else tuple(g or "" for g in found.groups())


def fill(template: str, groups: Sequence[str]) -> str | None:
    """The template with wildcards filled in order and ``{n}`` by number; None where an offset meets no number, leads
    below zero, or a group is missing."""
    out, last, turn = [], 0, 0
    for m in _FIELD.finditer(template):
        out.append(template[last : m.start()])
        last = m.end()
        if m[1] is None:
            number, turn = turn, turn + 1
        else:
            number = int(m[1]) - 1
        if not 0 <= number < len(groups):
            return None
        value = groups[number]
        if m[1] is not None and m[2] is not None:
            if not value.isdecimal() or int(value) + int(m[2]) < 0:
                return None
            value = str(int(value) + int(m[2]))
        out.append(value)
    return "".join(out) + template[last:]


def load_mapping(path: str | Path) -> Rules:
    """Reads a mapping file: JSON, or YAML where PyYAML is installed; of a directory, ait's ``op_mapping_file.json``
    in it. Raises MappingError with one line.

    docs/formats.md describes the file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / AIT_FILE
    try:
        if path.stat().st_size > _MAX_FILE:
            raise MappingError(f"{path}: larger than {_MAX_FILE >> 20} MiB; not a mapping file")
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise MappingError(f"{path}: {e.strerror or e}; name a YAML or JSON mapping file") from None
    except UnicodeDecodeError:
        raise MappingError(f"{path}: not text; name a YAML or JSON mapping file") from None
    return parse_mapping(_parse(path, text), str(path))


def _parse(path: Path, text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        problem = f"{path}: not JSON ({e})"
        if path.suffix.lower() == ".json":
            raise MappingError(problem) from None
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise MappingError(f"{problem}; for YAML install PyYAML, or write the mapping as JSON") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as e:
        where = str(e).replace("\n", " ")[:200]
        raise MappingError(f"{path}: not YAML: {where}") from None


def parse_mapping(data: Any, origin: str) -> Rules:
    """A mapping from plain values: ``{pattern: template or list}``, or ``{"rename": ..., "rules": [...]}``."""
    if not isinstance(data, Mapping) or not data:
        raise MappingError(f"{origin}: expected a mapping of patterns to templates")
    if not all(isinstance(k, str) for k in data):
        raise MappingError(f"{origin}: keys must be strings")
    listed = data.get("rules")
    listed = isinstance(listed, list) and any(isinstance(rule, Mapping) for rule in listed)
    ours = isinstance(data.get("rename"), Mapping) or listed
    if ours and (bad := sorted(set(data) - {"rename", "rules"})):
        raise MappingError(f"{origin}: unknown key {bad[0]!r}: only 'rename' and 'rules' are allowed; "
                           "put patterns into 'rules'")  # fmt: skip
    if not set(data) <= {"rename", "rules"}:
        own = tuple(_rule({"mine": k, "golden": v}, f"{origin}: {k}") for k, v in data.items())
        return Rules(origin, (), own, types=_types(data))
    renames, rules = data.get("rename") or {}, data.get("rules") or []
    if not isinstance(renames, Mapping) or not isinstance(rules, Sequence) or isinstance(rules, str):
        raise MappingError(f"{origin}: 'rename' must be a mapping and 'rules' a list")
    pairs = []
    for pattern, target in renames.items():
        _check_pattern(pattern, origin)
        if not isinstance(target, str):
            raise MappingError(f"{origin}: rename {pattern!r}: the new name must be a string")
        pairs.append(Rename(pattern, target))
    return Rules(origin, tuple(pairs), tuple(_rule(r, f"{origin}: rule {i + 1}") for i, r in enumerate(rules)))


def _types(data: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """ait's op mapping, ``{"LinearOperation": ["Linear"]}``; {} for a file that cannot be one."""
    plain = {k: [v] if isinstance(v, str) else v for k, v in data.items()}
    if all(_TYPE.fullmatch(t) for k, v in plain.items() for t in (k, *v)):
        return {k: tuple(v) for k, v in plain.items()}
    return {}


_KEYS = {"mine", "golden", "roles", "join", "dim", "transpose", "alone"}


def _rule(spec: Any, where: str) -> TapRule:
    if isinstance(spec, Mapping) and (bad := sorted(map(str, set(spec) - _KEYS))):
        raise MappingError(f"{where}: {bad[0]!r} is not known; known are {', '.join(sorted(_KEYS))}")
    if not isinstance(spec, Mapping) or "mine" not in spec:
        raise MappingError(f"{where}: expected the keys mine, golden, and perhaps {', '.join(sorted(_KEYS)[1:])}")
    pattern = spec["mine"]
    _check_pattern(pattern, where)
    golden = _strings(spec.get("golden", []), f"{where}: golden")
    join, dim, transpose = spec.get("join", CAT), spec.get("dim"), spec.get("transpose", [])
    if join not in (CAT, SUM):
        raise MappingError(f"{where}: join must be {CAT} or {SUM}, not {join!r}")
    if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
        raise MappingError(f"{where}: dim must be a whole number")
    axes = transpose if isinstance(transpose, list) else None
    if axes is None or sorted(axes, key=str) != list(range(len(axes))):
        raise MappingError(f"{where}: transpose must list dimensions, such as [1, 0]")
    how = (join, dim, tuple(axes))
    roles = spec.get("roles")
    if roles is None:
        if not golden:
            raise MappingError(f"{where}: golden names no tap")
        parts = [RoleRule(None, tuple(_source(g, None) for g in golden), *how)]
    elif isinstance(roles, Mapping) and roles and all(isinstance(r, str) for r in roles):
        parts = [RoleRule(r, _sources(v, golden, f"{where}: role {r}"), *how) for r, v in roles.items()]
    else:
        raise MappingError(f"{where}: roles must map mine's roles to golden's")
    alone = spec.get("alone", False)
    if not isinstance(alone, bool):
        raise MappingError(f"{where}: alone must be true or false, not {alone!r}")
    label = f"{pattern} ← {', '.join(golden) or 'roles'}"
    return TapRule(pattern, tuple(parts), label, alone)


def _sources(value: Any, golden: Sequence[str], where: str) -> tuple[Source, ...]:
    found = []
    for text in _strings(value, where):
        if "/" in text:
            found.append(_source(text, None))
        elif golden:
            found += [Source(g, text) for g in golden]
        else:
            raise MappingError(f"{where}: {text!r} names no tap, and the rule has no 'golden'")
    return tuple(found)


def _source(text: str, role: str | None) -> Source:
    tap, slash, own = text.partition("/")
    return Source(tap, own if slash else role)


def _strings(value: Any, where: str) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not fits(list[Text], values):
        raise MappingError(f"{where}: expected a template or a list of them")
    return list(values)


def _check_pattern(pattern: Any, where: str) -> None:
    if not isinstance(pattern, str) or not pattern or len(pattern) > 1000:
        raise MappingError(f"{where}: the pattern must be a string of at most 1000 characters")
    try:
        _compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise MappingError(f"{where}: {pattern!r} is not a regular expression: {e}") from None
