"""Ranks of other tools' dumps: copies that differ, partial sums and pieces that nobody wrote down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_accprobe.comparison.engine import compare

RNG = np.random.default_rng(5)
UNKNOWN = "layout unknown: ranks of one shape"
X = RNG.standard_normal((6, 8)).astype(np.float32)


def msit(root: Path, **ranks: np.ndarray) -> Path:
    """A dump with one module; r0, r1 ...: what each rank gave out."""
    for name, values in ranks.items():
        where = root / f"torch_tensors/{name[1:]}_9{name[1:]}/0/root.a"
        where.mkdir(parents=True)
        torch.save(torch.from_numpy(np.ascontiguousarray(values)), where / "output.pth")
    return root


def sglang(root: Path, dims: str, *ranks: np.ndarray) -> Path:
    root.mkdir()
    for rank, values in enumerate(ranks):
        meta = {"dims": dims, "sglang_parallel_info": {"tp_rank": rank, "tp_size": len(ranks)}}
        name = f"step=0___rank={rank}___dump_index=1___name=x.pt"
        torch.save({"value": torch.from_numpy(values), "meta": meta}, root / name)
    return root


def only(golden: Path, mine: Path) -> tuple[str, str, float | None]:
    (pair,) = compare(golden, mine).pairs
    return pair.status, pair.message, pair.rel_l2


def test_copies_that_are_equal(tmp_path: Path) -> None:
    one, two = msit(tmp_path / "g", r0=X), msit(tmp_path / "m", r0=X, r1=X)
    assert only(one, two) == ("pass", UNKNOWN, 0.0)
    assert only(two, one) == ("pass", "", 0.0)  # how golden was put together stands in the plan


def test_copies_with_nan_are_equal(tmp_path: Path) -> None:
    x = X.copy()
    x[0, 0] = np.nan
    status, message, _ = only(msit(tmp_path / "g", r0=x), msit(tmp_path / "m", r0=x, r1=x))
    assert (status, message) == ("pass", UNKNOWN)


@pytest.mark.parametrize("kind", ["msit", "sglang"])
def test_one_ranks_copy_is_wrong(tmp_path: Path, kind: str) -> None:
    bad = X.copy()
    bad[2] *= 1.5
    if kind == "msit":
        golden, mine = msit(tmp_path / "g", r0=X), msit(tmp_path / "m", r0=X, r1=bad)
    else:
        golden, mine = sglang(tmp_path / "g", "t h", X), sglang(tmp_path / "m", "t h # tp:replicated", X, bad)
    status, message, rel = only(golden, mine)
    assert status == "fail"
    assert "ranks differ (rank 1 from rank 0)" in message
    assert rel == pytest.approx(np.linalg.norm(bad - X) / np.linalg.norm(X), rel=1e-6)


def test_partial_sums_that_nobody_wrote_down(tmp_path: Path) -> None:
    part = RNG.standard_normal(X.shape).astype(np.float32)
    one, two = msit(tmp_path / "g", r0=X), msit(tmp_path / "m", r0=X - part, r1=part)
    for golden, mine, how in ((one, two, f"; {UNKNOWN}"), (two, one, "")):
        status, message, rel = only(golden, mine)
        assert (status, message) == ("pass", f"the sum over ranks is compared{how}")
        assert rel is not None
        assert rel < 1e-6


def test_a_partial_sum_with_a_fault(tmp_path: Path) -> None:
    part = RNG.standard_normal(X.shape).astype(np.float32)
    wrong = X - part
    wrong[1] += 0.3
    status, message, rel = only(msit(tmp_path / "g", r0=X), msit(tmp_path / "m", r0=wrong, r1=part))
    assert status == "fail"
    assert "the sum over ranks" in message
    assert rel == pytest.approx(0.3 * np.sqrt(8) / np.linalg.norm(X), rel=1e-4)


def test_pieces_that_nobody_wrote_down(tmp_path: Path) -> None:
    one, two = msit(tmp_path / "g", r0=X), msit(tmp_path / "m", r0=X[:, :4], r1=X[:, 4:])
    assert only(one, two)[0] == "pass"
    assert only(two, one)[0] == "pass"


@pytest.mark.parametrize("fault", [False, True])
def test_fewer_heads_than_ranks(tmp_path: Path, fault: bool) -> None:
    """Two heads over four ranks: neighbours hold the same head, and the note does not say so."""
    heads = [np.ascontiguousarray(X[:, 4 * h : 4 * h + 4]) for h in (0, 0, 1, 1)]
    golden = sglang(tmp_path / "g", "t kv_heads[tp]", X)
    if fault:
        heads[2] = heads[2] + np.float32(0.1)
    status, _, rel = only(golden, sglang(tmp_path / "m", "t kv_heads[tp]", *heads))
    assert status == ("fail" if fault else "pass")
    assert rel == pytest.approx(0.1 * np.sqrt(24) / np.linalg.norm(X) if fault else 0, rel=1e-4)


def test_ranks_pair_one_by_one_where_both_sides_have_them(tmp_path: Path) -> None:
    parts = X[:, :4].copy(), X[:, 4:].copy()
    golden = msit(tmp_path / "g", r0=parts[0], r1=parts[1])
    parts[1][3] += 1
    found = compare(golden, msit(tmp_path / "m", r0=parts[0], r1=parts[1]))
    assert [(p.rank, p.status) for p in sorted(found.pairs, key=lambda p: p.rank or 0)] == [(0, "pass"), (1, "fail")]
