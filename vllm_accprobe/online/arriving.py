"""A dump's calls while it grows: only those of some steps, with what earlier rounds have seen of each tap.

Not here: which steps (live.py), how a call is made (opcheck/calls/records.py).
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.opcheck.calls.module_index import ModuleIndex
from vllm_accprobe.opcheck.calls.neighbours import Neighbours, Past
from vllm_accprobe.opcheck.calls.records import Calls, Captured

HELLO, WELCOME, RUN, DATA, JOURNAL_FRAME, SYNC, HAVE, END, REFUSED, READY = range(1, 11)
PROTOCOL = 1
HEAD = struct.Struct("<3sBQ")
PLACE = struct.Struct("<QQ")
"""Before the bytes of a segment and of the journal: segment (0 of the journal), offset in its data."""
MAGIC = b"ap1"
CHUNK = 1 << 20
"""Chosen: bytes of a payload that travel in one piece."""
WORDS = 64 << 10
"""Chosen: the longest JSON object but WELCOME's and RUN's."""
_LIMITS = {
    HELLO: WORDS, WELCOME: CHUNK, RUN: CHUNK, DATA: CHUNK + PLACE.size, JOURNAL_FRAME: CHUNK + PLACE.size, SYNC: 0,
    HAVE: WORDS, END: WORDS, REFUSED: WORDS, READY: 0,
}  # fmt: skip
MOST_SEGMENTS = 1 << 14
"""Chosen: of one rank; at a gigabyte each more than any disk holds."""

class KeptPasts(Neighbours):
    """Neighbours whose caches go on where the last round left them. pasts: by rank and tap; tap: the one at hand."""

    def __init__(self, index: ModuleIndex, pasts: dict[tuple[int, str], Past]):
        super().__init__(index)
        self.tap = ""
        self._pasts = pasts

    def past(self, rank: int, cls: str) -> Past | None:
        made = super().past(rank, cls)
        if made is None:
            return None
        kept = self._pasts.setdefault((rank, self.tap), made)
        kept.shared = made.shared  # more is known of who has whose beginning
        return kept


class ArrivingCalls(Calls):
    """pasts: what attention looks back at, which this adds to; keeps: of the first round, None in it."""

    def __init__(
        self, dump: Dump, model: Path | None, pasts: dict[tuple[int, str], Past], keeps: Mapping[str, str] | None
    ):  # fmt: skip
        super().__init__(dump, model)
        self._kept = self._neighbours = KeptPasts(self, pasts)
        self._keeps = keeps

    def only(self, low: int, high: int) -> None:
        """Leaves the calls of the steps from low + 1 to high, with all that lies beside them in these steps."""
        chosen = {
            key: {place: records for place, records in held.items() if low < place[0] <= high}
            for key, held in self.by_tap.items()
        }  # fmt: skip
        self.by_tap = defaultdict(dict, {key: held for key, held in chosen.items() if held})
        ops = {key: [o for o in held if o.step is not None and low < o.step <= high] for key, held in self.ops.items()}
        self.ops = {key: held for key, held in ops.items() if held}

    def of(self, rank: int, tap: str, **more: Any) -> Iterator[Captured]:  # type: ignore[override]
        self._kept.tap = tap
        return super().of(rank, tap, **more)
