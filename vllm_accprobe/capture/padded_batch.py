"""The rows of a plain model's call: a rectangle of tokens, some of them padding, and its images.

The problem: a model outside vLLM is called with ``input_ids`` [batch, length], a mask and a cache; its tensors are
[batch, length, ...] or [batch, heads, length, ...], nobody names requests, and ``generate`` calls the vision tower
before the model itself. The idea: rows are the (batch row, position) pairs that the mask keeps, flattened so that
tensors look like vLLM's; a batch row is a request from the call in which its cache is empty. A run of placeholder
tokens is one image, and images are encoded in the order of the prompts; ``generate``'s arguments are kept until the
tower runs.

Not here: which calls are steps (torch_model.py), arithmetic on rows (core/rows.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from vllm_accprobe.capture.core.attribute_override import override
from vllm_accprobe.capture.core.rows import (
    EncoderItem,
    Requests,
    Scheduled,
    Space,
    logits_space,
    token_space,
    vision_space,
)
from vllm_accprobe.capture.core.session import HEAD, VISION, is_plain
from vllm_accprobe.config import ProbeConfig
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
    """The outermost modules next to the language model that hold parameters and are no head."""
    if not language:
        return []
    up = language.rpartition(".")[0]
    parent = model.get_submodule(up) if up else model
    leaf = language.rpartition(".")[2]
    return [
        m for name, m in parent.named_children() if name not in (leaf, "lm_head") and any(True for _ in m.parameters())
    ]


class TowerCalls:
    """Tells when a tower runs before the model: ``begin`` is called with the arguments of ``generate``.

    Wraps ``generate`` and the towers' forwards on their instances until ``undo``.
    """

    def __init__(self, model: torch.nn.Module, begin: Callable[[dict[str, Any]], None]):
        self._undo = ExitStack()
        self.undo = self._undo.close
        """Puts back what was wrapped, the last one first."""
        self._arguments: dict[str, Any] | None = None
        generate = getattr(model, "generate", None)
        found = towers(model, language_path(model))
        if generate is None or not found:
            return

        @functools.wraps(generate)
        def generating(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("input_ids", args[0] if args else None)
            self._arguments = kwargs | {"input_ids": ids}
            try:
                return generate(*args, **kwargs)
            finally:
                self._arguments = None

        self._undo.callback(override(model, "generate", generating))
        for tower in found:
            self._undo.callback(override(tower, "forward", self._announcing(tower.forward, begin)))

    def _announcing(self, forward: Callable[..., Any], begin: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._arguments is not None:
                begin(self._arguments)
            return forward(*args, **kwargs)

        return run


class Rectangle:
    """The batch of the call that runs.

    batch: its requests in row order. prompts: the call computes prompts, its cache being empty. first: number of the
    first request.
    """

    def __init__(self, config: ProbeConfig, requests: Requests, model: torch.nn.Module, first: int = 0):
        self._config = config
        self._requests = requests
        self._model = model
        self.batch: list[Scheduled] = []
        self.prompts = False
        self._grid: tuple[int, int, int] | None = None
        self._keep: list[int] = []
        self._real: torch.Tensor | None = None
        self._indices: dict[tuple[int, torch.device], torch.Tensor] = {}
        own = getattr(model, "config", None)
        texts = [vars(c) for c in (own, getattr(own, "text_config", None)) if hasattr(c, "__dict__")]
        self._heads = {n for c in texts for name, n in c.items() if "heads" in name and isinstance(n, int)}
        self._ids: torch.Tensor | None = None
        self._names: list[str] = []
        self._items: list[EncoderItem] = []
        self._count = first

    def begin(self, values: Mapping[str, Any]) -> bool:
        """A call with the arguments ``values``, by name. False where they hold no token ids [batch, length]: its
        tensors then have no rows."""
        ids = values.get("input_ids")
        self._grid = None
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return False
        host = ids.detach().cpu()
        batch, length = host.shape
        past = _past_length(values)
        self.prompts = past == 0
        mask = values.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape == (batch, past + length):
            real = mask.detach().cpu().bool()
        else:
            real = torch.ones(batch, past + length, dtype=torch.bool)
        if past == 0 or len(self._names) != batch:
            self._names = []
            token = placeholder(self._model)
            for row in range(batch):
                prompt = host[row][real[row, past:]].tolist()
                name = f"call-{self._count}"
                self._count += 1
                images = images_of(prompt, token) if past == 0 else ()
                self._requests.add(name, prompt, int(real[row, :past].sum()) + len(prompt), images)
                self._names.append(name)
        self.batch, self._keep = [], []
        for row, name in enumerate(self._names):
            columns = torch.nonzero(real[row, past:]).flatten().tolist()
            self.batch.append(Scheduled(name, int(real[row, :past].sum()), len(columns)))
            self._keep += [row * length + column for column in columns]
        self._items = []
        if past == 0:  # later steps have no images to encode
            for name in self._names:
                request = self._requests.get(name)
                for k, image in enumerate(request.images if request else ()):
                    self._items.append(EncoderItem(name, k, "image", image.n))
        self._grid, self._real = (batch, length, past + length), real
        self._indices.clear()
        self._ids = host.reshape(-1)[self._keep]
        return True

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, S, ...], [B, H, S, ...] or [B*S, ...] → [kept B*S, ...]; the last position only, [B, 1, ...], → [B, ...];
        keys of the cache and of this call, [B, past + S, ...], → [kept B*(past + S), ...], which are no rows of it.

        [1, S, ...] in a larger batch is meant for every row of it (cosines of the positions)."""
        if self._grid is None or not is_plain(tensor) or not tensor.dim():
            return tensor
        batch, length, keys = self._grid
        if tensor.shape[0] == batch * length != batch:
            return self._kept(tensor, length)
        if tensor.dim() < 2:
            return tensor
        if tensor.shape[0] == 1 and batch > 1 and tensor.dim() == 3 and tensor.shape[1] == length:
            tensor = tensor.expand(batch, *tensor.shape[1:])
        if tensor.shape[0] != batch:
            return tensor
        if tensor.dim() == 4 and tensor.shape[1] == 1 == length and tensor.shape[2] == keys not in self._heads:
            tensor = tensor[:, 0]  # latent keys are one head's, and have no place of this call
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == length:
                return self._kept((tensor if dim == 1 else tensor.movedim(dim, 1)).flatten(0, 1), length)
        if tensor.shape[1] == 1:
            return tensor.flatten(0, 1)
        return self._kept(tensor.flatten(0, 1), keys) if tensor.dim() > 2 and tensor.shape[1] == keys else tensor

    def _kept(self, rows: torch.Tensor, columns: int) -> torch.Tensor:
        """``rows``, the last ``columns`` of each prompt, without padding. On a device nothing waits: which rows they
        are is copied there once per call of the model."""
        assert self._real is not None
        index = self._indices.get((columns, rows.device))
        if index is None:
            index = torch.nonzero(self._real[:, -columns:].reshape(-1)).flatten()
            if rows.device.type != "cpu":
                index = index.pin_memory() if rows.device.type == "cuda" else index
                index = index.to(rows.device, non_blocking=True)
            self._indices[columns, rows.device] = index
        return rows if len(index) == len(rows) else rows[index]

    def space(self, part: str, rows: int) -> Space | None:
        """The row space of a tensor with ``rows`` rows in ``part`` of the model; None where it has no rows."""
        if self._grid is None:
            return None
        if part == VISION:
            return vision_space(self._config, self._requests, self._items, rows) if self._items else None
        if part == HEAD and rows == len(self.batch) != len(self._keep):
            return logits_space(self._config, self._requests, self.batch)
        space = token_space(self._config, self._requests, self.batch, 0)
        space.ids = self._ids
        if part == HEAD:  # the head saw every position: the same rows under the name of its space
            space.name, space.announced = "logits", False
        return space


def _past_length(values: Mapping[str, Any]) -> int:
    """Tokens already in the cache, by the cache's own word."""
    past = values.get("past_key_values")
    length = getattr(past, "get_seq_length", None)
    if callable(length):
        return int(length())
    position = values.get("cache_position")
    if isinstance(position, torch.Tensor) and position.numel():
        return int(position.reshape(-1)[0])
    return 0
