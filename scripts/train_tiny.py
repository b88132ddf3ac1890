"""Tiny language models trained on the spot, as Hugging Face directories that vLLM serves, with nothing to download.

The problem: random weights are kind to a judge. Trained ones have channels a hundred times the others, rows of
attention that all look at one token, and layers that differ, and rounding alone is felt there as a fault is. The
idea: 160 steps of AdamW on the bytes of Python's own library, which every machine has, with the transformers library's
models: some two minutes on one thread for four layers of width 256, and all of that comes by itself.

Token ids are byte values above the special tokens of tiny_tokenizer.py. The same name, seed and steps give the same
weights on the same machine and Python (another processor sums in another order).
Used as a module (``make("trained-qwen2", path)``) and as a script (``python scripts/train_tiny.py trained-qwen2 DIR``).
Not here: random weights (tiny_model.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

from tiny_model import MODELS

STEPS = 160
BATCH = 16
LENGTH = 256
"""Bytes of one training example: about as long as the laboratory's longest request."""
RATE = 3e-3
FIRST_BYTE = 8
"""Token id of byte 0: smaller ids are special tokens."""
TAUGHT = ("*.py",)
ASKED = ("json/*.py", "email/*.py", "logging/*.py")
"""Files of Python's library: what is learnt, and what prompts are made of."""

_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}  # 4 heads of 64
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "tie_word_embeddings": True,
}
_EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 192}
_LATENT = {
    "moe_intermediate_size": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    # transformers' DeepSeek-V2 has no renormalizing of the chosen experts' weights, vLLM's goes by this entry.
    "norm_topk_prob": False,
}


def _config(name: str, *more: dict[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    config = {k: v for k, v in MODELS[name].config.items() if k not in without}
    for entries in (_WIDE, *more):
        config |= entries
    return config


CONFIGS: dict[str, dict[str, Any]] = {
    "trained-qwen2": _config("qwen2"),
    "trained-llama": _config("llama"),
    "trained-gemma3": _config("qwen2", _GEMMA3, without=("rope_theta", "hidden_act")),
    "trained-qwen2-moe": _config("qwen2-moe", _EXPERTS),
    "trained-deepseek-v2": _config("deepseek-v2", _LATENT),
}


def library_bytes(patterns: tuple[str, ...], limit: int = 4 << 20) -> bytes:
    """The files of Python's library that match, by name, one after another; at most ``limit`` bytes."""
    folder = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for pattern in patterns for path in sorted(folder.glob(pattern)))
    return text[:limit]


def library_prompt(length: int, seed: int) -> list[int]:
    """``length`` token ids: bytes of a library file that was not learnt; the same for the same arguments."""
    text = library_bytes(ASKED)
    start = random.Random(seed).randrange(len(text) - length)
    return [byte + FIRST_BYTE for byte in text[start : start + length]]


def make(name: str, path: str | Path, *, seed: int = 0, steps: int = STEPS, **overrides: Any) -> Path:
    """Train model ``name`` and write it to the directory ``path`` (done already: nothing happens); returns it.

    ``overrides`` replace entries of config.json. Weights are saved as bfloat16. Raises KeyError for an unknown name.
    """
    import torch
    from tiny_tokenizer import write_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    config, path = CONFIGS[name] | overrides, Path(path)
    text, done = json.dumps(config, indent=2), json.dumps({"seed": seed, "steps": steps})
    trained = path / "trained.json"
    if trained.exists() and trained.read_text() == done and (path / "config.json").read_text() == text:
        return path
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(text)
    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    _train(net, seed, steps)
    # transformers gives checkpoints of experts their published layout back; its config would say other things than ours
    net.to(torch.bfloat16).save_pretrained(path)
    (path / "config.json").write_text(text)
    write_tokenizer(path, vocab_size=config["vocab_size"])
    greedy = {"do_sample": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    (path / "generation_config.json").write_text(json.dumps(greedy))
    trained.write_text(done)  # last: a directory that has it is a finished one
    return path


def _train(net: Any, seed: int, steps: int) -> None:
    """Next-byte prediction; the rate rises over a tenth of the steps and falls to a tenth along a cosine."""
    import numpy as np
    import torch

    text = np.frombuffer(library_bytes(TAUGHT), dtype=np.uint8)
    source = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, steps // 10)
    shape = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, total_iters=warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warm), RATE / 10),
        ],
        [warm],
    )
    net.train()
    for step in range(steps):
        starts = source.integers(0, len(text) - LENGTH, BATCH)
        ids = torch.from_numpy(np.stack([text[s : s + LENGTH] for s in starts]).astype(np.int64) + FIRST_BYTE)
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        shape.step()
        if step % 40 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model on Python's own library.")
    parser.add_argument("name", choices=sorted(CONFIGS))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    print(make(args.name, args.path, seed=args.seed, steps=args.steps))


if __name__ == "__main__":
    main()
