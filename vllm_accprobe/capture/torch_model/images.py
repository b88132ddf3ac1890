"""Where the images of a plain multi-modal model are: their placeholders, and the tower that encodes them.

The problem: a transformers model says nowhere which rows of its vision tower belong to which request, and its
``generate`` calls the tower before the model itself. The idea: a run of placeholder tokens in a prompt is one image,
and images are encoded in the order of the prompts; what ``generate`` was asked is kept until the tower runs.
Not here: the rows of an image (rows.py), steps (probe.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_accprobe.capture.core.put_over import put_over
from vllm_accprobe.dump.schema import Image


def placeholder(model: torch.nn.Module) -> int | None:
    """The token id that stands for a piece of an image, as the model's configuration says; None for other models."""
    config = getattr(model, "config", None)
    for name in ("image_token_id", "image_token_index"):
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def images_of(prompt: Sequence[int], token: int | None) -> tuple[Image, ...]:
    """Each run of ``token`` is one image. Its content is not known here, so its hash is empty."""
    found: list[Image] = []
    for at, value in enumerate(prompt):
        if value != token:
            continue
        if found and found[-1].pos + found[-1].n == at:
            found[-1] = Image("", found[-1].pos, found[-1].n + 1)
        else:
            found.append(Image("", at, 1))
    return tuple(found)


def language_path(model: torch.nn.Module) -> str:
    """Path of the language model inside a multi-modal one, "" for a plain language model."""
    if placeholder(model) is None:
        return ""
    paths = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ("language_model", "text_model")]
    return min(paths, key=len, default="")


def towers(model: torch.nn.Module, language: str) -> list[torch.nn.Module]:
    """The outermost modules beside the language model that hold parameters and are no head."""
    if not language:
        return []
    up = language.rpartition(".")[0]
    around = model.get_submodule(up) if up else model
    leaf = language.rpartition(".")[2]
    return [
        m for name, m in around.named_children() if name not in (leaf, "lm_head") and any(True for _ in m.parameters())
    ]


class Foresight:
    """Tells when a tower runs before the model: ``begin`` is called with what ``generate`` was given.

    Wraps ``generate`` and the towers' forwards on their instances until ``undo``.
    """

    def __init__(self, model: torch.nn.Module, begin: Callable[[dict[str, Any]], None]):
        self._undo: list[Callable[[], None]] = []
        self._asked: dict[str, Any] | None = None
        generate = getattr(model, "generate", None)
        found = towers(model, language_path(model))
        if generate is None or not found:
            return

        @functools.wraps(generate)
        def asked(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("input_ids", args[0] if args else None)
            self._asked = kwargs | {"input_ids": ids}
            try:
                return generate(*args, **kwargs)
            finally:
                self._asked = None

        self._undo.append(put_over(model, "generate", asked))
        for tower in found:
            self._undo.append(put_over(tower, "forward", self._announcing(tower.forward, begin)))

    def _announcing(self, forward: Callable[..., Any], begin: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._asked is not None:
                begin(self._asked)
            return forward(*args, **kwargs)

        return run

    def undo(self) -> None:
        """Puts back what was wrapped, the last one first."""
        while self._undo:
            self._undo.pop()()
