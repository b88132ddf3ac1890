"""Operators over ranks: against numpy where all ranks' tensors are there; else a line that says what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, faulty, normal, rows_of, wide, write_call

INT8 = torch.int8
Made = list[MadeCall]


def _each(kind: str, param: dict[str, Any], inputs: Sequence[Sequence[torch.Tensor]], outputs: Sequence[Any]) -> Made:
    """A call for each rank."""
    size = len(inputs)
    return [
        MadeCall(kind, {"rank": r, "rankSize": size, "rankRoot": 0, **param}, inputs[r], outputs[r])
        for r in range(size)
    ]


def all_reduce(kind: str, f: Callable[..., Any]) -> Callable[[np.random.Generator], Made]:
    def make(rng: np.random.Generator) -> Made:
        x = [normal(rng, 4, 6) for _ in range(3)]
        y = f(np.stack([wide(t) for t in x]), 0)
        return _each("AllReduceOperation", {"allReduceType": kind}, [[t] for t in x], [[bits(y)]] * 3)

    return make


def all_gather(rng: np.random.Generator) -> Made:
    x = [normal(rng, 4, 6) for _ in range(3)]
    y = np.stack([wide(t) for t in x])
    return _each("AllGatherOperation", {}, [[t] for t in x], [[bits(y)]] * 3)


def reduce_scatter(rng: np.random.Generator) -> Made:
    x = [normal(rng, 4, 6) for _ in range(2)]
    y = wide(x[0]) + wide(x[1])
    return _each("ReduceScatterOperation", {"reduceType": "sum"}, [[t] for t in x], [[bits(y[:2])], [bits(y[2:])]])


def broadcast(rng: np.random.Generator) -> Made:
    x = [normal(rng, 4, 6) for _ in range(2)]
    return _each("BroadcastOperation", {}, [[t] for t in x], [[x[0].clone()], [x[0].clone()]])


def linear(kind: int, residual: bool = False) -> Callable[[np.random.Generator], Made]:
    def make(rng: np.random.Generator) -> Made:
        x, w = [normal(rng, 4, 8) for _ in range(2)], [normal(rng, 6, 8) for _ in range(2)]
        more = [normal(rng, *((2, 6) if kind == 1 else (4, 6))) for _ in range(2)]
        products = [wide(a) @ wide(b).T for a, b in zip(x, w, strict=True)]
        both = np.concatenate([wide(t) for t in x])
        y = [{0: sum(products), 1: sum(products)[2 * r : 2 * r + 2], 2: both @ wide(w[r]).T, 3: products[r]}[kind]
             for r in range(2)]  # fmt: skip
        y = [t + wide(m) if residual else t for t, m in zip(y, more, strict=True)]
        out = [[bits(t), *([bits(both)] if kind == 2 else [])] for t in y]
        inputs = [[a, b, *([m] if residual else [])] for a, b, m in zip(x, w, more, strict=True)]
        param = {
            "type": kind,
            "hasResidual": residual,
            "quantType": -1,
            "keepIntermediate": kind == 2,
            "backend": "lcoc",
        }
        return _each("LinearParallelOperation", param, inputs, out)

    return make


def quantised(rng: np.random.Generator) -> Made:
    x, w = ([bits(rng.integers(-127, 128, s), INT8) for _ in range(2)] for s in ((4, 8), (6, 8)))
    scale = rng.uniform(1e-3, 1e-2, 6).astype(np.float32)
    y = sum(wide(a) @ wide(b).T for a, b in zip(x, w, strict=True)) * scale.astype(float)
    none = torch.zeros(0, dtype=torch.int32)
    inputs = [[a, b, none, torch.from_numpy(scale)] for a, b in zip(x, w, strict=True)]
    param = {"type": 0, "quantType": 1, "outDataType": 1}
    return _each("LinearParallelOperation", param, inputs, [[bits(y)]] * 2)


CASES: dict[str, Callable[[np.random.Generator], Made]] = {
    "sum": all_reduce("sum", np.sum), "max": all_reduce("max", np.max), "min": all_reduce("min", np.min),
    "prod": all_reduce("prod", np.prod), "gather": all_gather, "scatter": reduce_scatter, "broadcast": broadcast,
    "linear": linear(0), "linear residual": linear(0, True), "linear scatter": linear(1), "gather linear": linear(2),
    "alone": linear(3), "quantised": quantised,
}  # fmt: skip


def status(root: Path, made: Made) -> dict[tuple[int, str], str]:
    for rank, call in enumerate(made):
        write_call(root, call, device=rank)
    return {(r.rank, r.role): r.status for r in rows_of(root)}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_over_ranks(tmp_path: Path, name: str, seed: int) -> None:
    made = CASES[name](np.random.default_rng([seed, len(name)]))
    right = status(tmp_path / "right", made)
    assert set(right.values()) == {"pass"}, right
    made[1] = MadeCall(made[1].kind, made[1].param, made[1].inputs, [faulty(made[1].outputs[0]), *made[1].outputs[1:]])
    wrong = status(tmp_path / "wrong", made)
    assert [place for place, s in wrong.items() if s == "fail"] == [(1, "output.0")]


def test_one_rank_of_many_cannot_be_judged(tmp_path: Path) -> None:
    made = CASES["linear"](np.random.default_rng(0))
    write_call(tmp_path, made[1], device=1)
    (row,) = rows_of(tmp_path)
    assert (row.status, row.message) == (
        "skip", "works over 2 ranks, and the tensors of 1 are there: open the folder that holds all",
    )  # fmt: skip
