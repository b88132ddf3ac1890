"""Every reference: a right kernel passes, and each wrong one fails; what has no sample is named here. And how a call
finds its reference: a user's own, device kernels, what declines.

The samples, by family of operators, are in opcheck/samples/. What references decline stands there, too.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from opcheck.samples import atb, fused, modules, paged, recurrent, samplers, scaled
from opcheck.samples.sample import DECLINED, ONE_OFF, SAMPLES, faulty
from reference_calls import TABLE, evaluated, judged

from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Call, Declined, device_kernel, reference
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.registry import default_references

FAMILIES = (atb, fused, modules, paged, recurrent, samplers, scaled)


def verdicts(call: Call) -> dict[str, Verdict]:
    found = evaluated(call)
    return {role: judged(found[role], mine) for role, mine in call.outputs.items()}


def fails(call: Call) -> bool:
    return not all(v.passed for v in verdicts(call).values())


@pytest.mark.parametrize("name", SAMPLES)
def test_a_right_kernel_passes_and_each_wrong_one_fails(name: str) -> None:
    sample = SAMPLES[name]
    for which, made in sample.each():
        found = evaluated(made.call)
        for role, exact in made.exact.items():
            e = found[role]
            rows = slice(None) if e.rows is None else e.rows.numpy()
            np.testing.assert_allclose(e.value.numpy()[rows], exact[rows], 1e-9, 1e-9, err_msg=f"{which} {role}")
        right = {role: judged(found[role], mine) for role, mine in made.call.outputs.items()}
        assert all(v.passed for v in right.values()), (which, right)
        for role, mine in made.call.outputs.items() if ONE_OFF in sample.faults else ():
            wrong = replace(made.call, outputs={**made.call.outputs, role: faulty(mine, made.bump)})
            assert not verdicts(wrong)[role].passed, f"one wrong number passes: {which} {role}"
    for fault in set(sample.faults) - {ONE_OFF}:
        wrongs = sample.each(fault)
        assert wrongs, f"no variant can have the fault {fault!r}"
        for which, made in wrongs:
            assert fails(made.call), f"passes: {which}"


@pytest.mark.parametrize("name", DECLINED)
def test_what_no_reference_may_judge_is_declined_with_the_reason(name: str) -> None:
    for call, why in DECLINED[name]():
        with pytest.raises(Declined, match=why or None) as error:
            evaluated(call)
        assert not error.value.failed, error.value.reason


ALONE = {
    "api": "test_api.py", "gradients": "fused/test_npu_operators.py",
    "composite": "test_composite.py",
    "router": "test_composite.py", "experts": "test_composite.py",
    "fused_attention": "test_attention.py",
    "npu_attention": "fused/test_npu_attention.py", "onednn": "test_quantised.py", "plans": "", "reads_cache": "",
    "collective": "",
}  # fmt: skip
"""Modules of references, or single ones, without a sample, and the tests that they have instead; "": they compute
nothing."""


def test_each_reference_has_a_sample_or_tests_of_its_own() -> None:
    sampled = {TABLE.find(made.call.cls) for sample in SAMPLES.values() for _, made in sample.each()}
    for name in TABLE.names():
        found = TABLE.find(name.replace("*", "A"))
        here = found.__module__.rpartition(".")[2]
        own = here in ALONE or found.__name__ in ALONE
        assert found in sampled or own or name.endswith("_backward") or "npu" in found.__name__, name
    for file in filter(None, ALONE.values()):
        assert (Path(__file__).parent / file).exists(), file


def test_a_users_reference_in_ten_lines_and_what_wins() -> None:
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

    table = References([reference("Broken")(broken)])
    missing, crash = (table.evaluate(Call("t", cls)) for cls in ("Unknown", "Broken"))
    assert isinstance(missing, Declined)
    assert (missing.reason, missing.failed) == ("no reference for Unknown", False)
    assert isinstance(crash, Declined)
    assert (crash.reason, crash.failed) == ("the reference failed: RuntimeError: two lines", True)
    with pytest.raises(ValueError, match="no function marked"):
        References([math])
