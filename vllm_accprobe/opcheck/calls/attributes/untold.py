"""Attributes that a dump does not tell.

The problem: other tools record tensors and no numbers of modules. The idea: what the user names (``--attribute
eps=1e-6``, ``'*RotaryEmbedding:head_size=64'``) is added where nothing was recorded; a norm's epsilon is taken from
config.json, or fitted (fitted_epsilon.py), and each of its rows says where it came from. What was recorded stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.opcheck.calls.attributes.fitted_epsilon import ChosenEpsilon, choose, fit
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.norms import EPSILONS, configured, is_norm

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.module_index import ModuleIndex

_FITTED = 64
"""Modules of one class that are read for a fit (chosen: enough for a majority, and a second's work)."""
_VISION = ("visual", "vision", "model.visual")


def parsed(texts: Iterable[str]) -> tuple[tuple[str, str, Any], ...]:
    """(glob, name, value) of ``NAME=VALUE`` and ``GLOB:NAME=VALUE``. Raises ValueError with a sentence."""
    found = []
    for text in texts:
        place, equals, value = text.partition("=")
        glob, colon, name = place.rpartition(":")
        if not equals or not name.isidentifier():
            raise ValueError(f"{text!r} is not NAME=VALUE or GLOB:NAME=VALUE, e.g. eps=1e-6")
        try:
            plain = json.loads(value)
        except ValueError:
            plain = value
        found.append((glob if colon else "*", name, plain))
    return tuple(found)


class UntoldAttributes:
    """Of the modules of ``index``. settled: a call with the dtypes that its numbers have; given: what the user
    named."""

    def __init__(self, index: ModuleIndex, settled: Callable[[Call], Call], given: Iterable[tuple[str, str, Any]] = ()):
        self._index, self._settled, self._given = index, settled, tuple(given)
        self._chosen: dict[tuple[int, str], ChosenEpsilon] = {}

    def filled(self, rank: int, call: Call) -> Call:
        """``call`` with the attributes that were not recorded and are known."""
        named = {
            name: value for glob, name, value in self._given
            if name not in call.attrs and (fnmatchcase(call.cls, glob) or fnmatchcase(call.name, glob))
        }  # fmt: skip
        call = replace(call, attrs={**call.attrs, **named}) if named else call
        if not is_norm(call.cls) or any(n in call.attrs and n not in named for n in EPSILONS):
            return call
        if (own := next((n for n in EPSILONS if n in named), None)) is not None:
            return _told(call, ChosenEpsilon(float(named[own]), 0.0, f"epsilon {named[own]:g}, of --attribute"))
        in_config = self._configured(call)
        if in_config is not None:
            return _told(call, ChosenEpsilon(in_config, 0.0, f"epsilon {in_config:g}, of config.json"))
        return _told(call, self._of_class(rank, call.cls))

    def _configured(self, call: Call) -> float | None:
        """A vision tower's norms are not those of the language model, whose config.json stands around theirs."""
        config: Mapping[str, Any] = call.config
        if call.name.startswith(_VISION):
            inner = self._index.config.get("vision_config")
            config = inner if isinstance(inner, dict) else {}
        found = configured(config, call.cls)
        return None if found is None else float(found)

    def _of_class(self, rank: int, cls: str) -> ChosenEpsilon:
        if (rank, cls) not in self._chosen:
            taps = [tap for r, tap in self._index.by_tap if r == rank and self._index.cls_of(r, tap) == cls]
            fits = [f for f in (self._fit(rank, tap, cls) for tap in taps[:_FITTED]) if f is not None]
            chosen = self._chosen[rank, cls] = choose(fits)
            self._index.problems.append(f"{cls}: {chosen.said}")
        return self._chosen[rank, cls]

    def _fit(self, rank: int, tap: str, cls: str) -> Any:
        (_, records) = min(self._index.by_tap[rank, tap].items(), key=lambda c: c[0])
        if any(r.payload is None for r in records.values()):
            return None
        try:
            return fit(self._settled(self._index.call(rank, tap, cls, records)))
        except (DumpError, ValueError):
            return None


def _told(call: Call, chosen: ChosenEpsilon) -> Call:
    attrs = dict(call.attrs) if chosen.value is None else {**call.attrs, EPSILONS[0]: chosen.value}
    return replace(call, attrs=attrs, extra={**call.extra, "epsilon": {"slack": chosen.slack, "said": chosen.said}})
