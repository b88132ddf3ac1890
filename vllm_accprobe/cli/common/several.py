"""Options that take several words at once: ``-metric abs kl``, as Python's argparse has them.

The problem: click's options take a fixed number of words, and other tools' documents do not. The idea: an option whose
metavar lists its words and ends in dots, ``[abs|kl]...``, takes all that follow and are among these; each becomes an
option of its own before click reads the line. A word that is none of them stays what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_LISTED = re.compile(r"\[([\w|]+)\]\.\.\.")


def spread(options: Iterable[Any], arguments: Sequence[str]) -> list[str]:
    """The command line with each further word of such an option behind the option's own name."""
    known: dict[str, set[str]] = {}
    for option in options:
        match = _LISTED.fullmatch(getattr(option, "metavar", None) or "")
        known |= {key: set(match[1].split("|")) for key in option.opts} if match else {}
    out: list[str] = []
    name, words = "", set[str]()
    for i, argument in enumerate(arguments):
        if argument == "--":
            return [*out, *arguments[i:]]
        if argument in known:
            name, words = argument, known[argument]
            out.append(argument)
        elif name and argument in words:
            out += [argument] if out[-1] == name else [name, argument]
        else:
            out.append(argument)
            name = ""
    return out
