"""The process that checks calls while they come, and gives the rows of an offline check in the end.

The problem: opcheck goes tap by tap over a complete dump; here a dump grows step by step. The idea: each round reads
the copy's journals on from where the last one ended, and takes only the steps that are complete on all ranks and not
checked yet; what each tap has added up so far (pools, and what attention reads of earlier steps) is kept. In the end, a
tap that has the same calls with the same tensors in the complete dump keeps its rows; any other is checked once more
from the beginning. Where limits depend on how many outputs there will be, and a followed dump does not say, the rows of
the rounds are warnings, and opcheck makes the table.

Not here: when a round begins (serving.py).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from vllm_accprobe.align.tokens import is_sampled_token
from vllm_accprobe.dump.reader import Dump, GrowingDump
from vllm_accprobe.dump.record_table import TensorSite
from vllm_accprobe.formats import open_dump
from vllm_accprobe.judge.statistic import BUDGET, RATE, Budget
from vllm_accprobe.opcheck.calls.module_index import ModuleIndex
from vllm_accprobe.opcheck.calls.neighbours import Neighbours, Past
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.floors.pooled import Pools
from vllm_accprobe.opcheck.run.check_calls import check_calls
from vllm_accprobe.opcheck.run.job import STORED, Job, Tap
from vllm_accprobe.opcheck.run.open_job import OpenJob
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, OURS, SKIP

_PASTS = 2 << 30
"""Chosen: bytes of keys and values that are kept over rounds; beyond them attention is checked in the end."""
Key = tuple[int, str]


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
    """pasts: what attention looks back at, and children: taps below each one that any round has seen; this adds to
    both. keeps: of the first round, None in it."""

    def __init__(
        self, dump: Dump, model: Path | None, pasts: dict[tuple[int, str], Past],
        children: dict[tuple[int, str], list[str]], keeps: Mapping[str, str] | None,
    ):  # fmt: skip
        super().__init__(dump, model)
        self._kept = self._neighbours = KeptPasts(self, pasts)
        self._keeps = keeps
        for key, below in self.children.items():
            children[key] = list(dict.fromkeys([*children.get(key, ()), *below]))
        self.children = children

    def only(self, low: int, high: int) -> None:
        """Leaves the calls of the steps from low + 1 to high, with all that lies beside them in these steps."""
        chosen = {
            key: {place: records for place, records in written.items() if low < place[0] <= high}
            for key, written in self.by_tap.items()
        }  # fmt: skip
        self.by_tap = defaultdict(dict, {key: written for key, written in chosen.items() if written})
        ops = {key: [o for o in all_ if o.step is not None and low < o.step <= high] for key, all_ in self.ops.items()}
        self.ops = {key: some for key, some in ops.items() if some}

    def of(self, rank: int, tap: str, **more: Any) -> Iterator[Captured]:  # type: ignore[override]
        self._kept.tap = tap
        return super().of(rank, tap, **more)


class ArrivingJob(OpenJob):
    """A job on a dump that grows. spool: where rows wait; outputs, taps: of the whole dump, as its senders say, or
    None."""

    def __init__(self, job: Job, spool: IO[bytes], totals: tuple[int, int] | None):
        super().__init__(job)
        self._spool = spool
        self.budget = BUDGET if totals is None else Budget(RATE, max(totals[0], 1), max(totals[1], 1))
        self.options = replace(self.options, budget=self.budget)
        self.low = -1
        self.count = 0
        self._rows: dict[Key, list[tuple[int, int]]] = {}
        self._checked: dict[Key, dict[tuple[int | None, int], frozenset[str]]] = {}
        self._again: set[Key] = set()
        self._pools: dict[Key, Pools] = {}
        self._causes_at: dict[Key, Any] = {}
        self._pasts: dict[Key, Past] = {}
        self._children: dict[Key, list[str]] = {}
        self._growing = GrowingDump(job.dump)
        self._ranks: tuple[int, ...] = ()
        self._keeps: Mapping[str, str] | None = None
        self._later = False

    def look(self, ranks: Sequence[int], ended: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Checks what is complete and new; says what fails. ranks: that are to come; ended: that are all here. The last
        word has how many calls were checked so far."""
        begun = time.monotonic()
        dump = self._growing.look(self.low, _looked_back_at)
        high = _complete(dump, ranks, ended)
        opened = time.monotonic() - begun
        if high > self.low:
            model = Path(self.job.model) if self.job.model else None
            calls = ArrivingCalls(dump, model, self._pasts, self._children, self._keeps)
            calls.only(self.low, high)
            self.calls, self.low = calls, high
            self._ranks = self._ranks or dump.ranks
            self._keeps = calls.keeps()
            opened = time.monotonic() - begun
            for rank, tap, _ in calls.taps(self.job.ops):
                yield from self._tap(calls, rank, tap)
            self._trim()
        yield {"looked": self.count, "opened": opened}

    def _tap(self, calls: Calls, rank: int, tap: str) -> Iterator[dict[str, Any]]:
        key = rank, tap
        if self._later and key in self._again:
            return
        pools = self._pools.setdefault(key, Pools())
        found = ((captured, self._check(captured, pools)) for captured in calls.of(rank, tap))
        for captured, rows in check_calls(calls.dump, found):
            self._checked.setdefault(key, {})[captured.step, captured.call] = frozenset(captured.records)
            self.count += 1
            causes = self._causes_at.setdefault(key, self._causes_of_tap())
            for row in rows if causes is None else causes.with_cause(captured, rows):
                if row.status in (SKIP, ERROR) or row.unchecked_because:
                    self._again.add(key)  # what it lacks may come yet
                if row.status == FAIL:
                    yield {"fail": [rank, row.step, tap, row.cls, row.role, row.message]}
                line = json.dumps(row.to_plain()).encode()
                self._rows.setdefault(key, []).append((self._spool.seek(0, os.SEEK_END), len(line)))
                self._spool.write(line)

    def _trim(self) -> None:
        """Lets go of what attention looks back at where it grows too large; those taps are checked in the end."""
        written = (tensors for past in self._pasts.values() for tensors in past.written.values())
        size = sum(t.nbytes for tensors in written for t in tensors.values())
        if size > _PASTS:
            self._again |= set(self._pasts)
            self._pasts.clear()
            self._later = True

    def finish(self) -> Iterator[dict[str, Any]]:
        """The rows of the table, in opcheck's order; or why they are not those of the whole."""
        calls = Calls(open_dump(Path(self.job.dump)), Path(self.job.model) if self.job.model else None)
        if calls.budget() != self.budget:
            yield {"unsettled": "how many outputs there are was not known before the end"}
            return
        if calls.dump.ranks != self._ranks or calls.keeps() != self._keeps:
            yield {"unsettled": "the first calls did not show all that the whole dump shows"}
            return
        self.calls = calls
        again = 0
        for tap in self.taps():
            if tap != STORED and self._stands(calls, tap):
                yield from self._rows_of(tap)
                continue
            again += tap != STORED
            for row in self.rows(tap, {}, lambda step, call: None):
                yield {"row": row.to_plain()}
        yield {"finished": again, "problems": self.problems}

    def _stands(self, calls: Calls, tap: Tap) -> bool:
        key = tap[:2]
        if key in self._again:
            return False
        if key in calls.ops:
            written = calls.op_records.get(key, {})
            whole = {(o.step, o.call): frozenset(written.get((o.step, o.call), {})) for o in calls.ops[key]}
        else:
            whole = {place: frozenset(records) for place, records in calls.by_tap[key].items()}
        return whole == self._checked.get(key, {})

    def _rows_of(self, tap: Tap) -> Iterator[dict[str, Any]]:
        for at, length in self._rows.get(tap[:2], ()):
            self._spool.seek(at)
            yield {"row": json.loads(self._spool.read(length))}
        if self.source is None and self.options.standard == OURS and tap[:2] in self._pools:
            for row in self._pools[tap[:2]].rows(self.budget):
                yield {"row": row.to_plain()}


