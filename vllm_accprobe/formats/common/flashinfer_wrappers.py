"""Calls of FlashInfer's wrappers: what was planned, and on which object, for the run that needs it.

The problem: attention is three calls of one object, ``__init__`` with a workspace, ``plan`` with lengths and pages, and
``run`` with queries and a cache; each is a folder of its own, and a run means nothing without its plan. The idea: the
recorder notes the object's address (``self_id``) and process, folders are in order of time, so the last plan before a
run on the same object is its own; the plan's arguments become arguments ``plan.<name>`` of the run, those of the
constructor ``init.<name>``, by the signatures that the recorder wrote down. A workspace is memory that nobody had
written to. Source: flashinfer/api_logging.py of 0.7.2, flashinfer_api and replay_sequence.
Not here: folders and files (formats/flashinfer.py), values (flashinfer_calls.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_accprobe.formats.common.flashinfer_calls import arguments, parameters, role_of
from vllm_accprobe.formats.io.plain_file import FileTensor

INIT, PLAN = "init", "plan"
_METHODS = {"__init__": INIT, "plan": PLAN}
_WORKSPACE = "workspace"
_UNPLANNED = "no plan of its object was recorded"
_Object = tuple[object, object]


@dataclass(frozen=True)
class Told:
    """Named arguments, VALUES, and the tensors that they name, by role."""

    named: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, tuple[str, FileTensor]] = field(default_factory=dict)


class PlannedObjects:
    """What each object was told so far."""

    def __init__(self) -> None:
        self._told: dict[tuple[_Object, str], Told] = {}

    def part(self, told: Mapping[str, Any]) -> str:
        """``init`` or ``plan`` where the call is one of these on an object, else ""."""
        method = str(told.get("function_name")).rpartition(".")[2]
        return _METHODS.get(method, "") if told.get("self_id") is not None else ""

    def keep(self, told: Mapping[str, Any], held: Mapping[str, FileTensor], folder: str) -> None:
        """Remembers an ``init`` or a ``plan``. held: its tensors by role; folder: what they are called by."""
        part = self.part(told)
        args, kwargs = arguments(told, held, (), "")
        names = parameters(str(told.get("function_signature", "")))
        named = {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
        if len(args) > max(len(names), 1):
            named["*"] = {"skipped": "its signature was not recorded", "role": f"input.{part}"}
        found: dict[str, tuple[str, FileTensor]] = {}
        kept = {
            name: self._moved(value, f"input.{part}.{name}", held, found, folder)
            for name, value in named.items()
            if _WORKSPACE not in name
        }
        self._told[_object(told), part] = Told(kept, found)
        if part == INIT:  # an address is used again when its object is gone
            self._told.pop((_object(told), PLAN), None)

    def _moved(
        self, value: Any, role: str, held: Mapping[str, FileTensor], found: dict[str, tuple[str, FileTensor]],
        folder: str,
    ) -> Any:  # fmt: skip
        """The same VALUE with its tensors under roles of the run."""
        if isinstance(value, dict) and "tensor" in value:
            found[role] = folder, held[value["tensor"]["role"]]
            return {"tensor": {**value["tensor"], "role": role}}
        if isinstance(value, dict) and "list" in value:
            return {"list": [self._moved(v, f"{role}.{i}", held, found, folder) for i, v in enumerate(value["list"])]}
        if isinstance(value, dict) and "skipped" in value:
            return {**value, "role": role}
        return value

    def of_run(self, told: Mapping[str, Any]) -> Told:
        """What the object of a run was told; nothing for a function without an object."""
        if told.get("self_id") is None:
            return Told()
        named: dict[str, Any] = {}
        held: dict[str, tuple[str, FileTensor]] = {}
        for part in (INIT, PLAN):
            known = self._told.get((_object(told), part))
            if known is not None:
                named |= {f"{part}.{name}": value for name, value in known.named.items()}
                held |= known.held
            elif part == PLAN:
                named[PLAN] = {"skipped": _UNPLANNED, "role": "input.plan"}
        return Told(named, held)


def _object(told: Mapping[str, Any]) -> _Object:
    return str(told.get("process_id")), str(told.get("self_id"))


def known_role(key: str, side: str) -> str | None:
    """The role of a file's key; None where it is none of that side's, ``inputs`` or ``outputs``."""
    role = role_of(key)
    return role if role is not None and role.startswith("input.") == (side == "inputs") else None
