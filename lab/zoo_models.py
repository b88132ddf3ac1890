"""The zoo's dense decoder families as tiny models: each a config of the transformers library, as data.

The problem: a block's formula (norms before or behind, attention and MLP side by side, factors, windows, rotations)
differs between families, and what judges blocks must be right for each. The idea: a row per family, with the settings
on that make it differ; `scripts/zoo.py` makes the model and runs it. Not here: mixtures, recurrent and vision families.
"""

from __future__ import annotations

from typing import Any

from mode_models import Architecture

_IDS: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}
_BASE: dict[str, Any] = _IDS | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
_HEAD = {"head_dim": 32}
_LOCAL = {"sliding_window": 32}


def _types(*words: str) -> dict[str, list[str]]:
    return {"layer_types": [f"{word}_attention" for word in words]}


def _entry(config: str, model: str, base: dict[str, Any] = _BASE, differs: str = "", **fields: Any) -> Architecture:
    return Architecture(config, model, base | fields, differs=differs)


_GEMMA = _BASE | _HEAD | {"tie_word_embeddings": True}
_GPT = _IDS | {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_inner": 256, "n_positions": 1024}
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.02 * k for k in range(12)], "long_factor": [1.0 + 0.3 * k for k in range(12)],
}  # fmt: skip

MODELS: dict[str, Architecture] = {
    # vLLM's own classes
    "gemma": _entry("GemmaConfig", "GemmaForCausalLM", _GEMMA, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": _entry("Gemma2Config", "Gemma2ForCausalLM", _GEMMA, query_pre_attn_scalar=64, num_hidden_layers=4,
                     attn_logit_softcapping=4.0, final_logit_softcapping=30.0, **_LOCAL),
    "gemma3": _entry("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA, query_pre_attn_scalar=64, num_hidden_layers=4,
                     **_LOCAL, **_types("sliding", "sliding", "sliding", "full")),
    "gemma3n": _entry("Gemma3nTextConfig", "Gemma3nForCausalLM", _GEMMA, num_hidden_layers=4,
                      intermediate_size=[256] * 4, hidden_size_per_layer_input=32, laurel_rank=16,
                      vocab_size_per_layer_input=512, num_kv_shared_layers=2, activation_sparsity_pattern=[0.0] * 4,
                      **_LOCAL, **_types("sliding", "full", "sliding", "full"),
                      differs="the text model leaves out the embeddings of each layer"),
    "phi3": _entry("Phi3Config", "Phi3ForCausalLM", partial_rotary_factor=0.75, rope_parameters=_LONG,
                   original_max_position_embeddings=64,
                   differs="long factors wherever max_model_len exceeds the trained length"),
    "glm4": _entry("Glm4Config", "Glm4ForCausalLM", partial_rotary_factor=0.5, attention_bias=True, **_HEAD),
    "stablelm": _entry("StableLmConfig", "StableLmForCausalLM", use_qkv_bias=True, partial_rotary_factor=0.25),
    "gpt2": _entry("GPT2Config", "GPT2LMHeadModel", _GPT),
    "gptj": _entry("GPTJConfig", "GPTJForCausalLM", _GPT, rotary_dim=16, tie_word_embeddings=False),
    "opt": _entry("OPTConfig", "OPTForCausalLM", _IDS, hidden_size=128, ffn_dim=256, num_hidden_layers=3,
                  num_attention_heads=4, max_position_embeddings=1024, word_embed_proj_dim=128),
    "bloom": _entry("BloomConfig", "BloomForCausalLM", _IDS, hidden_size=128, n_layer=3, n_head=4),
    "falcon": _entry("FalconConfig", "FalconForCausalLM", _IDS, hidden_size=128, num_hidden_layers=3,
                     num_attention_heads=4, multi_query=True, parallel_attn=True, bias=False, alibi=False,
                     new_decoder_architecture=False),
    "falcon-new": _entry("FalconConfig", "FalconForCausalLM", _IDS, hidden_size=128, num_hidden_layers=3,
                         num_attention_heads=4, num_kv_heads=2, parallel_attn=True, bias=False, alibi=False,
                         new_decoder_architecture=True),
    "falcon-alibi": _entry("FalconConfig", "FalconForCausalLM", _IDS, hidden_size=128, num_hidden_layers=3,
                           num_attention_heads=4, multi_query=False, parallel_attn=False, bias=True, alibi=True,
                           new_decoder_architecture=False, differs="transformers adds ALiBi to scores and mask"),
    "exaone4": _entry("Exaone4Config", "Exaone4ForCausalLM", num_hidden_layers=4, sliding_window_pattern=4,
                      **_LOCAL, **_types("sliding", "sliding", "sliding", "full")),
    "nemotron": _entry("NemotronConfig", "NemotronForCausalLM", hidden_act="relu2", partial_rotary_factor=0.5, **_HEAD),
    "ernie4.5": _entry("Ernie4_5Config", "Ernie4_5ForCausalLM", use_bias=True, **_HEAD),
    "apertus": _entry("ApertusConfig", "ApertusForCausalLM", hidden_act="xielu"),
    "cohere": _entry("CohereConfig", "CohereForCausalLM", use_qk_norm=True, logit_scale=0.25, tie_word_embeddings=True),
    "cohere2": _entry("Cohere2Config", "Cohere2ForCausalLM", num_hidden_layers=4, logit_scale=0.25,
                      tie_word_embeddings=True, **_LOCAL, differs="its window holds the row itself besides"),
    "granite": _entry("GraniteConfig", "GraniteForCausalLM", embedding_multiplier=2.0, residual_multiplier=0.22,
                      attention_multiplier=0.125, logits_scaling=4.0),
    "hyperclovax": _entry("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM", embedding_multiplier=2.0,
                          residual_multiplier=0.5, attention_multiplier=0.125, logits_scaling=4.0, use_post_norm=True),
    "ministral3": _entry("Ministral3Config", "Ministral3ForCausalLM", **_HEAD),
    "minicpm3": _entry("MiniCPM3Config", "MiniCPM3ForCausalLM", num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32,
                       qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, scale_emb=2, scale_depth=1.4,
                       dim_model_base=64, differs="epsilon of q_a_layernorm and kv_a_layernorm"),
    # transformers' code on vLLM's layers and attention
    "arcee": _entry("ArceeConfig", "ArceeForCausalLM"),
    "cwm": _entry("CwmConfig", "CwmForCausalLM", num_hidden_layers=4, **_HEAD, **_LOCAL,
                  **_types("full", "sliding", "sliding", "sliding")),
    "glm": _entry("GlmConfig", "GlmForCausalLM", partial_rotary_factor=0.5, attention_bias=True, **_HEAD),
    "gpt-bigcode": _entry("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT, multi_query=True),
    "gpt-neox": _entry("GPTNeoXConfig", "GPTNeoXForCausalLM", _IDS, hidden_size=128, intermediate_size=256,
                       num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=1024, rotary_pct=0.25,
                       use_parallel_residual=True),
    "hunyuan": _entry("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", **_HEAD),
    "jais2": _entry("Jais2Config", "Jais2ForCausalLM"),
    "olmo": _entry("OlmoConfig", "OlmoForCausalLM", clip_qkv=8.0),
    "olmo2": _entry("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": _entry("Olmo3Config", "Olmo3ForCausalLM", num_hidden_layers=4, **_LOCAL,
                    **_types("sliding", "sliding", "sliding", "full")),
    "phi": _entry("PhiConfig", "PhiForCausalLM", partial_rotary_factor=0.5),
    "seed-oss": _entry("SeedOssConfig", "SeedOssForCausalLM", **_HEAD, attention_bias=True),
    "smollm3": _entry("SmolLM3Config", "SmolLM3ForCausalLM", num_hidden_layers=4, no_rope_layer_interval=4),
    "starcoder2": _entry("Starcoder2Config", "Starcoder2ForCausalLM", use_bias=True, sliding_window=32),
    "vaultgemma": _entry("VaultGemmaConfig", "VaultGemmaForCausalLM", _GEMMA, query_pre_attn_scalar=64,
                         attn_logit_softcapping=4.0, final_logit_softcapping=30.0, num_hidden_layers=4, **_LOCAL),
}  # fmt: skip
