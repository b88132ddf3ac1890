"""torchair's dumps: GE binaries and FX arrays, names through the graph, fused operators, tiled layouts."""

from pathlib import Path

import numpy as np
import pytest
from make_ge_files import ge
from support.peer_dumps import unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump, torchair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("f_torchair", tmp_path_factory.mktemp("torchair"))


# --- directories ---


def test_directories_of_a_graph_engine(tmp_path: Path) -> None:
    one = np.ones(2, np.float32)
    for rank in range(2):
        for token in (0, 1, 10):
            where = tmp_path / f"worldsize2_global_rank{rank}/dump_1/20261120101010/{rank + 4}/graph_1/1/{token}"
            ge(where / f"Add.net_add.1.2.17952000000000{token:02d}", [one * token], [one * (token + rank)])
    where = tmp_path / "worldsize2_global_rank0/dump_1/20261120101010/4/graph_1/1/0"
    ge(where / "4711", [], [one * 9])
    (where / "mapping.csv").write_text("4711,Mul." + "x" * 300 + ".3.2.1795200000000099\n")
    np.save(where / "Sub.s.4.2.1795200000000100.output.0.npy", one * 8)
    dump = open_dump(tmp_path)
    assert dump.ranks == (0, 1)
    assert {(r.rank, r.step) for r in dump.records} == {(r, t) for r in (0, 1) for t in (0, 1, 10)}
    long = next(r for r in dump.records if r.cls == "Mul")
    assert (long.tap, dump.read(long).tolist()) == ("x" * 300, [9.0, 9.0])
    converted = next(r for r in dump.records if r.cls == "Sub")
    assert (converted.role, dump.read(converted).tolist()) == ("output.0", [8.0, 8.0])
    assert not dump.skips


def test_tokens_of_fx_begin_with_one(tmp_path: Path) -> None:
    for token in (1, 2):
        where = tmp_path / f"data_dump/{token}/gm_20261120101010_dump"
        where.mkdir(parents=True)
        np.save(where / "mm-aten.mm.default.INPUT.1.20261120101010000000.npy", np.full(2, token))
        np.save(where / "add_1-aten.add.Tensor.OUTPUT.0.20261120101010000001.npy", np.full(2, token))
    dump = open_dump(tmp_path)
    places = [(r.step, r.tap, r.role, r.cls) for r in dump.records]
    assert places == [(t, *p) for t in (0, 1) for p in (("mm", "input.1", "aten.mm.default"),
                                                        ("add_1", "output.0", "aten.add.Tensor"))]  # fmt: skip


def op(name: str, inputs: tuple[str, ...], *fx: str, more: str = "") -> str:
    attr = 'attr {{\nkey: "_fx_tensor_name"\nvalue {{\ns: "{}"\n}}\n}}\n'
    outputs = (f"output_desc {{\n{more}{attr.format(f)}}}\n" for f in fx)
    return "".join((f'op {{\nname: "{name}"\n', *(f'input: "{i}"\n' for i in inputs), *outputs, "}\n"))


WRONG = 'attr {\nkey: "_fx_tensor_name"\nvalue { s: "wrong-one.OUTPUT.0" }\n}\n'
GRAPH = "graph {\n" + op("Data_0", ()) + op("Silu_1", ("Data_0:0",), "silu-aten.silu.default.OUTPUT.0", more=WRONG)
GRAPH += op("Split_2", ("Silu_1:0", "Data_0:0"), *(f"split-aten.split.Tensor.OUTPUT.{i}" for i in (0, 1))) + "}\n"


def test_the_graph_beside_a_dump() -> None:
    fx, inputs = torchair.read_graph(GRAPH.splitlines())
    assert fx == {("Silu_1", 0): ("silu", 0), ("Split_2", 0): ("split", 0), ("Split_2", 1): ("split", 1)}
    assert inputs == {"Data_0": [], "Silu_1": ["Data_0:0"], "Split_2": ["Silu_1:0", "Data_0:0"]}
    assert torchair.fused_inputs(["Silu_1", "Split_2"], inputs) == [("Silu_1", 0)]  # Data_0 enters once


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Silu_9Mul_11", ["Silu_9", "Mul_11"]),
        ("Mul_1Mul_11", ["Mul_1", "Mul_11"]),
        ("Mul_11", []),  # one operator's own name
        ("Mul_111", []),
        ("Mul_1Add", []),
        ("layer/Mul_1Silu_9", []),
    ],
)
def test_names_of_fused_operators(name: str, parts: list[str]) -> None:
    assert torchair.split_fused(name, {"Silu_9", "Mul_1", "Mul_11"}) == parts


# --- the reference pair ---


@pytest.mark.parametrize(("golden", "mine"), [("ge_nofusion_golden", "ge_mine"), ("ge_mine", "ge_nofusion_golden")])
def test_fusion_off_against_fusion_on(pair: Path, golden: str, mine: str) -> None:
    found = compare(pair / golden, pair / mine)
    assert found.first_divergence is not None
    assert found.first_divergence["module"] == "Mm_10"
    fused = [p for p in found.pairs if "Silu_9Mul_11" in p.golden + p.mine]
    ends = {(p.golden.partition(":")[2], p.mine.partition(":")[2]) for p in fused}
    assert ends == {("input.0", "input.0"), ("input.1", "input.1"), ("output.0", "output.0")}


def test_fx_against_ge_without_its_graph(pair: Path, tmp_path: Path) -> None:
    """Nothing tells which node is which: nothing is guessed."""
    source = next((pair / "ge_mine").rglob("Mm_8*".replace("Mm_8*", "MatMulV2.Mm_8.*")))
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / source.name).write_bytes(source.read_bytes())
    from vllm_accprobe.comparison.result import NothingCompared

    with pytest.raises(NothingCompared):
        compare(pair / "fx_golden", tmp_path)


def test_fx_of_releases_with_ranks(tmp_path: Path) -> None:
    """torch_npu 2.13: ranks' folders, executions from 0, a list's tensors each in a file."""
    where = tmp_path / "worldsize1_global_rank0/gm_20261123133550457755_dump"
    for step in (1, 2):
        (where / str(step)).mkdir(parents=True)
        for name in ("INPUT.0.0", "INPUT.0.1", "OUTPUT.0"):
            np.save(where / str(step) / f"cat-aten.cat.default.{name}.2026112313355045775{step}.npy", np.ones(2, "f4"))
    for named in (tmp_path, where, where.parent):
        found = [(r.step, r.role) for r in open_dump(named).records]
        assert found == [(n, role) for n in (1, 2) for role in ("input.0.0", "input.0.1", "output.0")]
