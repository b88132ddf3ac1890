"""Graphs that viewers get are sound: names twice, rings, disorder; and ATB's json."""

import importlib.util
import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
from topology.test_data_flow import capture

from vllm_accprobe import atb_json_to_onnx
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump
from vllm_accprobe.topology.data_flow import graph_of
from vllm_accprobe.topology.model_graph import GraphNode, GraphTensor, ModelGraph, atb_graph, sound, to_onnx, write_onnx


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


def node(name: str, kind: str, takes: str, gives: str, *inner: dict[str, Any], **param: Any) -> dict[str, Any]:
    made = {"opName": name, "opType": kind, "param": param, "inTensors": takes.split(), "outTensors": gives.split(),
            "internalTensors": []}  # fmt: skip
    return made | ({"nodes": list(inner)} if inner else {})


def layer(i: int) -> dict[str, Any]:
    """As ATB names them: every layer calls its own tensors by the same names."""
    return node(
        f"Llama_layer_{i}", "Llama_layer", f"h{i} w", f"h{i + 1}",
        node("norm", "RmsNormOperation", f"h{i} w", "intermediate_0", epsilon=1e-6),
        node("attention", "Attention", "intermediate_0", "intermediate_1",
             node("qkv", "LinearOperation", "intermediate_0 wq", "qkv_out", hasBias=False, transposeB=True),
             node("o", "LinearOperation", "qkv_out wo", "intermediate_1", hasBias=False)),
        node("add", "ElewiseOperation", f"h{i} intermediate_1", f"h{i + 1}", elewiseType=8, quant={"scale": [0.5, 1]}),
    )  # fmt: skip


def write(root: Path, layers: int = 3) -> Path:
    """``model/4711/Llama_model.json`` and ``layer/4711/Llama_layer.json``."""
    model = {"modelName": "Llama_model", "inTensors": ["ids"], "outTensors": ["logits"], "internalTensors": [],
             "nodes": [node("embed", "WordEmbedding", "ids table", "h0"), *(layer(i) for i in range(layers)),
                       node("head", "LmHead", f"h{layers} wh", "logits")]}  # fmt: skip
    for kind, name, data in (("model", "Llama_model", model), ("layer", "Llama_layer", layer(0))):
        where = root / kind / "4711"
        where.mkdir(parents=True)
        (where / f"{name}.json").write_text(json.dumps(data))
    return root / "model/4711/Llama_model.json"


@pytest.mark.parametrize(
    ("level", "kinds"),
    [
        (0, ["Llama_model"]),
        (1, ["WordEmbedding", *["Llama_layer"] * 3, "LmHead"]),
        (2, ["WordEmbedding", *["RmsNormOperation", "Attention", "ElewiseOperation"] * 3, "LmHead"]),
        (-1, ["WordEmbedding", *["RmsNormOperation", "LinearOperation", "LinearOperation", "ElewiseOperation"] * 3,
              "LmHead"]),
    ],
)  # fmt: skip
def test_levels(tmp_path: Path, level: int, kinds: list[str]) -> None:
    written = atb_json_to_onnx(str(write(tmp_path)), level)
    assert written == str(tmp_path / "model/4711/Llama_model.onnx")
    model = onnx.load(written)
    onnx.checker.check_model(model)
    assert [n.op_type for n in model.graph.node] == kinds
    assert model.graph.input[0].name == "ids"
    assert [v.name for v in model.graph.output] == ["logits"]


def test_layers_that_share_names_stay_apart(tmp_path: Path) -> None:
    model = onnx.load(atb_json_to_onnx(write(tmp_path)))
    takes = {n.name: list(n.input) for n in model.graph.node}
    gives = {n.name: list(n.output) for n in model.graph.node}
    for i in (1, 2, 3):
        head = f"{i}_Llama_layer_{i - 1}"
        assert takes[f"{head}/1_attention/0_qkv"][0] == gives[f"{head}/0_norm"][0]
        assert takes[f"{head}/2_add"] == [f"h{i - 1}", gives[f"{head}/1_attention/1_o"][0]]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for n in model.graph.node for a in n.attribute}
    assert attributes["elewiseType"] == 8
    assert attributes["epsilon"] == pytest.approx(1e-6)
    assert attributes["quant_scale"] == b"[0.5, 1]"


def test_a_layer_s_file_alone(tmp_path: Path) -> None:
    write(tmp_path)
    graph = atb_graph(tmp_path / "layer/4711/Llama_layer.json")
    assert graph.name == "Llama_layer_0"
    assert [n.name for n in graph.nodes] == ["0_norm", "1_attention/0_qkv", "1_attention/1_o", "2_add"]


def test_dtypes_and_shapes_from_the_table_of_operators(tmp_path: Path) -> None:
    path = write(tmp_path)
    table = tmp_path / "operation_io_tensors/4711/operation_tensors_0.csv"
    table.parent.mkdir(parents=True)
    table.write_text("OpType|OpName|InDType|InShape|OutDType|OutShape\n"
                     "WordEmbedding|embed|int64;float16|7;100,16|float16|7,16\n")  # fmt: skip
    model = onnx.load(atb_json_to_onnx(path, 1, {}))
    (ids,) = (v for v in model.graph.input if v.name == "ids")
    assert ids.type.tensor_type.elem_type == onnx.TensorProto.INT64
    assert [d.dim_value for d in ids.type.tensor_type.shape.dim] == [7]
    (logits,) = model.graph.output
    assert "not known" in logits.doc_string


@pytest.mark.parametrize(("text", "said"), [
    ("{", "is damaged"),
    ("[1, 2]", "is no topology of ATB's"),
    ('{"a": 1}', "is no topology of ATB's"),
    ('{"modelName": "m", "nodes": []}', "its list of nodes is empty"),
    ('{"nodes": [' * 60 + "]}" * 60, "more than 40 levels"),
    ('{"nodes": [' * 5000 + "]}" * 5000, "is damaged|levels"),
], ids=["cut", "list", "other", "empty", "deep", "deeper"])  # fmt: skip
def test_files_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DumpError, match=said):
        atb_json_to_onnx(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_bad_level(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="model_level='2'"):
        atb_json_to_onnx(write(tmp_path), "2")  # type: ignore[arg-type]
