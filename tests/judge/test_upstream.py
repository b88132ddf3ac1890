"""Places between children: what is there may be a slice of what one gave out, and has then no siblings."""

import numpy as np
import pytest

from vllm_accprobe.align.data_flow import INPUT, OUTPUT, PARAM, DataFlow, Tree
from vllm_accprobe.align.tokens import NO_ROWS, RowSet
from vllm_accprobe.judge.origins import find_origins
from vllm_accprobe.judge.siblings import GAIN
from vllm_accprobe.judge.tensor_errors import TensorErrors
from vllm_accprobe.standards.limits import Standard

UNIT, ROWS = 2.0**-8, 60
KEYS = np.arange(ROWS, dtype=np.int64)
TREE = Tree(
    {"m": "Attention", "m.qkv": "Linear", "m.attn": "Attention"},
    {"m": None, "m.qkv": "m", "m.attn": "m"},
    {None: ["m"], "m": ["m.qkv", "m.attn"], "m.qkv": [], "m.attn": []},
    {"m": False, "m.qkv": False, "m.attn": True},
)


def trace(tap, role, kind, order, width, odd=0.0):
    random = np.random.default_rng(order)
    rel = 0.005 + 0.0002 * random.standard_normal(ROWS)
    gain = 0.0001 * random.standard_normal(ROWS)
    rel, gain = rel + abs(odd), gain + odd
    more = {"rel": rel, "gain": gain, "rounding": UNIT, "width": width, "allowed": 0.05}
    flags = np.zeros(ROWS, bool)
    return TensorErrors(tap, role, 0, kind, order, 4 * UNIT, RowSet(KEYS), KEYS, rel, broken=flags, own=flags, **more)


@pytest.mark.parametrize(("whole", "found"), [(512, []), (256, ["m"])])
def test_a_slice_is_not_held_against_the_whole(whole, found):
    """All values are 2 % smaller: of q, k and v together that is less, and nothing happens in between."""
    traces = [
        trace("m", "input.hidden", INPUT, 0, 256),
        trace("m.qkv", "output.0", OUTPUT, 1, whole),
        trace("m.attn", "input.value", INPUT, 2, 256, odd=-0.02),
    ]
    origins = find_origins(DataFlow(traces, TREE), Standard(), {})
    assert [o.tap for o in origins] == found
    assert all(o.hidden is not None and o.hidden.how == GAIN for o in origins)


def test_what_stands_in_front_of_what():
    """A parent with two children and one parameter that never ran as a module."""
    where = {}
    for order, (tap, role, kind) in enumerate([
        ("m", "input.0", INPUT), ("m.a", "input.0", INPUT), ("m.a", "param.w", PARAM), ("m.a", "output.0", OUTPUT),
        ("m.b", "input.0", INPUT), ("m.b", "output.0", OUTPUT), ("m.c", "param.w", PARAM), ("m", "output.0", OUTPUT),
    ]):  # fmt: skip
        where[(tap, role)] = TensorErrors(tap, role, 0, kind, order, 1.0, NO_ROWS, NO_ROWS.keys, NO_ROWS.keys)
    taps = list(dict.fromkeys(tap for tap, _ in where))
    fronts = DataFlow(list(where.values()), Tree.of(taps, {}))

    def said(tap):
        return {f"{s.tap}/{s.role}": sorted(f"{t.tap}/{t.role}" for t in found) for s, found in fronts.places(tap)}

    # a leaf: its own input and parameter, and what a neighbour without outputs may hold
    assert said("m.a") == {"m.a/output.0": ["m.a/input.0", "m.a/param.w", "m.c/param.w"]}
    # the parent: between its children, and behind the last
    assert said("m") == {
        "m/output.0": ["m.a/output.0", "m.b/output.0", "m.c/param.w", "m/input.0"],
        "m.a/input.0": ["m.c/param.w", "m/input.0"],
        "m.b/input.0": ["m.a/output.0", "m.c/param.w", "m/input.0"],
    }
    assert fronts.earlier(where[("m.b", "output.0")]) == [where[("m.a", "output.0")]]


def test_what_a_module_gave_whose_own_output_nobody_saw():
    """A compiled module is known by a parameter alone; what its last child gave explains the root's output."""
    where = [
        TensorErrors(tap, role, 0, kind, order, 1.0, NO_ROWS, NO_ROWS.keys, NO_ROWS.keys)
        for order, (tap, role, kind) in enumerate([
            ("<root>", "input.ids", INPUT), ("model", "param.scale", PARAM), ("model.down", "output.0", OUTPUT),
            ("<root>", "output.0", OUTPUT), ("model.late", "output.0", OUTPUT),
        ])
    ]  # fmt: skip
    fronts = DataFlow(where, Tree.of(list(dict.fromkeys(t.tap for t in where)), {}))
    found = {s.role: {f"{t.tap}/{t.role}" for t in sources} for s, sources in fronts.places("<root>")}
    assert found["output.0"] == {"<root>/input.ids", "model/param.scale", "model.down/output.0"}


def test_what_a_router_said_is_not_all_that_went_into_experts():
    """The hidden states stay inside a compiled graph: what the norm gave explains what the experts gave."""
    where = {
        (tap, role): TensorErrors(tap, role, 0, kind, order, 1.0, NO_ROWS, NO_ROWS.keys, NO_ROWS.keys)
        for order, (tap, role, kind) in enumerate([
            ("m.norm", "output.0", OUTPUT), ("m.experts", "input.router_logits", INPUT),
            ("m.experts.method", "input.topk_weights", INPUT), ("m.experts.method", "input.topk_ids", INPUT),
            ("m.experts.method", "output.0", OUTPUT), ("m.experts", "output.0", OUTPUT),
        ])
    }  # fmt: skip
    fronts = DataFlow(list(where.values()), Tree.of(list(dict.fromkeys(tap for tap, _ in where)), {}))
    for tap in ("m.experts", "m.experts.method"):
        assert where["m.norm", "output.0"] in dict(fronts.places(tap))[where[tap, "output.0"]]
