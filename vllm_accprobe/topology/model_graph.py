"""A model as a graph of operators or modules: from ATB's topology, and as an ONNX file.

The problem: a dump of modules, one of operators and a library's json tell the same in three ways, and every viewer
reads ONNX, whose own operators say more than a dump knows. The idea: plain values, in which a tensor is its name
(`ModelGraph`); `sound` orders them as viewers want. In ONNX every node is an operator of a domain of ours, so that the
checker requires structure only; weights are attributes. ATB's nodes are opened level by level as ``atb_json_to_onnx``
of ait and msit does (0 is the whole model). The package ``onnx`` is an extra (``vllm-accprobe[onnx]``). Not here: dumps
(data_flow.py).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.common.foreign import torch_dtype
from vllm_accprobe.formats.io.plain_file import read_json, read_rows
from vllm_accprobe.whole_file import whole


@dataclass(frozen=True)
class GraphTensor:
    """name: unique in the graph; dtype: torch's name, "" where it is not known; shape: None where it is not known;
    note: one line for whoever examines it."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    note: str = ""


@dataclass(frozen=True)
class GraphNode:
    """One operator or module. inputs, outputs: names of tensors; kind: its type; attributes: numbers, texts, booleans,
    and lists of these; note: one line."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class ModelGraph:
    """nodes: each behind those whose outputs it takes; tensors: what is known of each name; inputs and outputs: of the
    whole; facts: about the run, short texts; notes: sentences on what the graph does not show."""

    name: str
    nodes: tuple[GraphNode, ...]
    tensors: Mapping[str, GraphTensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def sound(graph: ModelGraph) -> ModelGraph:
    """The same graph as viewers want it: every name is produced once and used after it was produced. A second
    producer's tensor gets a name of its own, which later takers mean; nodes that run in a ring keep the order they
    have, and what is used before it is produced becomes an input of the whole."""
    ordered = _ordered(graph.nodes, set(graph.inputs))
    tensors = dict(graph.tensors)
    inputs = list(dict.fromkeys(graph.inputs))
    means: dict[str, str] = {name: name for name in inputs}
    known = set(inputs)
    nodes = []
    for node in ordered:
        taken = []
        for name in node.inputs:
            if name and name not in means:
                inputs.append(name)
                known.add(name)
                means[name] = name
            taken.append(means.get(name, name))
        gives = []
        for name in node.outputs:
            own = _unused(name, known)
            if own != name:
                tensors[own] = replace(tensors.get(name, GraphTensor(name)), name=own)
            known.add(own)
            means[name] = own
            gives.append(own)
        nodes.append(replace(node, inputs=tuple(taken), outputs=tuple(gives)))
    outputs = tuple(dict.fromkeys(means[name] for name in graph.outputs if name in means))
    return replace(graph, nodes=tuple(nodes), tensors=tensors, inputs=tuple(inputs), outputs=outputs)


def _unused(name: str, taken: set[str]) -> str:
    unique, n = name or "tensor", 2
    while unique in taken:
        unique, n = f"{name}~{n}", n + 1
    return unique


def _ordered(nodes: Iterable[GraphNode], known: set[str]) -> list[GraphNode]:
    """Each node behind the giver of what it takes [A. B. Kahn, Commun. ACM 5 (1962) 558]; among those that may come
    next, the one that came first. A name's giver is the last one before the taker, or else the first one after it. A
    ring of waiting nodes begins with its first."""
    listed = list(nodes)
    givers: dict[str, list[int]] = {}
    for i, node in enumerate(listed):
        for name in node.outputs:
            givers.setdefault(name, []).append(i)

    def giver(name: str, i: int) -> int | None:
        among = givers.get(name, [])
        at = bisect_left(among, i)
        if at:
            return among[at - 1]
        return next((g for g in among[at : at + 2] if g != i), None) if name not in known else None

    waits = [{g for name in n.inputs if (g := giver(name, i)) is not None} for i, n in enumerate(listed)]
    if all(g < i for i, before in enumerate(waits) for g in before):
        return listed
    waiters: dict[int, list[int]] = {}
    for i, before in enumerate(waits):
        for g in before:
            waiters.setdefault(g, []).append(i)
    count = [len(before) for before in waits]
    ready = [i for i, n in enumerate(count) if not n]
    heapify(ready)
    out: list[GraphNode] = []
    done = [False] * len(listed)
    rest = iter(range(len(listed)))
    while len(out) < len(listed):
        i = heappop(ready) if ready else next(i for i in rest if not done[i])
        if done[i]:
            continue
        done[i] = True
        out.append(listed[i])
        for w in waiters.get(i, ()):
            count[w] -= 1
            if not count[w]:
                heappush(ready, w)
    return out


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
    """A dtype that ONNX lacks, or that it is not known, is written as bytes, a shape that it is not known as one
    dimension of that name: the checker wants both. The tensor's line says so."""
    element = getattr(onnx.TensorProto, _ELEMENTS.get(t.dtype, "UINT8"), onnx.TensorProto.UINT8)
    notes = [] if t.dtype in _ELEMENTS else [f"dtype: {t.dtype or 'not known'}"]
    notes += ["shape: not known"] if t.shape is None else []
    shape = ["unknown"] if t.shape is None else t.shape
    note = "; ".join([*notes, t.note] if t.note else notes)
    return onnx.helper.make_tensor_value_info(t.name, element, shape, doc_string=note)


