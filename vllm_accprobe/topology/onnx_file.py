"""A model's graph as an ONNX file, which Netron and other viewers open.

The problem: people want to look at a model, and every viewer reads ONNX; but ONNX's own operators say more than a dump
knows. The idea: every node is an operator of a domain of ours, named after the module's class or the library's
operator, so that onnx's checker asks for structure only: each tensor given once, before it is taken, with a dtype and a
shape at the border. Weights are told as attributes: a graph of nodes with a hundred inputs shows nobody anything.
Not here: the graph (model_graph.py). The package ``onnx`` is an extra (``vllm-accprobe[onnx]``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.topology.model_graph import GraphNode, GraphTensor, ModelGraph, sound

DOMAIN = "accprobe"
IR_VERSION, OPSET = 8, 17
"""Old enough for viewers of 2022; nothing newer is used."""
MISSING = "ONNX files are written by the package onnx, which is not installed: pip install 'vllm-accprobe[onnx]'"
_ELEMENTS = {
    "float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float64": "DOUBLE", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32",
    "uint64": "UINT64", "bool": "BOOL", "complex64": "COMPLEX64", "complex128": "COMPLEX128",
    "float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2", "float8_e4m3fnuz": "FLOAT8E4M3FNUZ",
    "float8_e5m2fnuz": "FLOAT8E5M2FNUZ",
}  # fmt: skip
_WORD = re.compile(r"\W+")


def write_onnx(graph: ModelGraph, path: Path) -> None:
    """``graph`` as a file that onnx's checker has passed. Raises DumpError where onnx is not installed, the graph has
    no node, or what was made is not valid; FileExistsError where the file exists."""
    model = to_onnx(graph)
    with open(path, "xb") as f:
        f.write(model.SerializeToString())


def to_onnx(graph: ModelGraph) -> Any:
    """An ``onnx.ModelProto``, checked. Raises DumpError."""
    try:
        import onnx
        from onnx import checker, helper
    except ImportError:
        raise DumpError(MISSING) from None
    if not graph.nodes:
        raise DumpError(f"{graph.name}: no operator and no module to draw")
    graph = sound(graph)
    known = graph.tensors

    def info(name: str) -> Any:
        t = known.get(name, GraphTensor(name))
        return _value(onnx, t)

    border = {*graph.inputs, *graph.outputs}
    inside = [name for node in graph.nodes for name in node.outputs if name not in border]
    proto = helper.make_graph(
        [_node(helper, n) for n in graph.nodes],
        graph.name,
        [info(name) for name in graph.inputs],
        [info(name) for name in graph.outputs],
        value_info=[info(name) for name in inside if known.get(name, GraphTensor("")).dtype],
        doc_string="\n".join(graph.notes),
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(proto, opset_imports=opsets, producer_name="accprobe", ir_version=IR_VERSION)
    helper.set_model_props(model, {k: v for k, v in graph.facts.items() if v})
    try:
        checker.check_model(model)
    except checker.ValidationError as e:
        raise DumpError(f"{graph.name}: onnx's checker refuses the graph: {' '.join(str(e).split())[:200]}") from None
    return model


def _node(helper: Any, node: GraphNode) -> Any:
    attributes = {_WORD.sub("_", k): v for k, v in node.attributes.items() if _plain(v)}
    made = helper.make_node(
        _WORD.sub("_", node.kind) or "Unknown", node.inputs, node.outputs, name=node.name, domain=DOMAIN, **attributes
    )
    if node.note:
        made.doc_string = node.note
    return made


def _plain(value: Any) -> bool:
    """What an attribute can hold: numbers and texts, and lists of one of these that are not empty."""
    if isinstance(value, (list, tuple)):
        kinds = {type(v) for v in value}
        return len(kinds) == 1 and kinds <= {int, float, str} and all(_plain(v) for v in value)
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return isinstance(value, (float, str))


def _value(onnx: Any, t: GraphTensor) -> Any:
    """A dtype that ONNX lacks, or that nobody knows, is written as bytes, a shape that nobody knows as one dimension of
    that name: the checker wants both. The tensor's line says so."""
    element = getattr(onnx.TensorProto, _ELEMENTS.get(t.dtype, "UINT8"), onnx.TensorProto.UINT8)
    notes = [] if t.dtype in _ELEMENTS else [f"dtype: {t.dtype or 'not known'}"]
    notes += ["shape: not known"] if t.shape is None else []
    shape = ["unknown"] if t.shape is None else t.shape
    note = "; ".join([*notes, t.note] if t.note else notes)
    return onnx.helper.make_tensor_value_info(t.name, element, shape, doc_string=note)
