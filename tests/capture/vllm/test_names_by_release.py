"""The declaration is what capture's source touches: nothing is touched that is not declared, nothing declared idly."""

import re

import pytest
from support.touched import touched

from vllm_accprobe.capture.vllm.names_by_release import PLACES

NOT_VLLMS = {
    "lengths": "our word", "begins": "our word", "slots": "our word",
    "__accprobe__": "ours", "_v2_mixed_warmup": "a request's id", "_warmup_": "a request's id", "_modules": "torch",
    "_compiled_call_impl": "torch", "forward": "torch", "get_device_name": "torch's device module",
    "mem_get_info": "torch's device module", "shape": "torch", "name": "an enum", "value": "an enum",
    "__dataclass_fields__": "Python", "__dict__": "Python", "__globals__": "Python", "__self__": "Python",
    "Lock": "Python", "Thread": "Python", "Enum": "Python", "exit": "Python", "patches": "our configuration",
    "enabled": "our configuration", "errcheck": "our configuration", "runner": "our adapter", "logits": "an argument",
    "timeout": "an argument", "xxh3_128_hexdigest": "xxhash", "NAME": "ours", "head": "ours", "blake2b": "Python",
    "hexdigest": "Python", "penalties": "a word of ours",
    "selection": "our file", "serial": "our file", "refused": "our file", "skipped": "a word of ours",
    "works": "a word of ours", "tp": "our word", "pp": "our word", "dp": "our word", "ep": "our word",
    "no": "a setting", "off": "a setting", "false": "a setting", "frequency": "a part of a name",
    "presence": "a part of a name", "repetition": "a part of a name", "run_dp_sharded_": "a part of a name",
    "language_model": "of each model, as it likes", "rope_parameters": "transformers", "rope_scaling": "transformers",
    "__name__": "Python", "__mro__": "Python", "__module__": "Python", "plugin": "ours",
    "TRANSPOSED": "ours", "transposed": "a word of ours", "compare": "ours", "columns": "ours",
    "__wrapped__": "Python", "_schema": "torch's operators", "from_address": "ctypes", "copy": "an event of ours",
    "transfer": "an event of ours", "reuse": "an event of ours", "event": "an event of ours",
    "detail": "a field of ours", "cross": "a part of a name", "encoder": "a part of a name",
    "decode": "a part of a name", "prefill": "a part of a name",
    "events": "a setting", "full": "a setting", "kv": "our word", "gate": "our word",
    "up": "our word", "block_tables": "of metadata of 0.11, and of vendors",
    "prefill_block_tables": "of metadata of 0.11",
    "enable_sequence_parallelism": "of 0.11, with pass_config",
    "batch_sharder": "a mode, see names_by_release.py", "adaptive_verification": "a mode", "model_state": "a mode",
    "num_new_sampled_tokens_per_step": "a mode", "use_sequence_parallel_moe": "a mode", "enable_sp": "a mode",
    "prints": "a setting", "_dispatch_has_kernel_for_dispatch_key": "torch's operators", "Module": "torch's",
    "__accprobe_original__": "ours",
    "fused_gumbel_argmax": "an operator", "device_type": "of each platform",
    "part": "our word", "owners": "a setting", "__qualname__": "Python", "custom_routing": "ours",
    "has_correction_bias": "ours", "custom_routing_function": "of each router, where it has one",
    "e_score_correction_bias": "of each router, where it has one",
    "num_expert_group": "of each router, where it has one",
    "renormalize": "of each router, where it has one", "routed_scaling_factor": "of each router, where it has one",
    "scoring_func": "of each router, where it has one", "topk_group": "of each router, where it has one",
    "use_grouped_topk": "of each router, where it has one",
    "flashcomm2_enable": "a mode", "pass_config": "a mode", "skip_final_all_reduce": "only some models set it",
    "_is_amx_tile_supported": "torch", "_init_amx": "torch", "type": "of torch's devices",
}  # fmt: skip
"""Names that the search finds and that are not vLLM's, and those of modes, whose marks name them."""


def _declared() -> set[str]:
    return {name for place in PLACES for need in place.needs for name in need.names}


def _unknown(found: dict[str, set[str]]) -> dict[str, set[str]]:
    known = _declared() | NOT_VLLMS.keys()
    known |= {part for place in PLACES for at in place.at for part in re.split("[.:]", at)}
    return {
        name: where
        for name, where in found.items()
        if name not in known and not any(re.fullmatch(name.replace("*", ".+"), one) for one in known if "*" in name)
    }


def test_all_that_capture_touches_is_declared() -> None:
    unknown = _unknown(touched())
    unknown = {name: where for name, where in unknown.items() if name not in ("*DIR", "*FORCE")}  # ours, of plugin.py
    assert not unknown, "declare these in vllm_accprobe/capture/vllm/names_by_release.py, or say whose they are"


@pytest.mark.parametrize(
    "code",
    [
        "def f(runner: Any) -> int:\n    return runner.brand_new",
        "def f(runner: Any) -> int:\n    return getattr(runner, 'brand_new', 0)",
        "def f(runner: Any) -> int:\n    batch = runner.input_batch\n    return batch.brand_new",
        "_TABLE = ('req_ids', 'brand_new')",
        "def f() -> None:\n    from vllm.engine.arg_utils import EngineArgs\n    EngineArgs.brand_new()",
    ],
)
def test_a_new_name_is_noticed(code: str) -> None:
    assert "brand_new" in _unknown(touched((), code))


def test_all_that_is_declared_is_touched() -> None:
    found = touched()
    stale = {
        name for name in _declared()
        if name not in found and not any("*" in one and re.fullmatch(one.replace("*", ".+"), name) for one in found)
    }  # fmt: skip
    assert not stale - {
        "run_dp_sharded_mrope_vision_model",
        "run_dp_sharded_vision_model",
    }  # put together in batch.py
