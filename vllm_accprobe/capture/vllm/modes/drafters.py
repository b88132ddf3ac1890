"""Draft models: none of their tensors is the target's, and what is not captured of them is counted.

The problem: a draft model runs within the target's step, shares modules with it, and has rows of its own: those of the
target shifted by one, then one for each request and guess, by release in other orders. A tap of the target that a
draft calls must not fire, and a dump must say that a second model was there. The idea: nothing that runs while drafts
are proposed is recorded (capturing.py); here the draft's modules are counted as skipped, and its weights, which no
row has to be known for, are recorded under ``draft:`` and their path, those of linear layers before a kernel packs
them and leaves nothing (loading.py). Weights that are the target's own are left out.
Not here: which rows of the target are drafts (core/rows.py).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.taps.params import ParameterLines, named_tensors, own_tensors
from vllm_accprobe.dump.schema import DRAFT_TAP

UNSEEN = "a draft model's: its weights are recorded, what it computes is not (its rows are guesses)"


def draft_model(runner: Any) -> torch.nn.Module | None:
    """The model that proposes drafts (V1: drafter, V2: speculator); None for none, and for n-grams."""
    for name in ("drafter", "speculator"):
        model = getattr(getattr(runner, name, None), "model", None)
        if isinstance(model, torch.nn.Module):
            return model
    return None


def record_draft_layer(parameters: ParameterLines, path: str, layer: torch.nn.Module) -> None:
    """The weights of ``layer``, which is loaded and not yet packed. Not those of embeddings and heads: only when all is
    loaded does a draft take the target's."""
    if hasattr(layer, "org_vocab_size"):
        return
    for name, tensor in own_tensors(layer):
        if tensor.numel():
            parameters.whole(f"{DRAFT_TAP}{path}", name, tensor)


def record_draft(session: Session, parameters: ParameterLines, runner: Any, target: torch.nn.Module) -> None:
    """Counts the modules of ``runner``'s draft model as skipped, and records its own weights."""
    model = draft_model(runner)
    if model is None or model is target:
        return
    shared = {tensor.data_ptr() for _, _, _, tensor in named_tensors(target) if tensor.numel()}
    own = [one for one in model.modules() if one not in set(target.modules())]
    session.sink.skip(DRAFT_TAP + type(model).__name__, UNSEEN, count=len(own))
    for path, _, name, tensor in named_tensors(model):
        if tensor.numel() and tensor.data_ptr() not in shared:
            parameters.whole(f"{DRAFT_TAP}{path}", name, tensor)
