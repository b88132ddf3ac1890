"""ATB dumps: headers by hand, layouts of several releases, torch against ATB, float against quantised ATB."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, write_call
from support.peer_dumps import unpack

from vllm_accprobe.align.engines import atb_torch
from vllm_accprobe.align.mapping import load_mapping
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.plan.make_plan import make_plan
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import atb, open_dump
from vllm_accprobe.formats.atb import AtbParameters
from vllm_accprobe.formats.io import atb_file

CODES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "int64": 9, "bool": 12}


def write(path: Path, values: np.ndarray, *, lines: Mapping[str, object] | None = None) -> None:
    """An ATB tensor as the library writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head: dict[str, object] = {"$Version": "1.0", "$Object.Count": 1, "$Object.Length": values.nbytes, "format": 2,
                               "dtype": CODES[values.dtype.name], "dims": ",".join(map(str, values.shape)),
                               "$Object.data": f"0,{values.nbytes}"} | dict(lines or {})  # fmt: skip
    text = "".join(f"{k}={v}\n" for k, v in head.items()) + "$End=1\n"
    path.write_bytes(text.encode() + values.tobytes())


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("atb")
    unpack("e_atb", root)
    unpack("e_atb_vs_torch", root)
    return root


# --- headers; what is refused: test_hostile_formats.py ---


def header(*lines: str, payload: int = 0) -> atb_file.AtbHeader:
    data = "".join(f"{line}\n" for line in (*lines, "$End=1")).encode()
    return atb_file.parse_header(data, len(data) + payload)


def test_headers_by_hand() -> None:
    found = header("$Version=1.0", "format=2", "dtype=27", "dims=3,5", payload=30)
    assert (found.dtype, found.shape, found.stored, found.stats) == ("bfloat16", (3, 5), True, None)
    assert found.offset == len("$Version=1.0\nformat=2\ndtype=27\ndims=3,5\n$End=1\n")
    assert header("dtype=0", "dims=", payload=4).shape == ()
    assert header("dtype=0", "dims=0,7").shape == (0, 7)
    found = header("dtype=1", "dims=4", "max=2.5", "min=-1", "mean=0.5", "l2norm=3")  # in place of values
    assert found.stats is not None
    assert (found.stored, found.stats.max, found.stats.l2, found.stats.count) == (False, 2.5, 3.0, 4)


def test_dtypes_without_counterpart_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "0_Op/after/outtensor0.bin", np.zeros(4, np.int8), lines={"dtype": 29})
    write(tmp_path / "0_Op/after/outtensor1.bin", np.zeros(4, np.int8), lines={"data": "../elsewhere.bin"})
    dump = atb.open(tmp_path)
    assert dump.records == []
    reasons = sorted(s.reason for s in dump.skips)
    assert reasons == ["dtype that is not known here (acl:29)", "its values lie in another file"]


# --- directories ---


