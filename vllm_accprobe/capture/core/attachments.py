"""What captures beside the module taps: operators, labels and patches, on a served model and on a plain one alike.

The problem: a model runner of vLLM and a Probe put the same three things on a model and must take them off again in the
same order, whatever happens between. The idea: one function that puts on what the settings ask for, and one object that
takes it off. Not here: the module taps themselves (hooks.py), and what each of the three does (dispatch.py, taker.py,
patches.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.labels.taker import Labels
from vllm_accprobe.capture.taps.hooks import Taps


class Attachments:
    """What stands beside one session's taps, until ``close``."""

    def __init__(self, labels: Labels, patches: Any):
        self.labels = labels
        self.patches = patches

    def close(self) -> None:
        """Collects what labels named and puts patched functions back; to be called before the sink is closed."""
        self.labels.close()
        if self.patches is not None:
            self.patches.close()


def put_on(
    session: Session,
    taps: Taps,
    model: torch.nn.Module,
    prefix: str,
    root: Path,
    rank: int,
    *,
    stored: bool,
    runner: Any = None,
    compiled: bool = False,
) -> Attachments:
    """Puts on ``model`` what ``session.config`` asks for besides ``taps``, which are attached.

    Args:
        prefix: path of the language model inside a multi-modal one, or "".
        root: the dump's directory; rank: the global rank that writes to it.
        stored: parameters' payloads are in the dump.
        runner: vLLM's model runner, or None for a model outside vLLM.
        compiled: the engine compiles or captures graphs.
    """
    config = session.config
    if config.ops:
        from vllm_accprobe.capture.ops.model_ops import of_model, of_runner

        if runner is not None:
            of_runner(session, taps, model, runner, stored, compiled)
        else:
            of_model(session, taps, model, stored)
    labels = Labels(
        session,
        Path(os.path.abspath(root)),
        rank,
        parts=lambda: {name: part for tap in taps.taps for name, part in tap.parts.items()},
        whole_graphs=compiled,
        outside=runner is None,  # an engine's warm-up makes many, which nobody misses
    )
    labels.open()
    patches = None
    if config.patches:
        from vllm_accprobe.capture.taps.patches import apply_named

        patches = apply_named(session, model, prefix, session.say)
    return Attachments(labels, patches)
