"""ATB's topology as ONNX: levels, names that layers share, dtypes from the table of operators, damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from vllm_accprobe import atb_json_to_onnx
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.topology.model_graph import atb_graph


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
