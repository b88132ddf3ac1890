"""What capture relies on in LoRA: who asks for which adapter, and who reads an adapter's files.

The problem, the words and who reads this: need.py. Not here: the engine (engine_names.py), runners (runners.py).
"""

from __future__ import annotations

from vllm_accprobe.capture.vllm.names.need import Need, VllmPlace, each

_NAME = "requests with different adapters are taken for the same"
_WEIGHTS = "adapters' weights are not in the dump: skipped"

PLACES = (
    VllmPlace("an adapter's request", ("vllm.lora.request:LoRARequest",), each("lora_name lora_int_id", _NAME)),
    VllmPlace(
        "runners with adapters", ("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin",),
        each("lora_manager", _WEIGHTS),
    ),
    VllmPlace(
        "who loads adapters", ("vllm.lora.worker_manager:WorkerLoRAManager",),
        (Need(("_load_adapter",), _WEIGHTS, takes=("lora_request",)),),
    ),
    VllmPlace(
        "a loaded adapter", ("vllm.lora.lora_model:LoRAModel", "vllm.lora.models:LoRAModel"), each("loras", _WEIGHTS),
    ),
    VllmPlace(
        "an adapter of one layer", ("vllm.lora.lora_weights:LoRALayerWeights",),
        each("lora_a lora_b scaling", _WEIGHTS),
    ),
)  # fmt: skip
