"""Pairs of one dump: which compare, what fails, what cannot be compared and why; hostile dumps."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_accprobe import labels, set_label, set_task_id
from vllm_accprobe.comparison.labelled_pairs import LabelComparison, LabelSide, LabelView, compare_labels, places
from vllm_accprobe.dump.label_files import Label
from vllm_accprobe.dump.reader import DumpError, open_dump
from vllm_accprobe.dump.schema import REPLICATED, Payload, Record

BASE = torch.linspace(-2, 3, 24).reshape(4, 6)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An open dump of labels; ``compare`` closes it."""
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "d"))
    monkeypatch.chdir(tmp_path)
    set_task_id()
    yield tmp_path / "d"
    labels.close()


def compare(dump: Path, **how: object) -> LabelComparison:
    labels.close()
    return compare_labels(open_dump(dump), **how)  # type: ignore[arg-type]


def pair(pta: object, acl: object, name: str = "x") -> None:
    set_label("pta", name, pta)
    set_label("acl", name, acl)


def changed(index: tuple[int, int], value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    other = BASE.clone()
    other[index] = value
    return other.to(dtype)


@pytest.mark.parametrize(
    ("pta", "acl", "status", "reason"),
    [
        (BASE, BASE.clone(), "pass", ""),
        (BASE, BASE.reshape(2, 1, 12), "pass", ""),
        (BASE, BASE.half(), "pass", ""),
        (BASE, BASE.bfloat16(), "pass", ""),
        (BASE.numpy(), BASE.clone(), "pass", ""),
        (BASE, changed((2, 3), 9.0), "fail", "an element is off by|row relative L2"),
        (BASE, changed((2, 3), float("nan")), "fail", "1 positions are NaN or infinite on one side only"),
        (changed((0, 0), float("nan")), changed((0, 0), float("nan")), "pass", ""),
        (changed((0, 0), float("inf")), changed((0, 0), -float("inf")), "fail", "1 positions are NaN or infinite"),
        (torch.arange(6), torch.arange(6), "pass", ""),
        (torch.arange(6), torch.arange(6) + 1, "fail", "values differ and must be equal"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "fail", "values differ and must be equal"),
        (torch.zeros(3), torch.zeros(3), "pass", ""),
        (torch.zeros(3), torch.ones(3), "fail", ""),
        (BASE, BASE[:2], "fail", "pta has 24 elements, acl 12"),
        (torch.zeros(0), torch.zeros(0), "skip", "both are empty"),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2), "skip", "complex64 is not compared here"),
    ],
)
def test_what_passes(made: Path, pta: object, acl: object, status: str, reason: str) -> None:
    pair(pta, acl)
    (found,) = compare(made).pairs
    assert found.status == status, found
    if reason:
        assert any(part in found.reason for part in reason.split("|")), found.reason
    else:
        assert status == "fail" or found.reason == ""


def test_equal_tensors_are_not_read(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair(BASE, BASE.clone())
    pair(torch.zeros(3), torch.zeros(3), "zeros")
    labels.close()
    dump = open_dump(made)
    monkeypatch.setattr(dump, "read", None)
    for p in compare_labels(dump).pairs:
        assert (p.status, p.compared, p.cosine, p.max_rel, p.rel_euclid) == ("pass", True, 1.0, 0.0, 0.0)


def test_a_bad_row_among_many_is_seen(made: Path) -> None:
    rng = np.random.default_rng(3)
    golden = torch.from_numpy(rng.normal(size=(2000, 64)).astype(np.float32))
    mine = golden.clone()
    mine[1234] *= 1.01
    pair(golden, mine)
    (found,) = compare(made).pairs
    assert found.status == "fail"
    assert found.rel_euclid is not None
    assert found.rel_euclid < 0.001  # the whole hides it


@pytest.mark.parametrize("kind", ["npy", "pt", "safetensors"])
def test_files_of_other_kinds(made: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"own.{kind}"
    set_label("pta", "x", BASE)
    set_label("acl", "x", tensor_path=str(file))
    if kind == "npy":
        np.save(file, BASE.numpy())
    elif kind == "pt":
        torch.save(BASE.bfloat16(), file)
    else:
        from safetensors.torch import save_file

        save_file({"t": BASE}, file)
    (found,) = compare(made).pairs
    assert found.status == "pass", found.reason
    assert found.acl is not None
    assert found.acl.path == f"rank0000/label-00000.{kind}"


def test_a_file_that_comes_after_the_run_is_found_by_acl(made: Path, tmp_path: Path) -> None:
    set_label("pta", "x", BASE)
    set_label("acl", "x", tensor_path="0_M/after/a.npy")
    found = compare(made)
    assert found.pairs[0].reason == "acl: its file was not found; --acl DIR names a directory to look in"
    late = tmp_path / "late" / "tensors" / f"0_{os.getpid()}" / "0" / "0_M" / "after"
    late.mkdir(parents=True)
    np.save(late / "a.npy", BASE.numpy())
    assert compare_labels(open_dump(made), [tmp_path / "late"]).pairs[0].status == "pass"


def test_files_beyond_the_budget_are_left_and_said(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ACCPROBE_MAX_GB", "0.0001")
    labels.close()
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "small"))
    set_task_id()
    np.save(tmp_path / "large.npy", np.zeros(20_000))
    set_label("pta", "x", BASE)
    set_label("acl", "x", tensor_path=str(tmp_path / "large.npy"))
    found = compare(tmp_path / "small")
    assert not list((tmp_path / "small" / "rank0000").glob("label-*"))
    assert "outside the directories that were named" in found.pairs[0].reason
    assert open_dump(tmp_path / "small").labels[0, 0, "label:x", "acl", 0].reason == (
        "its file is larger than what is left of the budget"
    )


def add(dump: Path, *events: dict[str, object]) -> None:
    with open(dump / "rank0000" / "journal.jsonl", "a") as f:
        for event in events:
            f.write(json.dumps({"event": "label", "step": 0, "tap": "label:x", "role": "acl", **event}) + "\n")


def test_a_hostile_dump_leads_nowhere(made: Path, tmp_path: Path) -> None:
    """Its journal may name any file, and its directory may hold links."""
    np.save(tmp_path / "secret.npy", BASE.numpy())
    set_label("pta", "x", BASE)
    labels.close()
    outside = [
        {"path": str(tmp_path / "secret.npy")},
        {"path": "../secret.npy"},
        {"path": "sub/secret.npy"},
        {"path": "x", "file": 7, "ending": "npy"},
    ]
    (made / "sub").symlink_to(tmp_path)
    (made / "rank0000" / "label-00007.npy").symlink_to(tmp_path / "secret.npy")
    for event in outside:
        add(made, event)
        (found,) = compare_labels(open_dump(made)).pairs
        assert (found.status, found.compared) == ("skip", False), event
    before = len(open_dump(made).labels)
    add(made, {"path": "x", "file": 0, "ending": "../../secret"}, {"path": 3}, {"path": "x", "file": -1})
    dump = open_dump(made)
    assert len(dump.labels) == before
    assert any("3 lines could not be understood" in p for p in dump.problems)


def test_a_damaged_file_is_a_reason(made: Path, tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"\x93NUMPY\x01", b"$Version=1.0\ndims=99999999999999\n$End=1\n")):
        file = tmp_path / f"bad{number}.{'bin' if number == 2 else 'npy'}"
        file.write_bytes(content)
        set_label("pta", f"x{number}", BASE)
        set_label("acl", f"x{number}", tensor_path=str(file))
    for p in compare(made).pairs:
        assert (p.status, p.compared) == ("skip", False)
        assert p.reason.startswith("acl: ")
        assert "\n" not in p.reason


