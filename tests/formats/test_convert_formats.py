"""Our dumps in other containers: read back by their own libraries and by ourselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli.cli_dumps import make
from safetensors.torch import load_file

from vllm_accprobe import cli
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("own") / "dump", ranks=2)


@pytest.mark.parametrize("kind", ["h5", "npz", "safetensors"])
def test_a_converted_dump_compares_with_the_original(dump: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / kind
    assert cli.main(["convert", str(dump), str(out), "--to", kind, "--rank", "0"]) == 0
    for sides in ((dump, out), (out, dump)):
        found = compare(*sides)
        assert found.verdict == "pass"
        assert "tensors are compared as wholes, step by step" in " ".join(found.plan)
        compared = [p for p in found.pairs if p.status == "pass"]
        assert all((p.max_abs_err or 0.0) == 0.0 for p in compared)
        assert {p.tap for p in compared} == {r.tap for r in open_dump(dump).records}


def test_safetensors_keep_their_dtypes(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    assert cli.main(["convert", str(dump), str(out), "--rank", "1"]) == 0
    own = open_dump(dump)
    stored = [r for r in own.records if r.rank == 1 and r.payload is not None]
    found = {k: v for k, v in load_file(out).items() if not k.startswith("__pad")}
    assert len(found) == len(stored)
    for r in stored:
        step = "param" if r.step is None else r.step
        t = found[f"{step}/{r.tap}/{r.role}" + (f"#{r.call}" if r.call else "")]
        assert (str(t.dtype), tuple(t.shape)) == (f"torch.{r.dtype}", r.shape)
        assert t.reshape(-1).view(torch.uint8).numpy().tobytes() == own.read(r).tobytes()


def test_nothing_is_overwritten_and_nothing_half_made_stays(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "there.npz"
    out.write_text("mine")
    assert cli.main(["convert", str(dump), str(out), "--rank", "0"]) == 2
    assert out.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["there.npz"]


def test_a_foreign_dump_converts_too(dump: Path, tmp_path: Path) -> None:
    h5, back = tmp_path / "a.h5", tmp_path / "back.safetensors"
    assert cli.main(["convert", str(dump), str(h5), "--rank", "0"]) == 0
    assert cli.main(["convert", str(h5), str(back)]) == 0
    assert compare(h5, back).verdict == "pass"
