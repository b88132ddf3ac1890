"""What a plan sets apart of operator calls, how it indexes rows, and partial sums that nobody adds up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.align.tokens import Rows, SideRows
from vllm_accprobe.comparison.plan.make_plan import Indices
from vllm_accprobe.comparison.plan.unit import loose, unsummed, unsummed_taps
from vllm_accprobe.dump.schema import Layout, Record

torch = pytest.importorskip("torch")

from vllm_accprobe.capture.torch_model import Probe  # noqa: E402
from vllm_accprobe.comparison.engine import compare  # noqa: E402
from vllm_accprobe.comparison.plan import make_plan as operators  # noqa: E402


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


def side(**spaces):
    rows = {}
    for name, (keys, keep) in spaces.items():
        rows[0, int(name[1:]), "tokens"] = Rows(np.array(keys), np.array(keep, bool), np.zeros(len(keys), bool))
    return SideRows(rows, {})


A, B = (0, 0, "tokens"), (0, 1, "tokens")


def test_rows_lie_in_several_tensors_and_the_last_counts():
    golden = side(s0=([10, 11, 12], [1, 1, 1]), s1=([12, 13], [1, 1]))
    found = Indices((golden, side(s0=([13, 12, 99, 10], [1, 1, 1, 0])))).meet(A, (A, B))
    assert found.used == (1,)
    assert (found.row.tolist(), found.other.tolist(), found.rows.keys.tolist()) == ([0, 1], [1, 0], [13, 12])
    assert (found.aligned, found.complete, found.both) == (False, False, False)


def test_the_same_rows_are_aligned_and_those_left_out_are_known():
    same = side(s0=([5, 6], [1, 1]))
    found = Indices((same, same)).meet(A, (A,))
    assert (found.aligned, found.complete, found.both) == (True, True, True)
    indices = Indices((same, side(s0=([5, 6], [1, 0]), s1=([7], [0]))))
    assert (indices.left_out, indices.kept) == ({(0, 0), (0, 1)}, {A})
    part = indices.meet(A, (A,))
    assert (part.aligned, part.complete, part.both) == (True, False, False)
    assert Indices((same, side(s0=([8], [1])))).meet(A, (A,)) is None


SHARE = "share"


def record(tap, cls, role, rank, digest, layout="replicated"):
    facts = dict.fromkeys(Record.__dataclass_fields__) | {
        "tap": tap, "cls": cls, "role": role, "rank": rank, "hash": f"{digest}{rank}", "step": 3, "call": 0, "seq": 1,
        "layout": Layout(layout, "tp", rank, 2) if layout == "partial" else Layout(layout),
    }  # fmt: skip
    return Record(**facts)


def two_ranks(read, role="input.x", cls="RMSNorm", ranks=(0, 1)):
    records = []
    for rank in ranks:
        records += [
            record("l.mlp.down_proj", "RowParallelLinear", "output.0", rank, SHARE, "partial"),
            record("l.mlp", "MLP", "output.0", rank, SHARE, "partial"),
            record("norm", cls, role, rank, read),
        ]
    return SimpleNamespace(ranks=ranks, records=records)


def test_what_a_norm_reads_as_a_whole_is_no_share() -> None:
    wrong = two_ranks(SHARE)
    found = loose(wrong)
    assert found == {(0, 3, "share0"), (1, 3, "share1")}
    assert unsummed_taps(wrong, found) == ["l.mlp.down_proj"]
    assert unsummed(wrong) == {(0, 3, 1), (1, 3, 1)}


@pytest.mark.parametrize(
    "honest",
    [
        two_ranks("sum"),
        two_ranks(SHARE, cls="MoERunner"),  # whoever adds up reads shares
        two_ranks(SHARE, role="output.0"),
        two_ranks(SHARE, ranks=(0,)),
    ],
)
def test_shares_that_somebody_may_add_up_stay_shares(honest: SimpleNamespace) -> None:
    assert loose(honest) == frozenset()
    assert unsummed_taps(honest, frozenset()) == []
    assert unsummed(honest) == frozenset()


@pytest.mark.parametrize(("roles", "left"), [
    (("input.output", "inplace.output"), ["inplace.output"]),  # what the buffer held before the call
    (("input.out", "inplace.out"), ["inplace.out"]),
    (("output",), ["output"]), (("out", "input.out"), ["out", "input.out"]),  # what a tool names its results
])  # fmt: skip
def test_only_a_buffer_that_was_written_in_place_is_set_apart(roles: tuple[str, ...], left: list[str]) -> None:
    records = [record("attn", "Attention", role, 0, SHARE) for role in roles]
    sides = [SimpleNamespace(ranks=(0,), ops=(), records=records) for _ in range(2)]
    golden, mine, skipped = operators.set_apart(*sides)
    assert [r.role for r in mine.records] == [r.role for r in golden.records] == left
    assert skipped == ({operators.FRESH: 1} if len(left) < len(roles) else {})
