"""What one dump alone shows of its weights: each rule finds its fault, and none speaks of a clean life."""

from __future__ import annotations

import numpy as np
import pytest
from judge.lives import lives, made, weight

from vllm_accprobe.dump.journal import WeightPrint
from vllm_accprobe.judge.weights import WeightFault, faults_within, side_of

OLD, NEW = weight(1), weight(2)
SWAPPED = OLD[[0, 4, 2, 3, 1, 5]]
OTHERS = [made(life, weight(10 + i), tap=f"o.{i}") for life in (0, 1) for i in range(4)]


def found(prints: list[WeightPrint], *kinds: str) -> list[WeightFault]:
    return faults_within(side_of(lives(prints, *kinds)), "mine")


@pytest.mark.parametrize("after", [OLD, NEW])
def test_a_clean_reload_is_silent(after: np.ndarray) -> None:
    assert found([made(0, OLD), made(1, after), *OTHERS], "reload") == []


def test_rows_that_a_reload_skips_are_named() -> None:
    parts = (("q", 0, 2), ("k", 2, 6))
    prints = [made(0, OLD, parts=parts), made(1, OLD, written=((2, 6, 1),), parts=parts), *OTHERS]
    (fault,) = found(prints, "reload")
    assert (fault.what, fault.rows, fault.event) == ("not written", "q", "reload 1")
    assert "holds what it held before" in fault.says


def test_a_bucket_that_means_to_write_one_layer_is_no_fault() -> None:
    untouched = [made(1, weight(10 + i), tap=f"o.{i}", times=0) for i in range(4)]
    assert found([made(0, OLD), *OTHERS[:4], made(1, NEW), *untouched], "sync") == []


def test_two_rows_that_packing_exchanges() -> None:
    (fault,) = found([made(0, OLD), made(0, SWAPPED, "packed")])
    assert (fault.what, fault.rows) == ("exchanged", "rows 1, 4")


def test_rows_of_an_expert_are_counted_within_it() -> None:
    (fault,) = found([made(0, OLD, block=3), made(0, OLD[[0, 1, 2, 5, 4, 3]], "packed", block=3)])
    assert fault.says.endswith("rows 0 and 2 were exchanged")
    assert fault.rows == "rows 0, 2 of expert 1"


def test_an_order_is_not_a_value() -> None:
    changed = OLD.copy()
    changed[3, 2] += 1
    (fault,) = found([made(0, OLD), made(0, changed, "packed")])
    assert fault.what == "value"
    assert found([made(0, OLD), made(0, OLD[::-1].copy(), "packed", undone="unknown")]) == []


@pytest.mark.parametrize(
    ("bits", "more", "what"),
    [(OLD * 0, {}, "zero"), (OLD, {"nan": 2}, "NaN"), (OLD, {"raw": True, "written": ((0, 3, 1),)}, "never filled")],
)
def test_scales(bits: np.ndarray, more: dict[str, object], what: str) -> None:
    (fault,) = found([made(0, bits, name="weight_scale", **more)])
    assert fault.what == what


def test_sleep_must_change_nothing() -> None:
    assert found([made(0, OLD), made(1, OLD, "packed")], "wake") == []
    (fault,) = found([made(0, OLD), made(1, NEW, "packed")], "wake")
    assert fault.what == "sleep"


def test_an_expert_that_is_not_packed_again() -> None:
    prints = [made(0, OLD), made(0, OLD[::-1].copy(), "packed", undone="unknown"), made(1, NEW), *OTHERS]
    (fault,) = found(prints, "reload")
    assert fault.what == "not packed again"
