"""What is not told, or told and not known, is never supposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, judged, normal, rows_of, wide, write_call
from support.peer_dumps import unpack

from vllm_accprobe.opcheck.run.result_row import PASS, SKIP


def product(**param: Any) -> MadeCall:
    rng = np.random.default_rng(0)
    x, w = normal(rng, 5, 8), normal(rng, 4, 8)
    return MadeCall("LinearOperation", {"hasBias": False, **param}, [x, w], [bits(wide(x) @ wide(w).T)])


@pytest.mark.parametrize(
    ("param", "why"),
    [
        ({"isClamp": True}, "parameter isClamp is not known here"),  # of ATB before 2.0
        ({"later": {"wild": 3}}, "parameter wild is not known here"),
        ({"transposeB": "yes"}, "parameter transposeB is 'yes'"),
        ({"outDataType": 99}, "outDataType 99 is none that is known here"),
    ],
)
def test_a_parameter_that_is_not_known(tmp_path: Path, param: dict[str, Any], why: str) -> None:
    (row,) = judged(tmp_path, product(**param)).values()
    assert (row.status, row.message) == (SKIP, why)


@pytest.mark.parametrize("param", [{"isClamp": False}, {"comment": ""}, {"later": {"wild": 0}}, {"hcclComm": 7}])
def test_one_that_is_not_set_does_not_matter(tmp_path: Path, param: dict[str, Any]) -> None:
    (row,) = judged(tmp_path, product(**param)).values()
    assert row.status == PASS


def test_an_input_too_many_is_not_passed_over(tmp_path: Path) -> None:
    made = product()
    more = MadeCall(made.kind, made.param, [*made.inputs, torch.ones(4)], made.outputs)
    (row,) = judged(tmp_path, more).values()
    assert (row.status, row.message) == (SKIP, "3 inputs, where its parameters ask for 2")


def test_codes_are_no_numbers(tmp_path: Path) -> None:
    codes = [torch.ones(3, 4, dtype=torch.int8), torch.ones(2, 4, dtype=torch.int8)]
    made = MadeCall("LinearOperation", {"hasBias": False, "linearType": 2}, codes, [torch.full((3, 2), 4.0)])
    (row,) = judged(tmp_path, made).values()
    assert (row.status, row.message) == (SKIP, "codes without an outDataType have no reference")


def test_nodes_are_no_operators_of_a_model(tmp_path: Path) -> None:
    """A node has the name of one of vLLM's classes: its operators are judged, and it is not."""
    write_call(tmp_path, product(), above="0_Linear")
    write_call(tmp_path, MadeCall("Linear", None, product().inputs, [torch.ones(5, 4)]), 0)
    write_call(tmp_path, MadeCall("SiluAndMul", None, [torch.ones(2, 8)], [torch.ones(2, 4)]), 1)
    found = {r.tap: (r.status, r.message) for r in rows_of(tmp_path)}
    assert found == {
        "0_Linear": (SKIP, "a graph of operators: those inside are checked by themselves"),
        "0_Linear.0_LinearOperation": (PASS, ""), "1_SiluAndMul": (SKIP, "no reference for SiluAndMul"),
    }  # fmt: skip


def test_the_reference_dump(tmp_path: Path) -> None:
    """Only its activation, whose number is FAST_GELU's and which computes SWISH, is wrong for its own inputs."""
    rows = [r for r in rows_of(unpack("e_atb", tmp_path) / "mine") if r.step is not None]
    judged_ = [r for r in rows if r.status != SKIP]
    assert len(judged_) == 33
    wrong = [r for r in judged_ if r.status != PASS]
    assert [(r.tap, r.message.rpartition("(")[2]) for r in wrong] == [
        (f"{n}_Qwen_layer.4_Mlp.2_ActivationOperation", "its numbers are those of SWISH)") for n in (3, 4)
    ]
