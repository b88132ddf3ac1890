"""Operators of ATB that only move numbers, against numpy, to the bit, and with one number wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, normal, wide

INT, LONG = torch.int32, torch.int64
Make = Callable[[np.random.Generator], MadeCall]


def gather(axis: int, index: tuple[int, ...]) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = normal(rng, 5, 6, 7)
        at = bits(rng.integers(0, x.shape[axis], index), LONG)
        y = np.take(wide(x), at.numpy(), axis)
        return MadeCall("GatherOperation", {"axis": axis, "batchDims": 0}, [x, at], [bits(y)])

    return make


def gather_by_batch(rng: np.random.Generator) -> MadeCall:
    x, at = normal(rng, 3, 6, 4), bits(rng.integers(0, 6, (3, 5)), INT)
    y = np.stack([wide(x)[i][at.numpy()[i]] for i in range(3)])
    return MadeCall("GatherOperation", {"axis": 1, "batchDims": 1}, [x, at], [bits(y)])


def concat(rng: np.random.Generator) -> MadeCall:
    a, b = normal(rng, 3, 4), normal(rng, 3, 7)
    return MadeCall("ConcatOperation", {"concatDim": -1}, [a, b], [bits(np.concatenate([wide(a), wide(b)], -1))])


def split(sizes: list[int]) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = normal(rng, 4, 12)
        cuts = np.cumsum(sizes)[:-1] if sizes else 3
        out = [bits(p) for p in np.split(wide(x), cuts, 1)]
        return MadeCall("SplitOperation", {"splitDim": 1, "splitNum": 3, "splitSizes": sizes}, [x], out)

    return make


def slice_of(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, 6, 8, 5)
    param = {"offsets": [1, -4, 0], "size": [3, 2, -1]}
    return MadeCall("SliceOperation", param, [x], [bits(wide(x)[1:4, 4:6, :])])


def transpose(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, 3, 4, 5)
    return MadeCall("TransposeOperation", {"perm": [2, 0, 1]}, [x], [bits(wide(x).transpose(2, 0, 1))])


def as_strided(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, 30)
    y = np.array([[wide(x)[2 + 7 * i + 3 * j] for j in range(4)] for i in range(3)])
    return MadeCall("AsStridedOperation", {"size": [3, 4], "stride": [7, 3], "offset": [2]}, [x], [bits(y)])


def repeat(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, 3, 4)
    return MadeCall("RepeatOperation", {"multiples": [2, 1, 3]}, [x], [bits(np.tile(wide(x), (2, 1, 3)))])


def set_value(rng: np.random.Generator) -> MadeCall:
    dst, src = normal(rng, 5, 6, 4), normal(rng, 2, 3, 4)
    after = wide(dst).copy()
    after[1:3, 2:5, :] = wide(src)
    param = {"starts": [1, 2, 0], "ends": [3, 5, 4], "strides": [1, 1, 1]}
    return MadeCall("SetValueOperation", param, [dst, src], [], {0: bits(after)})


def to_nz(dtype: torch.dtype, wide_by: int) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = bits(rng.integers(-50, 50, (2, 18, 40)), dtype)
        up = np.zeros((2, 32, -(-40 // wide_by) * wide_by))
        up[:, :18, :40] = wide(x)
        y = up.reshape(2, 32, -1, wide_by).transpose(0, 2, 1, 3)
        return MadeCall("TransdataOperation", {"transdataType": 2, "outCrops": [0, 0]}, [x], [bits(y, dtype)])

    return make


def from_nz(rng: np.random.Generator) -> MadeCall:
    x = normal(rng, 1, 3, 32, 16)
    y = np.concatenate([wide(x)[:, i] for i in range(3)], -1)[:, :20, :40]
    return MadeCall("TransdataOperation", {"transdataType": 1, "outCrops": [20, 40]}, [x], [bits(y)])


def unpad(rng: np.random.Generator) -> MadeCall:
    batch, most = 3, 7
    lengths = rng.integers(1, most + 1, batch)
    ids = np.zeros((batch, most), int)
    for row, n in zip(ids, lengths, strict=True):
        row[:n] = rng.integers(1, 100, n)
    sums = np.cumsum(most - lengths)
    tokens, offsets, at = np.zeros(batch * most, int), np.zeros(batch * most, int), 0
    for i, n in enumerate(lengths):
        tokens[at : at + n], offsets[at : at + n] = ids[i, :n], 0 if i == 0 else sums[i - 1]
        at += n
    before = np.array([0, *sums[:-1]])
    inputs = [bits(ids, LONG), bits(sums[:, None], INT), bits([[lengths.sum()]], LONG), bits(lengths[:, None], INT)]
    out = [bits(tokens[None], LONG), bits(before[:, None], INT), bits(offsets[None], INT)]
    return MadeCall("UnpadOperation", None, inputs, out)


def pad(rng: np.random.Generator) -> MadeCall:
    lengths = rng.integers(1, 6, 4)
    rows = normal(rng, int(lengths.sum()), 9)
    y = wide(rows)[np.cumsum(lengths) - 1]
    ids = torch.zeros(4, 6, dtype=LONG)
    inputs = [rows, torch.zeros(1, len(rows), dtype=INT), bits(lengths[:, None], INT), ids]
    return MadeCall("PadOperation", None, inputs, [bits(y)])


def unpad_rows(rng: np.random.Generator) -> MadeCall:
    x, lengths = normal(rng, 3, 6, 4), [2, 6, 3]
    y = np.concatenate([wide(x)[i, :n] for i, n in enumerate(lengths)])
    return MadeCall("UnpadWithHiddenStateOperation", {"qSeqLen": lengths, "maxSeqLen": 6}, [x], [bits(y)])


def pad_rows(rng: np.random.Generator) -> MadeCall:
    made = unpad_rows(rng)
    lengths, x = [2, 6, 3], wide(made.outputs[0])
    y, at = np.zeros((3, 6, 4)), 0
    for i, n in enumerate(lengths):
        y[i, :n] = x[at : at + n]
        at += n
    return MadeCall("PadWithHiddenStateOperation", {"qSeqLen": lengths, "maxSeqLen": 6}, [made.outputs[0]], [bits(y)])


def attention_masks(rng: np.random.Generator) -> MadeCall:
    x, lengths = normal(rng, 2, 1, 6, 6), [3, 5]
    y = [wide(x)[i, :, :n, :n].reshape(-1) for i, n in enumerate(lengths) for _ in range(2)]
    return MadeCall("GenAttentionMaskOperation", {"seqLen": lengths, "headNum": 2}, [x], [bits(np.concatenate(y))])


def scatter(add: bool) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x, more = normal(rng, 4, 6), normal(rng, 4, 3)
        at = np.stack([rng.permutation(6)[:3] for _ in range(4)])
        after = wide(x).copy()
        for i in range(4):
            for j in range(3):
                after[i, at[i, j]] = wide(more)[i, j] + (after[i, at[i, j]] if add else 0)
        param = {"axis": -1, "reduction": int(add)}
        return MadeCall("ScatterElementsV2Operation", param, [x, bits(at, INT), more], [bits(after)])

    return make


def index_add(kind: int) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x, more, at = normal(rng, 6, 5), normal(rng, 4, 5), rng.permutation(6)[:4]
        last = bits([0.5]) if kind == 1 else bits([2], INT)
        after = wide(x).copy()
        for i in range(4 if kind == 1 else 2):
            after[at[i]] += (0.5 if kind == 1 else 1.0) * wide(more)[i]
        return MadeCall("IndexAddOperation", {"indexType": kind, "axis": 0}, [x, bits(at, INT), more, last],
                        [bits(after)], {0: bits(after)})  # fmt: skip

    return make


def nonzero(rng: np.random.Generator) -> MadeCall:
    x = bits(rng.integers(0, 2, (4, 5)), LONG)
    at = np.array(np.nonzero(x.numpy()))
    y = np.zeros((2, 20), int)
    y[:, : at.shape[1]] = at
    return MadeCall("NonzeroOperation", None, [x], [bits(y, LONG), bits([at.shape[1]], LONG)])


CASES: dict[str, Make] = {
    "gather": gather(0, (8,)), "gather of two": gather(0, (2, 3)), "gather along 1": gather(1, (4,)),
    "gather by batch": gather_by_batch, "concat": concat, "split": split([]), "split by sizes": split([2, 3, 7]),
    "slice": slice_of, "transpose": transpose, "as strided": as_strided, "repeat": repeat, "set value": set_value,
    "to nz": to_nz(torch.float16, 16), "to nz int8": to_nz(torch.int8, 32), "from nz": from_nz, "unpad": unpad,
    "pad": pad,
    "unpad rows": unpad_rows, "pad rows": pad_rows, "masks": attention_masks, "scatter": scatter(False),
    "scatter add": scatter(True), "index add": index_add(1), "index add valid": index_add(2), "nonzero": nonzero,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_moved(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


@pytest.mark.parametrize(
    ("kind", "param", "inputs", "why"),
    [
        (
            "GatherOperation",
            {"axis": 0},
            [torch.zeros(3, 2), torch.tensor([7])],
            "an index lies outside of what it is an index of",
        ),
        (
            "AsStridedOperation",
            {"size": [2, 2], "stride": [9, 1], "offset": [0]},
            [torch.zeros(4)],
            "its strides lead out of its input",
        ),
        ("SliceOperation", {"offsets": [3], "size": [9]}, [torch.zeros(4)], "it cuts beyond its input"),
        (
            "RepeatOperation",
            {"multiples": [1 << 50]},
            [torch.zeros(4)],
            "its parameters do not fit the output that was captured",
        ),
        ("TransposeOperation", {"perm": [0, 0]}, [torch.zeros(2, 2)], "perm [0, 0] is no order of 2 dimensions"),
        ("SplitOperation", {"splitSizes": [1, 9]}, [torch.zeros(4)], "splitSizes [1, 9] do not fit 4"),
        ("TransposeOperation", {"perm": "10"}, [torch.zeros(2, 2)], "parameter perm is '10'"),
    ],
)
def test_parameters_that_lead_out_are_declined(
    tmp_path: Path, kind: str, param: dict[str, Any], inputs: list[torch.Tensor], why: str
) -> None:
    (row,) = judged(tmp_path, MadeCall(kind, param, inputs, [torch.zeros(2, 2)])).values()
    assert (row.status, row.message) == ("skip", why)
