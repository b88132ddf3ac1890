"""Prompts that are embeddings: what names them, and which of their rows are tokens.

The problem: a prompt of embeddings has no token ids, so that two of them looked alike, and the runner's buffer of ids
holds at their rows what an earlier request left there. The idea: the hash of the embeddings is the prompt's identity.
They are hashed after rounding to bfloat16, so that an engine in float32 and one in bfloat16, which cast what
a client sent, have the same name for it (float16 engines only where it was bfloat16 already). A prompt that is partly
tokens is named after both. Not here: prompts of tokens (core/rows.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch


def embeddings_of(new: Any) -> torch.Tensor | None:
    """A new request's prompt embeddings, [rows, width] in the model's dtype; None where its prompt is tokens."""
    found = getattr(new, "prompt_embeds", None)
    return found if isinstance(found, torch.Tensor) else None


def hash_embeddings(
    embeddings: torch.Tensor, ids: Sequence[int] | None = None, is_token: Sequence[bool] | None = None
) -> str:
    """128-bit BLAKE2b as 32 hex digits of ``embeddings``, [rows, width] in a float dtype, and of the ids at those rows
    that are tokens."""
    digest = hashlib.blake2b(repr(tuple(embeddings.shape)).encode(), digest_size=16)
    bits = embeddings.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
    digest.update(bits.numpy().tobytes())
    if ids is not None and is_token is not None:
        for id_, token in zip(ids, is_token, strict=True):
            digest.update((int(id_) if token else -1).to_bytes(4, "little", signed=True))
    return digest.hexdigest()
