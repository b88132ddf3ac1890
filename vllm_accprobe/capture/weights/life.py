"""A model's weights over its life: after each event, one pass over all of them and a line for each.

The problem: a sync that leaves one scale behind, a reload that loses a shard, a packed copy that stays old change no
shape and raise nothing. The idea: an event is opened by whoever sees vLLM's call (capture/vllm/weights/), each layer is
looked at just before it is packed, and all of them when the event is over, outside of any forward; the writes between
are watched. Fingerprints are all that is kept. A failure here is noted, ends the looking and nothing else. Not here:
what the lines say (dump/weights/), how a print is made (prints.py), what it means (judge/weights/).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_accprobe.capture.core.memory import DTYPE_NAMES
from vllm_accprobe.capture.taps.params import own_tensors
from vllm_accprobe.capture.weights.loaded_tensor import LoadedTensor
from vllm_accprobe.capture.weights.prints import RowSums, raw_bytes, sums_of
from vllm_accprobe.capture.weights.row_names import named_rows
from vllm_accprobe.capture.weights.writes import WriteWatch
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.dump.weights.weight_life import (
    LOAD,
    LOADED,
    MAX_ROWS,
    PACKED,
    WeightEvent,
    WeightPrint,
    event_line,
    pack_rows,
    print_line,
)

Key = tuple[str, str]
Line = Callable[[dict[str, Any]], None]


FULL, OFF = "full", "off"
TRANSPOSED = "transposed"
"""How a packed tensor was turned before its print was made: its last two dimensions."""


class WeightLife:
    """The events and prints of one rank.

    line: writes a journal line. chosen: whether a module (path, class) is looked at. step: the number of the next step.
    failed: told once, when something here has failed. how: FULL; ``prints``, without watching writes; or OFF.
    """

    def __init__(
        self,
        line: Line,
        chosen: Callable[[str, str], bool],
        step: Callable[[], int],
        failed: Callable[[BaseException], None],
        rank: int = 0,
        how: str = FULL,
    ):
        self.watch = WriteWatch(how == FULL)
        self.off = how == OFF
        self.open: str | None = None
        self._line, self._chosen, self._step, self._failed = line, chosen, step, failed
        self._rank = rank
        self._number = -1
        self._loaded: dict[Key, LoadedTensor] = {}
        self._reordered: set[Key] = set()
        self._said: dict[Key, str] = {}
        self._looked: set[Key] = set()
        self._about: dict[str, Any] = {}
        self._seconds, self._bytes = 0.0, 0

    @contextlib.contextmanager
    def safely(self) -> Iterator[None]:
        """What fails inside ends the looking, and reaches nobody."""
        try:
            yield
        except Exception as error:
            self.off = True
            with contextlib.suppress(Exception):
                self._failed(error)

    def begin(self, kind: str, **about: Any) -> None:
        """An event begins; the one that is open ends nothing. about: fields of WeightEvent."""
        if self.off:
            return
        self.open = kind
        self._number += 1
        self._looked.clear()
        self._about = about
        self._seconds, self._bytes = 0.0, 0
        if kind != LOAD:  # loading began before anybody could call this
            self.watch.forget()

    def look(self, path: str, module: torch.nn.Module) -> None:
        """``module`` has its tensors as they were given; they are packed next."""
        if self.off or self.open is None or not self._chosen(path, type(module).__name__):
            return
        with self.safely():
            for name, tensor in own_tensors(module):
                self._given(path, module, name, tensor)

    def finish(self, model: torch.nn.Module, *, given: bool) -> None:
        """The event is over: all tensors as they lie now. given: what was not looked at is as it was given."""
        kind, self.open = self.open, None
        if self.off or kind is None:
            return
        with self.safely():
            for path, module in model.named_modules():
                if hasattr(module, "base_layer"):  # an adapter's layer shows its base's tensors as its own
                    continue
                path = tap_path(path)
                if not self._chosen(path, type(module).__name__):
                    continue
                for name, tensor in own_tensors(module):
                    self._lies(path, module, name, tensor, given)
            self._event(kind)

    def adapter(self, prints: Callable[[Callable[..., None]], None], **about: Any) -> None:
        """An event of its own: an adapter's slot. prints: calls what it is given with (path, class, name, form,
        tensor)."""
        if self.off or self.open is not None:
            return
        with self.safely():
            self._number += 1
            self._about, self._seconds, self._bytes = about, 0.0, 0
            prints(self._slot)
            self._event("lora")

    def _event(self, kind: str) -> None:
        detail = [self._about.pop("detail", "")]
        if self.watch.failed is not None:
            detail.append(f"writes were not watched to the end: {self.watch.failed}")
        self._line(event_line(WeightEvent(
            self._rank, self._number, kind, self._step(), seconds=self._seconds, nbytes=self._bytes,
            detail="; ".join(filter(None, detail)), **self._about,
        )))  # fmt: skip

    # --- tensors -----------------------------------------------------------------------------------------------

    def _given(self, path: str, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        key = (path, name)
        if key in self._looked or not _plain(tensor):
            return
        self._looked.add(key)
        before, raw = self._loaded.get(key), raw_bytes(tensor)
        if before is not None and before.same(tensor, raw):
            sums = before.sums
        else:
            sums = self._sums(tensor)
            self._loaded[key] = LoadedTensor(sums, tensor.dtype, raw)
        self._print(path, module, name, LOADED, tensor.dtype, sums, seen=tensor)

    def _lies(self, path: str, module: torch.nn.Module, name: str, tensor: torch.Tensor, given: bool) -> None:
        key = (path, name)
        if not _plain(tensor) or not tensor.numel():
            return
        if given and key not in self._looked:
            self._given(path, module, name, tensor)
            return
        loaded = self._loaded.get(key)
        raw = raw_bytes(tensor) if loaded is not None else None
        if key in self._looked and loaded is not None and loaded.same(tensor, raw):
            return  # it lies as it was given
        before = loaded if loaded is not None and loaded.dtype == tensor.dtype else None
        view, how = tensor, ""
        if before is not None and (turned := transposed(tensor, before.sums.shape)) is not None:
            view, how = turned, TRANSPOSED
        sums = self._sums(view)
        if key in self._looked:
            reordered = before is not None and not how and sums.whole != before.sums.whole
            (self._reordered.add if reordered else self._reordered.discard)(key)
            if before is not None and not how and not reordered:
                return  # it lies as it was given
        if key in self._reordered:
            how = "unknown"  # an order that is not undone
        seen = tensor if key not in self._looked else None
        self._print(path, module, name, PACKED, tensor.dtype, sums, undone=how, seen=seen)

    def _slot(self, path: str, cls: str, name: str, form: str, tensor: torch.Tensor) -> None:
        sums = self._sums(tensor)
        self._line(print_line(_made(self._rank, self._number, path, cls, name, form, tensor.dtype, sums)))

    def _sums(self, tensor: torch.Tensor) -> RowSums:
        start = time.perf_counter()
        sums = sums_of(tensor)
        self._seconds += time.perf_counter() - start
        self._bytes += tensor.numel() * tensor.element_size()
        return sums

    def _print(
        self,
        path: str,
        module: torch.nn.Module,
        name: str,
        form: str,
        dtype: torch.dtype,
        sums: RowSums,
        *,
        undone: str = "",
        seen: torch.Tensor | None = None,
    ) -> None:
        block, parts = named_rows(module, path, name, sums.shape)
        written, raw = (None, False) if seen is None else self.watch.of(seen)
        more = {"undone": undone, "block": block, "parts": parts, "written": written, "raw": raw}
        cls = type(module).__name__
        made = _made(self._rank, self._number, path, cls, name, form, dtype, sums, **more)
        rows = None
        if len(sums.order) <= MAX_ROWS and self._said.get((path, f"{name} {form}")) != made.order:
            rows = pack_rows(sums.short)
            self._said[path, f"{name} {form}"] = made.order
        self._line(print_line(made) | ({} if rows is None else {"rows": rows}))


def tap_path(path: str) -> str:
    """A module's path as it was before an adapter's layer was put around it."""
    return path.replace(".base_layer", "")


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype in DTYPE_NAMES and tensor.layout is torch.strided and not tensor.is_quantized


def transposed(packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """``packed`` with its last two dimensions turned, where that is what the loaded one's ``shape`` says."""
    if packed.ndim < 2 or len(shape) != packed.ndim or packed.shape[-1] == packed.shape[-2]:
        return None
    turned = packed.transpose(-1, -2)
    return turned if tuple(turned.shape) == shape else None


def _made(
    rank: int, number: int, path: str, cls: str, name: str, form: str, dtype: torch.dtype, sums: RowSums, **more: Any
) -> WeightPrint:
    order, bag = sums.whole
    return WeightPrint(
        rank, number, path or ROOT_TAP, cls, name, form, DTYPE_NAMES[dtype], sums.shape, order, bag, sums.zeros,
        sums.nan, **more,
    )  # fmt: skip
