"""ATB's topology of a model or a layer (json) as a graph, down to a level of detail.

The problem: ATB writes a model as nodes in nodes; a viewer wants one flat list, and a reader sometimes only the layers.
The idea: nodes are opened level by level down to the one asked for, as ``atb_json_to_onnx`` of ait and msit does (level
0 is the whole model, 1 its nodes); dtypes and shapes come from the table of operators beside it, where there is one.
A layer of one model calls its tensors what its neighbour calls its own: a name that is given twice is another tensor
each time, and the latest before a taker is meant (model_graph.sound).
Not here: which of ATB's operators is which module (formats/common/atb_topology.py, align/engines/atb_torch.py).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.common.foreign import torch_dtype
from vllm_accprobe.formats.io.plain_file import read_json, read_text
from vllm_accprobe.topology.model_graph import GraphNode, GraphTensor, ModelGraph
from vllm_accprobe.topology.onnx_file import write_onnx

MAX_JSON = 64 << 20
_DEEPEST, _MOST = 40, 50_000


def atb_json_to_onnx(
    layer_topo_info: str | Path, model_level: int = -1, cache_csv_file: Mapping[str, Any] | None = None
) -> str:
    """Writes ``X_layer.onnx`` beside ``X_layer.json``, over an earlier one, and returns its path.

    layer_topo_info: a layer's or a model's topology as ATB wrote it; model_level: how deep nodes are opened, 1 for the
    outermost, -1 for all the way. cache_csv_file: taken for msit's sake; the table of operators beside the json is read
    each time. Raises DumpError: one sentence on what is wrong.
    """
    path = Path(layer_topo_info)
    if type(model_level) is not int or model_level < -1:
        raise DumpError(f"model_level={model_level!r}: write a depth, 1 for the outermost nodes, or -1 for all")
    graph = atb_graph(path, None if model_level < 0 else model_level)
    target = path.with_suffix(".onnx")
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        write_onnx(graph, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return str(target)


def atb_graph(path: Path, level: int | None = None) -> ModelGraph:
    """The graph of a json file of ATB's. Raises DumpError for what is none."""
    try:
        data = read_json(path, MAX_JSON)
    except (OSError, ValueError, RecursionError) as e:
        raise DumpError(f"{path}: no topology can be read from it ({str(e)[:120]})") from None
    if not isinstance(data, Mapping) or not ("nodes" in data or "opType" in data):
        raise DumpError(f"{path} is no topology of ATB's: it has no nodes (write it with --atb-type model or layer)")
    name = str(data.get("modelName") or data.get("opName") or path.stem)
    found: list[tuple[str, Mapping[str, Any]]] = []
    if level == 0 or not isinstance(data.get("nodes"), list):
        found.append((name, data))
    else:
        _open(data, "", 1, level, found)
    if not found:
        raise DumpError(f"{path}: its list of nodes is empty")
    known = _table(path)
    tensors: dict[str, GraphTensor] = {}
    nodes = []
    for place, n in found:
        takes, gives = _texts(n.get("inTensors")), _texts(n.get("outTensors"))
        kinds = known.get(str(n.get("opName")), ((), ()))
        for names, told in zip((takes, gives), kinds, strict=True):
            for own, (dtype, shape) in zip(names, told, strict=False):
                tensors.setdefault(own, GraphTensor(own, dtype, shape))
        note = f"inner nodes: {len(n['nodes'])}" if isinstance(n.get("nodes"), list) and n["nodes"] else ""
        nodes.append(GraphNode(place, str(n.get("opType") or name), takes, gives, _attributes(n.get("param")), note))
    given = {name for node in nodes for name in node.outputs}
    outputs = tuple(t for t in _texts(data.get("outTensors")) if t in given)
    taken = {name for node in nodes for name in node.inputs}
    inputs = tuple(t for t in _texts(data.get("inTensors")) if t in taken)
    if not outputs:
        outputs = nodes[-1].outputs
    return ModelGraph(name, tuple(nodes), tensors, inputs, outputs, {"source": path.name})


def _open(
    node: Mapping[str, Any], above: str, depth: int, level: int | None, out: list[tuple[str, Mapping[str, Any]]]
) -> None:
    """The nodes at ``level``, and those above it that have none inside, with their paths as dumps spell them."""
    for i, child in enumerate(node["nodes"]):
        if not isinstance(child, Mapping):
            continue
        if depth > _DEEPEST or len(out) > _MOST:
            raise DumpError(f"a topology with more than {_DEEPEST} levels or {_MOST:,} nodes is not drawn")
        place = f"{above}{i}_{child.get('opName') or child.get('opType') or 'node'}"
        inner = child.get("nodes")
        if isinstance(inner, list) and inner and (level is None or depth < level):
            _open(child, f"{place}/", depth + 1, level, out)
        else:
            out.append((place, child))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _attributes(param: Any, above: str = "") -> dict[str, Any]:
    """Parameters of an operator, those of parameters with a dot between; what is neither number nor text as json."""
    out: dict[str, Any] = {}
    if not isinstance(param, Mapping):
        return out
    for key, value in list(param.items())[:200]:
        if isinstance(value, Mapping):
            out |= _attributes(value, f"{above}{key}.") if above.count(".") < 4 else {}
        elif isinstance(value, (bool, int, float, str)):
            out[f"{above}{key}"] = value if isinstance(value, (float, str)) else int(value)
        elif isinstance(value, list) and value:
            out[f"{above}{key}"] = json.dumps(value)[:500]
    return out


_Kinds = tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[tuple[str, tuple[int, ...]], ...]]


def _table(path: Path) -> dict[str, _Kinds]:
    """operator's name → ((dtype, shape) of its inputs, of its outputs), from ``operation_io_tensors/<pid>/*.csv``."""
    out: dict[str, _Kinds] = {}
    home = path.absolute().parent
    where = home.parent.parent / "operation_io_tensors" / home.name
    files = sorted(f for f in where.glob("operation*.csv") if f.is_file() and not f.is_symlink())
    for file in files[:1]:
        try:
            for row in csv.DictReader(io.StringIO(read_text(file)), delimiter="|"):
                sides = [_kinds(row.get(f"{side}DType"), row.get(f"{side}Shape")) for side in ("In", "Out")]
                out.setdefault(str(row.get("OpName", "")), (sides[0], sides[1]))
        except (OSError, ValueError, csv.Error):
            return {}
    return out


def _kinds(dtypes: str | None, shapes: str | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    shaped = [tuple(int(d) for d in re.findall(r"\d{1,15}", s)) for s in (shapes or "").split(";")]
    return tuple(zip((torch_dtype(d) for d in (dtypes or "").split(";") if d.strip()), shaped, strict=False))
