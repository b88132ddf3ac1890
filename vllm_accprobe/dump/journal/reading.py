"""Reads one rank's journal into a Dump.

The problem: lines may be torn, damaged, from a newer release, or promise what the files do not hold. The idea: every
line stands for itself; what is not understood is counted and named in ``problems``; afterwards each record is checked
against the segment files and the row maps, and loses what does not hold. Not here: a line's fields (event_lines.py,
tensor_lines.py).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from vllm_accprobe.dump import image_calls
from vllm_accprobe.dump.face import Dump, row_space
from vllm_accprobe.dump.files import MISSING, DumpError, find_segment, journal_lines
from vllm_accprobe.dump.journal import events
from vllm_accprobe.dump.journal.event_lines import KINDS, LABEL
from vllm_accprobe.dump.journal.state_lines import STATE_KINDS
from vllm_accprobe.dump.journal.tensor_lines import record
from vllm_accprobe.dump.opcalls import op_call, replaced
from vllm_accprobe.dump.schema import JOURNAL, PADDING, SCHEMA, Layout, OpCall, Record, Skip, rank_dir
from vllm_accprobe.dump.weights.weight_lines import weight_event, weight_print

LOST = "payload that is not in its file"
"""The reason under which they are counted; their statistics and hashes are there still."""


def check_schema(e: dict[str, Any], where: Path) -> None:
    """Raises DumpError where the journal's first line names no schema, or one of a later accprobe."""
    schema = e.get("schema")
    if type(schema) is not int or schema < 1:
        raise DumpError(f"{where}: schema is {events.short(schema)}, not a number: not a dump of accprobe")
    if schema > SCHEMA:
        raise DumpError(f"{where}: schema {schema} is newer than this accprobe, which reads {SCHEMA}: upgrade it")


def _parse(line: bytes) -> Any:
    """JSON as Python's encoder writes it. orjson is several times as fast, but refuses half a surrogate pair."""
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)


