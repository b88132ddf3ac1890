"""ATB's operators from dumps: what a dump keeps, and what it lacks. Their formulas: opcheck/samples/atb.py."""

import json
from pathlib import Path

import pytest
import torch
from atb_dumps import MadeCall, judged, rows_of, write_call
from opcheck.samples import atb
from opcheck.samples.dtypes import HALF
from opcheck.samples.sample import Draw
from reference_calls import evaluated
from support.peer_dumps import unpack

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.atb.operands import Operands
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, SKIP


def of(call: Call) -> MadeCall:
    """A sample as it is written into a dump."""
    outputs = [t for role, t in call.outputs.items() if role.startswith("output.")]
    inplace = {int(r.rpartition(".")[2]): t for r, t in call.outputs.items() if r.startswith("inplace.")}
    return MadeCall(call.cls, call.attrs.get("param"), list(call.inputs.values()), outputs, inplace)


MAKERS = (atb.elementwise, atb.linear, atb.rms_norm, atb.moved_numbers, atb.decoders, atb.cache_writes, atb.sort)


@pytest.mark.parametrize("make", MAKERS, ids=lambda m: m.__name__)
def test_samples_from_dumps_pass(tmp_path: Path, make) -> None:
    for n, made in enumerate(make(Draw(0, HALF))):
        found = judged(tmp_path / str(n), of(made.call))
        assert {r: found[r].status for r in made.call.outputs} == dict.fromkeys(made.call.outputs, PASS), found
        assert {(r.cls, r.tap) for r in found.values()} == {(made.call.cls, made.call.name)}


def test_each_call_has_its_own_parameters(tmp_path: Path) -> None:
    for token, length in enumerate((2, 3, 2, 2)):
        x = torch.randn(2, 4, 5).half()
        cut = torch.cat([x[0, :length], x[1, :4]])
        param = {"qSeqLen": [length, 4]} if token < 3 else None
        write_call(tmp_path, MadeCall("UnpadWithHiddenStateOperation", param, [x], [cut]), token=token)
    assert [row.status for row in rows_of(tmp_path)] == [PASS, PASS, PASS, SKIP]


def test_an_empty_tensor_has_parts(tmp_path: Path) -> None:
    x = torch.zeros(0, 5).half()
    call = Call("0", "SplitOperation", {"0": x}, attrs={"param": {"splitDim": 0, "splitNum": 2}},
                outputs={"output.0": x, "output.1": x})  # fmt: skip
    assert evaluated(call).keys() == call.outputs.keys()


COSINE = MadeCall("ElewiseOperation", {"elewiseType": 3}, [torch.zeros(2, 3).half()], [torch.ones(2, 3).half()])


def test_an_input_that_was_changed_is_a_fault(tmp_path: Path) -> None:
    changed = COSINE.inputs[0].clone()
    changed[0, 0] += 1
    found = judged(tmp_path, MadeCall(COSINE.kind, COSINE.param, COSINE.inputs, COSINE.outputs, {0: changed}))
    assert {r: x.status for r, x in found.items()} == {"output.0": PASS, "inplace.0": FAIL}


def test_inputs_that_were_kept_behind_the_operator_only(tmp_path: Path) -> None:
    """``-time 1``: the output is judged; that the input is the same as before cannot be, nor what else is written."""
    found = judged(tmp_path / "cos", COSINE, after=True)
    assert {r: x.status for r, x in found.items()} == {"output.0": PASS, "inplace.0": SKIP}
    made = of(atb.cache_writes(Draw(7, HALF))[0].call)
    assert judged(tmp_path / "right", made, after=True)["output.0"].status == PASS
    wrong = [made.outputs[0].roll(1, 1), made.outputs[1]]
    moved = {2: wrong[0], 3: made.inplace[3]}
    found = judged(tmp_path / "wrong", MadeCall(made.kind, made.param, made.inputs, wrong, moved), after=True)
    assert (found["output.0"].status, found["output.1"].status) == (FAIL, PASS)


def test_the_residual_of_a_norm_is_no_weight(tmp_path: Path) -> None:
    """Two executions with two residuals: each is judged with its own."""
    for token in (0, 1):
        write_call(tmp_path, of(atb.rms_norm(Draw(token, HALF), "")[6].call), token=token)
    found = {(r.step, r.role): r.status for r in rows_of(tmp_path) if r.step is not None}
    assert found == {(t, f"output.{k}"): PASS for t in (0, 1) for k in (0, 1)}


