"""Which modes with other rows a wheel has, and the line of its source that shows it.

The problem: whether a release can be asked for context parallelism or FlashComm at all is said by its source only. The
idea: each mode names a file and what stands in a line of it; the first such line is the proof. Not here: the modes,
and what is done about each (capture/vllm/names/modes.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_accprobe.capture.vllm.names.modes import MODES, Mode
from vllm_accprobe.doctor.wheel.holding import Wheels


@dataclass(frozen=True)
class ModeFound:
    """at: ``file.py:line``."""

    mode: Mode
    at: str


def modes_found(wheels: Wheels) -> list[ModeFound]:
    """The modes of the wheel and its vLLM, in the declaration's order; a vendor's own line before vLLM's."""
    found = []
    for mode in MODES:
        at = next((where for mark in mode.marks if (where := _line(wheels, mark))), "")
        if at:
            found.append(ModeFound(mode, at))
    return found


def _line(wheels: Wheels, mark: str) -> str:
    end, _, text = mark.partition(":")
    for package in wheels.sources.packages:
        for file, data in sorted(package.files.items()):
            if f"/{file}".endswith(f"/{end}") and text.encode() in data:
                for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
                    if text in line and not line.lstrip().startswith("#"):
                        return f"{file}:{number}"
    return ""
