"""Counts of pairs: the same wherever they are shown, their parts the whole, each held against compare.csv.

What each report prints of other tools' dumps, copies, dtypes and standards is frozen (tests/freeze)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.counts import check
from support.peer_dumps import unpack
from synthetic_model import capture, scaled, write

from vllm_accprobe.comparison import engine, store

PROMPTS = {"a": [3, 14, 15, 9, 2], "b": [6, 5, 3]}
FAULT = {"model.layers.1.mlp.down_proj": scaled(1.2)}


def dump(root: Path, name: str, *, payloads: bool = True, **how: Any) -> Path:
    return write(capture(**({"prompts": PROMPTS, "tokens": 3} | how)), root / name, payloads=payloads)


def clean(root: Path) -> Any:
    return engine.compare(dump(root, "golden"), dump(root, "mine", chunk=2))


def ranks(root: Path) -> Any:
    return engine.compare(dump(root, "golden"), dump(root, "mine", tp=2))


def with_skips(root: Path) -> Any:
    """Statistics of other batches say nothing of single rows."""
    how = {"payloads": False, "together": False}  # of the shorter request the batches stay the same
    result = engine.compare(dump(root, "golden", **how), dump(root, "mine", chunk=4, **how))
    assert result.counts.skipped
    return result


def judged_again(root: Path) -> Any:
    store.save(engine.compare(dump(root, "golden"), dump(root, "mine", faults=FAULT)).measured, root)
    return engine.rejudge(store.load(root), standard="strict")


def statistics(root: Path) -> Any:
    return engine.compare(*(unpack("a_msprobe_stat", root) / side for side in ("golden", "mine")))


@pytest.mark.parametrize("kind", [clean, ranks, with_skips, judged_again, statistics])
def test_each_count_is_the_same_wherever_it_is_shown(kind: Any, tmp_path: Path) -> None:
    result = kind(tmp_path)
    found = check(result, tmp_path)
    assert found["compared"]
    if kind is clean:  # no tensor has the hash of another, for each holds other rows; yet every stored bit is the same
        assert found["bits"] == found["identical"] == found["compared"] == found["pass"]
    if kind is statistics:
        judged = [p for p in result.pairs if "statistics" in p.message]
        assert judged
        assert not any(p.identical or p.bit_identical for p in judged)


def test_a_zero_of_the_other_sign_is_identical_and_not_to_the_bit(tmp_path: Path) -> None:
    for name, zero in (("golden", 0.0), ("mine", -0.0)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.array([[1.0, zero], [3.0, 4.0]], np.float32))
        np.save(tmp_path / name / "y.npy", np.array([[1.0, np.nan], [3.0, 4.0]], np.float32))
    result = engine.compare(tmp_path / "golden", tmp_path / "mine")
    check(result, tmp_path)
    assert {p.mine: (p.identical, p.bit_identical) for p in result.pairs} == {
        "x.npy": (True, False), "y.npy": (True, True),
    }  # fmt: skip
