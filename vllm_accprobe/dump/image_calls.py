"""Modules of an encoder that run once for each image, or once for each batch of images, of a step.

The problem: capture gives a tensor of an encoder the rows of all images of the step, and in some models a module is
called for one image after the other (a convolution in front of the blocks), or the encoder runs once for pictures and
once for videos; then half of the rows can look like all of them. The idea: in a step with several images a module that
is called several times, and more often than in steps with one image, has rows that nobody can name. Not here: images
that are dealt out to ranks, whose rows are exact (schema.DEALT).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from vllm_accprobe.dump.schema import DEALT, Record, RowSpace

REASON = "called several times in a step with several images: whose rows these are cannot be told"


def unnamed(records: Sequence[Record], rows: Mapping[tuple[int, int, str], RowSpace]) -> list[int]:
    """Which of one rank's ``records`` have rows of an encoder that cannot be trusted. rows: by (rank, step, space)."""
    calls: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, r in enumerate(records):
        if r.step is not None and r.rows is not None and r.rows.startswith("vision") and DEALT not in r.rows:
            calls[r.tap, r.role][r.step].append(i)
    found: list[int] = []
    for by_step in calls.values():
        if max(map(len, by_step.values())) < 2:
            continue
        several = {step: any(_several(records[i], rows) for i in at) for step, at in by_step.items()}
        usual = max((len(at) for step, at in by_step.items() if not several[step]), default=1)
        for step, at in by_step.items():
            if several[step] and len(at) > usual:
                found += at
    return found


def _several(record: Record, rows: Mapping[tuple[int, int, str], RowSpace]) -> bool:
    """Whether the step has more than one image, as far as its rows tell; those that were not selected count."""
    space = rows.get((record.rank, record.step or 0, record.rows or ""))
    if space is None:
        return False
    return len({(s.req, s.image) for s in space.segments}) > 1 or space.n < space.src_rows
