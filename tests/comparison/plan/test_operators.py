"""Dumps with operator calls: what says nothing about the model is set apart by name; what is left is compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_accprobe.capture.torch_model import Probe  # noqa: E402
from vllm_accprobe.comparison.engine import compare  # noqa: E402
from vllm_accprobe.comparison.plan import units as operators  # noqa: E402


class Model(torch.nn.Module):
    """An embedding and a block of plain operators; ``slip`` is added to what the block's square gives."""

    def __init__(self, slip: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.slip = slip
        self.embed = torch.nn.Embedding(64, 16)
        self.block = torch.nn.Linear(16, 16)

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.block(self.embed(input_ids))
        out = torch.empty_like(hidden)
        torch.mul(hidden, 1 + self.slip, out=out)
        return out


@pytest.fixture
def dump(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, slip: float = 0.0, ops: bool = True, rows: int = 1, **settings: Any) -> Path:
        with Probe(Model(slip), dir=tmp_path / name, ops=ops, **settings) as probe:
            torch.manual_seed(1)
            ids = torch.randint(0, 64, (4, 9))
            for start in range(0, 4, rows):
                probe.model(ids[start : start + rows], torch.ones(rows, 9))
        return tmp_path / name

    return make


def test_a_clean_pair_passes_and_operators_are_compared(dump: Callable[..., Path]) -> None:
    result = compare(dump("golden"), dump("mine"))
    assert result.verdict == "pass"
    taps = {p.tap for p in result.pairs if p.status == "pass"}
    assert "<root>::aten.mul.out" in taps
    assert "embed::aten.embedding.default" in taps
    assert all(p.identical for p in result.pairs)


def test_an_operators_error_is_seen(dump: Callable[..., Path]) -> None:
    result = compare(dump("golden"), dump("mine", slip=0.5))
    assert result.verdict == "fail"
    failed = {(p.tap, p.role) for p in result.pairs if p.status == "fail"}
    assert ("<root>::aten.mul.out", "inplace.input.out") in failed
    assert ("embed::aten.embedding.default", "output.0") not in failed


def test_another_batching_is_no_error(dump: Callable[..., Path]) -> None:
    result = compare(dump("golden", rows=1), dump("mine", rows=2))
    assert result.verdict == "pass"
    assert result.coverage["skipped"][operators.SHAPES] > 0
    assert not [p for p in result.pairs if "::" in p.tap and p.status == "fail"]


@pytest.mark.parametrize("with_ops", ["golden", "mine"])
def test_operators_on_one_side_only_are_counted(dump: Callable[..., Path], with_ops: str) -> None:
    result = compare(dump("golden", ops=with_ops == "golden"), dump("mine", ops=with_ops == "mine"))
    assert result.verdict == "pass"
    assert result.coverage["skipped"][operators.ONE_SIDE] > 0
    assert not result.coverage["taps_only_golden"]
    assert not result.coverage["taps_only_mine"]


def test_dumps_of_code_without_modules(tmp_path: Path) -> None:
    from vllm_accprobe import begin_dump, end_dump

    for name, factor in (("golden", 2.0), ("mine", 2.0), ("wrong", 2.5)):
        for k in range(3):
            begin_dump(tmp_path / name)
            (torch.arange(6.0) + k).mul(factor)
            end_dump()
        begin_dump(tmp_path / name)
        end_dump(close=True)
    same = compare(tmp_path / "golden", tmp_path / "mine")
    assert same.verdict == "pass"
    assert {p.tap for p in same.pairs} == {
        "::aten.arange.default", "::aten.add.Tensor", "::aten.mul.Tensor",
    }  # fmt: skip
    wrong = compare(tmp_path / "golden", tmp_path / "wrong")
    assert wrong.verdict == "fail"
    assert {p.tap for p in wrong.pairs if p.status == "fail"} == {"::aten.mul.Tensor"}


def test_a_traced_dump_has_nothing_to_compare_but_modules(dump: Callable[..., Path]) -> None:
    result = compare(dump("golden", ops_mode="trace"), dump("mine"))
    assert result.verdict == "pass"