@pytest.mark.parametrize(("above", "rank", "step"), [
    ("ait_dump/tensors/1_4711/3", 1, 3),
    ("tensors/4711/3", 0, 3),
    ("tensors/thread_4711", 0, 0),
    ("4711_9", 4711, 0),
    ("3", 0, 3),
    ("", 0, 0),
])  # fmt: skip
def test_layouts(tmp_path: Path, above: str, rank: int, step: int) -> None:
    where = tmp_path / above / "0_ChatGlm6BModelEncoderTorch/0_GraphRunner/3_SelfAttentionOpsRunner"
    write(where / "after/outTensor0.bin", np.arange(6, dtype=np.float32).reshape(2, 3))
    write(where / "before/inTensor12.bin", np.ones(2, np.int64))
    write(where / "after/intensor12.bin", np.zeros(2, np.int64))
    dump = open_dump(tmp_path)
    tap = "0_ChatGlm6BModelEncoderTorch.0_GraphRunner.3_SelfAttentionOpsRunner"
    found = [(r.tap, r.role, r.rank, r.step) for r in sorted(dump.records, key=lambda r: r.seq)]
    assert found == [(tap, role, rank, step) for role in ("input.12", "inplace.12", "output.0")]
    assert dump.records[2].cls == "SelfAttentionOpsRunner"
    assert dump.read(dump.records[2]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert dump.records[2].name.endswith("3_SelfAttentionOpsRunner/after/outTensor0.bin")


def test_order_of_execution(packed: Path) -> None:
    """An operator's inputs, what runs inside, its outputs; 10_x behind 9_x."""
    records = sorted(open_dump(packed / "e_atb/golden").records, key=lambda r: r.seq)
    names = [f"{r.tap}/{r.role}" for r in records if r.step is not None]
    layer = "3_Qwen_layer"
    assert names.index(f"{layer}/input.0") < names.index(f"{layer}.0_RmsNormOperation/input.0")
    assert (
        names.index(f"{layer}.1_Attention/output.0")
        == names.index(f"{layer}.1_Attention.5_LinearOperation/output.0") + 1
    )
    assert names.index(f"{layer}/output.0") == names.index("4_Qwen_layer/input.0") - 1


def test_statistic_csv(tmp_path: Path) -> None:
    head = "Device and PID,Execution Count,Op Name,Op Type,Op Id,Input/Output,Tensor Index,Dtype,Format,Shape,Max,Min,"
    head += "Mean,Norm,Tensor Path"
    row = '0_7,2,Layer/Linear,LinearOperation,3_1,output,0,float16,nd,"8,4",{high},-1,0.25,{norm},N/A'
    for side, high in (("g", 2.0), ("m", 3.0)):
        (tmp_path / side).mkdir()
        lines = [head, row.format(high=high, norm=4 + high), "0_7,x,broken"]
        (tmp_path / side / "statistic.csv").write_text("\n".join(lines))
    dump = open_dump(tmp_path / "g")
    (record,) = dump.records
    assert (record.tap, record.role, record.step, record.shape) == ("3_Layer.1_Linear", "output.0", 2, (8, 4))
    assert dump.problems == ["statistic.csv: 1 lines are not understood"]
    assert [(s.tap, s.reason, s.count) for s in dump.skips] == [("statistic.csv", atb.UNKNOWN_LINE, 1)]
    assert compare(tmp_path / "g", tmp_path / "g").verdict == "pass"
    found = compare(tmp_path / "g", tmp_path / "m")
    assert (found.verdict, found.coverage["pairs"]) == ("fail", 1)


# --- the reference pairs ---


@pytest.mark.parametrize("mapping", ["op_mapping", "op_mapping/op_mapping_file.json"])
def test_torch_against_atb_by_a_mapping(packed: Path, mapping: str) -> None:
    pair = packed / "e_atb_vs_torch"
    found = compare(pair / "golden", pair / "mine", mapping=pair / mapping)
    assert found.first_divergence is not None
    assert found.first_divergence["golden"].endswith("weights/root.model.layers.0.self_attn.o_proj.weight.pth")
    assert [o["module"] for o in found.origins] == ["3_Qwen_layer.1_Attention.5_LinearOperation"]
    assert "names: 3_Qwen_layer.1_Attention.5_LinearOperation is model.layers.0.self_attn.o_proj" in found.plan


def test_atb_against_torch(packed: Path) -> None:
    """The other way round, the golden is the faulty one; the same pairs meet."""
    sides = [open_dump(packed / "e_atb_vs_torch" / side) for side in ("golden", "mine")]
    there, back = make_plan(*sides), make_plan(*reversed(sides))
    assert {u.key for u in there.units} == {u.key for u in back.units}
    assert len(there.units) == 77


# --- other graphs ---

ROWS, WIDTH, LAYERS = 4, 6, 3


def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(x @ w.T, np.float32)


def _model(torch_root: Path, atb_root: Path, fault: bool) -> None:
    """Layers with one linear for q, k and v, whose bias a later operator adds, and one for gate and up, all on one
    level of the ATB graph, and in front of an attention that is wrong enough for a test (the mean of q, k, v)."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    nodes = []

    def module(name: str, tensors: Mapping[str, np.ndarray], cls: str = "") -> None:
        where = torch_root / "torch_tensors/cpu_1/0" / name
        where.mkdir(parents=True, exist_ok=True)
        for key, value in tensors.items():
            torch.save(torch.from_numpy(value[None].copy()), where / f"{key}.pth")
        children.setdefault(name, cls)

    def op(layer: int, kind: str, ins: list[np.ndarray], outs: list[np.ndarray], **param: object) -> None:
        node = nodes[layer]["nodes"]
        where = atb_root / f"tensors/0_2/0/{layer}_Flat_layer/{len(node)}_{kind}"
        node.append({"opName": kind, "opType": kind, "param": param})
        for when, name, values in (("before", "intensor", ins), ("after", "outtensor", outs)):
            for k, value in enumerate(values):
                write(where / when / f"{name}{k}.bin", value)

    children: dict[str, str] = {}
    for i in range(LAYERS):
        nodes.append({"opName": f"l{i}", "opType": "Flat_layer", "param": {}, "nodes": []})
        here = f"root.model.layers.{i}"
        start = x
        normed = x / np.sqrt((x * x).mean(-1, keepdims=True))
        module(f"{here}.self_attn", {}, "Attn")
        module(f"{here}.input_layernorm", {"input_0": x, "output": normed}, "Norm")
        op(i, "RmsNormOperation", [x, np.ones(WIDTH, np.float32)], [normed])
        w, b = (
            rng.standard_normal((3 * WIDTH, WIDTH)).astype(np.float32),
            rng.standard_normal(3 * WIDTH).astype(np.float32),
        )
        raw = linear(normed, w)
        fused = raw + b
        for k, part in zip("qkv", np.split(fused, 3, axis=-1), strict=True):
            module(f"{here}.self_attn.{k}_proj", {"input_0": normed, "output": part}, "Linear")
        if fault and i == 1:
            b = b.copy()
            b[WIDTH + 2] += 0.5
            fused = raw + b
        op(i, "LinearOperation", [normed, w], [raw], hasBias=False)
        op(i, "ElewiseOperation", [raw, b], [fused], elewiseType=8)
        op(i, "SplitOperation", [fused], [np.ascontiguousarray(p) for p in np.split(fused, 3, axis=-1)])
        mixed = np.asarray(sum(np.split(fused, 3, axis=-1)) / 3, np.float32)
        w = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        module(f"{here}.self_attn.o_proj", {"input_0": mixed, "output": linear(mixed, w)}, "Linear")
        op(i, "PagedAttentionOperation", [fused], [mixed])
        op(i, "LinearOperation", [mixed, w], [linear(mixed, w)], hasBias=False)
        x = x + linear(mixed, w)
        normed = x / np.sqrt((x * x).mean(-1, keepdims=True))
        op(i, "ElewiseOperation", [start, linear(mixed, w)], [x], elewiseType=8)
        module(f"{here}.post_attention_layernorm", {"input_0": x, "output": normed}, "Norm")
        op(i, "RmsNormOperation", [x, np.ones(WIDTH, np.float32)], [normed])
        w = rng.standard_normal((4 * WIDTH, WIDTH)).astype(np.float32)
        wide = linear(normed, w)
        gate, up = np.split(wide, 2, axis=-1)
        module(f"{here}.mlp.gate_proj", {"input_0": normed, "output": gate}, "Linear")
        module(f"{here}.mlp.up_proj", {"input_0": normed, "output": up}, "Linear")
        op(i, "LinearOperation", [normed, w], [wide], hasBias=False)
        w = rng.standard_normal((WIDTH, 2 * WIDTH)).astype(np.float32)
        inner = np.maximum(gate, 0) * up
        op(i, "ActivationOperation", [wide], [inner], activationType=9)
        op(i, "LinearOperation", [inner, w], [linear(inner, w)], hasBias=False)
        module(f"{here}.mlp.down_proj", {"input_0": inner, "output": linear(inner, w)}, "Linear")
        x = x + linear(inner, w)
        op(i, "ElewiseOperation", [normed, linear(inner, w)], [x], elewiseType=8)
        module(here, {"output_0": x}, "DecoderLayer")
        write(atb_root / f"tensors/0_2/0/{i}_Flat_layer/after/outtensor0.bin", x)
    tree: dict[str, Any] = {"name": "root", "type": "Model", "children": []}
    tree["children"] = [{"name": n, "type": c, "children": []} for n, c in children.items()]
    (torch_root / "torch_tensors/cpu_1/model_tree.json").write_text(json.dumps(tree))
    (atb_root / "model/2").mkdir(parents=True)
    (atb_root / "model/2/Flat.json").write_text(json.dumps({"modelName": "m", "nodes": nodes}))


@pytest.mark.parametrize("fault", [False, True])
def test_a_flat_graph_with_fused_projections(tmp_path: Path, fault: bool) -> None:
    _model(tmp_path / "torch", tmp_path / "atb", fault)
    found = compare(tmp_path / "torch", tmp_path / "atb")
    names = {line.removeprefix("names: ") for line in found.plan if line.startswith("names: ") and " is " in line}
    here = "model.layers.1"
    assert {
        f"1_Flat_layer is {here}",
        f"1_Flat_layer.0_RmsNormOperation is {here}.input_layernorm",
        "1_Flat_layer.2_ElewiseOperation is " + " with ".join(f"{here}.self_attn.{k}_proj" for k in "qkv"),
        f"1_Flat_layer.3_SplitOperation is {here}.self_attn.q_proj",
        f"1_Flat_layer.4_PagedAttentionOperation is {here}.self_attn.o_proj/input.0",
        f"1_Flat_layer.5_LinearOperation is {here}.self_attn.o_proj",
        f"1_Flat_layer.6_ElewiseOperation is {here}.post_attention_layernorm/input.0",
        f"1_Flat_layer.8_LinearOperation is {here}.mlp.gate_proj with {here}.mlp.up_proj",
        f"1_Flat_layer.10_LinearOperation is {here}.mlp.down_proj",
    } <= names
    assert "1_Flat_layer.1_LinearOperation is" not in " ".join(names)  # its bias is added behind it
    roles = {(p.tap, p.role) for p in found.pairs}
    assert {("1_Flat_layer.3_SplitOperation", f"output.{k}") for k in range(3)} <= roles
    if not fault:
        assert found.verdict == "pass", [(p.mine, p.message) for p in found.pairs if p.status == "fail"]
        return
    assert found.first_divergence is not None
    assert found.first_divergence["module"] == "1_Flat_layer.2_ElewiseOperation"


def test_the_users_types_pair_what_is_left(tmp_path: Path) -> None:
    """A type that nothing is known of, in layers and outside; where counts differ it is said and not guessed."""
    (tmp_path / "map.json").write_text(
        json.dumps({"MagicOperation_outtensor1": ["Magic_output_1"], "OddOperation": ["Odd"]})
    )
    types = load_mapping(tmp_path / "map.json").types
    taps = [
        "0_MagicOperation",
        *(f"{i}_Block.{k}" for i in (1, 2) for k in ("0_MagicOperation", "1_OddOperation", "2_OddOperation")),
    ]
    modules = [("magic", "Magic"), *((f"h.{i}.{n}", c) for i in (0, 1) for n, c in (("m", "Magic"), ("o", "Odd")))]
    matches, lines = atb_torch.atb_to_torch(atb.tree(taps, {}), modules, {}, types)
    named = {m.atb: m.torch for m in matches if m.atb[1] == "output.1"}
    assert named == {
        ("0_MagicOperation", "output.1"): (("magic", "output.1"),),
        ("1_Block.0_MagicOperation", "output.1"): (("h.0.m", "output.1"),),
        ("2_Block.0_MagicOperation", "output.1"): (("h.1.m", "output.1"),),
    }
    assert lines == [
        f"mapping: 2 OddOperation of {i}_Block, 1 Odd that no other operator has: not paired" for i in (1, 2)
    ]


def test_models_with_other_numbers_of_layers() -> None:
    forest = atb.tree(["0_WordEmbedding", "1_Layer.0_Linear", "2_Layer.0_Linear", "3_RmsNormOperation"], {})
    modules = [("embed", "Embedding"), *((f"h.{i}.o", "Linear") for i in range(3)), ("norm", "Norm")]
    matches, lines = atb_torch.atb_to_torch(forest, modules, {}, {})
    outputs = {m.atb[0]: m.torch[0][0] for m in matches if m.atb[1] == "output.0"}
    assert outputs == {"0_WordEmbedding": "embed", "3_RmsNormOperation": "norm"}
    assert lines == [
        "mapping: 2 layers in the ATB graph, 3 in the torch model: only what stands outside of layers is mapped"
    ]


@pytest.mark.parametrize("topology", [True, False])
def test_float_against_quantised(tmp_path: Path, topology: bool) -> None:
    """The quantised graph has an operator more per layer, other types and other numbers."""
    norm, add, quantised = "RmsNormOperation", "ElewiseOperation", "LinearQuantOperation"
    layers = {"g": [norm, "LinearOperation", add, "LinearOperation"], "m": [norm, add, quantised, add, quantised]}
    for side, layer in layers.items():
        nodes = []
        for i in range(2):
            kinds = [{"opType": k, "param": {}} for k in layer]
            adds = [k for k, n in enumerate(kinds) if n["opType"] == "ElewiseOperation"]
            kinds[adds[-1]]["param"] = {"elewiseType": 8}
            if len(adds) > 1:
                kinds[adds[0]]["param"] = {"elewiseType": 6}  # quantises
            nodes.append({"opType": "Layer", "param": {}, "nodes": kinds})
            rng = np.random.default_rng(i)
            for k, kind in enumerate(kinds):
                values = (
                    rng.standard_normal((3, 4)).astype(np.float16)
                    if kind["param"] != {"elewiseType": 6}
                    else np.ones((3, 4), np.int8)
                )
                write(tmp_path / side / f"tensors/0_9/0/{i}_Layer/{k}_{kind['opType']}/after/outtensor0.bin", values)
                if kind["opType"].startswith("Linear"):
                    wide = np.ones((3, 4), np.int8 if "Quant" in str(kind["opType"]) else np.float16)
                    write(tmp_path / side / f"tensors/0_9/0/{i}_Layer/{k}_{kind['opType']}/before/intensor0.bin", wide)
        if topology:
            (tmp_path / side / "model/9").mkdir(parents=True)
            (tmp_path / side / "model/9/m.json").write_text(json.dumps({"nodes": nodes}))
    found = compare(tmp_path / "g", tmp_path / "m")
    assert found.verdict == "pass", [(p.mine, p.message) for p in found.pairs if p.status == "fail"]
    pairs = {(p.golden.split("0_9/0/")[1], p.mine.split("0_9/0/")[1]) for p in found.pairs}
    assert (
        "1_Layer/3_LinearOperation/after/outtensor0.bin",
        "1_Layer/4_LinearQuantOperation/after/outtensor0.bin",
    ) in pairs
    assert (
        "0_Layer/2_ElewiseOperation/after/outtensor0.bin",
        "0_Layer/3_ElewiseOperation/after/outtensor0.bin",
    ) in pairs
    assert len(pairs) == 8
    assert any("4 tensors that are integers on one side" in line for line in found.plan)


# --- where the parameters of an ATB operator come from, which source counts, and tables that are none ---


HEAD = "CaseNum|CaseName|OpName|OpParam|InNum\n"


def call(param: dict[str, object] | None = None, **more: torch.Tensor) -> MadeCall:
    return MadeCall("LinearOperation", param, [torch.ones(2, 2), torch.ones(2, 2)], [torch.ones(2, 2)])


def param(root: Path, step: int = 0) -> object:
    dump = open_dump(root)
    assert isinstance(dump, atb.AtbDump)
    return dump.call_attributes(0, step, "3_Layer.0_LinearOperation").get("param")


def test_the_nearest_source_counts(tmp_path: Path) -> None:
    write_call(tmp_path, call(), above="3_Layer")
    write_call(tmp_path, call(), above="3_Layer", token=2)
    assert param(tmp_path) is None
    nodes = [*({"opType": f"X{i}"} for i in range(3)),
             {"opType": "Layer", "nodes": [{"opType": "LinearOperation", "param": {"from": "topology"}}]}]  # fmt: skip
    (tmp_path / "model/7").mkdir(parents=True)
    (tmp_path / "model/7/m.json").write_text(json.dumps({"nodes": nodes}))
    assert param(tmp_path) == {"from": "topology"}
    table = tmp_path / "operation_io_tensors/7/operation_tensors_2.csv"
    table.parent.mkdir(parents=True)
    table.write_text(HEAD + '1|x|LinearOperation_3_0|{"from": "table"}|2\n')
    assert (param(tmp_path), param(tmp_path, 2)) == ({"from": "topology"}, {"from": "table"})  # of execution 2 alone
    (tmp_path / "tensors/0_7/2/3_Layer/0_LinearOperation/op_param.json").write_text('{"from": "file"}')
    assert (param(tmp_path), param(tmp_path, 2)) == ({"from": "topology"}, {"from": "file"})


def test_a_table_that_is_named_is_of_all_executions(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [
        '1|x|LinearOperation_3_0|{"a": 1}|2',
        "2|x|LinearOperation|{}|2",  # no id
        "3|x|LinearOperation_4|{broken|2",
        "short",
        "",
        "6|x|Custom_Name_Operation_5_1_2|{}|2",
    ]
    table.write_text(HEAD + "\n".join(rows) + "\n")
    parameters = AtbParameters({})
    assert parameters.add_table(table) == 2
    assert parameters.problems == ["t.csv: 3 lines are not understood"]
    assert parameters.of(0, 7, "3_L.0_LinearOperation") == {"a": 1}
    assert parameters.of(0, 7, "3_L.0_RopeOperation") is None
    assert parameters.of(0, 7, "5_L.1_M.2_Custom_Name_Operation") == {}


@pytest.mark.parametrize("text", ["", "a|b\n", "\x00\xff", HEAD.replace("OpParam", "Param")])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DumpError, match="is no table of ATB's operators"):
        AtbParameters({}).add_table(tmp_path / "t.csv")


@pytest.mark.parametrize("text", ["", "[1]", "{", "null", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\x00"])
def test_a_broken_file_of_parameters_tells_nothing(tmp_path: Path, text: str) -> None:
    where = write_call(tmp_path, call(), above="3_Layer")
    (where / "op_param.json").write_text(text)
    dump = open_dump(tmp_path)
    assert isinstance(dump, atb.AtbDump)
    assert dump.call_attributes(0, 0, "3_Layer.0_LinearOperation") == {}
    told = [s for s in dump.problems if "op_param.json is damaged" in s]
    assert len(told) == (0 if text in ("[1]", "null") else 1)


def test_inputs_by_number_and_what_was_kept_behind_only(tmp_path: Path) -> None:
    made = MadeCall("LinearOperation", None, [torch.ones(2, 2), torch.ones(2, 2)], [torch.ones(2, 2)],
                    {1: torch.zeros(2, 2)})  # fmt: skip
    write_call(tmp_path / "a", made)
    write_call(tmp_path / "b", made, after=True)
    before, after = (open_dump(tmp_path / n) for n in "ab")
    assert isinstance(before, atb.AtbDump)
    assert isinstance(after, atb.AtbDump)
    place = 0, 0, "0_LinearOperation"
    assert {k: r.role for k, r in before.call_inputs(*place).items()} == {"0": "input.0", "1": "param.weight"}
    assert {k: r.role for k, r in after.call_inputs(*place).items()} == {"0": "inplace.0", "1": "inplace.1"}
    assert before.call_attributes(*place) == {}
    assert after.call_attributes(*place) == {"kept_after": ["0", "1"]}


@pytest.mark.parametrize(
    ("layer", "own", "weight"),
    [(1, {}, 1), (2, {}, 2), (2, {"hasBias": True}, 3), (3, {}, 2), (3, {"hasBias": True}, 3)],
)
def test_a_norm_s_weight_stands_behind_what_it_adds(tmp_path, layer, own, weight):
    name = {1: "normParam", 2: "preNormParam", 3: "postNormParam"}[layer]
    write_call(tmp_path, MadeCall("RmsNormOperation", {"layerType": layer, name: own}, [torch.ones(2)] * 4))
    roles = {k: r.role for k, r in open_dump(tmp_path).call_inputs(0, 0, "0_RmsNormOperation").items()}  # type: ignore[attr-defined]
    assert [k for k, role in roles.items() if role == "param.weight"] == [str(weight)]
