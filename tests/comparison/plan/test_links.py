"""Whose output an input is, by its bytes: of the made-up model every hand-over is known."""

from dataclasses import replace

import numpy as np
import xxhash
from synthetic_model import capture

from vllm_accprobe.comparison.plan.relations import BOTH, GOLDEN, MINE, links_of
from vllm_accprobe.comparison.plan.units import make_plan

LAYER = "model.layers.1"


def of(golden, mine):
    return links_of(make_plan(golden, mine).units)


def changed(dump, tap, role):
    """``dump`` with other bytes of one tensor, in all steps."""
    for i, r in enumerate(dump.records):
        if (r.tap, r.role) == (tap, role):
            bits = dump.data[r.payload.off] ^ np.uint16(1 << 7)
            dump.data[r.payload.off] = bits
            dump.records[i] = replace(r, hash=xxhash.xxh3_128_hexdigest(bits.tobytes()))
    return dump


def test_an_input_is_the_output_of_the_tap_that_made_it():
    links = of(capture(), capture(chunk=4))
    for to, maker in (
        ((f"{LAYER}.mlp.down_proj", "input.input_", 0), f"{LAYER}.mlp.act_fn"),
        ((f"{LAYER}.mlp", "input.x", 0), f"{LAYER}.post_attention_layernorm"),
        ((f"{LAYER}.mlp.gate_up_proj", "input.input_", 0), f"{LAYER}.post_attention_layernorm"),
        ((LAYER, "input.hidden_states", 0), "model.layers.0"),
        (("model.norm", "input.x", 0), "model.layers.2"),
    ):
        assert links[to] == ((maker, "output.0", 0), BOTH)
    # q, k and v are parts of one product, a residual sum is nobody's output: no bytes say where they are from.
    assert not any(tap.endswith((".attn", ".post_attention_layernorm")) for tap, _, _ in links)
    assert all(maker[1].startswith("output") and to[1].startswith("input") for to, (maker, _) in links.items())


def test_the_innermost_of_those_that_pass_a_tensor_on_made_it():
    """The block's output is its last product's: whoever adds it up gets what the product made."""
    golden, mine = capture(), capture()
    for dump in (golden, mine):  # the next layer is given the block's output itself
        made = {r.step: r for r in dump.records if (r.tap, r.role) == (f"{LAYER}.mlp", "output.0")}
        for i, r in enumerate(dump.records):
            if (r.tap, r.role) == ("model.layers.2", "input.hidden_states"):
                dump.records[i] = replace(r, hash=made[r.step].hash)
    links = of(golden, mine)
    assert links["model.layers.2", "input.hidden_states", 0][0] == (f"{LAYER}.mlp.down_proj", "output.0", 0)


def test_what_one_side_changes_on_the_way_is_told_by_the_other():
    key = (f"{LAYER}.mlp.down_proj", "input.input_", 0)
    maker = (f"{LAYER}.mlp.act_fn", "output.0", 0)
    assert of(capture(), changed(capture(), *key[:2]))[key] == (maker, GOLDEN)
    assert of(changed(capture(), *key[:2]), capture())[key] == (maker, MINE)
    both = changed(capture(), *key[:2]), changed(capture(), *key[:2])
    assert key not in of(*both)


def test_a_side_without_hashes_or_with_the_tensor_in_parts_denies_nothing():
    key, maker = (f"{LAYER}.mlp.down_proj", "input.input_", 0), f"{LAYER}.mlp.act_fn"
    mine = capture()
    mine.records = [replace(r, hash=None) for r in mine.records]
    assert of(capture(), mine)[key] == ((maker, "output.0", 0), BOTH)
    mine = changed(capture(), *key[:2])
    mine.records = [replace(r, shape=(*r.shape, 1)) if (r.tap, r.role) == key[:2] else r for r in mine.records]
    assert of(capture(), mine)[key] == ((maker, "output.0", 0), BOTH)


def test_equal_by_chance_in_one_step_is_no_link():
    golden, mine = capture(), capture()
    key = (f"{LAYER}.self_attn.attn", "input.key", 0)
    for dump, steps in ((golden, {0}), (mine, {0, 1})):
        made = {r.step: r for r in dump.records if (r.tap, r.role) == ("model.embed_tokens", "output.0")}
        for i, r in enumerate(dump.records):
            if (r.tap, r.role) == key[:2] and r.step in steps:
                dump.records[i] = replace(r, hash=made[r.step].hash)
    assert key not in of(golden, mine)


def test_without_hashes_nothing_is_said():
    dumps = capture(), capture()
    for dump in dumps:
        dump.records = [replace(r, hash=None) for r in dump.records]
    assert of(*dumps) == {}