class RankReader:
    """Reads one rank's journal into a dump."""

    def __init__(self, dump: Dump, rank: int):
        self.dump, self.rank = dump, rank
        self.directory = dump.path / rank_dir(rank)
        self.records: list[Record] = []
        self.ops: list[OpCall] = []
        self.bad: list[str] = []
        self.unknown: Counter[str] = Counter()
        self.layouts: dict[str, Layout] = {}
        self.torn = 0
        self.unreadable: str | None = None

    def read(self) -> None:
        """Reads the journal to its end, or to where it is torn; what is not understood is counted."""
        try:
            for number, line, length in journal_lines(self.directory / JOURNAL):
                if number:
                    self._line(number, line, length)
                else:
                    self.torn = length
        except OSError as error:
            self.unreadable = error.strerror or str(error)
        self.records = replaced(self.records, self.ops)
        self._check_payloads()
        self._check_rows()
        self.dump.padding += [r for r in self.records if r.rows == PADDING]
        self.dump.records += [r for r in self.records if r.rows != PADDING]
        self.dump.ops += self.ops
        self._report()

    def _line(self, number: int, line: bytes | None, length: int) -> None:
        try:
            if line is None:
                raise ValueError(f"{length} bytes long")
            e = _parse(line)
            if not isinstance(e, dict) or not isinstance(e.get("event"), str):
                raise ValueError("not an event")
            if e["event"] == "start":
                check_schema(e, self.directory / JOURNAL)
                self.dump.starts.setdefault(self.rank, e)
            else:
                self._event(e)
        except RecursionError:
            self.bad.append(f"line {number}: nested too deep")
        except (ValueError, OverflowError) as error:  # JSON's errors, too
            self.bad.append(f"line {number}: {error}")

    def _event(self, e: dict[str, Any]) -> None:
        kind, dump, rank = e["event"], self.dump, self.rank
        if kind in ("tensor", "param"):
            self.records.append(record(rank, e, self.layouts))
            return
        if kind == "op":
            self.ops.append(op_call(rank, e))
            return
        if kind == "weight":
            dump.lives.prints.append(weight_print(rank, e))
            return
        if kind == "life":
            dump.lives.events.append(weight_event(rank, e))
            return
        if kind == "error":
            dump.errors.append({**e, "rank": rank})
            return
        found = KINDS.get(kind) or STATE_KINDS.get(kind)
        if found is None:
            self.unknown[kind[:40]] += 1
            return
        value = found.from_line(e, **({"rank": rank} if found is LABEL else {}))
        if kind == "request":
            dump.requests[rank, value.req] = value
        elif kind == "rows" and value.space == PADDING:
            dump.padding_rows[rank, value.step] = value
        elif kind == "rows":
            dump.rows[rank, value.step, value.space] = value
        elif kind == "step":
            dump.steps[rank, value.step] = value
        elif kind == "module":
            dump.modules.setdefault(rank, []).append(value)
        elif kind == "masks":
            dump.masks.update({(rank, value.step, req): by for req, by in value.masked.items()})
        elif kind == "skip":
            dump.skips.append(value)
        elif kind == "state":
            dump.states.append((rank, value))
        elif kind == "cached":
            dump.cached.append((rank, value))
        elif kind == "states":
            dump.state_totals[rank] = value
        elif kind == "armed":
            dump.armed.append((rank, value))
        elif kind == "stop":
            dump.stops.setdefault(rank, value)
        elif kind == "end":
            dump.ends[rank] = value
        elif kind == "label":
            dump.labels[rank, value.step, value.tap, value.role, value.call] = value

    def _check_payloads(self) -> None:
        """Only a payload that its file really holds stays with its record."""
        lost: Counter[str] = Counter()
        failed: dict[int, str] = {}
        first: dict[str, Record] = {}
        for i, r in enumerate(self.records):
            if r.payload is None or r.payload.nbytes == 0:
                continue
            seg = r.payload.seg
            data = self.dump.data.get((self.rank, seg))
            if data is None and seg not in failed:
                try:
                    data = self.dump.data[self.rank, seg] = find_segment(self.directory, seg)
                except DumpError as error:
                    failed[seg] = str(error)
            if data is None:
                reason = failed[seg]
            elif r.payload.off + r.payload.nbytes > data.size:
                reason = f"{data.path.name} ends before them"
            else:
                continue
            if not lost[reason]:
                first[reason] = r
            lost[reason] += 1
            self.records[i] = replace(r, payload=None)
        for reason, n in lost.items():
            said = f"rank {self.rank}: {_tensors(n)} lost the payload: {reason}"
            self.dump.problems.append(said)
            self.dump.skips.append(Skip(first[reason].tap, LOST, first[reason].step, first[reason].role, n))
            if not reason.endswith(MISSING):
                self.dump.unread.append(said)

    def _check_rows(self) -> None:
        """A row map that does not fit its tensor would lead analysis astray: the tensor then has no rows."""
        odd = 0
        for i, r in enumerate(self.records):
            if r.rows is None or r.step is None:
                continue
            space = row_space(self.dump, r)
            if space is None or not r.shape or space.n != r.shape[r.row_dim]:
                self.records[i] = replace(r, rows=None)
                odd += 1
        if odd:
            self.dump.problems.append(f"rank {self.rank}: {_tensors(odd)} without a row map that fits: rows not known")
        for i in image_calls.unnamed(self.records, self.dump.rows):
            r = self.records[i]
            self.records[i] = replace(r, rows=None)
            self.dump.skips.append(Skip(r.tap, image_calls.REASON, r.step, r.role))

    def _report(self) -> None:
        say, rank = self.dump.problems.append, f"rank {self.rank}"
        if self.unreadable:
            say(f"{rank}: {JOURNAL} cannot be read{' further' if self.records else ''}: {self.unreadable}")
            return
        if self.rank not in self.dump.starts:
            say(f"{rank}: the journal has no first line: not all of it may be here")
        if self.bad:
            n = self.dump.bad_lines[self.rank] = len(self.bad)
            say(f"{rank}: {n} line{'s' * (n > 1)} could not be understood and {'are' if n > 1 else 'is'} ignored "
                f"(first: {self.bad[0][:200]})")  # fmt: skip
        if self.unknown:
            kinds = ", ".join(f"{k} ({n})" for k, n in self.unknown.most_common(5))
            say(f"{rank}: {sum(self.unknown.values())} events of unknown kind ignored: {kinds}")
        if self.torn:
            say(f"{rank}: the journal's last line is torn ({self.torn} bytes ignored)")
        if self.rank in self.dump.stops:
            say(f"{rank}: capture stopped early: {self.dump.stops[self.rank].reason}")
        if self.rank not in self.dump.ends:
            readable = sum(r.payload is not None for r in self.records)
            say(f"{rank} was not closed (killed, or still running): {_tensors(readable)} readable, "
                f"{len(self.records)} known")  # fmt: skip


def _tensors(n: int) -> str:
    return f"{n} tensor{'s' if n != 1 else ''}"
