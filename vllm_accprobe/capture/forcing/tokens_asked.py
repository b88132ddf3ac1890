"""Which tokens a request is to be answered with, as its client says it.

The problem: after a token that two servers do not choose alike, they answer other texts, and nothing can be compared;
so a client names the tokens beforehand. The idea: they come with the request in ``vllm_xargs``, which every release
hands on to ``SamplingParams.extra_args``, as one string of numbers: 0.11 takes no lists there, and later releases look
at each item of a list. Not here: putting them in place (forced_sampler.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "accprobe_along"
"""Of ``vllm_xargs``: token ids in decimal with a blank between two, the first generated token first. The client has
the same word (gate/sending/ways.py)."""
_NUMBERS = re.compile(r"\d{1,9}(?: \d{1,9})*")


@dataclass(frozen=True)
class NamedTokens:
    """prompt: tokens of the prompt; ids: of the answer, from its first token on; largest of ids."""

    prompt: int
    ids: tuple[int, ...]
    largest: int

    def at(self, computed: int) -> int:
        """The token that follows the first ``computed`` ones; -1 where none is named: in the prompt, or after the
        last one."""
        k = computed - self.prompt
        return self.ids[k] if 0 <= k < len(self.ids) else -1


def asked(extra: Mapping[str, Any] | None, prompt: int) -> NamedTokens | None:
    """Of a request's extra_args; None where it asks for nothing. Raises ValueError, which quotes nothing."""
    said = (extra or {}).get(KEY)
    if said is None:
        return None
    if not isinstance(said, str) or not _NUMBERS.fullmatch(said):
        raise ValueError(f"{KEY} is not a text of token ids with a blank between two")
    ids = tuple(map(int, said.split(" ")))
    return NamedTokens(prompt, ids, max(ids))
