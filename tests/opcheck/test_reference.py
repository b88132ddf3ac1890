"""How a call finds its reference: a user's own, device kernels, what declines."""

import math

import pytest
import torch
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined, device_kernel
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.registry import default_references


def test_a_users_reference_in_ten_lines_and_what_wins() -> None:
    from vllm_accprobe.opcheck.reference import reference

    @reference("torch.ops.vendor.twice", "RMSNorm")
    def twice(call: Call) -> torch.Tensor:
        return call.wide("x") * 2

    table = default_references()
    table.add(twice)
    for cls in ("torch.ops.vendor.twice", "RMSNorm"):
        found = table.evaluate(Call("t", cls, {"x": torch.ones(1, 2)}))
        assert not isinstance(found, Declined)
        assert found["output.0"].value.tolist() == [[2.0, 2.0]]
    assert table.find("Gemma3RMSNorm") is TABLE.find("GemmaRMSNorm")
    assert table.find("LlamaRMSNorm") is TABLE.find("Qwen3RMSNorm")


def test_a_device_kernel_is_found_as_a_reference_is_and_is_none() -> None:
    @device_kernel("RMSNorm", "Half*")
    def here(call: Call) -> torch.Tensor:
        return call.tensor("x") / 2

    table = default_references()
    table.add(here)
    for cls in ("RMSNorm", "HalfNorm"):  # in the place of ours, and beside it
        found = table.run(Call("t", cls, {"x": torch.ones(2, dtype=torch.bfloat16)}))
        assert not isinstance(found, Declined)
        assert (found["output.0"].dtype, found["output.0"].tolist()) == (torch.bfloat16, [0.5, 0.5])
    assert table.find("RMSNorm") is TABLE.find("RMSNorm")
    assert isinstance(table.find("HalfNorm"), Declined)
    missing = table.run(Call("t", "RMSNorm"))
    assert isinstance(missing, Declined)
    assert missing.reason == "input x was not captured"
    assert isinstance(table.run(Call("t", "LlamaMLP")), Declined)  # a block has a reference and no kernel
    with pytest.raises(ValueError, match="at least one name"):
        device_kernel()


def test_a_lookup_declines_and_a_crash_is_a_value() -> None:
    def broken(call: Call) -> torch.Tensor:
        raise RuntimeError("two\nlines")

    from vllm_accprobe.opcheck.reference import reference

    table = References([reference("Broken")(broken)])
    missing, crash = (table.evaluate(Call("t", cls)) for cls in ("Unknown", "Broken"))
    assert isinstance(missing, Declined)
    assert (missing.reason, missing.failed) == ("no reference for Unknown", False)
    assert isinstance(crash, Declined)
    assert (crash.reason, crash.failed) == ("the reference failed: RuntimeError: two lines", True)
    with pytest.raises(ValueError, match="no function marked"):
        References([math])
