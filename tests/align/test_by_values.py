"""A relation is told where all bits agree, and only there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_accprobe.align.derived import Relation, Relations
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.writer import RankWriter, write_run_json
from vllm_accprobe.topology.data_flow import CallTensor

X, Y = torch.randn(2, 20, 48, generator=torch.Generator().manual_seed(3)).unbind()


def told(where: Path, missing: torch.Tensor, **had: torch.Tensor) -> Relation | None:
    """What is told of ``missing`` where ``had`` was there before."""
    write_run_json(where, {})
    writer = RankWriter(where, 0, {}, budget_bytes=1 << 30, block_bytes=1 << 16)
    for i, (name, t) in enumerate([*had.items(), ("missing", missing)]):
        bits = t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32).numpy()
        writer.put([(bits.ctypes.data, bits.nbytes)], {"event": "tensor", "step": 0, "tap": name, "class": "M",
                   "role": "output.0", "seq": i, "dtype": str(t.dtype)[6:], "shape": list(t.shape)})  # fmt: skip
    writer.close("done", {})
    dump = open_dump(where)
    seen = {r.tap: CallTensor(r.role, None, r.dtype, r.shape, r) for r in dump.records}
    return Relations(dump).explain(seen.pop("missing"), list(seen.items()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_told(tmp_path: Path, dtype: torch.dtype) -> None:
    x, y = X.to(dtype), Y.to(dtype)
    assert told(tmp_path / "add", x + y, x=x, y=y) == Relation("Add", ("x", "y"))
    assert told(tmp_path / "mul", x * y, x=x, other=x - y, y=y) == Relation("Mul", ("x", "y"))
    cut = Relation("Slice", ("x",), {"axis": -1, "begin": 8, "end": 24})
    assert told(tmp_path / "slice", x[:, 8:24], x=x, y=y) == cut
    assert told(tmp_path / "rows", x[[3, 17]], y=y, x=x) == Relation("Gather", ("x",), {"axis": 0, "rows": 2})


def test_what_nearly_fits_is_not_told(tmp_path: Path) -> None:
    x, y = X.bfloat16(), Y.bfloat16()
    off = (x + y).view(torch.int16)
    off[3, 5] ^= 1
    assert told(tmp_path / "bit", off.view(torch.bfloat16), x=x, y=y) is None
    assert told(tmp_path / "rounded", (X + Y).bfloat16(), x=x, y=y) is None  # rounded once, the sum of others
    assert told(tmp_path / "order", x[[17, 3]], x=x) is None
    twice = torch.cat([x[:, :8], x[:, :8]], -1)
    assert told(tmp_path / "twice", x[:, :8], x=twice) is None  # in two places: nobody knows which
    assert told(tmp_path / "zero", x, x=x, y=torch.zeros_like(x)) is None
    assert told(tmp_path / "few", x[:1, :4] + y[:1, :4], x=x[:1, :4], y=y[:1, :4]) is None


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    x = X.clone()
    x[2, 2] = np.inf
    assert told(tmp_path / "inf", x + Y, x=x, y=Y) is None
