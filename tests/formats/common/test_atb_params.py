"""Where the parameters of an ATB operator come from, which source counts, and tables that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from atb_dumps import MadeCall, write_call

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import atb, open_dump
from vllm_accprobe.formats.atb import AtbParameters, id_of

HEAD = "CaseNum|CaseName|OpName|OpParam|InNum\n"


def call(param: dict[str, object] | None = None, **more: torch.Tensor) -> MadeCall:
    return MadeCall("LinearOperation", param, [torch.ones(2, 2), torch.ones(2, 2)], [torch.ones(2, 2)])


def param(root: Path, step: int = 0) -> object:
    dump = open_dump(root)
    assert isinstance(dump, atb.AtbDump)
    return dump.call_attributes(0, step, "3_Layer.0_LinearOperation").get("param")


def test_ids() -> None:
    assert id_of("3_Qwen_layer.1_Attention.0_LinearOperation") == "3_1_0"


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


def test_commas_are_read_too(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text('OpName,OpParam\nLinearOperation_3_0,"{""a"": 1, ""b"": [2, 3]}"\n')
    parameters = AtbParameters({})
    parameters.add_table(table)
    assert parameters.of(0, 0, "3_L.0_LinearOperation") == {"a": 1, "b": [2, 3]}


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
    told = [s for s in dump.problems if "op_param.json: no parameters can be read from it" in s]
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
def test_a_norm_s_weight_stands_behind_what_it_adds(
    tmp_path: Path, layer: int, own: dict[str, bool], weight: int
) -> None:
    name = {1: "normParam", 2: "preNormParam", 3: "postNormParam"}[layer]
    write_call(tmp_path, MadeCall("RmsNormOperation", {"layerType": layer, name: own}, [torch.ones(2)] * 4))
    roles = {k: r.role for k, r in open_dump(tmp_path).call_inputs(0, 0, "0_RmsNormOperation").items()}  # type: ignore[attr-defined]
    assert [k for k, role in roles.items() if role == "param.weight"] == [str(weight)]
