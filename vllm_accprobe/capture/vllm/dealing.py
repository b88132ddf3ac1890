"""Images that are dealt out to ranks: which of them a rank's encoder computes while it runs.

The problem: with ``--mm-encoder-tp-mode data`` every rank encodes some of a step's images, whole ones picked by their
size, or tiles cut at any place, and the tensors do not say which. The idea: vLLM runs such an encoder in a function of
its own, ``run_dp_sharded_*`` (model_executor/models/vision.py), that is given all images and picks by plain arithmetic;
around each call the same arithmetic says what is this rank's, and for as long as the call runs, rows of the encoder are
counted in that. Where the arithmetic is not known, such rows have no names. Not here: rows (rows.py), layouts of the
tensors (session.py), joining the ranks (align).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from vllm_accprobe.capture.core.rows import EncoderItem, ItemRun
from vllm_accprobe.capture.vllm.batch import EngineBatch

_NAME = "run_dp_sharded_"
_BY_SIZE, _BY_TILE = _NAME + "mrope_vision_model", _NAME + "vision_model"


def deals(vllm_config: Any) -> bool:
    """Whether the engine was asked to deal out the encoder's inputs. Models that cannot do so split weights instead."""
    config = getattr(getattr(vllm_config, "model_config", None), "multimodal_config", None)
    mode = getattr(config, "mm_encoder_tp_mode", None)
    return mode == "data" and int(getattr(vllm_config.parallel_config, "tensor_parallel_size", 1) or 1) > 1


def watch_dealing(batch: EngineBatch, vllm_config: Any) -> Dealing | None:
    """What tells ``batch`` of each deal, or None for an engine that does not deal images out."""
    if not deals(vllm_config):
        return None
    dealing = Dealing(batch)
    if not dealing.seen:
        batch.blind()
    return dealing


class Dealing:
    """Wraps the functions that deal, wherever vLLM's modules hold them, until ``close``.

    batch: is told what its rank computes. seen: functions that were found.
    """

    def __init__(self, batch: EngineBatch):
        self._batch = batch
        self._undo: list[Callable[[], None]] = []
        self.seen: set[str] = set()
        wrapped: dict[int, Callable[..., Any]] = {}
        for path, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if not path.startswith("vllm") or not isinstance(names, dict):
                continue
            for name in [n for n in names if n.startswith(_NAME)]:
                original = names[name]
                if callable(original):
                    self._put(names, name, wrapped.setdefault(id(original), self._around(name, original)))

    def close(self) -> None:
        """Puts the functions back."""
        while self._undo:
            self._undo.pop()()

    def _put(self, names: dict[str, Any], name: str, wrapped: Callable[..., Any]) -> None:
        self.seen.add(name)
        before = names[name]
        names[name] = wrapped

        def undo() -> None:
            if names.get(name) is wrapped:  # else somebody wrapped it after us
                names[name] = before

        self._undo.append(undo)

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        batch = self._batch

        def dealt(*args: Any, **kwargs: Any) -> Any:
            try:
                batch.dealt(lambda items: self._runs(name, original, items, args, kwargs))
                return original(*args, **kwargs)
            finally:
                batch.gathered()

        return dealt

    def _runs(
        self, name: str, original: Any, items: list[EncoderItem], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, tuple[ItemRun, ...]] | None:
        """(how many of the waiting ``items`` this call takes, what this rank computes of them); None: not known."""
        world = getattr(original, "__globals__", {})
        if name == _BY_SIZE and len(args) >= 3:
            return by_size(items, [math.prod(map(int, grid)) for grid in args[2]], world)
        if name == _BY_TILE and args:
            return by_tile(items, int(args[0].shape[0]), *_place(world))
        return None


def _place(world: dict[str, Any]) -> tuple[int, int]:
    """(this rank, ranks) of the group that images are dealt to, as the dealing function asks for them."""
    rank, size = (world[f"get_tensor_model_parallel_{what}"]() for what in ("rank", "world_size"))
    return int(rank), int(size)


def by_size(
    items: list[EncoderItem], sizes: list[int], world: dict[str, Any]
) -> tuple[int, tuple[ItemRun, ...]] | None:
    """Whole images, by vLLM's own get_load_balance_assignment. sizes: patches of each image of the call."""
    mine = items[: len(sizes)]
    if len(mine) != len(sizes) or not all(
        size * mine[0].placeholders == sizes[0] * item.placeholders for size, item in zip(sizes, mine, strict=True)
    ):
        return None  # other images than these, or pruned ones
    rank, ranks = _place(world)
    order, counts, _ = world["get_load_balance_assignment"](sizes, ranks)
    start = sum(counts[:rank])
    return len(mine), tuple(ItemRun(mine[i], 0, mine[i].placeholders) for i in order[start : start + counts[rank]])


def by_tile(items: list[EncoderItem], tiles: int, rank: int, ranks: int) -> tuple[int, tuple[ItemRun, ...]] | None:
    """Equal stretches of all tiles, the last ones padded. An image is one tile or several, of equally many
    placeholders each."""
    total = sum(item.placeholders for item in items)
    if not tiles or not total or total % tiles or any(item.placeholders % (total // tiles) for item in items):
        return None
    width = total // tiles
    begin = rank * -(-tiles // ranks) * width
    end = begin + -(-tiles // ranks) * width
    runs, at = [], 0
    for item in items:
        first, stop = max(begin - at, 0), min(end - at, item.placeholders)
        if first < stop:
            runs.append(ItemRun(item, first, stop - first))
        at += item.placeholders
    if end > max(total, begin):
        runs.append(ItemRun(None, 0, end - max(total, begin)))
    return len(items), tuple(runs)
