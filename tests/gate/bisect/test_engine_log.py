"""What a log of vLLM 0.32 tells, and that what it does not tell is not taken for the same."""

from __future__ import annotations

from pathlib import Path

from vllm_accprobe.gate.bisect.trials import facts, read, same, used

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
    assert read(None) == read(tmp_path / "none") == ""
