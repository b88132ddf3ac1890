"""The zoo's mixtures of experts, recurrent and hybrid decoders, vision models and encoders: small configs, as data.

The problem: routers, states that are carried from step to step, vision towers and encoders each have code of their own,
and the judge must be right for each. The idea: a row per family, as in zoo_models.py, with the settings on that make it
differ: groups, correction biases, factors, shared experts, several groups of B and C, windows. Not here: what vLLM 0.32
cannot run on a CPU: Mamba 1, FalconMamba and Jamba (their convolution's weight is packed, IndexError), DBRX (its loader
knows no ``w13_weight``), Nemotron-H (experts without a gate), OLMo's hybrid (a Triton kernel), LongCat-Flash (zero
experts in its loader), sigmoid routers without groups (``scoring_func == "softmax"`` is asserted). What it computes
wrongly there is switched off, or said in a row's ``defect``.
"""

from __future__ import annotations

from typing import Any

from mode_models import Architecture
from tiny_model import VISION_TOKENS

_ATTENTION: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
_DENSE = _ATTENTION | {"intermediate_size": 256}
_MLA = _DENSE | {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "moe_intermediate_size": 64, "n_routed_experts": 16, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
_UNGROUPED = "transformers' gated norm takes all channels for one group"
_UNCORRECTED = ("UnquantizedFusedMoEMethod", "the CPU's router without groups leaves out the scores' correction")
_TURNED = ("RotaryEmbedding", "the CPU's kernel rotates tensors of three dimensions wrongly")
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 32,
}  # fmt: skip

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_PICTURES = {"limit_mm_per_prompt": {"image": 1, "video": 0}}
_ENCODER = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_POOLING = {"runner": "pooling", "max_model_len": 256, "max_num_batched_tokens": 256}

