"""Experts that give out shared and routed sums apart, against those that add them."""

from hand_made import Dump, by_name, f32

from vllm_accprobe.align.names import bridge

TAP = "model.layers.0.mlp.experts"
SHARED = "model.layers.0.mlp.shared_expert"


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


def blocks():
    """(experts that add the shared ones inside, with what the routed gave; without it; the routed ones alone). Values:
    shared 1, 2; routed 4, 5."""
    inside, older, alone = Dump(), Dump(), Dump()
    inside.put(TAP, "input.hidden_states", f32([1, 2]), cls="MoERunner")
    inside.put(f"{TAP}._shared_experts._layer", "output.0", f32([1, 2]), cls="Qwen2MoeMLP")
    inside.put(f"{TAP}.routed_experts.quant_method", "output.0", f32([4, 5]), cls="UnquantizedFusedMoEMethod")
    inside.put(TAP, "output.0", f32([5, 7]), cls="MoERunner")
    older.put(TAP, "input.hidden_states", f32([1, 2]), cls="FusedMoE")
    older.put(SHARED, "output.0", f32([1, 2]), cls="Qwen2MoeMLP")
    older.put(TAP, "output.0", f32([5, 7]), cls="FusedMoE")
    alone.put(SHARED, "output.0", f32([1, 2]), cls="Qwen2MoeMLP")
    alone.put(TAP, "input.hidden_states", f32([1, 2]), cls="FusedMoE")
    alone.put(TAP, "output.0", f32([4, 5]), cls="FusedMoE")
    return inside, older, alone


def test_routed_experts_alone_are_held_against_the_routed_ones_or_nothing():
    for mine_alone in (True, False):
        inside, older, alone = blocks()
        met = bridge(*((inside, alone) if mine_alone else (alone, inside)))
        values = [d.read(by_name(d)[TAP, "output.0"]).tolist() for d in (met.golden, met.mine)]
        assert values == [[[4, 5]], [[4, 5]]]
        assert any("routed experts alone" in line for line in met.lines)

        met = bridge(*((older, alone) if mine_alone else (alone, older)))
        one, other = (met.golden, met.mine) if mine_alone else (met.mine, met.golden)
        assert (TAP, "output.0") not in by_name(one)
        assert other.read(by_name(other)[TAP, "output.0"]).tolist() == [[4, 5]]
        assert (TAP, "input.hidden_states") in by_name(one)
        assert "the routed experts alone on one side: 1 outputs not compared" in met.lines


def test_blocks_of_one_kind_are_left_alone():
    for k in range(3):
        one, other = blocks()[k], blocks()[k]
        met = bridge(one, other)
        assert (met.golden, met.mine, met.lines) == (one, other, [])
    inside, older, _ = blocks()
    assert bridge(inside, older).lines == []
