"""Weights that differ from golden's, within one dump, and those that loading did not write."""

import numpy as np
import pytest
from judge.lives import lives, made, weight

from vllm_accprobe.comparison import messages
from vllm_accprobe.dump.journal import Lives, WeightPrint
from vllm_accprobe.judge.weights import NEVER_WRITTEN, any_layers, faults_within, side_of, weights_between

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
        "golden recorded nothing of its weights: mine's 2 were checked by themselves after loading, reload 1"
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


OTHERS = [made(life, weight(10 + i), tap=f"o.{i}") for life in (0, 1) for i in range(4)]
Q_AND_K = (("q", 0, 2), ("k", 2, 6))


def rows_of(bits: np.ndarray, *order: int) -> np.ndarray:
    return bits[list(order)]


def one_value_off() -> np.ndarray:
    changed = OLD.copy()
    changed[3, 2] += 1
    return changed


PACKED_AGAIN = [made(0, OLD), made(0, OLD[::-1].copy(), "packed", undone="unknown")]
"""Of an order that is not known."""
LIVES: dict[str, tuple[list[WeightPrint], tuple[str, ...], dict[str, str]]] = {
    "a clean reload": ([made(0, OLD), made(1, OLD), *OTHERS], ("reload",), {}),
    "a clean reload of other values": ([made(0, OLD), made(1, NEW), *OTHERS], ("reload",), {}),
    "rows that a reload skips": (
        [made(0, OLD, parts=Q_AND_K), made(1, OLD, written=((2, 6, 1),), parts=Q_AND_K), *OTHERS], ("reload",),
        {"what": "not written", "rows": "q", "event": "reload 1", "says": "contains its earlier values"},
    ),
    "a bucket that means to write one layer": (
        [made(0, OLD), *OTHERS[:4], made(1, NEW), *(made(1, weight(10 + i), tap=f"o.{i}", times=0) for i in range(4))],
        ("sync",), {},
    ),
    "two rows that packing exchanges": (
        [made(0, OLD), made(0, rows_of(OLD, 0, 4, 2, 3, 1, 5), "packed")], (),
        {"what": "exchanged", "rows": "rows 1, 4"},
    ),
    "rows of an expert, counted within it": (
        [made(0, OLD, block=3), made(0, rows_of(OLD, 0, 1, 2, 5, 4, 3), "packed", block=3)], (),
        {"says": "rows 0 and 2 were exchanged", "rows": "rows 0, 2 of expert 1"},
    ),
    "a value": ([made(0, OLD), made(0, one_value_off(), "packed")], (), {"what": "value"}),
    "an order is not a value": (PACKED_AGAIN, (), {}),
    "scales of 0": ([made(0, OLD * 0, name="weight_scale")], (), {"what": "zero"}),
    "scales of NaN": ([made(0, OLD, name="weight_scale", nan=2)], (), {"what": "NaN"}),
    "scales in part": (
        [made(0, OLD, name="weight_scale", raw=True, written=((0, 3, 1),))], (), {"what": "never filled"},
    ),
    "a sleep that changes nothing": ([made(0, OLD), made(1, OLD, "packed")], ("wake",), {}),
    "a sleep that changes all": ([made(0, OLD), made(1, NEW, "packed")], ("wake",), {"what": "sleep"}),
    "an expert that is not packed again": (
        [*PACKED_AGAIN, made(1, NEW), *OTHERS], ("reload",), {"what": "not packed again"},
    ),
    "loading that writes all": ([made(0, OLD, raw=True), made(0, NEW, tap="l.1", raw=True)], (), {}),
    "memory that nobody filled": (
        [made(0, OLD, raw=True), made(0, NEW, tap="l.1", times=0, raw=True)], (),
        {"what": NEVER_WRITTEN, "tap": "l.1", "rows": "",
         "says": "l.1.weight was never written by loading: it contains earlier values of the memory"},
    ),
    "some rows of it": (
        [made(0, OLD, times=4, raw=True)], (), {"says": "l.0.weight (rows 4, 5) was never written by loading"},
    ),
    "what the module filled, and other layers were written": (
        [made(0, weight(i), tap=f"layers.{i}.norm", times=6 if i else 0) for i in range(3)], (),
        {"tap": "layers.0.norm", "says": "as initialised, while loading wrote that of other layers"},
    ),
    "a constant": ([made(0, OLD), made(0, NEW, tap="model", name="normalizer", times=0)], (), {}),
    "a table": ([made(0, OLD), made(0, NEW, tap="l.1", name="cos_sin_cache", times=0, raw=True)], (), {}),
    "where nobody looked": ([made(0, OLD, written=None), made(0, NEW, tap="l.1", written=None)], (), {}),
    "alone": ([made(0, OLD, times=0, raw=True)], (), {}),
}  # fmt: skip
"""Life → its prints, its later events, and what its only finding has; {}: none."""


@pytest.mark.parametrize("life", LIVES)
def test_the_life_of_a_weight(life):
    prints, kinds, expected = LIVES[life]
    found = faults_within(side_of(lives(prints, *kinds)), "mine")
    assert len(found) == bool(expected), found
    for name, value in expected.items():
        seen = getattr(found[0], name)
        assert value in seen if name == "says" else seen == value


def test_form() -> None:
    assert any_layers("model.layers.3.mlp.experts.12", "w2") == any_layers("model.layers.4.mlp.experts.0", "w2")
