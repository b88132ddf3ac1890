"""What is written passes onnx's checker, and Netron draws it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import onnx
import pytest
from topology.test_data_flow import capture

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump
from vllm_accprobe.topology.data_flow import graph_of
from vllm_accprobe.topology.model_graph import GraphNode, GraphTensor, ModelGraph, to_onnx, write_onnx


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
