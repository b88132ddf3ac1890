"""What capture relies on where weights change: calls of runners, workers, models and adapters' managers.

The problem, the words and who reads this: need.py. A name that is gone here costs the weights' life or a part of it,
never a capture. Not here: the engine (engine_names.py), runners (runners.py), caches (cache_names.py).
"""

from __future__ import annotations

from vllm_accprobe.capture.vllm.names.need import V1, V2, WORKER, Need, VllmPlace, each

_RELOADS = "weights that are reloaded are not looked at"
_TRANSFERS = "a session of vLLM's weight transfer is not looked at"
_SLEEPS = "weights are not looked at after sleep"
_SYNCS = "weights that are handed to the live model are not looked at"
_SLOTS = "adapters' slots are not looked at"
_BASE = "a layer under an adapter's is looked at twice"

PLACES = (
    VllmPlace(
        "the V1 runner's weights", ("vllm.v1.worker.gpu_model_runner:GPUModelRunner",),
        each("reload_weights", _RELOADS), kind=V1,
    ),
    VllmPlace(
        "the V2 runner's weights", ("vllm.v1.worker.gpu.model_runner:GPUModelRunner",),
        each("reload_weights", _RELOADS), since=(0, 22), kind=V2,
    ),
    VllmPlace(
        "the worker's weights", ("vllm.v1.worker.gpu_worker:Worker",),
        (Need(("sleep",), _SLEEPS, takes=("level",)), Need(("wake_up",), _SLEEPS, takes=("tags",))), kind=WORKER,
    ),
    VllmPlace(  # a vendor's worker that has no transfer has none that could be missed
        "weight transfer", ("vllm.v1.worker.gpu_worker:Worker",),
        (
            *each("update_weights", _TRANSFERS),
            *each("start_weight_update finish_weight_update", _TRANSFERS, since=(0, 21)),
        ),
        since=(0, 18),
    ),
    VllmPlace(
        "a model's weights", ("vllm.model_executor.models.llama:LlamaForCausalLM",),
        (Need(("load_weights",), _SYNCS, takes=("weights",)),),
    ),
    VllmPlace(
        "who keeps adapters", ("vllm.lora.worker_manager:WorkerLoRAManager",), each("_adapter_manager", _SLOTS),
    ),
    VllmPlace(
        "adapters' slots", ("vllm.lora.model_manager:LoRAModelManager", "vllm.lora.models:LoRAModelManager"),
        (
            *each("activate_adapter lora_index_to_id _registered_adapters", _SLOTS),
            *each("_get_lora_layer_weights", "what an adapter was to put into its slot is not known"),
        ),
    ),
    VllmPlace(
        "an adapter's layer", ("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA",),
        (*each("base_layer", _BASE), *each("lora_a_stacked lora_b_stacked", _SLOTS)),
    ),
)  # fmt: skip
