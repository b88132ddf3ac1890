"""What is said of graphs: each kind of step that an error can be bound to, and when nothing may be said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_accprobe.judge.shape import Condition, GraphRows, entry, of_steps, piece_of

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
            "only in steps with padding (1 of 4, 1 of 8, 2 of 8 and 3 of 8 rows are nobody's)",
        ),
        (
            lambda size, padding, *_: size == 8 and padding > 0,
            "only in steps replayed at size 8 with padding (1 of 8, 2 of 8 and 3 of 8 rows are nobody's)",
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
    condition = Condition("padding", "only in steps with padding (1 of 4 rows are nobody's)", (), ((1, 4),))
    told = entry(condition, piece_of("b.o", GRAPHS), "rows of padding hold NaN or infinity at a.attn")
    assert told == {
        "sentence": "only in steps with padding (1 of 4 rows are nobody's) (piece 2: b.o); rows of padding hold NaN or "
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
