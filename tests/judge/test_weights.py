"""Weights that differ from golden's, within one dump, and those that loading did not write."""

from typing import Any

import numpy as np
import pytest
from judge.lives import lives, made, weight

from vllm_accprobe.comparison import messages
from vllm_accprobe.dump.journal import Lives, WeightPrint
from vllm_accprobe.judge.weights import NEVER_WRITTEN, WeightFault, any_layers, faults_within, side_of, weights_between

OLD, NEW = weight(1), weight(2)
CLEAN = lives([made(0, OLD), made(1, NEW)], "reload")


def test_two_that_are_one_have_no_findings() -> None:
    found = weights_between(CLEAN, CLEAN)
    assert (found["findings"], found["compared"]) == ([], 1)


def test_a_dump_that_tells_nothing_is_not_compared() -> None:
    assert weights_between(Lives(), Lives()) == {}
    assert weights_between(CLEAN, Lives())["told"] == 0


def test_mines_own_life_is_told_beside_a_golden_that_says_nothing_of_its_weights() -> None:
    """Another tool's golden, or transformers': what mine's own dump shows needs none."""
    other = [made(0, OLD + 1, tap="l.1"), made(1, OLD + 2, tap="l.1")]
    left = lives([made(0, OLD), made(1, OLD, times=0), *other], "reload")
    found = weights_between(Lives(), left)
    assert [(f["what"], f["side"], f["module"]) for f in found["findings"]] == [("not written", "mine", "l.0")]
    assert (found["compared"], found["told"]) == (0, 2)
    assert [e["event"] for e in found["events"]["mine"]] == ["loading", "reload 1"]
    assert messages.weights(found)[0].startswith("the weights, not the kernel: l.0.weight")
    assert (
        "golden tells nothing of its weights: mine's 2 were looked at by themselves after loading, reload 1"
        in (messages.weights(found)[-1])
    )
    clean = weights_between(Lives(), lives([made(0, OLD), made(1, OLD + 1)], "reload"))
    assert clean["findings"] == []
    assert messages.weights(clean)[-1].endswith("after loading, reload 1: nothing wrong")


def test_a_parameter_that_stays_as_before_is_told_with_a_golden_only() -> None:
    stays = lives([made(0, OLD), made(1, OLD)], "reload")
    (found,) = weights_between(CLEAN, stays)["findings"]
    assert found["what"] == "differs"
    assert found["event"] == "reload 1"
    assert found["says"].endswith("golden's changed there and mine's did not")


def test_other_shapes_are_counted_and_not_compared() -> None:
    found = weights_between(CLEAN, lives([made(0, weight(1, 3)), made(1, weight(2, 3))], "reload"))
    assert (found["findings"], found["compared"]) == ([], 0)
    assert sum(found["not_compared"].values()) == 1


def test_a_fault_of_both_is_no_difference() -> None:
    both = lives([made(0, OLD), made(0, OLD[[1, 0, 2, 3, 4, 5]], "packed")])
    (found,) = weights_between(both, both)["findings"]
    assert (found["what"], found["side"]) == ("exchanged", "both")


def test_what_packing_computes_of_a_wrong_scale_is_not_blamed() -> None:
    def run(scale: int, times: int) -> Lives:
        return lives([
            made(0, OLD, name="weight_scale"), made(0, weight(7), name="sums", times=0),
            made(1, weight(scale), name="weight_scale", times=times), made(1, weight(scale + 50), name="sums"),
            *(made(life, weight(20), tap="o") for life in (0, 1)),
        ], "reload")  # fmt: skip

    (found,) = weights_between(run(2, 6), run(1, 0))["findings"]
    assert (found["what"], found["parameter"]) == ("not written", "weight_scale")


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
    assert "contains its earlier values" in fault.says


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


def faults(*prints: Any) -> list[WeightFault]:
    return faults_within(side_of(lives(list(prints))), "mine")


def test_loading_that_writes_all_is_silent() -> None:
    assert faults(made(0, weight(1), raw=True), made(0, weight(2), tap="l.1", raw=True)) == []


def test_memory_that_nobody_filled() -> None:
    (fault,) = faults(made(0, weight(1), raw=True), made(0, weight(2), tap="l.1", times=0, raw=True))
    assert (fault.what, fault.tap, fault.rows) == (NEVER_WRITTEN, "l.1", "")
    assert fault.says == "l.1.weight was never written by loading: it contains earlier values of the memory"


def test_some_rows_of_it() -> None:
    (fault,) = faults(made(0, weight(1), times=4, raw=True))
    assert fault.says.startswith("l.0.weight (rows 4, 5) was never written by loading")


def test_what_the_module_filled_and_other_layers_were_written() -> None:
    norm = [made(0, weight(i), tap=f"layers.{i}.norm", times=6 if i else 0) for i in range(3)]
    (fault,) = faults(*norm)
    assert fault.tap == "layers.0.norm"
    assert fault.says.endswith("as initialised, while loading wrote that of other layers")


def test_constants_and_tables_are_none() -> None:
    written = made(0, weight(1))
    assert faults(written, made(0, weight(2), tap="model", name="normalizer", times=0)) == []
    assert faults(written, made(0, weight(2), tap="l.1", name="cos_sin_cache", times=0, raw=True)) == []


def test_where_nobody_looked_nothing_is_known() -> None:
    assert faults(made(0, weight(1), written=None), made(0, weight(2), tap="l.1", written=None)) == []
    assert faults(made(0, weight(1), times=0, raw=True)) == []


def test_form() -> None:
    assert any_layers("model.layers.3.mlp.experts.12", "w2") == any_layers("model.layers.4.mlp.experts.0", "w2")
