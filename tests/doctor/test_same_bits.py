"""Rows of two dumps are paired by request and position, and only equal is equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from doctor import small_engine
from doctor.small_engine import CHANGES, TAPS

from vllm_accprobe.config import PREFIX
from vllm_accprobe.doctor.graph_proof import Bits, Tally, first_difference, outcome
from vllm_accprobe.dump.journal_writer import digest
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.writer import RankWriter, write_run_json


def bits(root: Path, **settings: str) -> Bits:
    small_engine.main({PREFIX + "DIR": str(root), **settings})
    return Bits(open_dump(root))


@pytest.mark.parametrize("number", range(len(TAPS)))
def test_the_first_place_whose_values_part(tmp_path: Path, number: int) -> None:
    right = bits(tmp_path / "a")
    wrong = bits(tmp_path / "b", **{CHANGES: TAPS[number]})
    parting = first_difference(right, wrong)
    assert parting is not None
    assert (parting.tap, parting.role, parting.spot.rows, parting.spot.differing) == (TAPS[number], "output.0", 16, 16)
    assert first_difference(right, right) is None


Rows = list[tuple[int, int, int]]
"""(request, first position, rows) of each step's only part."""
ONE_BY_ONE: Rows = [(0, 0, 1), (0, 1, 1), (0, 2, 1)]
TOGETHER: Rows = [(0, 0, 3)]


def roots(
    root: Path, steps: Rows, change: Callable[[np.ndarray, int], None] = lambda a, s: None, stats: bool = False
) -> Bits:
    """A dump of the root's output alone: row p holds p, p + 1, p + 2, p + 3."""
    write_run_json(root, {})
    w = RankWriter(root, 0, {}, budget_bytes=1 << 30, block_bytes=1 << 16)
    w.line({"event": "request", "req": 0, "id": "x", "prompt": "ab" * 16, "prompt_len": 3})
    for step, (req, pos, n) in enumerate(steps):
        w.line({"event": "step", "step": step, "batch": {"requests": 1, "tokens": n}})
        segment = {"req": req, "pos": pos, "n": n, "row": 0, "phase": "prefill"}
        w.line({"event": "rows", "step": step, "space": "tokens", "src_rows": n, "segments": [segment],
                "ids": list(range(pos, pos + n))})  # fmt: skip
        values = (np.arange(pos, pos + n, dtype="<f4")[:, None] + np.arange(4, dtype="<f4")).copy()
        change(values, step)
        at = [(values.ctypes.data, values.nbytes)]
        line = {
            "event": "tensor", "step": step, "tap": "<root>", "class": "M", "role": "output.0", "call": 0, "seq": 0,
            "dtype": "float32", "shape": list(values.shape), "rows": "tokens", "row_dim": 0, "hash": digest(at),
        }  # fmt: skip
        if stats:
            w.line(line)
        else:
            w.put(at, line)
    w.close("done", {})
    return Bits(open_dump(root))


def set_last(value: float) -> Callable[[np.ndarray, int], None]:
    def change(values: np.ndarray, step: int) -> None:
        values[-1, 0] = value

    return change


def test_other_batches_pair_all_the_same(tmp_path: Path) -> None:
    found = outcome(roots(tmp_path / "a", ONE_BY_ONE), roots(tmp_path / "b", TOGETHER))
    assert (found.root, found.batches, found.same) == (Tally(3, 0, 0.0), False, True)
    assert found.tokens == Tally(3, 0)
    wrong = outcome(
        roots(tmp_path / "c", TOGETHER),
        roots(tmp_path / "d", ONE_BY_ONE, lambda a, s: set_last(9)(a, s) if s == 1 else None),
    )
    assert (wrong.root.rows, wrong.root.differing) == (3, 1)
    # row 1 of (1, 2, 3, 4) has a 9 in place of the 1; all three rows are of one step of the first dump
    assert wrong.root.rel_l2 == pytest.approx(8 / math.sqrt(14 + 30 + 54))


@pytest.mark.parametrize(("ours", "theirs", "differ"), [(-0.0, 0.0, 1), (math.nan, math.nan, 0), (math.inf, 1.0, 1)])
def test_bits_are_compared_and_not_numbers(tmp_path: Path, ours: float, theirs: float, differ: int) -> None:
    pair = (
        roots(tmp_path / "a", TOGETHER, set_last(ours)),
        roots(tmp_path / "b", ONE_BY_ONE, lambda a, s: set_last(theirs)(a, s) if s == 2 else None),
    )
    assert outcome(*pair).root.differing == differ


def test_statistics_tell_by_their_hashes(tmp_path: Path) -> None:
    values = roots(tmp_path / "a", ONE_BY_ONE)
    assert outcome(values, roots(tmp_path / "b", ONE_BY_ONE, stats=True)).root == Tally(3, 0, 0.0)
    other = roots(tmp_path / "c", ONE_BY_ONE, lambda a, s: set_last(9)(a, s) if s == 1 else None, stats=True)
    assert outcome(values, other).root == Tally(3, 1, 0.0)
    # rows of a whole whose values are not there cannot be told apart
    assert outcome(values, roots(tmp_path / "d", TOGETHER, stats=True)).root.same is None
