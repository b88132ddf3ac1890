"""How many layers the data has been through, seen or not."""

from types import SimpleNamespace

import pytest

from vllm_accprobe.align.data_flow import Layers, gaps, unseen_taps
from vllm_accprobe.dump.schema import ROOT_TAP, Module, Skip
from vllm_accprobe.standards.limits import Standard


def keys(*names):
    return [(n.partition("/")[0], n.partition("/")[2], 0) for n in names]


def depths(layers, flow):
    return [len(layers.passed(key)) for key in flow]


def test_depth_counts_numbered_blocks():
    flow = keys("embed/output.0", "m.layers.0/input.x", "m.layers.0.mlp/output.0", "m.layers.1.mlp/output.0", "norm/o")
    assert depths(Layers(flow, []), flow) == [0, 1, 1, 2, 2]


def test_layers_that_nobody_saw_are_passed_by_what_comes_behind_them():
    taps = [ROOT_TAP, "m", "m.embed", *(f"m.layers.{i}" for i in range(4)), "m.norm", "logits_processor"]
    modules = [Module(tap, "X", i) for i, tap in enumerate(taps)]
    skips = [Skip("m", "compiled by torch.compile, which calls past its own tap")]
    skips += [Skip(f"m.layers.{i}", "never called in a captured step") for i in range(4)]
    skips += [Skip("visual.blocks.0", "never called in a captured step")]  # and not inside of what is compiled
    dump = SimpleNamespace(skips=skips, modules={0: modules})
    unseen = unseen_taps(dump)
    assert unseen == ["m", "m.embed", *(f"m.layers.{i}" for i in range(4)), "m.norm"]

    compiled = keys(f"{ROOT_TAP}/input.ids", f"{ROOT_TAP}/output.0", "logits_processor/input.x", "sampler/output.token")
    layers = Layers(compiled, modules, unseen)
    assert depths(layers, compiled) == [0, 4, 4, 4]
    passed = [layers.passed(key) for key in compiled]
    assert gaps(passed, [key[0] for key in compiled], [True] * 4) == [0, 4, 0, 0]

    some = keys(
        "m.embed/output.0", "m.layers.2/input.x", "m.layers.2/output.0", "m.norm/param.weight", "m.norm/input.x"
    )
    layers = Layers(some, modules, [t for t in unseen if t not in {key[0] for key in some}])
    assert depths(layers, some) == [0, 3, 3, 3, 4]
    passed = [layers.passed(key) for key in some]
    assert gaps(passed, [key[0] for key in some], [True, True, True, False, True]) == [0, 2, 0, 0, 1]


def test_what_may_be_added_in_a_gap_is_what_may_pile_up_in_its_layers():
    s, unit = Standard(), 2.0**-8
    assert s.gap_limits(unit, 256, 0) == s.created_limits(unit, 256)
    assert s.gap_limits(unit, 256, 3).row == s.total_limits(unit, 256, 3).row == 16 * unit
    assert s.gap_limits(unit, 256, 3).ratio == pytest.approx(4 * s.created_limits(unit, 256).ratio)
