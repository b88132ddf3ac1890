"""Whose an error between modules is, and steps that graphs replay. Blame as a whole: tests/comparison, tests/e2e."""

from typing import Any

import numpy as np
import pytest

from vllm_accprobe.align.data_flow import INPUT, OUTPUT, DataFlow, Tree
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.error_pattern import Condition, GraphRows, entry, of_steps, piece_of
from vllm_accprobe.judge.origins import Origin, created_over, find_origins, in_all_layers, owner, removed
from vllm_accprobe.judge.siblings import TensorStats
from vllm_accprobe.judge.tensor_errors import TensorErrors
from vllm_accprobe.standards.limits import Standard

ROWS = np.arange(3)
ATTENTION, LAYER = "model.layers.2.self_attn.attn", "model.layers.2"


def trace(tap: str, kind: str) -> TensorErrors:
    return TensorErrors(tap, f"{kind}.0", 0, kind, 0, 1.0, RowSet(ROWS), ROWS, np.ones(3))


@pytest.mark.parametrize(
    ("tap", "sink", "kind", "whose"),
    [
        (ROOT_TAP, ATTENTION, INPUT, "model.layers.2.self_attn"),  # nobody saw self_attn's own tensors
        ("model", ATTENTION, INPUT, "model.layers.2.self_attn"),
        ("model.layers.2.self_attn", ATTENTION, INPUT, "model.layers.2.self_attn"),
        ("model", LAYER, INPUT, "model"),  # model.layers is a list and computes nothing
        (ROOT_TAP, "norm", INPUT, ROOT_TAP),
        ("logits_processor", "lm_head", INPUT, "logits_processor"),  # called by a neighbour
        (ATTENTION, ATTENTION, OUTPUT, ATTENTION),
        (LAYER, LAYER, OUTPUT, LAYER),
    ],
)
def test_the_body_that_an_error_lies_in(tap: str, sink: str, kind: str, whose: str) -> None:
    assert owner(tap, trace(sink, kind)) == whose


KEYS = np.arange(6)
POOLER = Tree.of(["pooler"], {"pooler": "DispatchPooler"})


def pooled(before: float, after: float, shared: bool) -> list[str]:
    """Taps that are blamed for a vector of one step: its error, beside hidden states whose last row is off; what is
    before that row is exact."""
    limit = 0.01
    into = TensorErrors("pooler", "input.hidden_states", 0, INPUT, 0, limit, RowSet(KEYS), KEYS[5:], np.array([before]))
    out = TensorErrors("pooler", "output.0", 0, OUTPUT, 1, limit, RowSet(KEYS), KEYS, np.full(6, after),
                shared=np.zeros(6, np.int64) if shared else np.zeros(0, np.int64))  # fmt: skip
    return [c.tap for c in find_origins(DataFlow([into, out], POOLER), Standard(), {})]


def test_a_vector_without_rows_may_have_its_error_of_any_row_of_its_step() -> None:
    assert pooled(before=0.009, after=0.011, shared=True) == []
    assert pooled(before=0.009, after=0.011, shared=False) == ["pooler"]  # rows of its own: the first had no such input
    assert pooled(before=0.009, after=0.5, shared=True) == ["pooler"]
    assert pooled(before=0.0, after=0.011, shared=True) == ["pooler"]


def test_not_a_number_that_a_vector_may_have_of_any_row() -> None:
    bad = np.array([True])
    for broken, blamed in ((bad, []), (~bad, ["pooler"])):
        into = TensorErrors("pooler", "input.0", 0, INPUT, 0, 0.01, RowSet(KEYS), KEYS[5:],
                     np.array([np.inf if broken[0] else 0.1]), broken=broken)  # fmt: skip
        out = TensorErrors("pooler", "output.0", 0, OUTPUT, 1, 0.01, RowSet(KEYS), KEYS, np.full(6, np.inf),
                    broken=np.ones(6, bool), shared=np.zeros(6, np.int64))  # fmt: skip
        assert [c.tap for c in find_origins(DataFlow([into, out], POOLER), Standard(), {}) if c.trace is out] == blamed


