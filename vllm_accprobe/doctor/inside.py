"""Runs in a subprocess: imports vLLM and prints, as one JSON line, what only an import can tell.

The problem: importing vLLM may print, hang or crash. The idea: a process whose last line is JSON after a marker; every
question has a value or the error it met. Which names are needed, capture/vllm/names_by_release.py declares. Not here:
what the answers mean (checks.py).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from vllm_accprobe.capture.vllm.names_by_release import PLACES, Release, VllmPlace

MARKER = "accprobe-doctor:"
WORKER, ARGUMENTS = "the worker's wrapper", "the engine's arguments"
RUNNERS = {"V1": ("the V1 runner",), "V2": ("the V2 runner", "V2's batch", "V2's request states")}
SCHEDULER = ("SchedulerOutput", "NewRequestData", "CachedRequestData")
"""Places of the declaration."""


def main() -> None:
    """Prints the answers as one line of JSON; for a process of its own, in which vLLM may be imported."""
    answers: dict[str, Any] = {}
    for name, question in (
        ("version", _version),
        ("platform", _platform),
        ("worker", _worker),
        ("runners", lambda: {key: _runner(_named(*of), release_of(_version())) for key, of in RUNNERS.items()}),
        ("default_runner", _default_runner),
        ("scheduler", lambda: _all_lacking(*SCHEDULER)),
        ("engine_args", lambda: _all_lacking(ARGUMENTS)),
        ("capture", lambda: importlib.import_module("vllm_accprobe.capture.vllm.capturing").__name__),
    ):
        answers[name] = _answer(question)
        if name == "version" and "error" in answers[name]:
            break
    print("\n" + MARKER + json.dumps(answers), flush=True)


def _answer(question: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": question()}
    except (Exception, SystemExit) as error:  # whatever vLLM does on import, the other checks still run
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def _version() -> str:
    return str(importlib.import_module("vllm.version").__version__)


def _platform() -> dict[str, Any]:
    platform = importlib.import_module("vllm.platforms").current_platform
    kind = type(platform)
    try:
        device = str(platform.get_device_name())
    except Exception:  # many platforms have no names for their devices
        device = ""
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "device_type": str(getattr(platform, "device_type", "") or ""),
        "device": device,
        "own": kind.__module__.startswith("vllm.platforms."),
    }


def _named(*names: str) -> list[VllmPlace]:
    """The places with these names that the release at hand has."""
    return [place for place in PLACES if place.name in names and place.due(release_of(_version()))]


def release_of(version: str) -> Release | None:
    """``0.32.0+cpu`` → (0, 32, 0); None for a development version."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?!\d*\.?dev)", version)
    return tuple(int(n or 0) for n in found.groups()) if found else None


def _there(place: VllmPlace) -> str:
    """The module and class of the first of a place's modules that is there, "" for none."""
    for at in place.at:
        with contextlib.suppress(ImportError):  # of a package above it
            if importlib.util.find_spec(at.partition(":")[0]) is not None:
                return at
    return ""


def _lacking(place: VllmPlace, release: Release | None) -> list[str]:
    """Without what of a place there is no capture, as far as it is not there: members, fields, attributes that a method
    sets. Raises whatever importing it does."""
    module, _, name = _there(place).partition(":")
    cls = getattr(importlib.import_module(module), name, None) if module else None
    if cls is None:
        return [name or place.at[0]]
    have, source = {*dir(cls), *getattr(cls, "__dataclass_fields__", ())}, ""
    for base in cls.__mro__:
        with contextlib.suppress(OSError, TypeError):  # no source, as of what is built in
            source += inspect.getsource(base)
    needs = [need for need in place.needs if need.loss in _DECISIVE and need.due(release)]
    return [
        f"{name}.{'/'.join(need.names)}" for need in needs
        if not any(one in have or re.search(rf"\bself\.{one}\b", source) for one in need.names)
    ]  # fmt: skip


_DECISIVE = {place.loss for place in PLACES if place.name in (WORKER, ARGUMENTS, *SCHEDULER)}
"""What follows from a missing name where nothing can be captured, or no row can be identified."""


def _worker() -> str:
    (place,) = _named(WORKER)
    if lacking := _lacking(place, release_of(_version())):
        raise LookupError(f"no {', '.join(lacking)} in {' or '.join(at.partition(':')[0] for at in place.at)}")
    return _there(place).partition(":")[0]


def _runner(places: Sequence[VllmPlace], release: Release | None) -> dict[str, Any]:
    if not places or not _there(places[0]):
        return {"there": False}
    try:
        return {"there": True, "missing": [name for place in places for name in _lacking(place, release)]}
    except Exception as error:
        return {"there": True, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def _default_runner() -> str:
    """V1 or V2, as far as it can be known without a model's configuration."""
    wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if wanted is not None:
        return "V2" if wanted.strip().lower() in ("1", "true") else "V1"
    config = importlib.import_module("vllm.config").VllmConfig
    if not isinstance(getattr(config, "use_v2_model_runner", None), property):
        return "V1"
    triton = importlib.import_module("vllm.triton_utils").HAS_TRITON
    return "V2 or V1, by model" if triton else "V1"


def _all_lacking(*names: str) -> list[str]:
    return [name for place in _named(*names) for name in _lacking(place, release_of(_version()))]
