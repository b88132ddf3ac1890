"""Strides and offsets of what is not contiguous stand in the journal, whichever way the tensor took."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_accprobe import Probe
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.record_table import TensorSite

STEPS = 5
"""More than an input is checked for changes, so that the last ones take the short way."""


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Views(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.view, self.turned, self.whole, self.both = Same(), Same(), Same(), Same()
        self.step = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        memory = torch.arange(6 * 8 * 4.0).reshape(6, 8, 4) + self.step
        self.view(memory[:, 2:5])
        self.turned(memory[0, :, :3].clone().repeat(1, 2).t())
        self.whole(memory)
        self.both(memory[:, :2] if self.step % 2 else memory[:, 4:6].contiguous())
        self.step += 1
        return input_ids


def test_each_way_writes_strides_and_offsets(tmp_path: Path) -> None:
    model = Views()
    probe = Probe(model, dir=str(tmp_path / "d"))
    session: Any = probe.session
    session.flatten = None
    with torch.no_grad():
        for _ in range(STEPS):
            model(torch.arange(6)[None])
    probe.close()
    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    views = {"view": ((32, 4, 1), 8), "turned": ((1, 6), 0), "whole": (None, 0)}
    for record in (r for r in dump.records if r.role in ("input.x", "output.0") and r.tap in (*views, "both")):
        expected = views.get(record.tap, ((32, 4, 1), 0) if record.step % 2 else (None, 0))
        assert (record.stride, record.offset) == expected, record
        if record.tap == "view":
            memory = np.arange(6 * 8 * 4.0, dtype=np.float32).reshape(6, 8, 4) + record.step
            assert np.array_equal(dump.read(record), memory[:, 2:5])
    assert sum(r.tap == "view" for r in dump.records) == 2 * STEPS


LINE = {"event": "tensor", "step": 0, "tap": "m", "role": "input.x", "dtype": "bfloat16", "shape": [2, 3]}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({}, None),
        ({"stride": [9, 1], "offset": 4}, None),
        ({"stride": [9, 1, 1]}, "stride"),
        ({"stride": [-9, 1]}, "stride"),
        ({"stride": [True, 1]}, "stride"),
        ({"stride": [1 << 60, 1]}, "stride"),
        ({"stride": "9"}, "stride"),
        ({"stride": [9, 1], "offset": -1}, "offset"),
    ],
)
def test_a_strangers_strides_are_checked(more: dict[str, Any], key: str | None) -> None:
    if key is not None:
        with pytest.raises(ValueError, match=key):
            TensorSite.of_line({**LINE, **more})
        return
    found = TensorSite.of_line({**LINE, **more})
    assert (found.stride, found.offset) == (tuple(more["stride"]) if more else None, more.get("offset", 0))
