"""The built-in table of vLLM's places and transformers'."""

from hand_made import Dump, f32

from vllm_accprobe.align.names import bridge

TRANSFORMERS = {"engine": {"runner": "accprobe.Probe"}, "versions": {"transformers": "5"}}
VLLM = {"versions": {"vllm": "0.32"}}


def test_built_in_rules_whichever_side_vllm_is():
    golden, mine = Dump(run=TRANSFORMERS), Dump(run=VLLM)
    golden.put("model.layers.1", "input.hidden_states", f32([3, 5]))
    golden.put("model.layers.1", "output.0", f32([7, 9]))
    golden.put("<root>", "output.logits", f32([1, 1]))
    for role, v in (
        ("input.hidden_states", [1, 2]),
        ("input.residual", [2, 3]),
        ("output.0", [3, 4]),
        ("output.1", [4, 5]),
    ):
        mine.put("model.layers.1", role, f32(v))
    mine.put("<root>", "output.0", f32([2, 2]))
    for sides in ((golden, mine), (mine, golden)):
        b = bridge(*sides)
        assert b.foreign
        names = [{(r.tap, r.role) for r in d.records} for d in (b.golden, b.mine)]
        assert names[0] & names[1] == {
            ("model.layers.1", "input.hidden_states+residual"),
            ("model.layers.1", "output.0+1"),
        }
