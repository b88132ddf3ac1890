"""Writes a golden pack: one zip file of a few megabytes from a dump (docs/golden.md).

Not here: sketches (sketch.py), reading a pack (opened.py), capture of a pack's rows (make.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RequestShape:
    """What `rows_wanted` must know of one request.

    prompt_len: positions of its prompt. generated: forwards of generated tokens, whose rows lie at positions
    prompt_len .. prompt_len + generated - 1. chunk_ends: last positions of the prefill's chunks, where they are known
    already; the prompt's last position always counts as one. prompt: `hash_tokens` of the ids, which makes the random
    rows another choice for each prompt; "" is a prompt like any other."""

    prompt_len: int
    generated: int = 0
    chunk_ends: tuple[int, ...] = ()
    prompt: str = ""


@dataclass(frozen=True)
class RowChoice:
    """rows: (index of the request, position), the most important first: a budget cuts the end."""

    rows: tuple[tuple[int, int], ...]

    def of(self, request: int) -> tuple[int, ...]:
        """The request's positions, ascending."""
        return tuple(sorted(position for r, position in self.rows if r == request))


@dataclass(frozen=True)
class PackSummary:
    """What `pack` wrote. bytes: of the file; taps: that have a full row or a sketch; rows_full, rows_sketched: rows
    (request, position) that have a full row, only sketches; left_out: reason → rows of tensors."""

    bytes: int
    taps: int
    rows_full: int
    rows_sketched: int
    left_out: Mapping[str, int] = field(default_factory=dict)


def rows_wanted(requests: Sequence[RequestShape], seed: int) -> RowChoice:
    """Which rows a pack stores in full, by rule: first, last of the prompt, chunk ends, decode, random by ``seed``."""
    raise NotImplementedError


def pack(
    dump: Path, out: Path, *, max_bytes: int | None = None, seed: int = 0, prompts: Path | None = None
) -> PackSummary:
    """Writes the pack ``out`` of the dump at ``dump``. Raises DumpError, OSError, ValueError."""
    raise NotImplementedError
