"""Command lines of other tools that the command line's library cannot read, rewritten before it sees them.

The problem: msprobe's ``-d 0 1 2 3`` is a list without commas, and its ``-j`` a flag where ours is a number of
processes. The idea: one function of words, for the commands that stand for another tool's. Not here: what the options
mean (precheck_options.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_DEVICE = re.compile(r"\d{1,4}|(?:cpu|cuda|npu|xpu|mps)(?::\d{1,4})?", re.ASCII)


def documented(command: str | None, arguments: Sequence[str]) -> list[str]:
    """``opcheck``: ``-d 0 1 2 3`` as ``-d 0,1,2,3`` (``-d npu:0 npu:1`` likewise, where no file is called so), and
    ``-j`` without a number as ``--jit_compile``. What stands behind ``--`` stays."""
    found: list[str] = []
    rest = list(arguments)
    while rest and command == "opcheck":
        word = rest.pop(0)
        if word == "--":
            return [*found, word, *rest]
        if word in ("-d", "--device"):
            devices = []
            while rest and _DEVICE.fullmatch(rest[0]) and (rest[0].isdecimal() or not Path(rest[0]).exists()):
                devices.append(rest.pop(0))
            found += [word, ",".join(devices)] if devices else [word]
        elif word == "-j" and not (rest and rest[0].isdecimal()):
            found.append("--jit_compile")
        else:
            found.append(word)
    return [*found, *rest]