def _looked_back_at(site: TensorSite) -> bool:
    """Whether records of earlier steps are read for calls of later ones, besides what `Past` has."""
    return site.parameter or is_sampled_token(site.tap, site.role)


def _complete(dump: Dump, ranks: Sequence[int], ended: Sequence[int]) -> int:
    """The last step that is complete on all ranks: one that another has followed; -1 where a rank has not begun."""
    if set(ranks) - set(dump.ranks):
        return -1
    steps: dict[int, list[int]] = defaultdict(list)
    for rank, step in dump.steps:
        steps[rank].append(step)
    high = 1 << 62
    for rank in dump.ranks:
        if rank in dump.ends or rank in ended:
            continue
        known = sorted(steps[rank])
        high = min(high, known[-2] if len(known) > 1 else -1)
    return high


def main() -> None:
    """The protocol, as worker.py's: a job, then words, one JSON object a line. Ends with its input."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    with tempfile.TemporaryFile() as spool:
        try:
            first = json.loads(sys.stdin.readline())
            bench = ArrivingJob(Job.from_json(first["job"]), spool, first["totals"] and tuple(first["totals"]))
            say({"ready": True})
            for line in sys.stdin:
                request = json.loads(line)
                for message in bench.finish() if "finish" in request else bench.look(request["look"], request["ended"]):
                    say(message)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
