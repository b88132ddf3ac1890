"""From a real capture to the edges of the model: each one is what the source says, at every level of detail."""

from pathlib import Path

import pytest
import torch
from support.peer_dumps import unpack
from topology.layered_model import Layered

from vllm_accprobe import Probe
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump
from vllm_accprobe.topology.data_flow import GAP, graph_of
from vllm_accprobe.topology.model_graph import ModelGraph, sound, to_onnx

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def capture(where: Path, layers: int = 2, **settings: object) -> Path:
    model = Layered(layers)
    with torch.inference_mode(), Probe(model, dir=str(where), **settings):
        model(IDS)
    return where


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("flow") / "d")


def edges(graph: ModelGraph) -> set[tuple[str, str]]:
    """(giver, taker); a giver that is none is an input of the whole."""
    gives = {name: node.name for node in graph.nodes for name in node.outputs}
    return {(gives.get(name, name), node.name) for node in graph.nodes for name in node.inputs}


def test_the_edges_are_the_source_s(dump: Path) -> None:
    graph = graph_of(open_dump(dump))
    found = edges(graph)
    assert not [n.name for n in graph.nodes if n.kind == GAP]
    kinds = {n.name: n.kind for n in graph.nodes}
    givers = {taker: {kinds.get(g, g) for g, t in found if t == taker} for _, taker in found}
    assert givers["embed"] == {"input_ids"}
    assert ("embed", "layers.0.norm") in found
    assert givers["layers.0.mixer.core"] == {"Slice"}
    assert ("layers.0.mixer.core", "layers.0.mixer.out") in found
    assert givers["layers.0.gated.down"] == {"Mul"}
    assert givers["layers.0.norm2"] == {"Add"} == givers["layers.1.norm"] == givers["norm"]
    added = next(g for g, t in found if t == "layers.1.norm")
    before = next(g for g, t in found if t == "layers.0.norm2")
    assert {g for g, t in found if t == added} == {before, "layers.0.gated.down"}
    assert {g for g, t in found if t == before} == {"embed", "layers.0.mixer.out"}
    slices = {tuple(n.attributes[k] for k in ("begin", "end")) for n in graph.nodes if n.kind == "Slice"}
    assert slices == {(0, 32), (32, 64), (64, 96)}
    assert graph.inputs == ("input_ids",)
    assert graph.outputs == ("head/output.0",)


@pytest.mark.parametrize(("level", "drawn"), [(0, 1), (1, 5), (2, 3 + 2 * 4), (None, None), (99, None)])
def test_levels_of_detail(dump: Path, level: int | None, drawn: int | None) -> None:
    graph = graph_of(open_dump(dump), level)
    called = [n for n in graph.nodes if "tap" in n.attributes]
    # embed, norm, head, and per layer: the layer itself; or its four; or its nine innermost.
    assert len(called) == (3 + 2 * 9 if drawn is None else drawn)
    assert len(to_onnx(graph).graph.node) == len(graph.nodes)


def test_a_model_of_twenty_layers(tmp_path: Path) -> None:
    dump = open_dump(capture(tmp_path / "d", layers=20))
    whole, layers = graph_of(dump), graph_of(dump, 1)
    assert sum("tap" in n.attributes for n in whole.nodes) == 3 + 20 * 9
    assert not [n for n in whole.nodes if n.kind == GAP]
    assert [n.name for n in layers.nodes if n.kind == "Layer"] == [f"layers.{i}" for i in range(20)]
    for i in range(1, 20):
        assert (f"layers.{i - 1}", f"layers.{i}") in edges(layers)
    assert to_onnx(whole).ByteSize() < 2 << 20


def test_statistics_alone_show_modules_and_gaps(tmp_path: Path) -> None:
    """Hashes are in the journal, values are not: what needs values is a gap that says so."""
    graph = graph_of(open_dump(capture(tmp_path / "d", task="stats")))
    assert ("layers.0.mixer.core", "layers.0.mixer.out") in edges(graph)
    gaps = [n for n in graph.nodes if n.kind == GAP]
    assert gaps
    assert all("guess" in n.note for n in gaps)
    assert any("guess" in note for note in graph.notes)
    assert not {n.kind for n in graph.nodes} & {"Slice", "Add", "Mul"}
    to_onnx(graph)


def test_operators_inside_modules(tmp_path: Path) -> None:
    graph = graph_of(open_dump(capture(tmp_path / "d", ops=True)))
    kinds = {n.kind for n in graph.nodes}
    assert any("addmm" in kind or "linear" in kind for kind in kinds), kinds
    assert len(sound(graph).nodes) == len(graph.nodes)
    to_onnx(graph)


@pytest.mark.parametrize("name", ["c_msit_torch", "e_atb", "a_msprobe_tensor", "d_xray_h5", "f_torchair"])
def test_dumps_of_other_tools(name: str, tmp_path: Path) -> None:
    """Without hashes: tensors are told apart by the bytes that were read."""
    root = unpack(name, tmp_path)
    side = next(p for p in sorted(root.iterdir()) if p.is_dir() and "golden" in p.name)
    graph = graph_of(open_dump(side))
    assert len(graph.nodes) > 5
    assert len(edges(graph)) >= len(graph.nodes) // 2
    to_onnx(graph)


def test_atb_s_operators_meet(tmp_path: Path) -> None:
    graph = graph_of(open_dump(unpack("e_atb", tmp_path) / "golden"))
    layer = "3_Qwen_layer"
    assert (f"{layer}.0_RmsNormOperation", f"{layer}.1_Attention.0_LinearOperation") in edges(graph)
    assert (f"{layer}.4_Mlp.1_LinearOperation", f"{layer}.4_Mlp.3_ElewiseOperation") in edges(graph)
    assert not [n for n in graph.nodes if n.kind == GAP]


def test_nothing_to_draw(dump: Path, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"no input of any module was recorded.*--tree"):
        graph_of(open_dump(unpack("b_sglang_tp", tmp_path) / "golden"))
    with pytest.raises(DumpError, match="no tensor of a step"):
        graph_of(open_dump(dump), step=7)
