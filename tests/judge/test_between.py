"""Golden's weights against mine's: from which event on they differ, and who is not blamed for it."""

from __future__ import annotations

from judge.lives import lives, made, weight

from vllm_accprobe.comparison import messages
from vllm_accprobe.dump.journal import Lives
from vllm_accprobe.judge.weights import weights_between

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
