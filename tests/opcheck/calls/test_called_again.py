"""Blocks that run several times in a step, and heads of another name: each call has its own parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from opcheck_dumps import Maker

from vllm_accprobe.dump.block_code import FORWARD
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.registry import default_references

X = torch.arange(6.0).reshape(3, 2)


def checked(root: Path, tap: str) -> list[dict[str, Expected]]:
    """What the calls of ``tap`` should give."""
    found = [default_references().evaluate(c.what) for c in Calls(open_dump(root), None).of(0, tap)]
    assert not any(isinstance(f, Declined) for f in found), found
    return found  # type: ignore[return-value]


def test_a_block_that_is_called_again_has_its_own_parts(tmp_path: Path) -> None:
    """A second part runs in the second call alone."""
    maker = Maker(tmp_path)
    code = {"output.0": "(x + norm.0[0])", "inside.norm.0/x": "x", "inside.norm.1/x": "norm.0[0]"}
    maker.module("b", "OddBlock", **{FORWARD: code})
    maker.module("b.norm.0", "Odd")
    maker.module("b.norm.1", "Odd")
    maker.request(0, 3)
    maker.step(0, [(0, 0, 3)])
    for k in (1.0, 2.0):
        maker.call("b", "OddBlock", {"x": k * X}, number=int(k) - 1)
        maker.call("b.norm.0", "Odd", {"x": k * X}, 10 * k * X, number=int(k) - 1)
        if k == 2.0:
            maker.call("b.norm.1", "Odd", {"x": X}, X)  # and not what the other part gave
        maker.call("b", "OddBlock", {}, 11 * k * X, number=int(k) - 1)
    maker.close()
    first, second = checked(tmp_path, "b")
    assert torch.equal(first["output.0"].value, 11 * X.double())
    assert set(first) == {"output.0"}
    assert torch.equal(second["output.0"].value, 22 * X.double())
    assert torch.equal(second["inside.norm.1/x"].value, 20 * X.double())  # the other part's input is as it should be


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_a_head_of_another_name(tied: bool, tmp_path: Path) -> None:
    """Or of the embedding, whose first call looks tokens up."""
    maker, cls = Maker(tmp_path), "VocabParallelEmbedding" if tied else "ParallelLMHead"
    maker.module("output", cls)
    maker.param("output", cls, weight=4 * torch.eye(2))
    maker.module("logits_processor", "LogitsProcessor", scale=0.5)
    maker.request(0, 3)
    maker.step(0, [(0, 0, 3)])
    if tied:
        maker.call("output", cls, {"input_": torch.tensor([0, 1, 1])}, 4 * torch.eye(2)[[0, 1, 1]])
    maker.call("output", cls, {"x": X}, 4 * X, number=int(tied))
    maker.call("logits_processor", "LogitsProcessor", {"hidden_states": X}, 2 * X)
    maker.close()
    *_, head = checked(tmp_path, "output")
    assert torch.equal(head["output.0"].value, 4 * X.double())
    (only,) = checked(tmp_path, "logits_processor")
    assert torch.equal(only["output.0"].value, 2 * X.double())
