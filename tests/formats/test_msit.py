"""Torch dumps of msit and ait: places, order of execution, statistics alone."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.peer_dumps import unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import msit, open_dump


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("c_msit_torch", tmp_path_factory.mktemp("msit"))


def test_any_directory_of_it_will_do(pair: Path) -> None:
    top = open_dump(pair / "golden")
    for inside in ("*", "*/torch_tensors", "*/torch_tensors/*"):
        dump = open_dump(next((pair / "golden").glob(inside)))
        assert [(r.tap, r.role, r.step) for r in dump.records] == [(r.tap, r.role, r.step) for r in top.records]
    token = open_dump(next((pair / "golden").glob("*/torch_tensors/*/0")))
    assert {r.tap for r in token.records} == {r.tap for r in top.records if r.step is not None}


def test_order_of_execution(pair: Path) -> None:
    """model_tree.json declares attention and mlp before the norms, and the rotary embedding behind everything."""
    records = sorted((r for r in open_dump(pair / "golden").records if r.step is not None), key=lambda r: r.seq)
    outputs = [r.tap for r in records if r.role == "output.0"]
    layer = "model.layers.0"
    inside = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
              "self_attn", "post_attention_layernorm", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj",
              "mlp"]  # fmt: skip
    within = [f"{layer}.{m}" for m in inside]
    wanted = ["model.embed_tokens", *within, layer, "model.layers.1.input_layernorm"]
    assert [t for t in outputs if t in wanted] == wanted
    assert outputs[-2:] == ["model.norm", "lm_head"]
    assert outputs.index("model.rotary_emb") < outputs.index(f"{layer}.input_layernorm")


def test_statistics_alone(pair: Path, tmp_path: Path) -> None:
    """--dump statistics: no .pth beside the tables; against the whole dump and against each other."""
    for side in ("golden", "mine"):
        shutil.copytree(pair / side, tmp_path / side)
        for f in (tmp_path / side).rglob("*.pth"):
            f.unlink()
    found = compare(tmp_path / "golden", tmp_path / "mine")
    assert found.verdict == "fail"
    assert found.first_divergence is not None
    assert found.first_divergence["module"] == "model.layers.0.self_attn.q_proj"
    clean = open_dump(tmp_path / "golden")
    record = next(r for r in clean.records if r.tap == "model.layers.0.mlp" and r.role == "output.0")
    values = np.asarray(torch.load(next((pair / "golden").rglob("root.model.layers.0.mlp/output.pth"))))
    assert record.stats is not None
    assert record.shape == values.shape
    assert record.stats.max == pytest.approx(float(values.max()), rel=1e-6)
    assert record.stats.l2 == pytest.approx(float(np.linalg.norm(values.astype(np.float64))), rel=1e-6)


def _module(root: Path, process: str, token: int, module: str, **tensors: object) -> None:
    where = root / "torch_tensors" / process / str(token) / module
    where.mkdir(parents=True)
    for name, value in tensors.items():
        torch.save(value, where / f"{name}.pth")


def test_tokens_ranks_and_containers(tmp_path: Path) -> None:
    for device in (0, 1):
        for token in (0, 10, 2):
            x = torch.full((1, 3), 10.0 * token + device)
            _module(tmp_path, f"{device}_77{device}", token, "root.a", input_0=x, output_0=x, output_1=(x, x + 1))
            _module(tmp_path, f"{device}_77{device}", token, "root", input_0_1=x.to(torch.bfloat16))
    dump = open_dump(tmp_path)
    assert dump.ranks == (0, 1)
    assert sorted({r.step for r in dump.records if r.step is not None}) == [0, 2, 10]
    roles = {(r.tap, r.role) for r in dump.records}
    outputs = {("a", "output.0"), ("a", "output.1.0"), ("a", "output.1.1")}
    assert roles == {("<root>", "input.0.1"), ("a", "input.0"), *outputs}
    record = next(r for r in dump.records if (r.rank, r.step, r.role) == (1, 10, "output.1.1"))
    assert dump.read(record).tolist() == [[102.0] * 3]
    assert record.name == "torch_tensors/1_771/10/root.a/output_1.pth:1"
    bits = next(r for r in dump.records if r.tap == "<root>")
    assert bits.dtype == "bfloat16"


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    _module(tmp_path, "0_1", 0, "root.a", output=torch.ones(2))
    where = tmp_path / "torch_tensors/0_1/0/root.a"
    (where / "input_0.pth").write_bytes(b"cut")
    (tmp_path / "torch_tensors/0_1/model_tree.json").write_text("[" * 100_000)
    (where / "link.pth").symlink_to("/etc/hostname")
    dump = open_dump(tmp_path)
    assert [(r.tap, r.role) for r in dump.records] == [("a", "output.0")]
    assert [s.reason for s in dump.skips] == ["file that cannot be read"]
    assert len(dump.problems) == 3


def test_an_atb_dump_beside_it_is_said(tmp_path: Path) -> None:
    _module(tmp_path / "ait_dump", "0_1", 0, "root.a", output=torch.ones(2))
    (tmp_path / "ait_dump/tensors").mkdir()
    for path in (tmp_path, tmp_path / "ait_dump"):
        dump = open_dump(path)
        assert [r.tap for r in dump.records] == ["a"]
        said = "holds an ATB dump, not read with the torch dump beside it: name it instead"
        assert dump.problems == [f"{tmp_path}/ait_dump/tensors {said}"]
    assert open_dump(tmp_path / "ait_dump/torch_tensors").problems == []


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    for run in ("msit_dump_1", "msit_dump_2"):
        _module(tmp_path / run, "0_1", 0, "root.a", output=torch.ones(2))
    with pytest.raises(DumpError, match=r"holds 2 dumps .*: name one of them"):
        open_dump(tmp_path)


# --- the order in which modules ran, where nobody wrote it down ---


def test_order_without_statistics() -> None:
    declared = ["h", "h.0", "h.0.attn", "h.0.mlp", "h.0.ln_1", "h.0.ln_2", "wte"]
    places = msit.execution_order(declared, declared, {})
    order = sorted(declared, key=lambda m: places[m][1])
    assert order == ["wte", "h.0.ln_1", "h.0.attn", "h.0.ln_2", "h.0.mlp", "h.0", "h"]


def test_who_hands_on_runs_first() -> None:
    """Names that tell nothing: b takes what c gives, a takes what b gives."""
    row = {k: ("float32", (2,), float(k)) for k in range(4)}
    tables = {"root.a": {"input.0": row[2], "output.0": row[3]}, "root.b": {"input.0": row[1], "output.0": row[2]},
              "root.c": {"input.0": row[0], "output.0": row[1]}}  # fmt: skip
    places = msit.execution_order(list(tables), list(tables), tables)
    assert sorted(tables, key=lambda m: places[m]) == ["root.c", "root.b", "root.a"]


def test_a_circle_of_equal_values_ends() -> None:
    same = ("float32", (2,), 0.0)
    tables = {m: {"input.0": same, "output.0": same} for m in ("root.a", "root.b", "root.c")}
    places = msit.execution_order(list(tables), list(tables), tables)
    assert sorted(tables, key=lambda m: places[m]) == list(tables)