MAX_JSON = 64 << 20
_DEEPEST, _MOST = 40, 50_000


def atb_json_to_onnx(
    layer_topo_info: str | Path, model_level: int = -1, cache_csv_file: Mapping[str, Any] | None = None
) -> str:
    """Writes ``X_layer.onnx`` next to ``X_layer.json``, over an earlier one, and returns its path.

    layer_topo_info: a layer's or a model's topology as ATB wrote it; model_level: how deep nodes are opened, 1 for the
    outermost, -1 for all the way. cache_csv_file: taken for msit's sake; the table of operators next to the json is
    read each time. Raises DumpError: one sentence on what is wrong.
    """
    path = Path(layer_topo_info)
    if type(model_level) is not int or model_level < -1:
        raise DumpError(f"model_level={model_level!r}: write a depth, 1 for the outermost nodes, or -1 for all")
    graph = atb_graph(path, None if model_level < 0 else model_level)
    target = path.with_suffix(".onnx")
    with whole(target) as part:
        part.unlink(missing_ok=True)
        write_onnx(graph, part)
    return str(target)


def atb_graph(path: Path, level: int | None = None) -> ModelGraph:
    """The graph of a json file of ATB's. Raises DumpError for what is none."""
    data = read_json(path, MAX_JSON)
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
        for names, types in zip((takes, gives), kinds, strict=True):
            for own, (dtype, shape) in zip(names, types, strict=False):
                tensors.setdefault(own, GraphTensor(own, dtype, shape))
        note = f"inner nodes: {len(n['nodes'])}" if isinstance(n.get("nodes"), list) and n["nodes"] else ""
        nodes.append(GraphNode(place, str(n.get("opType") or name), takes, gives, _attributes(n.get("param")), note))
    produced = {name for node in nodes for name in node.outputs}
    outputs = tuple(t for t in _texts(data.get("outTensors")) if t in produced)
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
            head, *rows = read_rows(file) or [[]]
            for row in (dict(zip(head, cells, strict=False)) for cells in rows):
                sides = [_kinds(row.get(f"{side}DType"), row.get(f"{side}Shape")) for side in ("In", "Out")]
                out.setdefault(str(row.get("OpName", "")), (sides[0], sides[1]))
        except DumpError:
            return {}
    return out


def _kinds(dtypes: str | None, shapes: str | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    shaped = [tuple(int(d) for d in re.findall(r"\d{1,15}", s)) for s in (shapes or "").split(";")]
    return tuple(zip((torch_dtype(d) for d in (dtypes or "").split(";") if d.strip()), shaped, strict=False))