@pytest.mark.parametrize(
    ("first", "last", "blamed"), [(0.5, 0.5, ["down_proj"]), (0.0, 0.5, ["act_fn"]), (0.0, 0.05, [])]
)
def test_rows_of_which_nothing_in_front_was_compared_give_way(first: float, last: float, blamed: list[str]) -> None:
    """As of a pack: some rows of modules, all rows of the best logits, where 0.1 may have piled up."""
    few, unit = RowSet(KEYS[:3]), 2.0**-8
    tree = Tree.of(["down_proj", "act_fn"], {})
    made = TensorErrors("down_proj", "output.0", 0, OUTPUT, 0, 0.01, few, few.keys, np.full(3, first), rounding=unit)
    into = TensorErrors("act_fn", "input.0", 0, INPUT, 1, 0.01, few, few.keys, np.full(3, first), rounding=unit)
    out = TensorErrors("act_fn", "output.0", 0, OUTPUT, 2, 0.01, RowSet(KEYS), KEYS[3:], np.full(3, last),
                       allowed=0.1, rounding=unit)  # fmt: skip
    assert [c.tap for c in find_origins(DataFlow([made, into, out], tree), Standard(), {})] == blamed


BEHIND = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("doubted", "gap", "attn", "proj", "blamed"),
    [([], 0, 0.07, 0.0, ["attn"]), ([5], 0, 0.07, 0.0, []), ([4], 0, 0.07, 0.0, ["attn"]),
     ([5], 0, 0.0, 0.5, ["o_proj"]), ([5], 2, 0.0, 0.5, []), ([5], 0, np.inf, 0.0, ["attn"])],
)  # fmt: skip
def test_rows_that_earlier_ones_may_have_changed(
    doubted: list[int], gap: int, attn: float, proj: float, blamed: list[str]
) -> None:
    """In row 5 a fault of attention, or of the projection behind it whose input agrees. A doubt of row 4 is none of
    row 5, and no other expert makes infinity of numbers."""
    names = {"attn": f"{BEHIND}.attn", "o_proj": f"{BEHIND}.o_proj"}
    tree = Tree.of(list(names.values()), {names["attn"]: "Attention", names["o_proj"]: "RowParallelLinear"})
    places = [("attn", INPUT, 0.004), ("attn", OUTPUT, attn), ("o_proj", INPUT, attn), ("o_proj", OUTPUT, attn + proj)]
    traces = [
        TensorErrors(names[name], f"{kind}.0", 0, kind, order, 0.01, RowSet(KEYS), KEYS[5:], np.array([max(err, 1e-4)]),
                     rounding=2.0**-8, allowed=0.02, gap=gap * (kind == OUTPUT), doubted=np.array(doubted, np.int64))
        for order, (name, kind, err) in enumerate(places)
    ]  # fmt: skip
    found = find_origins(DataFlow(traces, tree), Standard(), {})
    assert [c.tap.rpartition(".")[2] for c in found] == blamed


@pytest.mark.parametrize(
    ("cls", "later", "gone"),
    [("RMSNorm", 0.0, True), ("RMSNorm", 0.4, True), ("Attention", 0.0, True), ("Attention", 0.4, False)],
)
def test_what_later_rows_read_is_not_removed(cls: str, later: float, gone: bool) -> None:
    """An error in row 2, of which row 2 of its reader shows nothing, and rows behind it where this mixes rows may."""
    tree, unit, rows = Tree.of(["k", "reader"], {"reader": cls}), 2.0**-8, RowSet(KEYS)
    places = [("k", OUTPUT, KEYS[2:3], [0.5]), ("reader", INPUT, KEYS[2:3], [0.5]),
              ("reader", OUTPUT, KEYS[2:], [1e-3, later, later, later])]  # fmt: skip
    traces = [TensorErrors(tap, f"{kind}.0", 0, kind, order, 0.01, rows, keys, np.array(err), rounding=unit)
              for order, (tap, kind, keys, err) in enumerate(places)]  # fmt: skip
    c = Origin("k", traces[0], KEYS[2:3], np.array([0.5]), np.zeros(1), "jump")
    assert removed(c, DataFlow(traces, tree), traces) is gone


