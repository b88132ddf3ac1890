"""What has arrived, of all ranks, whichever way it came.

The problem: pieces come over many lines or through files, in any order of ranks, faster than they can be checked. The
idea: one object that knows which ranks there are to be, what each has, and which have ended; that applies a piece and
says what to answer; and that makes whoever brings more wait while too much is unchecked. Not here: the lines
(receiver.py), the files (shared.py), the checks (checking.py).
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import open_regular
from vllm_accprobe.dump.schema import JOURNAL as JOURNAL_NAME
from vllm_accprobe.dump.schema import RUN_JSON, rank_dir
from vllm_accprobe.online.frames import DATA, END, JOURNAL, RUN, SYNC, FrameError, number, place_of, said_in
from vllm_accprobe.online.mirror import MirrorError, RankMirror, keep_run
from vllm_accprobe.whole_file import write_private

MOST_RANKS = 1 << 16
HOLD_S = 600.0
"""Chosen: after this time a little more is taken even if nothing was checked: shorter than a sender's patience."""
_FIRST_LINE = 1 << 20
_KEPT = "arrival.json"
_DIRECTORY = re.compile(r"rank(\d{4,5})", re.ASCII)


class RankArrival:
    """One rank. totals: outputs and taps of it, None where its sender cannot know; ended: all of it is here; wire: who
    brings it now; turn: held by whoever applies pieces."""

    def __init__(self, root: Path, rank: int, budget: int):
        self.mirror = RankMirror(root, rank, budget)
        self._root, self._kept = root, self.mirror.directory / _KEPT
        kept = _object(self._kept)
        self.totals = _totals(kept.get("totals"))
        self.ended = bool(self.mirror.written) and kept.get("ended") == self.mirror.written
        self.wire: Any = None
        self.turn = threading.Lock()

    def keep(self, totals: tuple[int, int] | None) -> None:
        """What a receiver that is started again is to know besides the files. Raises OSError."""
        self.totals = totals
        kept = {"totals": totals, "ended": self.mirror.written if self.ended else None}
        write_private(self._kept, json.dumps(kept) + "\n")

    def apply(self, kind: int, body: bytes | bytearray) -> dict[str, Any] | None:
        """Takes a piece; what is to be answered where it asks. Raises FrameError, MirrorError, OSError."""
        if kind == DATA:
            self.mirror.data(*place_of(body))
        elif kind == JOURNAL:
            _, offset, lines = place_of(body)
            self.mirror.journal(offset, lines)
            self.ended = self.ended and not self.mirror.waits
        elif kind == RUN:
            keep_run(self._root, bytes(body))
        elif kind == SYNC:
            return {"journal": self.mirror.sync()}
        elif kind == END:
            have = self.mirror.sync()
            if number(said_in(body), "journal", 1 << 50) != have:
                raise FrameError("the end is not where the journal ends")
            self.ended = True
            self.keep(self.totals)
            return {"journal": have}
        else:
            raise FrameError("a piece that no sender sends")
        return None


class ArrivedRanks:
    """root: where the copy of the dump grows; ranks: those that are taken, None for all; budget: bytes for each rank;
    ahead: bytes that may lie unchecked; say: gets lines."""

    def __init__(
        self, root: Path, ranks: Sequence[int] | None, *, budget: int, ahead: int, say: Callable[[str], object]
    ):  # fmt: skip
        self.root, self.budget, self.ahead, self.say = root, budget, ahead, say
        self.wanted = None if ranks is None else frozenset(ranks)
        self.ranks: dict[int, RankArrival] = {}
        self.checked_bytes = 0
        self.busy = False
        """Whether a check is under way; while none is, nobody has to wait."""
        self.stop = threading.Event()
        self._lock = threading.Lock()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(root.iterdir()):
            match = _DIRECTORY.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink() and (ranks is None or int(match[1]) in ranks):
                self.ranks[int(match[1])] = RankArrival(root, int(match[1]), budget)

    def begin(self, said: dict[str, Any]) -> tuple[int, RankArrival]:
        """The rank that a HELLO names. Raises FrameError, MirrorError, OSError."""
        if said.get("protocol") != 1:
            raise FrameError("it speaks another version of the protocol: install the same accprobe on both sides")
        rank = number(said, "rank", MOST_RANKS)
        if self.wanted is not None and rank not in self.wanted:
            raise MirrorError(f"rank {rank} is not asked for (--ranks, rank_list)")
        totals = _totals(said.get("totals"))
        with self._lock:
            if rank not in self.ranks:
                self.ranks[rank] = RankArrival(self.root, rank, self.budget)
            found = self.ranks[rank]
        if found.totals != totals:
            found.keep(totals)
        return rank, found

    @property
    def nbytes(self) -> int:
        return sum(r.mirror.nbytes for r in list(self.ranks.values()))

    @property
    def ended(self) -> list[int]:
        return sorted(rank for rank, r in list(self.ranks.items()) if r.ended)

    def room(self) -> None:
        """Waits while too much is unchecked: no further piece is read meanwhile, so that its sender waits, too."""
        until = time.monotonic() + HOLD_S
        while (
            self.busy and self.nbytes - self.checked_bytes > self.ahead and time.monotonic() < until
            and not self.stop.wait(0.02)
        ):  # fmt: skip
            pass

    def expected(self) -> list[int]:
        """The ranks that there are to be: those asked for, or those of the run by its own words, else those seen."""
        if self.wanted is not None:
            return sorted(self.wanted)
        seen = set(self.ranks)
        sizes = [n for rank in seen if (n := _world(self.root / rank_dir(rank) / JOURNAL_NAME))]
        chosen = _chosen(self.root / RUN_JSON)
        all_of_it = range(max(sizes, default=0))
        return sorted(seen | {r for r in all_of_it if not chosen or any(a <= r <= b for a, b in chosen)})

    def complete(self) -> bool:
        """Whether all of all ranks is here."""
        return bool(self.ranks) and set(self.expected()) <= set(self.ended) and all(
            r.ended for r in list(self.ranks.values())
        )  # fmt: skip

    def totals(self) -> tuple[int, int] | None:
        """Outputs and taps of all ranks, where every sender knows them."""
        found = [self.ranks[r].totals if r in self.ranks else None for r in self.expected()]
        known = [t for t in found if t is not None]
        return (sum(t[0] for t in known), sum(t[1] for t in known)) if known and len(known) == len(found) else None


def _totals(given: Any) -> tuple[int, int] | None:
    """Outputs and taps of a rank, as its sender says; None where it does not, or says nonsense."""
    if isinstance(given, list) and len(given) == 2 and all(type(n) is int and 0 <= n < 1 << 40 for n in given):
        return given[0], given[1]
    return None


def _world(journal: Path) -> int:
    """The number of ranks by a journal's first line, 0 where it does not say."""
    start = _object(journal, first_line=True)
    n = start.get("world_size")
    return n if type(n) is int and 0 < n <= MOST_RANKS else 0


def _chosen(run: Path) -> list[tuple[int, int]]:
    """The ranges of ranks that a probe was set to."""
    probe = _object(run).get("probe")
    ranks = probe.get("ranks") if isinstance(probe, dict) else None
    pairs = ranks if isinstance(ranks, list) else []
    return [(p[0], p[1]) for p in pairs if isinstance(p, list) and len(p) == 2 and all(type(n) is int for n in p)]


def _object(path: Path, first_line: bool = False) -> dict[str, Any]:
    try:
        with os.fdopen(open_regular(path), "rb") as f:
            text = f.readline(_FIRST_LINE) if first_line else f.read(_FIRST_LINE)
        found = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
