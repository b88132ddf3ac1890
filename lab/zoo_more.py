"""More families for the zoo: decoders of few users, encoders that classify, pictures and sound: small configs, as data.

The problem: a family's false alarm is seen only with a model of it. The idea: rows as in zoo_models.py; where no
library has a model, its ``model_type`` and its architecture by name, with weights that vLLM draws. Not here, as vLLM
0.32 cannot run them on a CPU: Kimi-Linear (cutlass), Laguna and AFMoE (sigmoid routers without groups), Mamba 1,
Step 1 (ALiBi).
"""

from __future__ import annotations

from typing import Any

from mode_models import Architecture

from lab.zoo_mixed import _DENSE, _MLA, _UNCORRECTED

_LLAMA = _DENSE | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 512, "head_dim": 32}


def _llama(architecture: str, **fields: Any) -> Architecture:
    """A model that vLLM alone has, with a config like that of llama and ``fields``: of another type, which has no
    rules about its norms."""
    return Architecture("arcee", architecture, _LLAMA | fields)


MODELS: dict[str, Architecture] = {
    "internlm2": _llama("InternLM2ForCausalLM", bias=True),
    "internlm3": _llama("InternLM3ForCausalLM", bias=True, qkv_bias=True),
    "orion": _llama("OrionForCausalLM"),
    "solar": _llama("SolarForCausalLM", num_hidden_layers=4, bskcn_1=[1], bskcn_2=[2], bskcn_3=[1], bskcn_4=[3],
                    bskcn_tv=[0.9, 0.8]),
    "exaone": _llama("ExaoneForCausalLM", num_layers=3, layer_norm_epsilon=1e-5, activation_function="silu"),
    "bailing": _llama("BailingMoeForCausalLM", num_experts=8, num_experts_per_tok=2, num_shared_experts=1,
                      moe_intermediate_size=64, first_k_dense_replace=1, norm_topk_prob=True, use_bias=False,
                      use_qkv_bias=False, use_qk_norm=False, rotary_dim=32, score_function="softmax",
                      embedding_dropout=0.0, routed_scaling_factor=1.0),
    "minicpm": _llama("MiniCPMForCausalLM", scale_emb=2, scale_depth=1.4, dim_model_base=64),
    "telechat2": _llama("TeleChat2ForCausalLM"),
    "teleflm": _llama("TeleFLMForCausalLM", use_mup=True, input_mult=1.5, output_mult=0.7, mup_scale_factor=2.0),
    "pangu": _llama("PanguEmbeddedForCausalLM", bias=True),
    "iquest-loop": _llama("IQuestLoopCoderForCausalLM", loop_num=2, loop_window_size=32),
    "mimo": _llama("MiMoForCausalLM", attention_bias=True, num_nextn_predict_layers=0),
    "chatglm": Architecture("chatglm", "ChatGLMForConditionalGeneration", {
        "num_layers": 3, "padded_vocab_size": 512, "hidden_size": 128, "ffn_hidden_size": 256, "kv_channels": 32,
        "num_attention_heads": 4, "seq_length": 1024, "multi_query_attention": True, "multi_query_group_num": 2,
        "add_qkv_bias": True, "rmsnorm": True, "post_layer_norm": True, "add_bias_linear": False,
        "original_rope": True, "tie_word_embeddings": False, "apply_residual_connection_post_layernorm": False}),
    "dots1": Architecture("Dots1Config", "Dots1ForCausalLM", _DENSE | {
        "head_dim": 32, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}),
    "persimmon": Architecture("PersimmonConfig", "PersimmonForCausalLM", _DENSE | {"num_key_value_heads": 4,
                              "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "nemotron-h": Architecture("NemotronHConfig", "NemotronHForCausalLM", _DENSE | {
        "hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, "head_dim": 32, "mamba_num_heads": 8,
        "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 32,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"]}),
    "helium": Architecture("HeliumConfig", "HeliumForCausalLM", _DENSE | {"head_dim": 32}),
    "nanochat": Architecture("NanoChatConfig", "NanoChatForCausalLM", _DENSE | {"final_logit_softcapping": 15.0}),
    "gemma4": Architecture("Gemma4TextConfig", "Gemma4ForCausalLM", _DENSE | {
        "head_dim": 32, "global_head_dim": 32, "num_hidden_layers": 4, "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0,
        "tie_word_embeddings": True}),
    "hrm": Architecture("HrmTextConfig", "HrmTextForCausalLM", _DENSE | {"head_dim": 32}),
    "step3p5": Architecture("step3p5", "Step3p5ForCausalLM", _LLAMA | {
        "num_attention_groups": 2, "num_hidden_layers": 4, "sliding_window": 32, "moe_num_experts": 8, "moe_top_k": 2,
        "moe_intermediate_size": 64, "share_expert_dim": 64, "moe_layers_enum": "2,3", "use_head_wise_attn_gate": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        defect=_UNCORRECTED),
    "granite-swa": Architecture("GraniteSWAConfig", "GraniteSWAForCausalLM", _DENSE | {"sliding_window": 32,
        "embedding_multiplier": 2.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125,
        "logits_scaling": 4.0}),
}  # fmt: skip

_PLAIN_LLAMA = ("LlamaConfig", "LlamaForCausalLM", _DENSE | {"head_dim": 32})
_GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_FOUR = {"bits": 4, "group_size": 32}
MODELS |= {
    # ways of serving
    "llama-float16": Architecture(*_PLAIN_LLAMA, engine={"dtype": "float16"}),
    "llama-float32": Architecture(*_PLAIN_LLAMA, engine={"dtype": "float32"}),
    "llama-prefixes": Architecture(*_PLAIN_LLAMA, engine={"enable_prefix_caching": True}),
    "llama-chunks": Architecture(*_PLAIN_LLAMA, engine={"max_num_batched_tokens": 16}),
    "llama-ngram": Architecture(*_PLAIN_LLAMA, engine={"speculative_config": _GUESSES}),
    "gemma3-float32": Architecture("Gemma3TextConfig", "Gemma3ForCausalLM", _DENSE | {
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32}, engine={"dtype": "float32"}),
    "deepseek-v3-mtp": Architecture("deepseek_v3", "DeepseekV3ForCausalLM", _MLA | {
        "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "vocab_size": 512,
        "num_nextn_predict_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6},
        engine={"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
    "llama-gptq": Architecture("llama", "LlamaForCausalLM", _LLAMA | {"quantization_config": _FOUR | {
        "quant_method": "gptq", "desc_act": False, "sym": True}}),
    "llama-awq": Architecture("llama", "LlamaForCausalLM", _LLAMA | {"quantization_config": _FOUR | {
        "quant_method": "awq", "zero_point": True, "version": "gemm"}}),
}  # fmt: skip
