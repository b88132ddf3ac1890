"""Experts that give out shared and routed sums apart, against those that add them."""

from hand_made import Dump, by_name, f32

from vllm_accprobe.align.bridge import bridge

TAP = "model.layers.0.mlp.experts"


def sides():
    """(adds inside, gives out apart)"""
    whole, apart = Dump(), Dump()
    whole.put(TAP, "input.hidden_states", f32([1, 2]), cls="FusedMoE")
    whole.put(TAP, "output.0", f32([5, 7]), cls="FusedMoE")
    apart.put(TAP, "input.hidden_states", f32([1, 2]), cls="SharedFusedMoE")
    apart.put(TAP, "output.0", f32([1, 2]), cls="SharedFusedMoE")
    apart.put(TAP, "output.1", f32([4, 5]), cls="SharedFusedMoE")
    return whole, apart


def test_their_sum_is_compared_whichever_side_it_is():
    whole, apart = sides()
    for golden, mine in ((whole, apart), (apart, whole)):
        met = bridge(golden, mine)
        assert not met.foreign
        assert any("shared and routed experts" in line for line in met.lines)
        values = [d.read(by_name(d)[TAP, "output.0+1"]).tolist() for d in (met.golden, met.mine)]
        assert values == [[[5, 7]], [[5, 7]]]
        parted = met.mine if mine is apart else met.golden
        assert {role for _, role in by_name(parted)} == {"input.hidden_states", "output.0+1"}


def test_two_of_a_kind_are_left_alone():
    for k in (0, 1):
        one, other = sides()[k], sides()[k]
        met = bridge(one, other)
        assert (met.golden, met.mine, met.lines) == (one, other, [])
