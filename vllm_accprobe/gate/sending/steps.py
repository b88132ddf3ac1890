"""What the engine computed when: for each request its steps, as an engine that we started wrote them down.

    OUT/steps-0/steps-rank0.jsonl   {"step": 7, "requests": [["p3.pass1", 512, 256], ...]}: the request as it was sent,
                                    tokens computed before, tokens of this step; steps-1 of the next engine

The problem: whether a token came from a second chunk, a batch of nine or a prefix hit, its log-probability does not
tell. The idea: read the engine's own lines. Where a send was gone on with, what the last engine says of a request
counts: the others did not answer it. Not here: writing (capture/forcing/step_log.py), what is made of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = tuple[int, int, int, int]
"""Step, tokens computed before, tokens of this step, requests in this step."""


def folder_name(engine: int) -> str:
    return f"steps-{engine}"


def request_id(name: str, pass_index: int) -> str:
    """What the prompt ``name`` is called in pass ``pass_index``: a server may not have one id twice."""
    return name if pass_index == 0 else f"{name}.pass{pass_index}"


@dataclass(frozen=True)
class Steps:
    """by_request: rows of each request id."""

    by_request: dict[str, list[Row]] = field(default_factory=dict)

    def rows(self, pass_index: int, name: str) -> list[Row]:
        """In the order of computation; empty where the server was not ours. A request that was preempted has rows
        for the same tokens again."""
        return self.by_request.get(request_id(name, pass_index), [])


def read(out: Path) -> Steps:
    """Of a folder of `send`; what is no such line is left out. Raises OSError."""
    found: dict[str, list[Row]] = {}
    for folder in sorted((p for p in out.glob("steps-*") if _number(p) is not None), key=lambda p: _number(p) or 0):
        engine: dict[str, list[Row]] = {}
        for path in sorted(folder.glob("steps-rank*.jsonl")):
            _add(engine, path)
        found |= engine
    return Steps(found)


def _number(path: Path) -> int | None:
    said = re.fullmatch(r"steps-(\d{1,6})", path.name)
    return int(said[1]) if said and path.is_dir() else None


def _add(engine: dict[str, list[Row]], path: Path) -> None:
    for line in _lines(path):
        try:
            step, parts = int(line["step"]), [(str(name), int(a), int(n)) for name, a, n in line["requests"]]
        except (KeyError, TypeError, ValueError):
            continue
        for name, before, n in parts:
            engine.setdefault(name, []).append((step, before, n, len(parts)))


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as f:
        for raw in f:
            try:
                yield json.loads(raw)
            except (ValueError, RecursionError):
                continue