def test_statistics_only(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels.close()
    monkeypatch.setenv("VLLM_ACCPROBE_TASK", "stats")
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "s"))
    set_task_id()
    pair(BASE, BASE.clone(), "same")
    pair(BASE, BASE * 2, "other")
    found = {p.data_id: p for p in compare(tmp_path / "s").pairs}
    assert found["same"].status == "pass"
    assert found["other"].status == "skip"
    assert "only statistics were kept" in found["other"].reason


def test_equal_values_have_the_cosine_one(made: Path, tmp_path: Path) -> None:
    """Also where they were read, which files are: no rounding of sums makes it 0.9999999999999999."""
    values = np.linspace(-2, 3, 24, dtype=np.float32).reshape(4, 6)
    np.save(tmp_path / "own.npy", values)
    set_label("pta", "x", torch.from_numpy(values))
    set_label("acl", "x", tensor_path=str(tmp_path / "own.npy"))
    pair(torch.zeros(3), torch.ones(3), "zero")
    one, zero = compare(made).pairs
    assert (one.cosine, one.max_rel, one.mean_rel, one.rel_euclid) == (1.0, 0.0, 0.0, 0.0)
    assert (zero.cosine, zero.max_rel, zero.mean_rel, zero.rel_euclid) == (0.0, 0.0, 0.0, math.inf)


def stored(role: str, shape: tuple[int, ...]) -> Record:
    where = Payload(0, 0, 4 * math.prod(shape))
    return Record(0, 2, "label:x", "", role, 1, 0, "float32", shape, None, 0, None, None, REPLICATED, where)


@pytest.mark.parametrize(("golden", "mine", "shape"), [
    ((4, 6), (4, 6), (4, 6)), ((2, 3, 5), (2, 3, 5), (6, 5)), ((24,), (24,), (1, 24)),
    ((4, 6), (2, 12), (1, 24)),  # of another shape: one row
    ((1 << 21, 2), (1 << 21, 2), (1, 1 << 22)),  # more rows than a table holds
])  # fmt: skip
def test_rows_of_the_last_dimension_or_one(golden, mine, shape) -> None:
    key = (2, 0, "x", 1)
    sides = {(*key, role): LabelSide("", "float32", own, None, stored(role, own))
             for role, own in (("pta", golden), ("acl", mine))}  # fmt: skip
    unit = LabelView(sides).unit_of(key)
    assert (unit.golden_key, unit.key, unit.depth) == (("x", "pta", 1), ("x", "acl", 1), 1)
    (g,), (m,) = unit.golden, unit.mine
    assert g.first.shape == m.first.shape == g.merge.shape == shape
    assert g.where == m.where == (None if shape[0] == 1 else (0, 0, f"label:{shape[0]}"))


def test_a_file_counts_where_a_value_is_there_too() -> None:
    file = Label(0, 2, "label:x", "acl", 1, "a.npy")
    records = [stored("acl", (4, 6)), stored("output.0", (4, 6))]
    assert places(SimpleNamespace(records=records, labels={0: file}, path=Path())) == {(2, 0, "x", 1, "acl"): file}


def test_why_a_side_cannot_be_read_is_kept() -> None:
    def torn(record: Record, out: object) -> None:
        raise OSError("torn\nfile")

    key, dump = (2, 0, "x", 1), SimpleNamespace(read=torn)
    view = LabelView({(*key, r): LabelSide("", "float32", (4, 6), dump, stored(r, (4, 6))) for r in ("pta", "acl")})
    with pytest.raises(DumpError, match="torn file"):
        view.read(view.unit_of(key).golden[0].first)
    assert view.failed == {key: "torn file"}
