"""What reaches a row from upstream: slices between children, earlier rows, and lists continued from prefixes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.align.data_flow import INPUT, OUTPUT, PARAM, DataFlow, Tree
from vllm_accprobe.align.tokens import NO_ROWS, RowSet, make_key
from vllm_accprobe.judge.origins import LONG, Influence, Prefixes, find_origins
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


SEEN = RowSet(np.arange(4))


def flat(n: int, *, bad: bool, jump: int) -> tuple[list[TensorErrors], Tree]:
    """Outputs of ``n`` taps that nobody encloses, as other tools' dumps have them; from ``jump`` on errors are larger.
    bad: all exceed their limits."""
    rng = np.random.default_rng(0)
    taps = [f"op{i}" for i in range(n)]
    traces = []
    for i, tap in enumerate(taps):
        rel = 1e-3 * (1 + rng.random(4)) * (50 if i >= jump else 1)
        traces.append(TensorErrors(tap, "output.0", 0, OUTPUT, i, 1e-4 if bad else 1e-2, SEEN, SEEN.keys, rel, rel=rel,
                            gain=rel * rng.choice([-1, 1], 4), rounding=2**-9, width=64))  # fmt: skip
    return traces, Tree.of(taps, {})


def found(traces: list[TensorErrors], tree: Tree) -> list[Any]:
    return [(c.tap, c.keys.tolist(), c.err.tolist(), c.explained.tolist(), c.chance, c.steps.tolist(),
             None if c.stats is None else (c.stats.before.tolist(), c.stats.gain_before.tolist()))
            for c in find_origins(DataFlow(traces, tree), Standard(), {})]  # fmt: skip


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_the_blame_is_that_of_asking_for_each_pair(bad: bool, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, tree = flat(60, bad=bad, jump=40)
    # taps that run again, later than others
    traces += [replace(t, call=c, order=t.order + 30 * c) for c in range(1, calls) for t in traces[::3]]
    quick = found(traces, tree)
    monkeypatch.setattr("vllm_accprobe.judge.origins.LONG", 1 << 30)
    assert quick == found(traces, tree)
    assert "op40" in [one[0] for one in quick]


@pytest.mark.parametrize("bad", [False, True])
def test_what_is_asked_grows_as_the_taps_do(bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    of = Influence.of

    def counted(*given: Any) -> np.ndarray:
        nonlocal asked
        asked += 1
        return of(*given)

    monkeypatch.setattr(Influence, "of", counted)
    monkeypatch.setattr(Influence, "again", lambda self, source, what, *rest: counted(self, source, *rest))
    counts = []
    for n in (100, 200):
        asked = 0
        found(*flat(n, bad=bad, jump=1 << 30))
        counts.append(asked)
    assert counts[1] < 2.5 * counts[0], counts  # pair by pair it is four times


def test_a_list_that_is_another_or_holds_the_place_itself_is_not_gone_on_from() -> None:
    """A state of another list would blame the wrong place."""
    traces, _ = flat(3 * LONG, bad=False, jump=1 << 30)
    sink, first, longer = traces[-1], traces[:LONG], traces[: LONG + 2]
    known: Prefixes[str] = Prefixes()
    known.keep(("a",), first, sink, "of the first")
    known.keep(("c",), first, first[2], "never kept")
    assert known.begun(("a",), longer, sink) == (LONG, "of the first")
    for name, sources, place in (("b", longer, sink), ("a", first[:-1], sink), ("a", longer, traces[3]),
                                 ("a", [traces[0], *traces[2:]], sink), ("c", longer, sink)):  # fmt: skip
        assert known.begun((name,), sources, place) == (0, None)


def tensor(seen, rows, err, vision=False, everywhere=0.0):
    return TensorErrors("t", "output.0", 0, "output", 0, 0.0, RowSet(seen), rows, err, everywhere, vision)


def earlier_rows(source, keys):
    """The definition: the largest error of the same request at or before each key."""
    pairs = list(zip(source.keys.tolist(), source.err.tolist(), strict=True))
    return [max([e for k, e in pairs if k >> 32 == key >> 32 and k <= key], default=0.0) for key in keys.tolist()]


@pytest.mark.parametrize("seed", range(8))
def test_earlier_rows_of_the_same_request(seed):
    random = np.random.default_rng(seed)
    seen = np.array([make_key(who, at) for who in range(4) for at in range(random.integers(1, 30))])
    rows = np.sort(random.choice(seen, max(len(seen) // 2, 1), replace=False))
    source = tensor(seen, rows, random.random(len(rows)))
    keys = np.sort(random.choice(seen, max(len(seen) // 3, 1), replace=False))
    found = Influence({}).of(source, source.err, False, RowSet(keys), True)
    assert found.tolist() == earlier_rows(source, keys)
    alone = Influence({}).of(source, source.err, False, RowSet(keys), False)
    at = dict(zip(rows.tolist(), source.err.tolist(), strict=True))
    assert alone.tolist() == [at.get(k, 0.0) for k in keys.tolist()]


def test_a_prefix_computed_for_another_request_counts():
    """Request 1 has rows from position 2 on: what stands before was computed for request 0."""
    seen = np.array([make_key(0, p) for p in range(3)] + [make_key(1, p) for p in (2, 3)])
    source = tensor(seen, seen, np.array([5.0, 1.0, 9.0, 2.0, 3.0]))
    found = Influence({}).of(source, source.err, False, RowSet(seen), True)
    assert found.tolist() == [5.0, 5.0, 9.0, 5.0, 5.0]  # request 0's own row at position 2 is not request 1's


def test_an_image_reaches_the_text_it_fills_and_what_follows():
    image = np.array([make_key(7, 0), make_key(7, 1)])
    source = tensor(image, image, np.array([0.25, 0.5]), vision=True)
    text = np.array([make_key(0, p) for p in range(4)])
    influence = Influence({7: [(0, 1, 2)]})
    assert influence.of(source, source.err, False, RowSet(text), False).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert influence.of(source, source.err, True, RowSet(image), True).tolist() == [0.5, 0.5]
    assert Influence({}).of(source, source.err, False, RowSet(text), False).tolist() == [0.0] * 4
    back = tensor(text, text, np.ones(4))
    assert influence.of(back, back.err, True, RowSet(image), True).tolist() == [0.0, 0.0]


def test_a_parameter_reaches_everything():
    none = np.zeros(0, np.int64)
    source = tensor(none, none, np.zeros(0), everywhere=2.0)
    assert Influence({}).of(source, source.err, False, RowSet(np.arange(3)), True).tolist() == [2.0] * 3


def test_what_is_remembered_stays_within_its_bound():
    rows = RowSet(np.arange(1000))
    sources = [tensor(rows.keys, rows.keys, np.full(1000, float(i))) for i in range(20)]
    influence = Influence({}, kept=20_000)
    for _ in range(2):
        for i, source in enumerate(sources):
            assert influence.again(source, "rel", source.err, False, rows, True).max() == i
    assert influence._bytes <= 20_000