def test_another_function_is_named(tmp_path: Path) -> None:
    x = torch.linspace(-3, 3, 40).half()[None]
    (row,) = judged(tmp_path, MadeCall("ActivationOperation", {"activationType": 3}, [x],
                                       [(x.double() * x.double().sigmoid()).half()])).values()  # fmt: skip
    assert row.status == FAIL
    assert row.message.endswith("(its numbers are those of SWISH)")


def test_tied_groups_have_no_reference(tmp_path: Path) -> None:
    x = torch.full((3, 8), 0.5).half()
    param = {"groupNum": 4, "k": 2, "groupMultiFlag": 0, "n": 1}
    made = MadeCall("GroupTopkOperation", param, [x, torch.arange(8, dtype=torch.int32)], [], {0: x})
    found = judged(tmp_path, made)["inplace.0"]
    assert (found.status, found.message) == (SKIP, "two of its groups or experts are tied")


def test_a_token_that_no_rand_gives_is_a_fault(tmp_path: Path) -> None:
    found = judged(tmp_path, of(atb.a_draw_that_some_rand_gives(Draw(0, HALF), "beyond top-k").call))
    assert {r.status for r in found.values()} == {FAIL}
    assert "no rand between 0 and 1 gives it" in found["output.0"].message


def test_one_rank_of_many_cannot_be_judged(tmp_path: Path) -> None:
    write_call(tmp_path, of(atb.products_over_ranks(Draw(0, HALF), "")[1].call), process="1_7")
    (row,) = rows_of(tmp_path)
    assert (row.status, row.message) == (
        SKIP, "works over 2 ranks, and the tensors of 1 are there: open the folder that holds all",
    )  # fmt: skip
    for rank in (0, 1):
        made = of(atb.products_over_ranks(Draw(0, HALF), "")[rank].call)
        write_call(tmp_path / "both", made, process=f"{rank}_7")
    assert [(r.rank, r.status) for r in rows_of(tmp_path / "both")] == [(0, PASS), (1, PASS)]


def test_nodes_are_no_operators_of_a_model(tmp_path: Path) -> None:
    """A node has the name of one of vLLM's classes: its operators are judged, and it is not."""
    product = of(atb.other_products(Draw(0, HALF))[3].call)
    write_call(tmp_path, product, above="0_Linear")
    write_call(tmp_path, MadeCall("Linear", None, product.inputs, [torch.ones(5, 4)]), 0)
    write_call(tmp_path, MadeCall("SiluAndMul", None, [torch.ones(2, 8)], [torch.ones(2, 4)]), 1)
    found = {r.tap: (r.status, r.message) for r in rows_of(tmp_path)}
    assert found == {
        "0_Linear": (SKIP, "a graph of operators: those inside are checked by themselves"),
        "0_Linear.0_MatmulOperation": (PASS, ""), "1_SiluAndMul": (SKIP, "no reference for SiluAndMul"),
    }  # fmt: skip


def test_the_reference_dump(tmp_path: Path) -> None:
    """Only its activation, whose number is FAST_GELU's and which computes SWISH, is wrong for its own inputs."""
    rows = [r for r in rows_of(unpack("e_atb", tmp_path) / "mine") if r.step is not None and r.status != SKIP]
    assert len(rows) == 33
    assert [(r.tap, r.message.rpartition("(")[2]) for r in rows if r.status != PASS] == [
        (f"{n}_Qwen_layer.4_Mlp.2_ActivationOperation", "its numbers are those of SWISH)") for n in (3, 4)
    ]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "9" * 400])
def test_a_parameter_that_is_no_finite_number_is_no_formula(value: str) -> None:
    """Tables and files of strangers: json reads NaN and integers of any size."""
    given = Operands(Call("a", "A", attrs={"param": {"epsilon": json.loads(value), "axes": [json.loads(value)]}}))
    with pytest.raises(Declined, match="epsilon is no finite number"):
        given.param("epsilon", 1e-5)
    with pytest.raises(Declined, match="axes is no list of numbers"):
        given.numbers("axes")
