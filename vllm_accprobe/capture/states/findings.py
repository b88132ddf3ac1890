"""What the ledger has found, as lines: once per place, whatever number of layers shows it.

The problem: one wrong block is wrong in every layer, in every step after, and for every request that reads it. The
idea: what is found in a step is gathered by kind, block and reader, and becomes one line with its first layer and how
many there were; after MOST_FINDINGS lines the rest is counted. Not here: finding (books.py, given.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm_accprobe.capture.core.rows import external_ids
from vllm_accprobe.capture.states.ledger import GroupBooks, Mismatch
from vllm_accprobe.capture.states.metadata import WrongNumber
from vllm_accprobe.capture.states.schedule import Schedule, Strange
from vllm_accprobe.dump.journal.state_lines import MOST_FINDINGS, StateFinding


class Findings:
    """The findings of one rank. write: takes each line's finding, when its step has ended."""

    def __init__(self, schedule: Schedule, write: Callable[[StateFinding], None]):
        self.schedule = schedule
        self.step = -1
        self.count = 0
        self.first: dict[int, str] = {}
        """By group, its first layer."""
        self._write = write
        self._open: dict[tuple[Any, ...], StateFinding] = {}

    def name(self, internal: str) -> str:
        """As the client calls a request."""
        return external_ids(internal)[-1]

    def number(self, number: int) -> str:
        """As the client calls the request of the ledger's ``number``; "" for nobody."""
        return self.name(self.schedule.names[number]) if 0 <= number < len(self.schedule.names) else ""

    def bytes(
        self, layer: Any, found: Mismatch, books: GroupBooks, reader: tuple[int, int] | None, step: int,
        how: str = "", size: int = 0, rows: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Bytes of a layer's block. reader: request's number and its column in the table, -1 where not known; rows: the
        positions, where it is not a whole block's."""
        number, column = reader or (-1, -1)
        low = column * size if column >= 0 and size else None
        high = None if low is None else low + size - 1
        low, high = rows or (low, high)
        text = how + found.how
        if found.other >= 0 and found.kind == "other":
            text += f", written last by request '{self.number(int(books.writer[found.other]))}'"
        self._add(
            (found.kind, layer.group, found.block, number, layer.part), layer.path,
            StateFinding(step, found.kind, self._cache(layer.group), layer.group, layer.path, 1, found.block,
                         self.number(number), text, None, low, high, **self._writer(books, found.block),
                         part=layer.part),
        )  # fmt: skip

    def given(self, group: int, wrong: WrongNumber, books: GroupBooks, layers: int, step: int) -> None:
        """A number of a group's metadata."""
        self._add(
            (wrong.kind, group, wrong.block, wrong.request, wrong.slot), "",
            StateFinding(step, wrong.kind, self._cache(group), group, "", layers, wrong.block, self.name(wrong.name),
                         wrong.how, wrong.slot, wrong.low, wrong.high, **self._writer(books, wrong.block),
                         first=self.first.get(group, "")),
        )  # fmt: skip

    def strange(self, strange: Strange, how: str, books: GroupBooks, layers: int, size: int, step: int) -> None:
        """A block, or a run of blocks, that the schedule cannot mean."""
        low, last = strange.column * size, max(strange.last, strange.column)
        self._add(
            (strange.kind, strange.group, strange.block, strange.request.number), "",
            StateFinding(step, strange.kind, self._cache(strange.group), strange.group, "", layers, strange.block,
                         self.name(strange.request.name), how, None, low, (last + 1) * size - 1,
                         **self._writer(books, strange.block), first=self.first.get(strange.group, "")),
        )  # fmt: skip

    def owner(self, number: int, context: tuple[str, str]) -> str:
        """``request 'a' (adapter a1)``, for a sentence. context: (adapter, salt)."""
        name = self.number(number)
        adapter = f" (adapter {context[0]})" if context[0] else ""
        return f"request '{name}'{adapter}" if name else "nobody who is known"

    def _writer(self, books: GroupBooks, block: int) -> dict[str, Any]:
        events = tuple(f"{what} in step {step}" for step, what in books.events.get(block, ()))
        writer = int(books.writer[block]) if 0 <= block < len(books.writer) else -1
        owner = int(self.schedule.taker[block]) if 0 <= block < len(self.schedule.taker) else -1
        if writer < 0 and owner >= 0 and not len(books.known):  # no bytes are watched: who it was given to writes it
            return {"writer": self.number(owner), "written": int(self.schedule.taken[block]), "between": events}
        if writer < 0:
            return {"between": events}
        return {
            "writer": self.number(writer), "written": int(books.step[block]), "wrote_low": int(books.low[block]),
            "wrote_high": int(books.high[block]), "between": events,
        }  # fmt: skip

    def _cache(self, group: int) -> str:
        return self.schedule.groups[group].kind

    def _add(self, key: tuple[Any, ...], layer: str, finding: StateFinding) -> None:
        known = self._open.get(key)
        if known is None:
            self._open[key] = finding
        elif layer and layer != known.layer:
            self._open[key] = dataclasses.replace(known, layers=known.layers + 1)

    def flush(self) -> None:
        """A step has ended: what it has found is written."""
        if not self._open:
            return
        found, self._open = list(self._open.values()), {}
        for one in found:
            self.count += 1
            if self.count <= MOST_FINDINGS:
                self._write(one)
