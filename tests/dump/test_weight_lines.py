"""Lines of weights' lives: read as they were written, refused where a stranger wrote them otherwise."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.dump.journal import (
    LIFE,
    WEIGHT,
    WeightEvent,
    WeightPrint,
    pack_rows,
    print_line,
    row_count,
    unpack_rows,
)
from vllm_accprobe.dump.journal_writer import encode

ROWS = np.array([1, 2**32 - 1, 7], np.uint32)
PRINT = WeightPrint(
    0, 2, "l.0.qkv", "QKV", "weight", "loaded", "bfloat16", (3, 8), "0" * 15 + "a", "f" * 16, 4, 1, "transposed", 0,
    (("q", 0, 2), ("k", 2, 3)), ((0, 2, 1),), True, pack_rows(ROWS),
)  # fmt: skip
EVENT = WeightEvent(0, 3, "lora", 9, "b", 1, 0.25, 400, "why")


def written(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(encode(line)))
    return found


def test_lines_are_read_as_they_were_written() -> None:
    assert WEIGHT.from_line(written(print_line(PRINT)), rank=0) == PRINT
    assert LIFE.from_line(written(LIFE.to_line(EVENT)), rank=0) == EVENT


def test_rows_are_read_as_they_were_written() -> None:
    found = PRINT.sums()
    assert found is not None
    assert found.tolist() == ROWS.tolist()


@pytest.mark.parametrize(
    "change",
    [{"order": "x" * 16}, {"bag": "0"}, {"shape": [-1]}, {"shape": [1 << 62, 1 << 62, 2]}, {"shape": "3"}, {"life": -1},
     {"parts": [["q", 0]]}, {"parts": 3}, {"written": [["a"]]}, {"nan": "2"}, {"tap": 3}],
)  # fmt: skip
def test_a_strangers_line_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        WEIGHT.from_line(written(print_line(PRINT)) | change, rank=0)


def test_rows_of_another_length_are_none() -> None:
    assert unpack_rows(pack_rows(ROWS), 4) is None
    assert unpack_rows("!" * 16, 3) is None


def test_rows_are_all_dimensions_but_the_last() -> None:
    assert [row_count(s) for s in ((), (5,), (2, 3), (2, 3, 4))] == [1, 5, 2, 6]
