"""Wrong weights by the fingerprints of two dumps: which rank's rows, and where they stand in golden's whole tensor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge.lives import made

from vllm_accprobe.comparison.weight_places import due_rows, located, place_notes, with_causes
from vllm_accprobe.dump.journal import Lives, WeightEvent, WeightPrint
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Layout, Record
from vllm_accprobe.judge.weights import weights_between

COLUMN = "model.layers.0.mlp.gate_up_proj"
WHOLE = np.random.default_rng(0).integers(1, 1 << 15, (128, 8))
OTHER = np.random.default_rng(1).integers(1, 1 << 15, (128, 8))


def shard(size: int, index: int) -> Layout:
    return Layout("shard", "tp", index, size, -2, ((64 // size, 1), (64 // size, 1)))


def piece(bits: np.ndarray, size: int, rank: int) -> np.ndarray:
    found = due_rows(shard(size, rank), (128 // size, 8))
    assert found is not None
    assert found[1] == 128
    return bits[found[0]]


class Fake(Dump):
    """Prints of one parameter on some ranks, and of another one; no values."""

    def __init__(self, ranks: list[np.ndarray], other: np.ndarray = OTHER):
        super().__init__(Path("somewhere"), {})
        prints: list[WeightPrint] = []
        for rank, bits in enumerate(ranks):
            half = len(bits) // 2
            parts = (("gate", 0, half), ("up", half, 2 * half))
            prints.append(replace(made(0, bits, tap=COLUMN, parts=parts), rank=rank))
            prints.append(replace(made(0, other, tap="model.layers.1.mlp.gate_up_proj"), rank=rank))
            size = len(ranks)
            self.record(rank, COLUMN, bits.shape, shard(size, rank) if size > 1 else Layout("replicated"))
            self.record(rank, "model.layers.1.mlp.gate_up_proj", other.shape, Layout("replicated"))
        self.lives = Lives([WeightEvent(rank, 0, "load", 0) for rank in range(len(ranks))], prints)

    def record(self, rank: int, tap: str, shape: tuple[int, ...], layout: Layout) -> None:
        none: tuple[Any, ...] = (None, 0, None, None)
        self.records.append(Record(rank, None, tap, "", "param.weight", 0, 0, "bfloat16", shape, *none, layout, None))


def explained(golden: Dump, mine: Dump) -> dict[str, Any]:
    loaders: Any = (None, None)
    return located(weights_between(golden.lives, mine.lives), (golden, mine), [], [], loaders)


def changed(rows: slice, to: np.ndarray) -> np.ndarray:
    some = WHOLE.copy()
    some[rows] = to
    return some


HALVES = [piece(WHOLE, 2, r) for r in range(2)]
OF_ANOTHER_LAYER = "golden's model.layers.1.mlp.gate_up_proj.weight"


@pytest.mark.parametrize(("golden", "mine", "text"), [
    ([WHOLE], [WHOLE], []),
    ([WHOLE], [np.roll(WHOLE, 64, 0)], ["gate and up are exchanged"]),
    (HALVES, [HALVES[0], np.roll(HALVES[1], 32, 0)], ["rank 1's gate and rank 1's up are exchanged"]),
    (HALVES, [HALVES[0], HALVES[0]], ["all rows of rank 1 are golden's rows 32 before"]),
    ([WHOLE], [OTHER], [f"values are those of {OF_ANOTHER_LAYER}"]),
    ([WHOLE], [changed(slice(5, 9), OTHER[70:74])], [f"rows 5-8 stand in {OF_ANOTHER_LAYER}, from row 70 on"]),
    ([WHOLE], [changed(slice(10, 18), np.random.default_rng(5).integers(1, 1 << 15, (8, 8)))],
     ["rows 10-17 differ, and no other place in golden has them"]),
])  # fmt: skip
def test_where_wrong_rows_stand(golden: list[np.ndarray], mine: list[np.ndarray], text: list[str]) -> None:
    found = explained(Fake(golden), Fake(mine))
    assert [p["cause"]["text"] for p in found.get("places", []) if p["module"] == COLUMN] == text


def test_findings_and_origins_have_the_cause() -> None:
    golden, mine = Fake([WHOLE]), Fake([np.roll(WHOLE, 64, 0)])
    found = explained(golden, mine)
    (finding,) = found["findings"]
    assert finding["says"] == f"{COLUMN}.weight differs from golden's at loading: gate and up are exchanged"
    assert finding["cause"]["family"] == "address"
    assert place_notes(found) == []
    origins = with_causes([{"module": COLUMN, "role": "param.weight", "cause": None}], found)
    assert origins[0]["cause"] == finding["cause"]
    alone = found | {"findings": []}
    assert place_notes(alone) == [f"{COLUMN}.weight: gate and up are exchanged"]


@pytest.mark.parametrize(
    ("layout", "shape", "rows"),
    [
        (Layout("replicated"), (4, 8), [0, 1, 2, 3]),
        (Layout("shard", "tp", 1, 2, -2, ((2, 1),)), (2, 8), [2, 3]),
        (Layout("shard", "tp", 1, 2, -1, ((4, 1),)), (4,), [4, 5, 6, 7]),
        (Layout("shard", "tp", 3, 4, -2, ((2, 1), (1, 2), (1, 2))), (4, 8), [6, 7, 9, 11]),
        (Layout("shard", "ep", 1, 2, -3, ((2, 1),)), (2, 3, 8), [6, 7, 8, 9, 10, 11]),
    ],
)
def test_due_rows(layout: Layout, shape: tuple[int, ...], rows: list[int]) -> None:
    found = due_rows(layout, shape)
    assert found is not None
    assert found[0].tolist() == rows


def test_what_is_cut_through_its_rows_has_none() -> None:
    assert due_rows(Layout("shard", "tp", 0, 2, -1, ((4, 1),)), (8, 4)) is None
    assert due_rows(Layout("unknown", "tp", 0, 2), (8, 4)) is None
    assert due_rows(Layout("shard", "tp", 0, 2, -2, ((3, 1),)), (8, 4)) is None
    assert due_rows(Layout("shard", "tp", 0, 1 << 30, -2, ((8, 1),)), (8, 4)) is None