MODELS: dict[str, Architecture] = {
    "mixtral": Architecture("MixtralConfig", "MixtralForCausalLM",
                _ATTENTION | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3-moe": Architecture("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                  _DENSE | {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
                            "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "olmoe": Architecture("OlmoeConfig", "OlmoeForCausalLM",
              _ATTENTION | {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
                            "norm_topk_prob": False, "num_key_value_heads": 4}),
    "phimoe": Architecture("PhimoeConfig", "PhimoeForCausalLM",
               _ATTENTION | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
                             "attention_bias": True, "lm_head_bias": True, "sliding_window": None},
               late={"architectures": ["PhiMoEForCausalLM"]},
               differs="vLLM leaves out the bias of lm_head"),
    "granitemoe": Architecture("GraniteMoeConfig", "GraniteMoeForCausalLM",
                   _ATTENTION | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
                                 "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.3,
                                 "attention_multiplier": 0.125}),
    "granitemoeshared": Architecture("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM",
                         _ATTENTION | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
                                       "shared_intermediate_size": 96, "residual_multiplier": 0.3,
                                       "attention_multiplier": 0.125}),
    "deepseek-v3": Architecture("DeepseekV3Config", "DeepseekV3ForCausalLM",
                    _MLA | {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "glm4-moe-lite": Architecture("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM",
                                  _MLA | {"n_group": 1, "topk_group": 1}),
    "glm4-moe": Architecture("Glm4MoeConfig", "Glm4MoeForCausalLM",
                 _DENSE | {"head_dim": 32, "moe_intermediate_size": 64, "n_routed_experts": 16, "n_shared_experts": 1,
                           "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                           "routed_scaling_factor": 2.5, "norm_topk_prob": True, "use_qk_norm": True,
                           "partial_rotary_factor": 0.5, "attention_bias": True}),
    "ernie4.5-moe": Architecture("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM",
                     _DENSE | {"moe_intermediate_size": 64, "moe_num_experts": 8, "moe_k": 2,
                               "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "use_bias": False},
                     defect=_UNCORRECTED),
    "hunyuan-moe": Architecture("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM",
                    _DENSE | {"head_dim": 32, "num_experts": 8, "moe_topk": 2, "use_qk_norm": True,
                              "moe_intermediate_size": 256, "num_shared_expert": 1, "use_mixed_mlp_moe": True}),
    "minimax-m2": Architecture("MiniMaxM2Config", "MiniMaxM2ForCausalLM",
                   _ATTENTION | {"intermediate_size": 64, "head_dim": 32, "num_local_experts": 8,
                                 "num_experts_per_tok": 2, "rotary_dim": 16,
                                 "use_routing_bias": True}, late={"scoring_func": "softmax"},
                   defect=_UNCORRECTED),
    "gpt-oss": Architecture("GptOssConfig", "GptOssForCausalLM",
                _ATTENTION | {"intermediate_size": 64, "head_dim": 32, "num_local_experts": 4,
                              "num_experts_per_tok": 2, "sliding_window": 24, "num_hidden_layers": 2,
                              "layer_types": ["sliding_attention", "full_attention"]}),
    "llama4": Architecture("Llama4TextConfig", "Llama4ForCausalLM",
               _ATTENTION | {"intermediate_size": 64, "intermediate_size_mlp": 256, "head_dim": 32,
                             "num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
                             "num_hidden_layers": 4, "attention_chunk_size": 128, "use_qk_norm": True,
                             "no_rope_layers": [1, 1, 1, 0]}),
    "flex-olmo": Architecture("FlexOlmoConfig", "FlexOlmoForCausalLM",
                  _ATTENTION | {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}),
    "lfm2-moe": Architecture("Lfm2MoeConfig", "Lfm2MoeForCausalLM",
                 _DENSE | {"num_hidden_layers": 4, "tie_word_embeddings": True, "conv_L_cache": 3,
                           "moe_intermediate_size": 64, "num_experts": 8,
                           "num_experts_per_tok": 2, "num_dense_layers": 1, "use_expert_bias": True,
                           "norm_topk_prob": True, "routed_scaling_factor": 1.0,
                           "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
             defect=_TURNED),
    "exaone-moe": Architecture("ExaoneMoeConfig", "ExaoneMoeForCausalLM",
                   _DENSE | {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
                             "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                             "num_hidden_layers": 4, "sliding_window": 64, "sliding_window_pattern": 4,
                             "is_moe_layer": [False, True, True, True],
                             "routed_scaling_factor": 2.5, "norm_topk_prob": True}),
    # recurrent states
    "zamba2": Architecture("Zamba2Config", "Zamba2ForCausalLM",
               _DENSE | {"num_hidden_layers": 4, "num_key_value_heads": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
                         "tie_word_embeddings": True,
                         "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 32,
                         "chunk_size": 32, "num_mem_blocks": 2, "use_shared_attention_adapter": False,
                         "adapter_rank": 8, "use_mem_rope": True,
                         "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
                         "attention_hidden_size": 256, "attention_head_dim": 64, "use_mamba_kernels": False}),
    "granitemoehybrid": Architecture("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
                         _ATTENTION | _MAMBA2
                         | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
                            "shared_intermediate_size": 96, "num_hidden_layers": 4,
                            "layer_types": ["mamba", "attention", "mamba", "attention"],
                            "residual_multiplier": 0.3, "attention_multiplier": 0.125,
                            "position_embedding_type": None}, differs=_UNGROUPED),
    "falcon-h1": Architecture("FalconH1Config", "FalconH1ForCausalLM",
                  _DENSE | _MAMBA2
                  | {"head_dim": 32, "mamba_d_ssm": 256, "mamba_rms_norm": True, "key_multiplier": 0.4,
                     "ssm_out_multiplier": 0.3, "ssm_in_multiplier": 0.8, "attention_out_multiplier": 0.6,
                     "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "mlp_multipliers": [0.7, 0.5],
                     "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]},
                  differs="transformers norms before the gate, which vLLM applies first"),
    "mamba2": Architecture("Mamba2Config", "Mamba2ForCausalLM",
               {"hidden_size": 128, "state_size": 16, "num_heads": 8, "head_dim": 32, "expand": 2, "n_groups": 2,
                "num_hidden_layers": 3, "conv_kernel": 4, "chunk_size": 32, "tie_word_embeddings": False,
                "use_bias": False, "use_conv_bias": True, "rms_norm": True, "residual_in_fp32": False,
                "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}, differs=_UNGROUPED),
    "qwen3-next": Architecture("Qwen3NextConfig", "Qwen3NextForCausalLM",
                   _DENSE | {"num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2,
                             "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                             "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 2,
                             "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
                             "decoder_sparse_step": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
                             "full_attention_interval": 4}),
    "qwen3.5": Architecture("Qwen3_5TextConfig", "Qwen3_5ForCausalLM",
                _DENSE | {"num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2,
                          "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                          "linear_conv_kernel_dim": 4, "full_attention_interval": 4}),
    "lfm2": Architecture("Lfm2Config", "Lfm2ForCausalLM",
             _DENSE | {"num_hidden_layers": 4, "tie_word_embeddings": True, "conv_L_cache": 3, "conv_dim": 128,
                       "block_dim": 128, "block_multiple_of": 32,
                       "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
             defect=_TURNED),
    # pictures
    "qwen2-vl": Architecture("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", VISION_TOKENS | {
        "text_config": _DENSE | {"vocab_size": 512, "rope_parameters": _MROPE},
        "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2,
                          "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}},
        engine=_PICTURES, picture=True),
    "qwen3-vl": Architecture("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", VISION_TOKENS | {
        "text_config": _DENSE | {"vocab_size": 512, "head_dim": 32,
                                 "rope_parameters": _MROPE | {"mrope_interleaved": True}},
        "vision_config": {"depth": 2, "hidden_size": 64, "out_hidden_size": 128, "num_heads": 2,
                          "intermediate_size": 96, "patch_size": 14, "spatial_merge_size": 2,
                          "temporal_patch_size": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}},
        engine=_PICTURES, picture=True),
    # encoders
    "roberta": Architecture("RobertaConfig", "RobertaModel", _ENCODER, engine=_POOLING,
                            late={"position_embedding_type": "absolute"}),
    "xlm-roberta": Architecture("XLMRobertaConfig", "XLMRobertaModel", _ENCODER, engine=_POOLING,
                                late={"position_embedding_type": "absolute"}),
    "modernbert": Architecture("ModernBertConfig", "ModernBertModel", _ENCODER | {
        "local_attention": 32, "global_attn_every_n_layers": 3}, engine=_POOLING),
    "qwen3-embedding": Architecture("Qwen3Config", "Qwen3ForCausalLM", _DENSE | {"head_dim": 32}, engine=_POOLING),
}  # fmt: skip
