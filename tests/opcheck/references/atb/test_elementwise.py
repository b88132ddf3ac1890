"""Elementwise operators of ATB, each elewiseType, against numpy, right and with a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, normal, wide

SINGLE, INT8 = torch.float32, torch.int8
Make = Callable[[np.random.Generator], MadeCall]
Array = np.ndarray[Any, Any]
KIND = "ElewiseOperation"


def _shape(rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(3, 12)), int(rng.integers(4, 40))


def single(number: int, f: Callable[[Array], Array], dtype: torch.dtype = torch.float16, **param: Any) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = normal(rng, *_shape(rng), dtype=dtype)
        return MadeCall(KIND, {"elewiseType": number, **param}, [x], [bits(f(wide(x)), dtype)])

    return make


def pair(number: int, f: Callable[[Array, Array], Array], dtype: torch.dtype = torch.float16, out: Any = None) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        n, d = _shape(rng)
        a, b = normal(rng, n, d, dtype=dtype), normal(rng, *((1, d) if rng.integers(2) else (n, d)), dtype=dtype)
        return MadeCall(KIND, {"elewiseType": number}, [a, b], [bits(f(wide(a), wide(b)), out or dtype)])

    return make


def compared(number: int, f: Callable[[Array, Array], Array]) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        a, b = (bits(rng.integers(0, 2 if number in (11, 12) else 4, (5, 9)), INT8) for _ in range(2))
        return MadeCall(KIND, {"elewiseType": number}, [a, b], [bits(f(a.numpy(), b.numpy()), INT8)])

    return make


def inverted(rng: np.random.Generator) -> MadeCall:
    x = torch.from_numpy(rng.integers(0, 2, (5, 9)).astype(bool))
    return MadeCall(KIND, {"elewiseType": 7}, [x], [~x])


def cast(source: torch.dtype, target: torch.dtype, number: int) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = bits(50 * rng.standard_normal(_shape(rng)), source)
        y = bits(np.trunc(wide(x)) if not target.is_floating_point else wide(x), target)
        return MadeCall(KIND, {"elewiseType": 1, "outTensorType": number}, [x], [y], bump=3)

    return make


def quant(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, *_shape(rng))
    y = np.clip(np.round(wide(x) * 32.0 - 4), -128, 127)
    param = {"elewiseType": 6, "quantParam": {"inputScale": 32.0, "inputOffset": -4, "asymmetric": False}}
    return MadeCall(KIND, param, [x], [bits(y, INT8)], bump=5)


def quant_channel(rng: np.random.Generator) -> MadeCall:
    n, d = _shape(rng)
    x, scale, offset = normal(rng, n, d), bits(rng.uniform(0.02, 0.05, d)), bits(rng.integers(-5, 6, d), INT8)
    y = np.clip(np.round(wide(x) / wide(scale) + wide(offset)), -128, 127)
    return MadeCall(KIND, {"elewiseType": 17}, [x, scale, offset], [bits(y, INT8)], bump=5)


def quant_channel_without_offset(rng: np.random.Generator) -> MadeCall:
    made = quant_channel(rng)
    x, scale = made.inputs[:2]
    y = np.clip(np.round(wide(x) / wide(scale)), -128, 127)
    return MadeCall(KIND, {"elewiseType": 17}, [x, scale, torch.zeros(0, dtype=INT8)], [bits(y, INT8)], bump=5)


def dequant_channel(rng: np.random.Generator) -> MadeCall:
    n, d = _shape(rng)
    x, scale, offset = (
        bits(rng.integers(-127, 128, (n, d)), INT8),
        bits(rng.uniform(0.02, 0.05, d)),
        bits(rng.integers(-5, 6, d), INT8),
    )
    return MadeCall(KIND, {"elewiseType": 18}, [x, scale, offset], [bits((wide(x) - wide(offset)) * wide(scale))])


def dynamic(skewed: bool) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = normal(rng, *_shape(rng))
        y = wide(x)
        param = {"elewiseType": 19, "quantParam": {"asymmetric": skewed, "inputScale": 1.0, "inputOffset": 0}}
        if not skewed:
            scale = np.abs(y).max(-1) / 127
            return MadeCall(KIND, param, [x], [bits(np.round(y / scale[:, None]), INT8), bits(scale, SINGLE)], bump=5)
        scale = (y.max(-1) - y.min(-1)) / 255
        offset = -(y.max(-1) + y.min(-1)) / (2 * scale)
        coded = np.clip(np.round(y / scale[:, None] + offset[:, None]), -128, 127)
        return MadeCall(KIND, param, [x], [bits(coded, INT8), bits(scale, SINGLE), bits(offset, SINGLE)], bump=5)

    return make


def where(rng: np.random.Generator) -> MadeCall:
    mask, a, b = bits(rng.integers(0, 2, (5, 9)), INT8), normal(rng, 5, 9), normal(rng, 5, 9)
    return MadeCall("WhereOperation", None, [mask, a, b], [bits(np.where(mask.numpy() == 1, wide(a), wide(b)))])


def fill(rng: np.random.Generator) -> MadeCall:
    x, mask = normal(rng, 5, 9), bits(rng.integers(0, 2, (5, 9)), INT8)
    y = np.where(mask.numpy() == 1, -2.5, wide(x))
    return MadeCall("FillOperation", {"withMask": True, "value": [-2.5], "outDim": []}, [x, mask], [bits(y)])


def filled(rng: np.random.Generator) -> MadeCall:
    return MadeCall(
        "FillOperation", {"withMask": False, "value": [1.5], "outDim": [3, 4]}, [], [bits(np.full((3, 4), 1.5))]
    )


def onehot(rng: np.random.Generator) -> MadeCall:
    x = bits(rng.integers(0, 6, 7), torch.int32)
    one, zero = bits([1], torch.int32), bits([0], torch.int32)
    return MadeCall(
        "OnehotOperation", {"axis": -1, "depth": 6}, [x, one, zero], [bits(np.eye(6)[x.numpy()], torch.int32)]
    )


CASES: dict[str, Make] = {
    "cast to float": cast(torch.float16, SINGLE, 0), "cast to half": cast(SINGLE, torch.float16, 1),
    "cast to int": cast(SINGLE, torch.int32, 3), "cast to long": cast(torch.int32, torch.int64, 9),
    "cast to bfloat16": cast(SINGLE, torch.bfloat16, 27),
    "muls": single(2, lambda x: x * 0.125, mulsParam={"varAttr": 0.125}),
    "muls of old": single(2, lambda x: x * 3.0, varAttr=3.0),
    "cos": single(3, np.cos), "sin": single(4, np.sin, SINGLE), "neg": single(5, np.negative),
    "tanh": single(20, np.tanh),
    "quant": quant, "not": inverted, "add": pair(8, np.add), "add bfloat16": pair(8, np.add, torch.bfloat16),
    "mul": pair(9, np.multiply), "div": pair(10, np.divide), "sub": pair(15, np.subtract),
    "add of integers": pair(8, np.add, torch.int32),
    "and": compared(11, np.logical_and), "or": compared(12, np.logical_or), "less": compared(13, np.less),
    "greater": compared(14, np.greater), "equal": compared(16, np.equal), "quant by channel": quant_channel,
    "quant without offset": quant_channel_without_offset, "dequant by channel": dequant_channel,
    "dynamic": dynamic(False), "dynamic skewed": dynamic(True), "where": where, "fill": fill, "filled": filled,
    "onehot": onehot,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_elementwise(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


def test_an_unknown_type_and_an_unfit_output_are_declined(tmp_path: Path) -> None:
    made = CASES["cos"](np.random.default_rng(0))
    found = judged(tmp_path / "a", MadeCall(KIND, {"elewiseType": 99}, made.inputs, made.outputs))
    assert [r.message for r in found.values()] == ["elewiseType 99 is none that is known here"]
    found = judged(tmp_path / "b", MadeCall(KIND, made.param, made.inputs, [made.outputs[0].to(INT8)]))
    assert [r.message for r in found.values()] == ["elewiseType 3 gives floats, and int8 was captured"]


def test_a_parameter_of_another_kind_is_declined(tmp_path: Path) -> None:
    made = CASES["cos"](np.random.default_rng(0))
    (row,) = judged(tmp_path, MadeCall(KIND, {"elewiseType": "cos"}, made.inputs, made.outputs)).values()
    assert (row.status, row.message) == ("skip", "parameter elewiseType is 'cos'")


def test_a_list_that_would_fill_the_memory_is_declined(tmp_path: Path) -> None:
    made = MadeCall(
        "FillOperation", {"withMask": False, "value": [0.0], "outDim": [1 << 40, 1 << 20]}, [], [torch.zeros(3)]
    )
    (row,) = judged(tmp_path, made).values()
    assert (row.status, row.message) == ("skip", "its parameters do not fit the output that was captured")


def test_an_input_that_was_changed_is_a_fault(tmp_path: Path) -> None:
    made = CASES["cos"](np.random.default_rng(0))
    x = made.inputs[0]
    changed = x.clone()
    changed[0, 0] += 1
    found = judged(tmp_path, MadeCall(KIND, made.param, made.inputs, made.outputs, {0: changed}))
    assert {r: x.status for r, x in found.items()} == {"output.0": "pass", "inplace.0": "fail"}


def test_inputs_that_were_kept_behind_the_operator_only(tmp_path: Path) -> None:
    """``-time 1``: the output is judged; that the input is the same as before cannot be."""
    found = judged(tmp_path, CASES["cos"](np.random.default_rng(0)), after=True)
    assert {r: x.status for r, x in found.items()} == {"output.0": "pass", "inplace.0": "skip"}
