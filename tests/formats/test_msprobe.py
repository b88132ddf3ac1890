"""msprobe's dumps: places and order of execution, steps and ranks, the three kinds, and a real one made by the tool."""

import importlib.util
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.peer_dumps import expected, tensor, unpack, write

from vllm_accprobe.align import without_row_maps
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.result import NothingCompared
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.common.foreign import UNREADABLE
from vllm_accprobe.formats.msprobe import LOST, OUTSIDE, RecordPlace, place_of, record_stats

MAKER = Path(__file__).with_name("make_msprobe_dump.py")


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("msprobe")
    unpack("a_msprobe_tensor", where)
    unpack("a_msprobe_stat", where)
    return where


def test_statistics_alone_name_the_weight_and_say_the_four_figures(peers: Path) -> None:
    pair = peers / "a_msprobe_stat"
    found = compare(pair / "golden", pair / "mine")
    assert [(o["module"], o["role"]) for o in found.origins] == [("model.layers.1.mlp.down_proj", "param.weight")]
    by_name = {p.golden: p for p in found.pairs}
    for t in expected("a_msprobe_stat", "expected_plain.json")["statistics"]:
        name = t["name"].replace(":input_args", ".input").replace(":", ".")
        row = by_name[name]
        said = row.message.partition("golden | mine: ")[2].split(", ")
        assert said == [f"{k} {t[k]['golden']:.9g} | {t[k]['mine']:.9g}" for k in ("max", "min", "mean", "norm")]
        assert (row.cosine, row.rel_l2) == (None, None)
        if row.status == "pass":
            assert row.message.startswith("no payload: judged by statistics")


@pytest.mark.parametrize("sides", [("a_msprobe_stat", "a_msprobe_tensor"), ("a_msprobe_tensor", "a_msprobe_stat")])
def test_statistics_against_tensors(peers: Path, sides: tuple[str, str]) -> None:
    found = compare(peers / sides[0] / "golden", peers / sides[1] / "mine")
    assert [(o["module"], o["role"]) for o in found.origins] == [("model.layers.1.mlp.down_proj", "param.weight")]
    assert found.coverage["pairs"] == 357
    clean = compare(peers / sides[0] / "golden", peers / sides[1] / "golden")
    assert clean.verdict == "pass"
    assert clean.coverage["pairs"] == 357


def test_any_directory_and_the_file_itself(peers: Path) -> None:
    root = peers / "a_msprobe_tensor" / "golden"
    (rank,) = root.glob("step0/proc*")
    names = [r.name for r in open_dump(root).records]
    for inside in (root / "step0", rank, rank / "dump.json"):
        dump = open_dump(inside)
        assert [r.name for r in dump.records] == names
        assert {r.step for r in dump.records} == {0, None}
        assert dump.ranks == (0,)


def test_order_of_execution(peers: Path) -> None:
    records = sorted(open_dump(peers / "a_msprobe_tensor" / "golden").records, key=lambda r: r.seq)
    at = {r.name: i for i, r in enumerate(r for r in records if r.step is not None)}
    layer, mlp = "Module.model.layers.0.Qwen2DecoderLayer.forward.0", "Module.model.layers.0.mlp.Qwen2MLP.forward.0"
    down = "Module.model.layers.0.mlp.down_proj.Linear.forward.0"
    assert (at[f"{layer}.input.0"] < at[f"{mlp}.input.0"] < at[f"{down}.input.0"]
            < at["Functional.linear.6.forward.input.0"] < at["Functional.linear.6.forward.output.0"]
            < at[f"{down}.output.0"] < at[f"{mlp}.output.0"] < at[f"{layer}.output.0"])  # fmt: skip


def record(**sections: Any) -> dict[str, Any]:
    return sections


