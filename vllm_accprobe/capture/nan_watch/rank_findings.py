"""What errcheck has found on one rank so far, and its report on the disk.

The problem: the first alarm is the one that counts, yet those after it are to be counted, too; and a rank that is
killed must have left how far it came. The idea: one object that is told of alarms and writes itself, now and then and
at every change; a disk that does not take it is said once. Not here: finding and locating (watch.py, keep.py), the
file (dump/findings.py).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.dump.files import beside
from vllm_accprobe.dump.findings import FirstBad, RankReport, write

_PLACES = 100
"""Taps whose later alarms are counted apart."""
_REPORT_S = 10.0


class RankFindings:
    """The findings of one rank. ``parameters``: sentences on bad ones, by tap; ``taps``: how many are watched;
    ``steps``: how many were seen; ``first``: the alarm that counts. parallel: the rank's place among the others."""

    def __init__(self, root: Path, kinds: tuple[str, ...], parallel: Mapping[str, Any]) -> None:
        self.root = root
        self.first: FirstBad | None = None
        self.parameters: dict[str, list[str]] = {}
        self.taps = self.steps = 0
        self._kinds = kinds
        self._parallel = parallel
        self._later = 0
        self._places: Counter[str] = Counter()
        self._written = time.monotonic()
        self._fails = False

    def settle(self) -> None:
        """A second engine of one process writes beside the first one's."""
        for place in beside(self.root):
            if not (place / f"errcheck-rank{self._parallel['rank']:04d}.json").exists():
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.root = place
                return

    def counts(self, tap: str, held: bool) -> bool:
        """Told of an alarm: whether it is the one that counts, the first, or again at the first one's tap, now that its
        tensors are ``held``. Others are counted as later ones."""
        first = self.first
        if first is None:
            return True
        self._later += 1
        if len(self._places) < _PLACES or tap in self._places:
            self._places[tap] += 1
        return not first.dtype and held and tap == first.tap

    def old(self) -> bool:
        """Whether the report is so old that a killed rank would not have left how far it came."""
        return time.monotonic() - self._written > _REPORT_S

    def write(self, state: str, why: str = "") -> None:
        """Writes the report. Never raises for the disk."""
        self._written = time.monotonic()
        report = RankReport(
            rank=self._parallel["rank"],
            pid=os.getpid(),
            pp=self._parallel["pp"][0],
            dp=self._parallel["dp"][0] if self._parallel["dp"][1] > 1 else 0,
            state=state,
            why=why,
            kinds=self._kinds,
            taps=self.taps,
            steps=self.steps,
            later=self._later,
            places=dict(self._places),
            first=self.first,
            parameters=tuple(text for texts in self.parameters.values() for text in texts),
        )
        try:
            write(self.root, report)
        except OSError as error:
            if not self._fails:
                self._fails = True
                say(f"errcheck: its findings cannot be written to {self.root}: {error.strerror or error}")
