"""Counts of pairs: the same wherever they are shown, their parts the whole, for every kind of comparison.

What is identical by its numbers and what by its bits is held against comparisons in which it is known: a dump against
itself, against its own copy in another tool's file, against other batches, against one zero with another sign."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.cli_dumps import make
from support.counts import check
from support.peer_dumps import unpack
from synthetic_model import capture, scaled, write

from vllm_accprobe.cli import main
from vllm_accprobe.comparison import engine, store
from vllm_accprobe.dump.reader import open_dump

PROMPTS = {"a": [3, 14, 15, 9, 2], "b": [6, 5, 3]}
DOWN = "model.layers.1.mlp.down_proj"


def dump(root: Path, name: str, *, payloads: bool = True, **how: Any) -> Path:
    return write(capture(**({"prompts": PROMPTS, "tokens": 3} | how)), root / name, payloads=payloads)


def clean(root: Path) -> Any:
    return engine.compare(dump(root, "golden"), dump(root, "mine", chunk=2))


def faulty(root: Path) -> Any:
    return engine.compare(dump(root, "golden"), dump(root, "mine", faults={DOWN: scaled(1.2)}))


def ranks(root: Path) -> Any:
    return engine.compare(dump(root, "golden"), dump(root, "mine", tp=2))


def dtypes(root: Path) -> Any:
    return engine.compare(dump(root, "golden"), dump(root, "mine", dtype="float32"))


def statistics(root: Path) -> Any:
    return engine.compare(dump(root, "golden", payloads=False), dump(root, "mine", faults={DOWN: scaled(1.2)}))


def with_skips(root: Path) -> Any:
    """Statistics of other batches say nothing of single rows."""
    how = {"payloads": False, "together": False}  # of the shorter request the batches stay the same
    result = engine.compare(dump(root, "golden", **how), dump(root, "mine", chunk=4, **how))
    assert result.counts.skipped
    return result


def another_standard(root: Path) -> Any:
    return engine.compare(dump(root, "golden"), dump(root, "mine", faults={DOWN: scaled(1.2)}), standard="msprobe")


def judged_again(root: Path) -> Any:
    result = faulty(root)
    store.save(result.measured, root)
    return engine.rejudge(store.load(root), standard="strict")


def peers(name: str) -> Callable[[Path], Any]:
    return lambda root: engine.compare(*(unpack(name, root) / side for side in ("golden", "mine")))


def operators(root: Path) -> Any:
    torch = pytest.importorskip("torch")
    from vllm_accprobe.capture.torch_model import Probe

    for name, rows in (("golden", 1), ("mine", 2)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU())
        with Probe(model, dir=root / name, ops=True) as probe, torch.no_grad():
            for part in torch.linspace(-1, 1, 64).reshape(4, 16).split(rows):
                probe.model(part)
    return engine.compare(root / "golden", root / "mine")


KINDS = {
    "clean": clean, "faulty": faulty, "ranks": ranks, "dtypes": dtypes, "statistics": statistics, "skips": with_skips,
    "operators": operators, "standard": another_standard, "rejudge": judged_again,
    **{name: peers(name) for name in ("a_msprobe_tensor", "a_msprobe_stat", "d_xray_h5", "b_sglang_tp", "g_single")},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_count_is_the_same_wherever_it_is_shown(kind: str, tmp_path: Path) -> None:
    result = KINDS[kind](tmp_path)
    found = check(result, tmp_path / "out")
    assert found["compared"]


def test_other_batches_are_identical_to_the_bit(tmp_path: Path) -> None:
    """No tensor has the hash of another, for each holds other rows; yet every stored bit is the same."""
    found = check(clean(tmp_path), tmp_path / "out")
    assert found["bits"] == found["identical"] == found["compared"] == found["pass"]


@pytest.mark.parametrize("to", ["h5", "npz", "safetensors"])
def test_a_dump_and_its_own_copy_in_another_file_are_identical(to: str, tmp_path: Path) -> None:
    golden = make(tmp_path / "golden")
    assert main(["convert", str(golden), str(tmp_path / f"copy.{to}"), "--to", to]) == 0
    result = engine.compare(golden, tmp_path / f"copy.{to}")
    found = check(result, tmp_path / "out")
    assert found["identical"] == found["compared"] == found["pass"] > 20
    widened = sum(p.dtype_golden != p.dtype_mine for p in result.pairs)
    assert found["bits"] == found["compared"] - widened
    assert (widened > 0) == (to == "npz")  # which has no bfloat16 and cannot say that it was one, as h5 does


def test_a_dump_against_a_copy_of_itself_is_identical_to_the_bit(tmp_path: Path) -> None:
    found = check(engine.compare(make(tmp_path / "golden"), make(tmp_path / "mine")), tmp_path / "out")
    assert found["bits"] == found["identical"] == found["compared"] == found["pass"]


def test_a_zero_of_the_other_sign_is_identical_and_not_to_the_bit(tmp_path: Path) -> None:
    for name, zero in (("golden", 0.0), ("mine", -0.0)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.array([[1.0, zero], [3.0, 4.0]], np.float32))
        np.save(tmp_path / name / "y.npy", np.array([[1.0, np.nan], [3.0, 4.0]], np.float32))
    result = engine.compare(tmp_path / "golden", tmp_path / "mine")
    check(result, tmp_path / "out")
    assert {p.mine: (p.identical, p.bit_identical) for p in result.pairs} == {
        "x.npy": (True, False), "y.npy": (True, True),
    }  # fmt: skip


def test_equal_statistics_are_not_called_identical(tmp_path: Path) -> None:
    result = peers("a_msprobe_stat")(tmp_path)
    judged = [p for p in result.pairs if "statistics" in p.message]
    assert judged
    assert not any(p.identical or p.bit_identical for p in judged)


def test_labelled_pairs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import json

    torch = pytest.importorskip("torch")
    from vllm_accprobe import labels, set_label, set_task_id

    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "d"))
    monkeypatch.chdir(tmp_path)
    set_task_id()
    one = torch.linspace(-2, 3, 24).reshape(4, 6)
    pairs = {"same": (one, one), "off": (one, 2 * one), "empty": (one[:0], one[:0])}
    for name, sides in pairs.items():
        for side, value in zip(("pta", "acl"), sides, strict=True):
            set_label(side, name, value)
    set_label("pta", "alone", one)
    labels.close()
    assert open_dump(tmp_path / "d").records
    main(["labels", str(tmp_path / "d"), "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    counts = json.loads((tmp_path / "out" / "labels.json").read_text())["counts"]
    assert counts["pairs"] == counts["pass"] + counts["fail"] + counts["not_compared"] == 3
    assert f"{counts['pairs']} labelled pairs: {counts['pass']} pass, {counts['fail']} fail" in shown
