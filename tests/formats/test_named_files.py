"""Files that bear other tools' names, and what a conversion must not lose: places, ranks, gradients, later weights."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.peer_dumps import tensor, write

from vllm_accprobe.align.without_row_maps import take_names
from vllm_accprobe.cli import main
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump

NAMES = [
    f"layers.{i}.proj.Linear.0.forward_{part}" for i in (0, 1) for part in ("params.weight", "input.0", "output.0")
]


def arrays(step: int) -> dict[str, np.ndarray]:
    """Weights are those of every step."""
    rngs = {True: np.random.default_rng(0), False: np.random.default_rng(step)}
    return {name: rngs["params" in name].standard_normal((5, 4)).astype(np.float32) for name in NAMES}


@pytest.fixture
def h5(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "golden.h5", "w", track_order=True) as file:
        for step in (1, 2):
            group = file.create_group(str(step), track_order=True)
            for name, value in arrays(step).items():
                group[name] = value
    return tmp_path / "golden.h5"


@pytest.mark.parametrize("above", ["{step}", "copied/step{step}", "run/{step}/rank0"])
def test_a_folder_of_npy_takes_the_places_that_its_names_say(h5: Path, tmp_path: Path, above: str) -> None:
    wrong = "layers.0.proj.Linear.0.forward_output.0"
    for step in (1, 2):
        where = tmp_path / "mine" / above.format(step=step)
        where.mkdir(parents=True)
        for name, value in arrays(step).items():
            np.save(where / f"{name}.npy", value * np.float32(1.5 if (step, name) == (2, wrong) else 1))
    found = compare(h5, tmp_path / "mine")
    assert len(found.pairs) == 2 * len(NAMES)
    assert found.first_divergence is not None
    assert (found.first_divergence["module"], found.first_divergence["role"]) == ("layers.0.proj", "output.0")
    assert found.first_divergence["step"] == 2
    (pair,) = [p for p in found.pairs if p.status == "fail"]
    assert pair.golden == wrong
    assert pair.rel_l2 == pytest.approx(0.5, rel=1e-6)


def test_an_archive_with_names_for_keys_and_one_name_without_a_partner(h5: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **arrays(1), other=np.zeros(3, np.float32))
    golden, mine = take_names(open_dump(h5), open_dump(tmp_path / "mine.npz"))
    assert [(r.tap, r.role, r.step) for r in mine.records[:3]] == [
        ("layers.0.proj", "param.weight", None), ("layers.0.proj", "input.0", 1), ("layers.0.proj", "output.0", 1),
    ]  # fmt: skip
    assert mine.records[-1].tap == "other"
    assert mine.problems == ["6 of its 7 tensors bear names of the other dump's, whose places they take"]
    assert golden.records == open_dump(h5).records


def test_files_without_such_names_stay_what_they_are(h5: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    np.save(tmp_path / "mine" / "a.npy", np.zeros(3))
    np.save(tmp_path / "mine" / "b.npy", np.zeros(3))
    before = open_dump(tmp_path / "mine")
    assert take_names(open_dump(h5), before)[1] is before


def convert(dump: Path, out: Path, kind: str) -> Path:
    assert main(["convert", str(dump), str(out), "--to", kind]) in (0, None)
    return out


def msprobe(root: Path, rank: int, step: int, weight: float) -> None:
    module, api = "Module.up.Linear.forward.0", "Functional.silu.0.forward"
    values: dict[str, np.ndarray] = {}

    def full(name: str, value: float) -> dict[str, Any]:
        values[f"{name}.pt"] = np.full((2, 3), value, np.float32)
        return tensor(f"{name}.pt", shape=[2, 3])

    data = {
        module: {
            "input_args": [full(f"{module}.input.0", 1 + rank)], "input_kwargs": {},
            "output": [full(f"{module}.output.0", 2 + rank)],
            "parameters": {"weight": full(f"{module}.parameters.weight", weight)},
        },
        api: {
            "input_args": [full(f"{api}.input.0", 2 + rank)], "input_kwargs": {},
            "output": [full(f"{api}.output.0", 3 + rank + step)],
        },
    }  # fmt: skip
    write(root / f"step{step}/rank{rank}", data, values, {module: None, api: None}, level="mix", framework="pytorch")


@pytest.mark.parametrize("kind", ["h5", "npz", "safetensors"])
def test_ranks_and_weights_of_later_steps_survive_a_conversion(tmp_path: Path, kind: str) -> None:
    for rank in (0, 1):
        for step in (0, 1):
            msprobe(tmp_path / "dump", rank, step, 1.0 + step)
    found = compare(tmp_path / "dump", convert(tmp_path / "dump", tmp_path / "out", kind))
    assert found.verdict == "pass"
    assert len(found.pairs) == 2 * 2 * 5
    assert not found.coverage["skipped"]


def test_gradients_survive_a_conversion(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    for i, name in enumerate(("x", "grad__x", "param__up.weight", "grad__up.weight")):
        meta = {"step": 0, "rank": 0, "dump_index": i, "name": name}
        torch.save({"value": torch.full((2, 2), 1.0 + i), "meta": meta},
                   dump / f"step=0___rank=0___dump_index={i}___name={name}.pt")  # fmt: skip
    for kind in ("h5", "npz", "safetensors"):
        found = compare(dump, convert(dump, tmp_path / kind, kind))
        assert (found.verdict, len(found.pairs)) == ("pass", 4)
        assert not found.coverage["skipped"]


@pytest.mark.parametrize("kind", ["h5", "npz", "safetensors"])
def test_outputs_with_names_do_not_take_the_place_of_numbered_ones(tmp_path: Path, kind: str) -> None:
    """A backward run's record lists the gradients of weights, which have names, before or after its outputs."""
    norm = "Module.norm.LayerNorm"
    parts = ("parameters_grad.w", "parameters_grad.b", "backward.0.input.0", "backward.0.output.0")
    names = [f"{norm}.{part}" for part in parts]
    w, b, x, y = (tensor(f"{name}.pt", shape=[4]) for name in names)
    data = {f"{norm}.parameters_grad": {"w": [w], "b": [b]}, f"{norm}.backward.0": {"input": [x], "output": [y]}}
    values = {f"{name}.pt": np.full(4, value, np.float32) for value, name in enumerate(names, 1)}
    write(tmp_path / "dump/step0/rank0", data, values, dict.fromkeys(data), level="L0", framework="pytorch")
    found = compare(tmp_path / "dump", convert(tmp_path / "dump", tmp_path / "out", kind))
    assert found.verdict == "pass"
    assert len(found.pairs) == 4


# --- ranks of other tools' dumps: copies that differ, partial sums and pieces that nobody wrote down ---


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
