"""What was found in a wheel, as lines, as JSON, and as a row of docs/compatibility.md.

The problem: two hundred names that are there say nothing, one that is not says everything. The idea: what is missing
first, each with what follows from it; then the modes in which rows are others; the rest is a number. Not here: looking
(holding.py, modes_found.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_accprobe.doctor.finding import ERROR, OK, WARNING, Finding
from vllm_accprobe.doctor.installed import release
from vllm_accprobe.doctor.wheel.holding import Lack, Looked, Wheels
from vllm_accprobe.doctor.wheel.modes_found import ModeFound


def findings(wheels: Wheels, looked: Sequence[Looked], modes: Sequence[ModeFound]) -> list[Finding]:
    """One finding for what was looked at, one for each lack, one for each mode."""
    out = [_what(wheels)]
    there, kinds = sum(one.there for one in looked), len(looked)
    out.append(Finding(OK, "names", f"{there} names that capture relies on are there, in {kinds} classes and modules"))
    out += [Finding(ERROR, "missing", f"{one.owner}: {one.what}{_at(one.at)}", one.loss) for one in lacks(looked)]
    out += [
        Finding(OK, f"mode: {one.mode.fate}", f"{one.mode.name} ({one.at})", "" if one.mode.on else one.mode.says)
        for one in modes
    ]
    return out


def lacks(looked: Sequence[Looked]) -> list[Lack]:
    """All of them."""
    return [lack for one in looked for lack in one.lacks]


def to_json(wheels: Wheels, looked: Sequence[Looked], modes: Sequence[ModeFound]) -> dict[str, Any]:
    """``accprobe doctor --wheel FILE --json``."""
    return {
        "schema": 1,
        "ok": not lacks(looked),
        "wheel": str(wheels.wheel),
        "vllm": str(wheels.base),
        "findings": [one.to_json() for one in findings(wheels, looked, modes)],
        "places": [{"place": one.place, "owner": one.owner, "at": one.at, "there": one.there} for one in looked],
        "missing": [
            {"place": one.place, "owner": one.owner, "what": one.what, "loss": one.loss, "at": one.at}
            for one in lacks(looked)
        ],
        "modes": [{"mode": one.mode.name, "fate": one.mode.fate, "says": one.mode.says, "at": one.at} for one in modes],
    }


def summary(looked: Sequence[Looked]) -> str:
    """The last line."""
    n = len(lacks(looked))
    if not n:
        return "everything that capture relies on is there"
    return f"{n} thing{'s' * (n > 1)} that capture relies on {'are' if n > 1 else 'is'} missing"


def _what(wheels: Wheels) -> Finding:
    if wheels.wheel is wheels.base:
        return Finding(OK, "wheel", str(wheels.wheel))
    text = f"{wheels.wheel}, with {wheels.base} as the vLLM that it is for"
    if release(wheels.wheel.version) != release(wheels.base.version):
        return Finding(WARNING, "wheel", text, "their releases differ: name the vLLM that this version is made for")
    return Finding(OK, "wheel", text)


def _at(where: str) -> str:
    return f" ({where})" if where else ""