def one(value: float, **head: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    name = "Module.a.Linear.forward.0.output.0.pt"
    data = {"Module.a.Linear.forward.0": record(input_args=[], output=[tensor(name)])}
    return data, {name: np.array([1.0, value], "f4")}


def test_steps_that_one_side_lacks_are_counted_and_not_compared(tmp_path: Path) -> None:
    for step in (0, 1, 2):
        write(tmp_path / "golden" / f"step{step}" / "rank0", *one(step))
    for step in (1, 3):
        write(tmp_path / "mine" / f"step{step}" / "rank0", *one(step))
    found = compare(tmp_path / "golden", tmp_path / "mine")
    assert [(p.step, p.status) for p in found.pairs] == [(1, "pass")]
    assert "steps: 2 only in golden" in found.plan
    assert found.coverage["skipped"] == {without_row_maps.NO_STEP: 1, without_row_maps.NO_STEP_MINE: 2}
    assert (found.coverage["rows_only_golden"], found.coverage["rows_only_mine"]) == (2, 1)


def test_an_api_is_numbered_in_the_module_that_calls_it(tmp_path: Path) -> None:
    """One call more in the first module: msprobe's own numbers shift, ours do not."""
    apis = {"golden": ["a", "b"], "mine": ["a", "a", "b"]}
    for side, callers in apis.items():
        data, values, construct = {}, {}, {}
        for i, caller in enumerate(callers):
            name = f"Torch.add.{i}.forward"
            data[name] = record(input_args=[], output=[tensor(f"{name}.output.0.pt")])
            values[f"{name}.output.0.pt"] = np.array([1.0, ord(caller)], "f4")
            construct[name] = f"Module.{caller}.Block.forward.0"
        write(tmp_path / side, data, values, construct)
    found = compare(tmp_path / "golden", tmp_path / "mine")
    assert {p.mine: (p.golden, p.status) for p in found.pairs} == {
        "Torch.add.0.forward.output.0": ("Torch.add.0.forward.output.0", "pass"),
        "Torch.add.2.forward.output.0": ("Torch.add.1.forward.output.0", "pass"),
    }
    assert found.coverage["skipped"] == {"golden has no such call": 1}


def test_mindspore_dumps_are_npy(tmp_path: Path) -> None:
    for side, off in (("golden", 0.0), ("mine", 0.001)):
        name = "Cell.a.Dense.forward.0.output.0.npy"
        info = tensor(name, type="mindspore.Tensor", dtype="BFloat16")
        data = {"Cell.a.Dense.forward.0": record(input_args=[], output=[info])}
        values = np.array([1.0, 2.0 + off], "f4").view("u4") >> 16 << 16
        write(tmp_path / side / "step0" / "rank0", data, {name: values.view("f4")}, framework="mindspore")
    dump = open_dump(tmp_path / "golden")
    assert dump.run["framework"] == "mindspore"
    assert (dump.records[0].dtype, dump.read(dump.records[0]).tolist()) == ("bfloat16", [0x3F80, 0x4000])
    found = compare(tmp_path / "golden", tmp_path / "mine", standard="mindspore")
    assert found.standard["name"] == "mindspore"
    assert len(found.pairs) == 1


def test_payloads_outside_missing_and_wrong(tmp_path: Path) -> None:
    secret = tmp_path / "secret.pt"
    torch.save(torch.ones(2), secret)
    names = ["../../secret.pt", str(secret), "gone.pt", "ok.pt"]
    data = {f"Module.m{i}.Linear.forward.0": record(output=[tensor(n)]) for i, n in enumerate(names)}
    write(tmp_path / "d", data, {"ok.pt": np.ones(2, "f4")})
    dump = open_dump(tmp_path / "d")
    assert [r.payload is not None for r in dump.records] == [False, False, False, True]
    assert sorted(s.reason for s in dump.skips) == [LOST, OUTSIDE, OUTSIDE]
    assert sum("leads out of the dump" in p for p in dump.problems) == 2
    found = compare(tmp_path / "d", tmp_path / "d")
    assert [p.status for p in found.pairs] == ["skip", "skip", "skip", "pass"]
    data = {"Module.a.Linear.forward.0": record(output=[tensor("a.pt")])}
    write(tmp_path / "wrong", data, {"a.pt": np.ones(3, "f4")})
    wrong = open_dump(tmp_path / "wrong")
    assert [s.reason for s in wrong.skips] == [UNREADABLE]
    assert "a.pt holds [3] where [2] was announced" in wrong.problems[-1]
    with pytest.raises(DumpError, match="only statistics were stored"):
        wrong.read(wrong.records[0])


def test_names_that_cannot_be_parsed_are_counted(tmp_path: Path) -> None:
    """Their tensors stay; what is no record is a counted skip."""
    data = {"Module.a.Linear.forward.0": record(output=[tensor("a.pt")]), "free text": record(output=[tensor("b.pt")])}
    write(tmp_path / "d", {**data, "Module.b.Linear.forward.0": 7}, {n: np.ones(2, "f4") for n in ("a.pt", "b.pt")})
    dump = open_dump(tmp_path / "d")
    assert [r.tap for r in dump.records] == ["a", "free text"]
    assert [(s.tap, s.reason) for s in dump.skips] == [("Module.b.Linear.forward.0", "record that is no object")]
    assert "1 of 3 names cannot be parsed and are taps of their own, the first 'free text'" in dump.problems


def test_checksums_alone(tmp_path: Path) -> None:
    for side, sums in (("golden", ("aa", "bb")), ("mine", ("aa", "cc"))):
        data = {
            f"Module.m{i}.Linear.forward.0": record(output=[{"dtype": "torch.float32", "shape": [2], "md5": s}])
            for i, s in enumerate(sums)
        }
        write(tmp_path / side, data, {})
    found = compare(tmp_path / "golden", tmp_path / "mine")
    assert [(p.tap, p.status, p.message) for p in found.pairs] == [
        ("m0", "pass", ""), ("m1", "fail", "checksums differ")
    ]  # fmt: skip
    assert [o["module"] for o in found.origins] == ["m1"]
    shutil.rmtree(tmp_path / "mine")
    bare = {"Module.m0.Linear.forward.0": record(output=[{"dtype": "torch.float32", "shape": [2]}])}
    write(tmp_path / "mine", bare, {})
    with pytest.raises(NothingCompared):
        compare(tmp_path / "golden", tmp_path / "mine")


@pytest.mark.skipif(importlib.util.find_spec("msprobe") is None, reason="mindstudio-probe is not installed")
@pytest.mark.parametrize(
    ("task", "level", "summary"),
    [("tensor", "mix", "statistics"), pytest.param("statistics", "L0", "md5", marks=pytest.mark.extra)],
)  # extra: checksums of a dump that is no tool's: test_checksums_alone
def test_a_real_dump(tmp_path: Path, task: str, level: str, summary: str) -> None:
    """Forward and backward, modules and APIs, of the installed tool."""
    out = tmp_path / "dump"
    made = subprocess.run([sys.executable, str(MAKER), task, level, summary, str(out)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    found = compare(out / "step0", out / "step1")
    assert found.coverage["skipped"] == {}
    assert "steps: 1 paired by order (golden's 0 is mine's 1)" in found.plan
    assert [(o["module"], o["role"]) for o in found.origins] == [("blocks.1.up", "param.weight")]
    passed = {p.tap for p in found.pairs if p.status == "pass"}
    assert "blocks.0.up" in passed
    assert any(p.tap == "backward.blocks.0.up" for p in found.pairs)
    if task == "tensor":
        weight = next(p for p in found.pairs if (p.tap, p.role) == ("blocks.1.up", "param.weight"))
        names = ("Module.blocks.1.up.Linear.forward.0.parameters.weight.pt",) * 2
        values = [torch.load(next(out.glob(f"step{s}/*/dump_tensor_data/{n}"))) for s, n in enumerate(names)]
        g, m = (v.detach().double() for v in values)
        assert weight.rel_l2 == pytest.approx(((m - g).norm() / g.norm()).item(), rel=1e-12)
        assert "backward.blocks.1.up.Functional:linear" in {p.tap for p in found.pairs}


# --- records of msprobe: their places, and their tensors in the order of execution ---


def test_places() -> None:
    parents = {"Torch.add.3.forward": "Module.mlp.fc.Linear.forward.0", "Torch.mul.0.forward": None}
    assert place_of("Module.mlp.fc.Linear.forward.1", {}) == RecordPlace("mlp.fc", "Linear", 1, "mlp.fc", True)
    assert place_of("Module.Net.forward.0", {}) == RecordPlace("<root>", "Net", 0, "<root>", True)
    assert place_of("Cell.a.Dense.backward.0", {}) == RecordPlace("backward.a", "Dense", 0, "backward.a", True)
    assert place_of("Module.a.Linear.parameters_grad", {}).grads
    # Within its module an API is numbered anew; outside of any the number in its name is all there is.
    inside = RecordPlace("mlp.fc.Torch:add", "Torch.add", None, "mlp.fc", False)
    assert place_of("Torch.add.3.forward", parents) == inside
    assert place_of("Torch.mul.0.forward", parents) == RecordPlace("Torch:mul", "Torch.mul", 0, "", False)
    of_gradient = RecordPlace("backward.mlp.fc.Torch:add", "Torch.add", None, "backward.mlp.fc", False)
    assert place_of("Torch.add.3.backward", parents) == of_gradient
    assert place_of("x.debug", {}) == RecordPlace("x", "", None, "", False)


def test_statistics() -> None:
    assert record_stats({}, 2) is None
    assert record_stats({"Max": 2, "Min": -1, "Mean": 0.5, "Norm": 3.0}, 2) == Stats(2, -1.0, 2.0, 0.5, 3.0, 0, 0)
    odd = record_stats({"Max": math.inf, "Min": math.nan, "Mean": math.nan, "Norm": "?"}, 2)
    assert odd == Stats(2, None, None, None, None, 1, 1)
