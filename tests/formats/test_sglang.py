"""SGLang's dumper: names, notes, ranks put together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.peer_dumps import unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump, sglang


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("b_sglang_tp", tmp_path_factory.mktemp("sglang"))


def test_a_missing_rank_is_said(pair: Path, tmp_path: Path) -> None:
    for f in (pair / "mine").iterdir():
        if "rank=1" not in f.name or "attn_q" not in f.name:
            (tmp_path / f.name).write_bytes(f.read_bytes())
    found = compare(pair / "golden", tmp_path)
    skipped = [p for p in found.pairs if p.status == "skip"]
    assert {p.tap for p in skipped} == {"layers.0.attn_q", "layers.1.attn_q"}
    assert all("missing 1 of 2" in p.message for p in skipped)


@pytest.mark.parametrize(("name", "place"), [
    ("step=0___rank=1___dump_index=9___name=attn_out___layer_id=3", ("layers.3.attn_out", "output.0")),
    ("step=0___rank=0___dump_index=9___name=logits___phase=decode", ("logits.phase=decode", "output.0")),
    ("step=0___rank=0___dump_index=9___name=grad__x___tp_rank=1", ("x", "grad.0")),
    ("step=0___rank=0___dump_index=1___name=param__model.norm.weight", ("model.norm", "param.weight")),
    ("step=0___rank=0___dump_index=1___name=non_intrusive__model.layers.0.mlp.inputs.0___layer_id=0",
     ("model.layers.0.mlp", "input.0")),
    ("step=0___rank=0___dump_index=1___name=non_intrusive__layers.0.output.1", ("layers.0", "output.1")),
    ("step=0___rank=0___dump_index=1___name=non_intrusive__inputs.ids", ("<root>", "input.ids")),
])  # fmt: skip
def test_places(name: str, place: tuple[str, str]) -> None:
    assert sglang.place_of(sglang.parse_name(name + ".pt")) == place


def _save(root: Path, name: str, rank: int, value: torch.Tensor, dims: str | None, info: dict[str, int]) -> None:
    root.mkdir(exist_ok=True)
    tags = f"step=0___rank={rank}___dump_index=1___name={name}"
    meta: dict[str, object] = {"name": name, "rank": rank, "sglang_parallel_info": info}
    torch.save({"value": value, "meta": meta | ({"dims": dims} if dims else {})}, root / f"{tags}.pt")


def test_partial_sums_of_two_groups(tmp_path: Path) -> None:
    """Four ranks: halves of the width, each the sum of two."""
    for tp in range(2):
        for ep in range(2):
            info = {"tp_rank": tp, "tp_size": 2, "moe_ep_rank": ep, "moe_ep_size": 2}
            value = torch.full((3, 2), float(10 * tp + ep), dtype=torch.bfloat16)
            _save(tmp_path, "y", 2 * tp + ep, value, "t h[tp,ep:partial]", info)
    dump = open_dump(tmp_path)
    np.testing.assert_array_equal(dump.read(dump.records[0]), [[1.0, 1.0, 21.0, 21.0]] * 3)


def test_ranks_without_groups(tmp_path: Path) -> None:
    """The dumper outside of SGLang: nothing but ranks."""
    for rank in range(3):
        _save(tmp_path, "x", rank, torch.full((2, 1), float(rank)), "t h[tp]", {})
    dump = open_dump(tmp_path)
    assert [(r.layout.kind, r.layout.index, r.layout.size) for r in dump.records] == [("shard", i, 3) for i in range(3)]


def test_values_that_are_no_tensors_are_counted(tmp_path: Path) -> None:
    _save(tmp_path, "x", 0, torch.ones(2), None, {})
    torch.save({"value": 3, "meta": {}}, tmp_path / "step=0___rank=0___dump_index=2___name=n.pt")
    (tmp_path / "step=0___rank=0___dump_index=3___name=bad.pt").write_bytes(b"no torch file")
    dump = open_dump(tmp_path)
    assert [r.tap for r in dump.records] == ["x"]
    assert sorted(s.reason for s in dump.skips) == ["file that cannot be read", "value that is no tensor"]
    assert len(dump.problems) == 1


def test_two_dumps_in_one_directory(tmp_path: Path) -> None:
    for run in ("dump_1", "dump_2"):
        _save(tmp_path / run, "x", 0, torch.ones(2), None, {})
    with pytest.raises(DumpError, match=r"holds 2 dumps \(dump_1, dump_2\): name one"):
        open_dump(tmp_path)


# --- the notes of SGLang's dumper: what they say of a tensor's pieces ---


@pytest.mark.parametrize(
    ("note", "dims", "cuts", "copies"),
    [
        ("t h # tp:replicated", 2, [], {"tp"}),
        ("t num_heads[tp] head_dim", 3, [("tp", 1, "join", False)], set()),
        ("t (num_heads * head_dim)[tp]", 2, [("tp", 1, "join", False)], set()),
        ("t h[tp:partial]", 2, [("tp", 1, "partial", False)], set()),
        ("b s[cp:zigzag,sp] h # ep:replicated", 3, [("sp", 1, "join", False), ("cp", 1, "join", True)], {"ep"}),
        ("1 t h[ep:partial+natural]", 3, [("ep", 2, "partial", False)], set()),
    ],
)
def test_notes(note: str, dims: int, cuts: list[tuple[str, int, str, bool]], copies: set[str]) -> None:
    found = sglang.parse_dims(note)
    assert (found.dims, set(found.copies)) == (dims, copies)
    assert [(c.group, c.dim, c.kind, c.zigzag) for c in found.cuts] == cuts
