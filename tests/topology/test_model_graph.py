"""Names that are given twice, nodes out of order, rings: what viewers get is sound."""

from __future__ import annotations

import importlib.util
import random
import sys
from itertools import pairwise
from pathlib import Path

import onnx
import pytest
from topology.test_data_flow import capture

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump
from vllm_accprobe.topology.data_flow import graph_of
from vllm_accprobe.topology.model_graph import GraphNode, GraphTensor, ModelGraph, sound, to_onnx, write_onnx


def graph(*nodes: tuple[str, str, str], inputs: str = "", outputs: str = "") -> ModelGraph:
    made = tuple(GraphNode(name, "Op", tuple(takes.split()), tuple(gives.split())) for name, takes, gives in nodes)
    return ModelGraph("g", made, {}, tuple(inputs.split()), tuple(outputs.split()))


def check(g: ModelGraph) -> None:
    known = set(g.inputs)
    for node in g.nodes:
        assert set(node.inputs) <= known
        assert not set(node.outputs) & known
        known |= set(node.outputs)
    assert set(g.outputs) <= known


def test_a_name_that_is_given_twice_is_two_tensors() -> None:
    made = sound(graph(("a", "x", "h"), ("b", "h", "h"), ("c", "h", "y"), inputs="x", outputs="h y"))
    check(made)
    assert [n.outputs for n in made.nodes] == [("h",), ("h~2",), ("y",)]
    assert made.nodes[2].inputs == ("h~2",)
    assert made.outputs == ("h~2", "y")


def test_what_is_taken_and_never_given_is_an_input() -> None:
    made = sound(graph(("a", "x w", "y"), inputs="x", outputs="y"))
    check(made)
    assert made.inputs == ("x", "w")


def test_nodes_are_brought_into_order() -> None:
    chain = [(f"n{i}", f"t{i}", f"t{i + 1}") for i in range(500)]
    random.Random(5).shuffle(chain)
    made = sound(graph(*chain, inputs="t0", outputs="t500"))
    check(made)
    assert all(a.outputs == b.inputs for a, b in pairwise(made.nodes))


def test_a_ring_keeps_its_order() -> None:
    made = sound(graph(("a", "z", "x"), ("b", "x", "z"), outputs="z"))
    check(made)
    assert [n.name for n in made.nodes] == ["a", "b"]
    assert made.inputs == ("z",)
    assert made.outputs == ("z~2",)


# --- what is written passes onnx's checker, and Netron draws it ---


def small(**tensors: GraphTensor) -> ModelGraph:
    node = GraphNode("n 1", "Weird.op-type", ("x",), ("y",), {"n": 3, "odd.key": "v", "mixed": [1, "a"], "none": None})
    return ModelGraph("small", (node,), tensors, ("x",), ("y",))


def test_dtypes_and_shapes(tmp_path: Path) -> None:
    known = {"x": GraphTensor("x", "float4_e2m1", (2, 3)), "y": GraphTensor("y", "bfloat16", (), "min 0")}
    write_onnx(small(**known), tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=False)
    (x,), (y,) = model.graph.input, model.graph.output
    assert x.doc_string == "dtype: float4_e2m1"
    assert (y.type.tensor_type.elem_type, y.doc_string) == (onnx.TensorProto.BFLOAT16, "min 0")
    (node,) = model.graph.node
    assert (node.op_type, node.domain) == ("Weird_op_type", "accprobe")
    assert {a.name for a in node.attribute} == {"n", "odd_key"}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("mine")
    with pytest.raises(FileExistsError):
        write_onnx(small(), tmp_path / "m.onnx")


def test_without_onnx_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(DumpError, match=r"pip install 'vllm-accprobe\[onnx\]'"):
        to_onnx(small())


@pytest.mark.browser
def test_netron_draws_every_node(tmp_path: Path) -> None:
    pytest.importorskip("netron")
    pytest.importorskip("playwright")
    spec = importlib.util.find_spec("netron_picture")
    assert spec is not None
    import netron_picture

    if netron_picture.chromium() is None:
        pytest.skip("no Chromium on this machine")
    graph = graph_of(open_dump(capture(tmp_path / "d")))
    write_onnx(graph, tmp_path / "m.onnx")
    found = netron_picture.draw(tmp_path / "m.onnx", tmp_path / "m.png", "layers.0.norm")
    # An input and an output of the whole are drawn as nodes, too.
    assert found.nodes == len(graph.nodes) + len(graph.inputs) + len(graph.outputs)
    assert found.edges >= sum(len(n.inputs) for n in graph.nodes)
    assert (tmp_path / "m.png").stat().st_size > 5_000
