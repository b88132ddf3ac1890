"""bfloat16 numbers in float32 files are seen in a dump as a whole; embeddings of a float32 model are none."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from vllm_accprobe.cli import main
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.common import foreign


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def file(path: Path, dtype: torch.dtype, layers: int = 6, wrong: float = 0.0, on_grid: str = "embed") -> Path:
    """An npz as `accprobe convert` writes it: many steps of one embedding, and layers that compute in ``dtype``.
    on_grid: the taps whose numbers are a bfloat16 checkpoint's."""
    arrays: dict[str, np.ndarray] = {}
    for step in range(12):
        for k in range(layers):
            tap = "embed" if k == 0 else f"layers.{k}"
            x = drawn(100 * step + k, 8, 32).to(torch.bfloat16 if tap == on_grid else dtype).float()
            arrays[f"{step}/{tap}/output.0"] = (x * (1 + wrong)).to(dtype).float().numpy()
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_outputs_are_seen_and_compared_as_such(tmp_path: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    golden, mine = file(tmp_path / "g.npz", dtype), file(tmp_path / "m.npz", dtype, wrong=2e-3)
    assert foreign.note_values(open_dump(golden)) == name
    found = compare(golden, mine)
    assert f"golden: its float32 values are {name} numbers: judged by what {name} can hold" in found.notes
    assert found.verdict == ("pass" if name == "bfloat16" else "fail")  # 2e-3 is below bfloat16's rounding alone


def test_a_float32_model_of_a_bfloat16_checkpoint(tmp_path: Path) -> None:
    golden, mine = file(tmp_path / "g.npz", torch.float32), file(tmp_path / "m.npz", torch.float32, wrong=1e-3)
    assert foreign.note_values(open_dump(golden)) == ""
    found = compare(golden, mine)
    assert found.verdict == "fail"
    assert not [n for n in found.notes if "numbers: judged" in n]


def test_outputs_are_looked_at_of_all_taps(tmp_path: Path) -> None:
    """Steps repeat their taps: every so-manieth output may always be the embedding."""
    npz = np.load(file(tmp_path / "g.npz", torch.float32))
    with h5py.File(tmp_path / "g.h5", "w", track_order=True) as f:
        for step in range(16):
            group = f.create_group(str(step), track_order=True)
            for key in (k for k in npz if k.startswith(f"{step % 12}/")):
                group[f"{key.split('/')[1]}.Linear.0.forward_output.0"] = npz[key]
    assert open_dump(tmp_path / "g.h5").problems == []


def test_integers_and_constants_tell_nothing(tmp_path: Path) -> None:
    ids = {f"0/layers.{k}/output.0": np.arange(200, dtype=np.float32).reshape(10, 20) for k in range(5)}
    np.savez(tmp_path / "i.npz", **ids)
    assert foreign.note_values(open_dump(tmp_path / "i.npz")) == ""


def test_the_summary_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(file(tmp_path / "g.npz", torch.bfloat16))]) == 0
    assert "note: its float32 values are bfloat16 numbers: judged by what bfloat16 can hold" in capsys.readouterr().out
