"""Pairs of tensors that a program labels itself: ``set_label``, ``gen_id``, ``set_task_id``.

The problem: a model whose layers were replaced by an accelerator's own has two results for one thing, PyTorch's ("pta",
the reference) and the accelerator's ("acl"), and only the program knows which belong together. The idea: the same id
makes a pair; a task is a round of a conversation, and in a script without vLLM and `Probe` the first task opens a dump.
Not here: what happens to a labelled tensor (capture/labels.py), the comparison (comparison/labelled_pairs.py).
"""

from __future__ import annotations

import itertools
import os
from typing import Any

from vllm_accprobe.capture.labels import TASK_ENV, gen_id, set_label, taken

__all__ = ["close", "gen_id", "set_label", "set_task_id"]

_OFF = ("0", "false", "no", "off")
_tasks = itertools.count()
_plain: Any = None
_implied = False


def set_task_id() -> None:
    """Begins a task: call it before each round of a conversation.

    Tells accelerator libraries to write into a directory of this task. In a script that runs neither vLLM nor a
    `Probe`, labels count from the first call on: the first of them opens a dump, in ``VLLM_ACCPROBE_DIR`` or
    ./accprobe/<UTC time>, in which each task is a step. Does nothing with ``VLLM_ACCPROBE=0``.
    """
    global _plain, _implied
    if os.environ.get("VLLM_ACCPROBE", "").strip().lower() in _OFF:
        return
    implied, _implied = _implied, False
    os.environ[TASK_ENV] = f"{os.getpid()}_{next(_tasks)}"
    # The front end of a vLLM with the probe computes no model: its workers' labels are in the engine's dump.
    if not taken() and _plain is None and not os.environ.get("VLLM_ACCPROBE_RUN_ID"):
        from vllm_accprobe.capture.labels import PlainLabels

        _plain = PlainLabels()
    if _plain is not None and not (implied and not _plain.opened):
        _plain.begin_task()


def close() -> None:
    """Closes the dump that `set_task_id` opened; otherwise this happens when the process ends."""
    global _plain
    plain, _plain = _plain, None
    if plain is not None:
        plain.close()


if os.environ.get("ACCPROBE_LABELS") == "1":  # `accprobe compare --exec`: a script need not begin a task
    set_task_id()
    _implied = True
