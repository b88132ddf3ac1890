"""A golden made by the transformers library of the model and requests that an engine serves, pictures included.

The problem: a golden of another framework must be asked exactly what vLLM was asked. The idea: ``generate``, greedy,
one request at a time; a picture goes through the checkpoint's own image processor, and its one placeholder in the
prompt becomes as many as the picture has merged patches, as vLLM makes it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.engine import Ask


def capture(model: Path, asks: Sequence[Ask], out: Path, dtype: str = "float32") -> list[list[int]]:
    """Writes the dump to ``out`` and returns the tokens of each request."""
    import torch
    import transformers

    from vllm_accprobe import Probe

    pictures = any(a.image for a in asks)
    auto = transformers.AutoModelForImageTextToText if pictures else transformers.AutoModelForCausalLM
    net = auto.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    net.generation_config.eos_token_id = None  # as the engine's ignore_eos
    answers = []
    with Probe(net, dir=str(out)), torch.no_grad():
        for ask in asks:
            ids, more = list(ask.ids), {}
            if ask.image:
                ids, more = _with_picture(model, net.config.image_token_id, ids, ask.image)
            prompt = torch.tensor([ids])
            made = net.generate(prompt, max_new_tokens=ask.max_tokens, do_sample=False, **more)
            answers.append(made[0, len(ids) :].tolist())
    return answers


def _with_picture(model: Path, token: int, ids: list[int], picture: tuple[int, int, int]) -> tuple[list[int], Any]:
    import numpy as np
    import torch
    import transformers
    from PIL import Image

    width, height, seed = picture
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)  # as engine_worker.py
    processor = transformers.AutoImageProcessor.from_pretrained(model)
    features = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    at = ids.index(token)
    n = int(features["image_grid_thw"].prod()) // processor.merge_size**2
    ids = [*ids[:at], *[token] * n, *ids[at + 1 :]]
    kinds = (torch.tensor([ids]) == token).int()
    return ids, {**features, "mm_token_type_ids": kinds}
