"""Every reference: a right kernel passes, and each wrong one fails; what has no sample is named here.

The samples, by family of operators, are in opcheck/samples/. What references decline stands there, too.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from family_verdict import judged
from opcheck.samples import atb, fused, modules, paged, recurrent, samplers, scaled
from opcheck.samples.sample import DECLINED, ONE_OFF, SAMPLES, faulty
from reference_calls import TABLE, evaluated

from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Call, Declined

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
