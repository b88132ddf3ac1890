"""What capture relies on where weights change: calls of runners, workers, models and adapters' managers, and packers.

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
_PACKED = "packed weights of a CPU are compared without order only"
_READ_BACK = "weights inside a CPU's kernel are not read back"

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
    VllmPlace(
        "experts of a CPU", ("vllm.model_executor.layers.fused_moe.experts.cpu_moe",),
        each("cpu_prepack_moe_weight", _PACKED), since=(0, 28),
    ),
    VllmPlace(
        "a CPU's packing of experts", ("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",),
        each("isa", _PACKED), since=(0, 28),
    ),
    VllmPlace(
        "the experts' method", ("vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase",),
        each("moe_kernel", _PACKED), since=(0, 28),
    ),
    VllmPlace(
        "the experts' kernel", ("vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEKernel",),
        each("fused_experts", _PACKED), since=(0, 28),
    ),
    VllmPlace(
        "experts' parameters", ("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",),
        each("w13_weight w2_weight", _PACKED), since=(0, 13),
    ),
    VllmPlace(
        "a CPU's linear layers", ("vllm.model_executor.layers.utils",), each("cpu_linear", _READ_BACK),
    ),
    VllmPlace(
        "int8 layers", ("vllm.model_executor.layers.quantization.compressed_tensors.schemes."
                        "compressed_tensors_w8a8_int8",),
        each("weight_scale", _READ_BACK),
    ),
)  # fmt: skip
