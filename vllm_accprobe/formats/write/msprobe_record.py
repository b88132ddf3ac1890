"""One record of msprobe's dump.json: a call's tensors and arguments in its sections.

The problem: inputs and outputs are nested lists there, keyword arguments a dictionary, and a plain argument stands
beside tensors with its type; ours are roles (``input.2.1``, ``inplace.query``) and an operator's VALUES (opcalls.py).
The idea: what a role's numbers say is its place; what has no such place (a named output, a value after an in-place
change, a gradient) stands behind the outputs; each role that reading the section back would not give is noted.
Not here: which calls there are, their names and files (msprobe_dump.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.schema import OpCall, Record
from vllm_accprobe.formats.common.msprobe_words import INPUTS, KEYWORDS, OUTPUTS, PARAMETERS, STATS
from vllm_accprobe.formats.write import notes

_TYPES = {"dtype": "torch.dtype", "device": "torch.device", "memory_format": "torch.memory_format",
          "layout": "torch.layout"}  # fmt: skip


class Sections:
    """out: the record. tensors: (word of the file's name, record, its description) of what has or may have a file.

    op: the call's journal line, None for a module's. params: records of parameters by ``<tap>/<role>``."""

    def __init__(self, op: OpCall | None, records: Sequence[Record], params: Mapping[str, Record]):
        self.out: dict[str, Any] = {INPUTS: [], KEYWORDS: {}, OUTPUTS: []}
        self.tensors: list[tuple[str, Record, dict[str, Any]]] = []
        self._op, self._params, self._roles = op, params, {}  # type: ignore[var-annotated]
        self._records = records
        self._left = {r.role: r for r in records}
        if op is not None:
            self.out[INPUTS] = [self._value(v, f"input.{i}") for i, v in enumerate(op.args)]
            self.out[KEYWORDS] = {k: self._value(v, f"kwargs.{k}") for k, v in op.kwargs.items()}
            self.out[OUTPUTS] = [self._value(v, f"output.{i}") for i, v in enumerate(op.outputs)]
        for r in sorted(self._left.values(), key=lambda r: (_places(r.role) is None, r.seq)):  # names last
            self._take(r)

    def note(self) -> dict[str, Any]:
        """Roles by the name that a tensor has in the record, where that does not say them; layouts by role; an
        operator's whole line."""
        layouts = {r.role: r.layout.to_event() for r in self._records if notes.of_record(r).get("layout")}
        found = {"roles": self._roles, "layouts": layouts}
        return {k: v for k, v in found.items() if v} | ({"op": notes.of_op(self._op)} if self._op else {})

    def _take(self, r: Record) -> None:
        kind, _, rest = r.role.partition(".")
        info = info_of(r)
        if kind == "param":
            word, self.out.setdefault(PARAMETERS, {})[rest] = f"parameters.{rest}", info
        elif kind == "input" and _places(r.role) is None:
            word, self.out[KEYWORDS][rest] = f"kwargs.{rest}", info
        else:
            section = self.out[INPUTS if kind == "input" else OUTPUTS]
            places = _places(r.role) if kind in ("input", "output") else None
            if places is None or not _put(section, places, info):
                places = [len(section)]
                section.append(info)
            word = ".".join(("input" if kind == "input" else "output", *map(str, places)))
            if word != r.role:
                self._roles[word] = r.role
        self.tensors.append((word, r, info))

    def _value(self, value: Any, word: str) -> Any:
        """A VALUE as msprobe describes arguments."""
        if isinstance(value, Mapping):
            if "tensor" in value:
                return self._tensor(value["tensor"], word)
            if "list" in value:
                return [self._value(v, f"{word}.{i}") for i, v in enumerate(value["list"])]
            if "float" in value:
                return {"type": "float", "value": float(value["float"])}
            kind, said = next(iter(value.items()))
            if kind == "complex":
                return {"type": "complex", "value": said}
            if kind in _TYPES:
                return {"type": _TYPES[kind], "value": said if kind == "device" else f"torch.{said}"}
            if kind == "slice":
                return {"type": "slice", "value": said}
            return {"type": "ellipsis" if kind == "ellipsis" else "skipped", "value": str(said)}
        if value is None:
            return None
        return {"type": type(value).__name__, "value": value}

    def _tensor(self, t: Mapping[str, Any], word: str) -> dict[str, Any]:
        role = str(t["role"])
        r = self._left.pop(role, None) or self._params.get(str(t.get("param", "")))
        if r is None:
            about = {"type": "torch.Tensor", "dtype": f"torch.{t['dtype']}", "shape": list(t.get("shape", []))}
            return {**about, **{theirs: t.get(ours) for ours, theirs in STATS.items()}, "requires_grad": False}
        # Of a cache the record holds the blocks that the call touches, and the file has their shape.
        info = info_of(r) | ({} if t.get("blocks") else {"shape": list(t.get("shape", r.shape))})
        self.tensors.append((word, r, info))
        if word.replace("kwargs.", "input.", 1) != role:
            self._roles[word] = role
        return info


def _places(role: str) -> list[int] | None:
    """The numbers of ``input.2.1``; None for a role with a name in it, or without any."""
    parts = role.split(".")[1:]
    if not parts or not all(p.isdecimal() and len(p) < 4 for p in parts):
        return None
    return [int(p) for p in parts]


def _put(section: list[Any], places: Sequence[int], info: Any) -> bool:
    """Puts ``info`` at its place in nested lists; False where something else is there."""
    for at in places[:-1]:
        section.extend([None] * (at + 1 - len(section)))
        if section[at] is None:
            section[at] = []
        if not isinstance(section[at], list):
            return False
        section = section[at]
    at = places[-1]
    section.extend([None] * (at + 1 - len(section)))
    if section[at] is not None:
        return False
    section[at] = info
    return True


def info_of(r: Record) -> dict[str, Any]:
    """A tensor as msprobe describes it, statistics included, without its file."""
    s = r.stats
    values: dict[str, float | None] = dict.fromkeys(STATS.values(), math.nan if s is not None and s.nan else None)
    if s is not None and not s.nan:
        known = STATS if DTYPES[r.dtype].kind == "float" else ("max", "min")  # msprobe takes no others of integers
        values |= {STATS[name]: getattr(s, name) for name in known}
    about = {"type": "torch.Tensor", "dtype": f"torch.{r.dtype}", "shape": list(r.shape)}
    return {**about, **values, "requires_grad": False}