RULES = Standard()
LIMIT = 0.01


def over(err, before):
    rows = [np.asarray(x, float) for x in (err, np.zeros(len(err)), before, np.zeros(len(err)))]
    return created_over(TensorStats("t", "output.0", 2**-8, np.arange(len(err)), *rows), LIMIT, RULES)


def test_what_came_in_is_taken_off_in_squares():
    assert over([0.005, 0.001], [0.003, 0.0]) == pytest.approx(0.4)
    assert over([0.003], [0.005]) == 0.0


def test_what_is_beyond_the_limit_is_so_by_the_judges_rule():
    assert over([0.2], [0.0]) == pytest.approx(20.0)
    assert over([0.2], [0.002]) == pytest.approx((0.2 - RULES.amplification * 0.002) / LIMIT)
    behind_a_fault = over([0.25], [0.2])  # what it passes on may grow by so much
    assert behind_a_fault == pytest.approx(max(0.25 - RULES.wild * 0.2, 0.0) / LIMIT)
    assert behind_a_fault < 1


def test_rows_without_a_number_and_exact_places_tell_nothing():
    assert over([np.inf, 0.004, np.nan], [0.0, 0.0, 0.0]) == pytest.approx(0.4)
    assert over([0.1], [np.inf]) == 0.0
    assert over([], []) == 0.0
    assert created_over(TensorStats("t", "o", 0.0, np.arange(1), *[np.ones(1)] * 4), 0.0, RULES) == 0.0


def test_all_layers_or_not():
    ran = [f"model.layers.{i}.{what}" for i in range(3) for what in ("mlp", "attn")] + ["model.norm"]
    named = ["model.layers.0.mlp", "model.norm", "model.layers.2.mlp", "model.layers.0.attn"]
    assert in_all_layers(named, ran) == {}
    assert in_all_layers([*named, "model.layers.1.mlp"], ran) == {
        f"model.layers.{i}.mlp": {"in": 3, "of": 3} for i in (0, 2, 1)
    }


SIZES = (1, 2, 4, 8)
REAL = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12] * 3
"""Rows of somebody in each of thirty steps; more than eight fit into no graph."""


def steps(wrong: Any, *, mixing: bool = False, real: list[int] = REAL) -> Condition | None:
    """wrong: (size, padding, step, rows) → which rows of the step are wrong, or whether all are."""
    columns: list[list[Any]] = [[] for _ in range(6)]
    for step, n in enumerate(real):
        size = next((s for s in SIZES if s >= n), 0)
        padding = max(size - n, 0)
        bad = np.broadcast_to(wrong(size, padding, step, n), (n,))
        for row in range(n):
            for column, value in zip(columns, (step, size, padding, row, step, bad[row]), strict=True):
                column.append(value)
    numbers = [np.array(c, np.int64) for c in columns[:5]]
    return of_steps(GraphRows(*numbers, np.array(columns[5], bool)), mixing)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda size, padding, *_: size == 4, "only in steps replayed at size 4"),
        (lambda size, padding, *_: size in (2, 8), "only in steps replayed at sizes 2 and 8"),
        (lambda size, padding, *_: size > 0, "only in replayed steps, not in those that ran without a graph"),
        (lambda size, padding, *_: size == 0, "only in steps that ran without a graph"),
        (
            lambda size, padding, *_: padding > 0,
            "only in steps with padding (1 of 4, 1 of 8, 2 of 8 and 3 of 8 rows are padding)",
        ),
        (
            lambda size, padding, *_: size == 8 and padding > 0,
            "only in steps replayed at size 8 with padding (1 of 8, 2 of 8 and 3 of 8 rows are padding)",
        ),
        (lambda *_: True, "in replayed steps and in those that ran without a graph alike"),
    ],
)
def test_an_error_is_bound_to_a_kind_of_step(wrong: Any, said: str) -> None:
    found = steps(wrong)
    assert found is not None
    assert found.sentence == said


