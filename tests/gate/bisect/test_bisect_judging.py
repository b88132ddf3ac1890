"""A trial fails where it shows the command's difference; honest batching does not, nor a much smaller one."""

from pathlib import Path

import pytest
from made_folders import folder

from vllm_accprobe.gate.bisect import trials
from vllm_accprobe.gate.bisect.trials import TrialGate, facts, judge, rate_each, same, used
from vllm_accprobe.gate.sending.replies import read


@pytest.mark.parametrize("seed", range(10))
def test_the_same_server_passes(tmp_path: Path, seed: int) -> None:
    found = judge(read(folder(tmp_path / "g", 2 * seed)), read(folder(tmp_path / "m", 2 * seed + 1)))
    assert found.why is None
    assert not found.fails(rate_each(11, found.n), 0.0)


def test_a_fault_fails_and_a_small_one_is_not_it(tmp_path: Path) -> None:
    golden = read(folder(tmp_path / "g", 1, noise=0.0))
    large = judge(golden, read(folder(tmp_path / "l", 2, noise=0.0, fault=lambda length, k, index: 0.3)))
    small = judge(golden, read(folder(tmp_path / "s", 3, noise=0.0, fault=lambda length, k, index: 0.03)))
    rate = rate_each(11, 12)
    assert large.fails(rate, 0.0)
    assert small.fails(rate, 0.0)
    assert large.size > 5 * small.size
    assert large.fails(rate, 0.5 * large.size)
    assert not small.fails(rate, 0.5 * large.size)


def test_nothing_to_judge(tmp_path: Path) -> None:
    golden = read(folder(tmp_path / "g", 1))
    one = judge(golden, read(folder(tmp_path / "m", 2, prompts=0)))
    assert one.why
    assert not one.fails(1.0, 0.0)
    few = judge(read(folder(tmp_path / "g2", 1, prompts=3)), read(folder(tmp_path / "m2", 2, prompts=3)))
    assert few.why
    assert not TrialGate(1.0, 0.0, 12, "why").fails(1.0, 0.0)


def test_a_rate_that_can_be_reached() -> None:
    assert rate_each(10, 24) == 0.005
    assert rate_each(1, 24) == 0.05
    assert rate_each(10**6, 8) == 2 * 0.5**8
    assert rate_each(10**6, 2) == 0.05


# --- what a log of vLLM tells ---


LOG = """(APIServer pid=1) INFO 11-23 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=64.
(EngineCore pid=2) INFO 11-23 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m', \
enforce_eager=True, kv_cache_dtype=auto, enable_prefix_caching=False, compilation_config={'custom_ops': ['all', \
'-act'], 'ir_enable': 1}, kernel_config=KernelConfig(ir_op_priority=IrOpPriorityConfig(rms_norm=['native']), a=1)
(Worker pid=3) DEBUG 11-23 [compilation.py:1322] enabled custom ops: Counter({'rms_norm': 9, 'rotary_embedding': 1})
(Worker pid=3) DEBUG 11-23 [compilation.py:1323] disabled custom ops: Counter({'act': 4})
"""


def test_facts() -> None:
    assert facts(LOG) == {
        "eager": "True", "prefix": "False", "KV cache dtype": "auto", "custom operators": "['all', '-act']",
        "IR operators": "IrOpPriorityConfig(rms_norm=['native'])", "chunks": "max_num_batched_tokens=64.",
    }  # fmt: skip
    assert facts("nothing") == {}


def test_custom_operators_of_the_model() -> None:
    assert used(LOG) == {"rms_norm": True, "rotary_embedding": True, "act": False}
    assert used("INFO only") is None


def test_the_same_only_where_both_tell() -> None:
    assert same("prefix", {"prefix": "True"}, {"prefix": "True"})
    assert not same("prefix", {"prefix": "True"}, {"prefix": "False"})
    assert not same("prefix", {}, {})
    assert not same("", {"": "x"}, {"": "x"})


def test_no_log(tmp_path: Path) -> None:
    assert trials.read(None) == trials.read(tmp_path / "none") == ""
