"""A golden made by the transformers library: the same checkpoint and requests, in float32, without vLLM.

The problem: the golden that people have is often another framework's, whose modules are cut and called otherwise. The
idea: the probe's plain-torch entry, around ``generate`` of the same model directory; greedy and one request at a time.
Not here: requests with pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.engine import Ask


def capture(model: Path, asks: Sequence[Ask], out: Path) -> None:
    """Writes the dump to ``out``. Raises RuntimeError for a request with a picture."""
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_accprobe import Probe

    if any(ask.image for ask in asks):
        raise RuntimeError("transformers goldens of requests with pictures are not made here")
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.generation_config.eos_token_id = None  # as the engine's ignore_eos
    with Probe(net, dir=str(out)), torch.no_grad():
        for ask in asks:
            net.generate(torch.tensor([list(ask.ids)]), max_new_tokens=ask.max_tokens, do_sample=False)
