"""Which operators of an ATB dump are meant, by ids and by beginnings of names, as ait has them.

``24_1`` is the second operator of node 24 and all that runs inside; ``self`` is every type that begins with it, in
whatever case. Not here: the options' spelling (cli/opcheck.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from vllm_accprobe.formats.common.atb_params import id_of

_WORD = re.compile(r"(!?)([A-Za-z0-9_]+)", re.ASCII)
_ID = re.compile(r"\d{1,9}(_\d{1,9})*", re.ASCII)


def globs_of(words: Iterable[str]) -> tuple[str, ...]:
    """Globs, a plain word as all that begins with it, in any case."""
    return tuple(_begins(word) for word in words)


def _begins(word: str) -> str:
    match = _WORD.fullmatch(word)
    if match is None:
        return word
    return match[1] + "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in match[2]) + "*"


def is_id(text: str) -> bool:
    """Whether ``text`` is an operator's id as ait writes it."""
    return _ID.fullmatch(text) is not None


def has_id(tap: str, ids: Iterable[str]) -> bool:
    """Whether a tap is one of these operators, or inside of one."""
    own = id_of(tap)
    return any(own == i or own.startswith(f"{i}_") for i in ids)
