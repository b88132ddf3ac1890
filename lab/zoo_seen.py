"""The zoo's models that see or hear, and encoders that classify: small configs with their processors, as data.

The problem: each vision or audio tower, its placement among the text's rows and each pooling head has code of its own.
The idea: rows as in zoo_mixed.py; a processor is a class of the transformers library and its arguments.
"""

from __future__ import annotations

from typing import Any

from mode_models import Architecture

from lab.zoo_mixed import _DENSE, _ENCODER, _PICTURES, _POOLING

_TEXT = _DENSE | {"vocab_size": 512, "head_dim": 32}
_CLIP = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14, "projection_dim": 64,
}  # fmt: skip
_SIZE = {"size": {"height": 56, "width": 56}}
_IMAGE, _BREAK = "<|image_pad|>", {f" word{k}": "\n" * (k + 1) for k in range(4)}


def _picture(kind: str, processor: tuple[str, dict[str, Any]], drawn: bool = False, **fields: Any) -> Architecture:
    """drawn: vLLM's names are not those that the library writes."""
    name, engine = f"{kind}ForConditionalGeneration", _PICTURES | ({"load_format": "drawn"} if drawn else {})
    return Architecture(f"{kind}Config", name, fields, engine=engine, picture=True, processor=processor)


MODELS: dict[str, Architecture] = {
    "llava": _picture(
        "Llava",
        ("LlavaProcessor", {
            "image_processor": ("CLIPImageProcessor", {"size": {"shortest_edge": 56}, "crop_size": _SIZE["size"]}),
            "patch_size": 14, "vision_feature_select_strategy": "default", "image_token": _IMAGE,
            "num_additional_image_tokens": 1}), drawn=True,
        text_config=_TEXT | {"model_type": "llama"}, vision_config=_CLIP | {"model_type": "clip_vision_model"},
        image_token_index=6, vision_feature_layer=-2, vision_feature_select_strategy="default"),
    "llava-next": _picture(
        "LlavaNext",
        ("LlavaNextProcessor", {
            "image_processor": ("LlavaNextImageProcessor", {
                "size": {"shortest_edge": 56}, "crop_size": _SIZE["size"], "image_grid_pinpoints": [[56, 112],
                [112, 56], [112, 112]]}),
            "patch_size": 14, "vision_feature_select_strategy": "default", "image_token": _IMAGE,
            "num_additional_image_tokens": 1}), drawn=True,
        text_config=_TEXT | {"model_type": "mistral"}, vision_config=_CLIP | {"model_type": "clip_vision_model"},
        image_token_index=6, vision_feature_layer=-2, vision_feature_select_strategy="default",
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]]),
    "idefics3": _picture(
        "Idefics3",
        ("Idefics3Processor", {
            "image_processor": ("Idefics3ImageProcessor", {"size": {"longest_edge": 112},
                                                           "max_image_size": {"longest_edge": 56}}),
            "image_seq_len": 4, "renamed": {
                _IMAGE: "<image>", " word0": "<fake_token_around_image>", " word1": "<global-img>",
                " word2": "<end_of_utterance>", **{f" word{3 + k}": f"<row_{1 + k // 2}_col_{1 + k % 2}>"
                                                   for k in range(4)}}}),
        text_config=_TEXT | {"model_type": "llama"}, vision_config=_CLIP | {"model_type": "idefics3_vision"},
        image_token_id=6, scale_factor=2),
    "gemma3-mm": _picture(
        "Gemma3",
        ("Gemma3Processor", {
            "image_processor": ("Gemma3ImageProcessor", _SIZE), "image_seq_length": 4, "renamed": _BREAK,
            "tokens": {"image_token": _IMAGE, "boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>"}}),
        drawn=True,
        text_config=_TEXT | {"model_type": "gemma3_text", "sliding_window": 32, "query_pre_attn_scalar": 32},
        vision_config=_CLIP | {"model_type": "siglip_vision_model"}, mm_tokens_per_image=4, boi_token_index=4,
        eoi_token_index=5, image_token_index=6),
    "paligemma": _picture(
        "PaliGemma",
        ("PaliGemmaProcessor", {
            "image_processor": ("SiglipImageProcessor", _SIZE | {"image_seq_length": 16}), "renamed": _BREAK,
            "tokens": {"image_token": _IMAGE}}), drawn=True,
        text_config=_TEXT | {"model_type": "gemma", "num_image_tokens": 16},
        vision_config=_CLIP | {"model_type": "siglip_vision_model", "projection_dim": 128}, projection_dim=128,
        image_token_index=6),
    "internvl": _picture(
        "InternVL",
        ("InternVLProcessor", {
            "image_processor": ("GotOcr2ImageProcessor", _SIZE | {"crop_to_patches": True, "max_patches": 4}),
            "video_processor": ("InternVLVideoProcessor", _SIZE), "image_seq_length": 4,
            "tokens": {"start_image_token": "<|vision_start|>", "end_image_token": "<|vision_end|>",
                       "context_image_token": _IMAGE, "video_token": "<|video_pad|>"}}),
        text_config=_TEXT | {"model_type": "qwen2"},
        vision_config=_CLIP | {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=6, image_seq_length=4, downsample_ratio=0.5),
    "mistral3": _picture(
        "Mistral3",
        ("PixtralProcessor", {
            "image_processor": ("PixtralImageProcessor", {"size": {"longest_edge": 112}, "patch_size": 14}),
            "patch_size": 14, "spatial_merge_size": 2, "image_token": _IMAGE, "image_break_token": "<|im_start|>",
            "image_end_token": "<|vision_end|>"}),
        text_config=_TEXT | {"model_type": "mistral"},
        vision_config=_CLIP | {"model_type": "pixtral", "image_size": 112, "head_dim": 32}, image_token_index=6,
        vision_feature_layer=-1, spatial_merge_size=2),
    "glm4v": _picture(
        "Glm4v",
        ("Glm4vProcessor", {
            "image_processor": ("Glm4vImageProcessor", {"size": {"shortest_edge": 784, "longest_edge": 50176},
                                                        "patch_size": 14}),
            "video_processor": ("Glm4vVideoProcessor", {"patch_size": 14}), "renamed": {
                "<|vision_start|>": "<|begin_of_image|>", "<|vision_end|>": "<|end_of_image|>",
                " word0": "<|begin_of_video|>", " word1": "<|end_of_video|>", _IMAGE: "<|image|>",
                "<|video_pad|>": "<|video|>"},
            "tokens": {"image_token": "<|image|>", "video_token": "<|video|>"}}),
        text_config=_TEXT | {"partial_rotary_factor": 0.5,
                             "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                 "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "image_size": 112,
                       "patch_size": 14, "out_hidden_size": 128, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=6, video_token_id=7, image_start_token_id=4, image_end_token_id=5),
    # pooling
    "bert-classify": Architecture("BertConfig", "BertForSequenceClassification", _ENCODER | {"num_labels": 3},
                                  engine=_POOLING),
    "roberta-classify": Architecture("RobertaConfig", "RobertaForSequenceClassification", _ENCODER | {
        "num_labels": 3}, engine=_POOLING, late={"position_embedding_type": "absolute"}),
    "modernbert-classify": Architecture("ModernBertConfig", "ModernBertForSequenceClassification", _ENCODER | {
        "local_attention": 32, "global_attn_every_n_layers": 3, "num_labels": 3}, engine=_POOLING),
    "modernbert-tokens": Architecture("ModernBertConfig", "ModernBertForTokenClassification", _ENCODER | {
        "local_attention": 32, "global_attn_every_n_layers": 3, "num_labels": 3}, engine=_POOLING),
    "qwen3-classify": Architecture("Qwen3Config", "Qwen3ForSequenceClassification", _DENSE | {
        "head_dim": 32, "num_labels": 2}, engine=_POOLING),
    "gte": Architecture("GteConfig", "GteModel", _ENCODER, engine=_POOLING,
                        late={"position_embedding_type": "rope"}),
    "gemma3-embedding": Architecture("Gemma3TextConfig", "Gemma3TextModel", _TEXT | {
        "use_bidirectional_attention": True, "sliding_window": 32}, engine=_POOLING),
}  # fmt: skip
