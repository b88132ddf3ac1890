"""The records of one dump.json of msprobe: where each stands, and its tensors in the order of execution.

The problem: a record is a module or an API call with its tensors in nested lists, numbered over the whole step, written
when it ends. The idea: a module's place is its path; an API's place is the module that called it, so that its number
counts there; inputs stand before what ran inside, outputs behind it.
Not here: files and ranks (formats/msprobe.py), the arguments of API calls (msprobe_calls.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_accprobe.dump.schema import ROOT_TAP, Stats
from vllm_accprobe.formats.common.foreign import PARAM, VALUE
from vllm_accprobe.formats.common.msprobe_words import BACKWARD, SECTIONS, STATS

_MODULE = re.compile(r"(?:Module|Cell)\.(?:(.+)\.)?([^.]+)\.(forward|backward|parameters_grad)(?:\.(\d+))?")
_API = re.compile(r"(.+)\.(\d+)\.(forward|backward)")
_MAX_NESTED = 16


@dataclass(frozen=True)
class RecordPlace:
    """Where a record stands. inside: path of the module it is or was called by; module: whether it is one."""

    tap: str
    cls: str
    call: int | None
    inside: str
    module: bool
    grads: bool = False


@dataclass(frozen=True)
class RecordTensor:
    """One tensor of a record. suffix: its name behind the record's."""

    role: str
    suffix: str
    info: Mapping[str, Any]


def place_of(key: str, parents: Mapping[str, Any]) -> RecordPlace:
    """parents: record → the record that called it."""
    if match := _MODULE.fullmatch(key):
        path = match[1] or ROOT_TAP
        tap = path if match[3] == "forward" else BACKWARD + path
        return RecordPlace(tap, match[2], int(match[4] or 0), tap, True, match[3] == "parameters_grad")
    if match := _API.fullmatch(key):
        cls = match[1]
        head, _, name = cls.partition(".")
        leaf = f"{head}:{name.replace('.', '_')}" if name else head
        backward = match[3] == "backward"
        caller = parents.get(key) or parents.get(f"{match[1]}.{match[2]}.forward")
        inside = _MODULE.fullmatch(caller) if isinstance(caller, str) else None
        path = "" if inside is None else inside[1] or ROOT_TAP
        tap = f"{path}.{leaf}" if path and path != ROOT_TAP else leaf
        prefix = BACKWARD if backward else ""
        # Numbered where it was called: the number in the name counts calls of the whole step.
        return RecordPlace(prefix + tap, cls, None if path else int(match[2]), prefix + path if path else "", False)
    return RecordPlace(key.removesuffix(".debug"), "", None, "", False)


PlacedRecord = tuple[str, Mapping[str, Any], RecordPlace]
"""(name, record, place)."""


def in_order(places: list[PlacedRecord]) -> Iterator[tuple[str, RecordPlace, RecordTensor]]:
    """The tensors in the order of execution. Records are written when they end; a module began, with its weights and
    its inputs, before the first record inside it."""
    began: dict[str, int] = {}
    keyed: list[tuple[tuple[int, int, int, int], str, RecordPlace, RecordTensor]] = []
    for i, (key, record, place) in enumerate(places):
        above = place.inside
        while above:
            began.setdefault(above, i)
            above = above.rpartition(".")[0]
        start = began.pop(place.inside, i) if place.module and not place.grads else i
        depth = place.inside.count(".") if place.module else 1 << 20
        for n, leaf in enumerate(_leaves(record, place)):
            early = leaf.role.startswith(("input", PARAM))
            keyed.append(((start, 0, depth, n) if early else (i, 1, 0, n), key, place, leaf))
    for _, key, place, leaf in sorted(keyed, key=lambda item: item[0]):
        yield key, place, leaf


def _leaves(record: Mapping[str, Any], place: RecordPlace) -> Iterator[RecordTensor]:
    if "dtype" in record:  # what save() of level debug wrote
        yield RecordTensor(VALUE, "", record)
        return
    if place.grads:
        for name, value in record.items():
            for suffix, info in _tensors(value, ()):
                rest = suffix[1:] if suffix[:1] == ("0",) else suffix
                yield RecordTensor(".".join(("output", str(name), *rest)), ".".join((str(name), *rest)), info)
        return
    known = [section for section in SECTIONS if section in record]
    for section in known:
        role, word = SECTIONS[section]
        for suffix, info in _tensors(record[section], ()):
            yield RecordTensor(".".join((role, *suffix)), ".".join((word, *suffix)), info)
    if not known:
        for suffix, info in _tensors(record, ()):
            yield RecordTensor(".".join((VALUE, *suffix)), ".".join(suffix), info)


def _tensors(value: Any, suffix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if len(suffix) > _MAX_NESTED:
        return
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _tensors(item, (*suffix, str(i)))
    elif isinstance(value, dict):
        if "dtype" in value and "shape" in value:
            yield suffix or ("0",), value
            return
        if "type" in value and "value" in value:
            return  # a number or a text
        for key, item in value.items():
            yield from _tensors(item, (*suffix, str(key)))


def record_stats(info: Mapping[str, Any], count: int) -> Stats | None:
    """msprobe takes its statistics in the tensor's own dtype, infinities and NaN included, and none of bool."""
    values = [info.get(STATS[k]) for k in ("min", "max", "mean", "l2")]
    if all(v is None for v in values):
        return None
    numbers = [float(v) if isinstance(v, (int, float)) else None for v in values]
    ends = [v for v in numbers[:2] if v is not None]
    nan = int(any(math.isnan(v) for v in ends))
    finite = [v if v is not None and math.isfinite(v) else None for v in numbers]
    return Stats(count, finite[0], finite[1], finite[2], finite[3], nan, sum(math.isinf(v) for v in ends))