def test_one_wrong_row_of_a_step_makes_it_wrong() -> None:
    """A request too few: the last row of each padded step."""
    found = steps(lambda size, padding, step, n: np.arange(n) == (n - 1 if padding else -1))
    assert found is not None
    assert (found.kind, found.padded) == ("padding", ((1, 4), (1, 8), (2, 8), (3, 8)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda *_: False,
        lambda size, padding, step, n: step % 3 == 0,
        lambda size, padding, step, n: step == 3,  # chance: one step of thirty, and it is of size 4
        lambda size, padding, step, n: size == 4 or step % 4 == 0,
    ],
    ids=["nothing is wrong", "any", "one step", "others as well"],
)
def test_nothing_is_said_that_chance_would_do(wrong: Any) -> None:
    assert steps(wrong) is None


def test_one_kind_of_step_tells_nothing() -> None:
    assert steps(lambda *_: True, real=[4] * 20) is None
    unknown = np.full(4, -1)
    assert of_steps(GraphRows(np.arange(4), unknown, unknown, unknown, unknown, np.ones(4, bool)), False) is None


def test_what_attention_reads_from_a_wrong_step_is_no_evidence() -> None:
    """A request's rows behind a wrong one are wrong in any step, where rows are mixed; elsewhere they are evidence."""

    def wrong(size: int, padding: int, step: int, n: int) -> Any:
        return size > 0 or (np.arange(n) < 8 if step > 20 else False)

    found = steps(wrong, mixing=True)
    assert found is not None
    assert found.kind == "replayed"
    assert steps(wrong, mixing=False) is None


GRAPHS = {"pieces": [["embed", "a.qkv"], ["a.o", "a.down", "b.qkv"], ["b.o"]], "between": ["a.attn", "b.attn"]}


@pytest.mark.parametrize(
    ("tap", "piece", "said"),
    [
        ("a.down", 1, "piece 1: a.o … b.qkv"),
        ("b.o", 2, "piece 2: b.o"),
        ("a.attn", 0, "it runs between the pieces, and reads what piece 0 wrote: embed … a.qkv"),
        ("b.attn", 1, "it runs between the pieces, and reads what piece 1 wrote: a.o … b.qkv"),
    ],
)
def test_the_piece_of_a_tap(tap: str, piece: int, said: str) -> None:
    found = piece_of(tap, GRAPHS)
    assert found is not None
    assert (found.piece, found.sentence) == (piece, said)


def test_a_model_that_is_compiled_whole() -> None:
    found = entry(None, piece_of("a.o", {"pieces": [["a.qkv", "a.o"]], "between": ["a.attn"]}))
    assert found is not None
    assert found["sentence"] == "in the only piece: a.qkv … a.o"


@pytest.mark.parametrize("graphs", [{}, {"pieces": None}, {"pieces": [3, None], "between": 4}, {"pieces": []}])
def test_pieces_that_nobody_told(graphs: dict[str, Any]) -> None:
    assert piece_of("a.attn", graphs) is None


def test_the_whole_sentence() -> None:
    condition = Condition("padding", "only in steps with padding (1 of 4 rows are padding)", (), ((1, 4),))
    told = entry(condition, piece_of("b.o", GRAPHS), "rows of padding hold NaN or infinity at a.attn")
    assert told == {
        "sentence": "only in steps with padding (1 of 4 rows are padding) (piece 2: b.o); rows of padding hold NaN or "
        "infinity at a.attn",
        "condition": "padding", "sizes": [], "padding": [[1, 4]], "piece": 2, "taps": ["b.o"],
        "in_padding": "rows of padding hold NaN or infinity at a.attn",
    }  # fmt: skip
    alone = entry(None, piece_of("b.o", GRAPHS), "rows of padding hold NaN")
    assert alone is not None
    assert (alone["sentence"], alone["in_padding"]) == ("in piece 2: b.o", "")
    between = entry(None, piece_of("b.attn", GRAPHS))
    assert between is not None
    assert between["sentence"].startswith("it runs between the pieces")
    assert entry(None, None) is None
