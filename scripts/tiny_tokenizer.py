"""A byte-level BPE tokenizer with a chat template, made on the spot, and an image or audio processor's config.

The problem: `vllm serve` wants a tokenizer that can chat, and nothing may be downloaded. The idea: 256 bytes, a few
special tokens, and merges learned from a paragraph kept here, so that any text can be encoded and any token decoded.
The order of the ids is fixed: specials first (0 bos, 1 end, 2-3 chat, 4-7 vision), then bytes, then merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECIALS = [
    "<|bos|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
# The loop over content parts serves plain strings and OpenAI's lists of text and image parts alike.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = """The quick brown fox jumps over the lazy dog while the model reads the prompt and the tokens go by.
A number on one machine should be the number on another machine; where it is not, the first operator that parted
from the reference is the one to look at. Attention, normalisation, rotation, projection, experts and the head:
each of them takes a tensor and gives a tensor, and each of them can be compared, row by row, with what it was."""


def write_tokenizer(path: Path, *, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``path``. ``vocab_size`` counts specials and bytes too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # More text than the paragraph is not needed: what the merges do not fill is filled with numbered words below.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    if missing > 0:
        tokenizer.add_tokens([f" word{i}" for i in range(missing)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[1],
        "additional_special_tokens": SPECIALS[2:],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def write_image_processor(path: Path, vision: dict[str, Any]) -> None:
    """Write the processor configs of a Qwen2.5-VL; ``vision`` is its vision_config. Images up to 224 x 224 pixels."""
    image: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "min_pixels": 28 * 28,
        "max_pixels": 224 * 224,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(image, indent=2))
    video = image | {"video_processor_type": "Qwen2VLVideoProcessor"}
    video.pop("image_processor_type")
    (path / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))


def write_processor(path: Path, name: str, arguments: Mapping[str, Any]) -> None:
    """Write the processor ``name`` of the transformers library, with the tokenizer in ``path``; an argument that is a
    pair is a class and its arguments; ``renamed``: tokens that get another name."""
    import transformers

    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / file).read_text()
        for old, new in arguments.get("renamed", {}).items():
            text = text.replace(json.dumps(old), json.dumps(new))
        (path / file).write_text(text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    made = {k: getattr(transformers, v[0])(**v[1]) if isinstance(v, tuple) else v for k, v in arguments.items()
            if k != "renamed"}  # fmt: skip
    for attribute, token in made.pop("tokens", {}).items():
        setattr(tokenizer, attribute, token)
        setattr(tokenizer, f"{attribute}_id", tokenizer.convert_tokens_to_ids(token))
        tokenizer.init_kwargs[attribute] = token
    getattr(transformers, name)(tokenizer=tokenizer, **made).save_pretrained(path)


def write_audio_processor(path: Path, *, mels: int, frames: int) -> None:
    """Write the feature extractor's config of a Whisper with ``mels`` mel bins and ``frames`` rows in its encoder, each
    of 20 ms: two windows of 10 ms."""
    rate = 16000
    audio: dict[str, Any] = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": mels,
        "sampling_rate": rate,
        "hop_length": rate // 100,
        "n_fft": rate // 40,
        "chunk_length": frames // 50,
        "n_samples": frames * rate // 50,
        "nb_max_frames": 2 * frames,
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(audio, indent=2))
