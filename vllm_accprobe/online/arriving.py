"""A dump's calls while it grows: only those of some steps, with what earlier rounds have seen of each tap.

Not here: which steps (live.py), how a call is made (opcheck/calls/records.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.opcheck.calls.history import Past
from vllm_accprobe.opcheck.calls.module_index import ModuleIndex
from vllm_accprobe.opcheck.calls.neighbours import Neighbours
from vllm_accprobe.opcheck.calls.records import Calls, Captured


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
