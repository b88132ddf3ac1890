"""Where the code of each compared module is written, on both sides.

The problem: whoever fixes a culprit looks for its file, and two machines may run two files. The idea: what each capture
wrote down of a module (capture/taps/source.py), by mine's name. Not here: the words (report/neighbours/).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_accprobe.align.names import TapPair

Sources = dict[str, "tuple[str | None, str | None]"]
"""Mine's tap → (golden's ``package/file.py:line``, mine's), of taps of which at least one side knows it."""


def sources_of(pairs: Iterable[TapPair], golden: Any, mine: Any) -> Sources:
    """pairs: of the names' plan."""
    known = [{m.tap: m.source for ms in d.modules.values() for m in ms if m.source} for d in (golden, mine)]
    found = {p.mine.tap: (known[0].get(p.golden.tap), known[1].get(p.mine.tap)) for p in pairs}
    return {tap: both for tap, both in found.items() if any(both)}
