"""Statistics that a tool did not store are computed from its values, and only those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor, computed, missing


def _dump() -> tuple[ForeignDump, list[str]]:
    dump, read = ForeignDump(Path("made"), "made"), []

    def reads(name: str, values: np.ndarray) -> Any:
        def bits() -> np.ndarray:
            read.append(name)
            return values

        return bits

    x = np.array([1.0, -3.0, np.nan, np.inf], "f4")
    partly = Stats(count=3, min=0.0, max=9.0, mean=None, l2=None, nan=0, inf=0)
    whole = Stats(count=2, min=7.0, max=8.0, mean=7.5, l2=1.0, nan=0, inf=0)
    dump.add(Tensor("a", "a", "value", "float32", (4,), reads("a", x)))
    dump.add(Tensor("b", "b", "value", "int64", (3,), reads("b", np.array([1, 2, 6])), stats=partly))
    dump.add(Tensor("c", "c", "value", "float32", (2,), reads("c", x[:2]), stats=whole))
    dump.add(Tensor("d", "d", "value", "float32", (2,), None))
    return dump, read


def test_what_lacks_is_computed_and_what_is_there_is_kept() -> None:
    dump, read = _dump()
    ticks: list[int] = []
    found, failed = computed(dump, dump.records, lambda: ticks.append(1))
    assert (sorted(read), len(ticks), failed) == (["a", "b"], 2, [])
    a, b, c, d = (r.stats for r in found)
    assert a == Stats(count=4, min=-3.0, max=1.0, mean=-1.0, l2=pytest.approx(10**0.5), nan=1, inf=1)
    assert b == Stats(count=3, min=0.0, max=9.0, mean=3.0, l2=pytest.approx(41**0.5), nan=0, inf=0)
    assert (c, d) == (dump.records[2].stats, None)
    assert [missing(r) for r in dump.records] == [True, True, False, False]


def test_a_file_that_went_away_is_said_and_the_others_are_there() -> None:
    dump, _ = _dump()

    def gone() -> np.ndarray:
        raise DumpError("x.npy has gone")

    dump.add(Tensor("e", "e", "value", "float32", (2,), gone))
    found, failed = computed(dump, dump.records)
    assert failed == ["no statistics of 1 tensors: x.npy has gone"]
    assert found[-1].stats is None
    assert found[0].stats is not None


def test_summary_of_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The dump is not written into; the table goes where torch_xray's command has it, and a csv beside it."""
    (tmp_path / "plain").mkdir()
    np.save(tmp_path / "plain" / "x.npy", np.array([[1.5, -2.0], [0.5, 4.0]], "f4"))
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "plain"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "x.npy" in line or " x " in line)
    assert "-2" in row.split()
    assert "1" in row.split()  # the mean
    for _ in range(2):  # and over its own files
        assert main(["inspect", "plain", "sum.txt", "sum.csv"]) == 0
    assert row.split() == (tmp_path / "sum.txt").read_text().splitlines()[1].split()
    assert ",-2.0,4.0,1.0," in (tmp_path / "sum.csv").read_text()
    assert [p.name for p in (tmp_path / "plain").iterdir()] == ["x.npy"]
