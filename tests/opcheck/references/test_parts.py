"""What references ask of a call, and the words in which they decline."""

from __future__ import annotations

import pytest
import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references.composite import child_output, child_value, first, inside, routed_factor
from vllm_accprobe.opcheck.references.parts import param_if, ranks_of, reshaped, unit_of

Y = torch.arange(6.0).reshape(2, 3)
INSIDE = {
    "children": [("a", "output.0", Y), ("b", "output.0", Y + 1), ("b", "output.1", Y + 2), ("c", "output.0", Y[:1])],
    "read": lambda record: record,
}
BLOCK = Call("block", "Block", outputs={"output.0": Y}, extra=INSIDE)


def test_parameters_that_may_be_missing() -> None:
    call = Call("t", "T", params={"bias": torch.ones(2), "weight": torch.ones(0)})
    assert param_if(call, "bias").tolist() == [1.0, 1.0]
    assert param_if(call, "scale") is None
    with pytest.raises(Declined, match="parameter weight was packed"):
        param_if(call, "weight")


def test_the_coarsest_dtype_counts() -> None:
    assert unit_of(Y.bfloat16(), Y) == 2.0**-8
    assert unit_of(Y.half()) == 2.0**-11


def test_all_ranks_or_none() -> None:
    ranks = [Call("r", "R"), Call("r", "R")]
    assert ranks_of(Call("t", "T", extra={"ranks": ranks}), 2) == ranks
    with pytest.raises(Declined, match="not all of them were captured"):
        ranks_of(Call("t", "T", extra={"ranks": ranks}), 3)


def test_what_a_child_gave() -> None:
    assert child_output(BLOCK, "b").value.equal((Y + 1).double())
    assert child_output(BLOCK, "b", "output.1").value.equal((Y + 2).double())
    assert first(BLOCK, "nobody", "a", "b").value.equal(Y.double())
    assert first(BLOCK, "nobody") is None
    assert child_value(BLOCK, "output.0", "c", "output.0") is None  # of another shape
    assert child_value(BLOCK, "output.1", "a", "output.0") is None  # nothing of the block's to hold it against
    with pytest.raises(Declined, match="do not tell what it hands on"):
        child_output(BLOCK, "c")
    with pytest.raises(Declined, match="nothing inside it was captured"):
        inside(Call("t", "T"))


def test_another_shape_of_the_same_numbers() -> None:
    y = reshaped(Expected(Y, noise=2 * Y, groups=3.0), (3, 2))
    assert (y.value.shape, y.noise.shape, y.bound, y.groups) == ((3, 2), (3, 2), None, 3.0)


def block(config: float | None = None, own: float | None = None, **factors: float) -> Call:
    named = [{} if f is None else {"routed_scaling_factor": f} for f in (config, own)]
    return Call("t", "T", config=named[0], attrs=named[1], extra={"factors": factors} if factors else {})


@pytest.mark.parametrize("factor", [None, 1, 1.0])
def test_a_routed_factor_of_one_is_none(factor: float | None) -> None:
    assert routed_factor(block(factor)) == 1.0


def test_a_block_scales_by_what_no_object_inside_it_applies() -> None:
    """vLLM 0.32's runner or router; a block of up to 0.18, whose experts got 1; DeepSeek's name for it elsewhere."""
    assert routed_factor(block(2.5, 2.5, experts=2.5, routed=1.0)) == 1.0
    assert routed_factor(block(2.5, experts=1.0, routed=2.5)) == 1.0
    assert routed_factor(block(2.5, 2.5, experts=1.0)) == 2.5
    assert routed_factor(block(None, None, experts=2.5)) == 1.0
    for unknown in (block(2.5), block(2.5, 2.5, experts=2.0)):
        with pytest.raises(Declined, match="routed scaling factor"):
            routed_factor(unknown)
