"""The common tensor in one function: host memory, all of its rows wanted, seen at this tap in this form before.

The problem: what a tap decides about a tensor (which rows it has, how its line reads, where its bytes are) takes ten
times as long as its hash, and comes out the same step after step. The idea: per tap and role, the last decision is kept
as a Site, with the line as a template; while dtype, shape and the step's number of rows stay, it holds, and a tensor
costs a hash, a look-up and, if its bytes are new, statistics or a copy. Whatever is not common is declined, and takes
the general way (session.py, sink.py), which also makes the decisions that are kept here. Lines are those of the general
way. Not here: tensors of a device, vision towers, logits, selected rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import xxhash

from vllm_accprobe.capture.core.memory import DTYPE_NAMES, LAZY
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.sink import Sink
from vllm_accprobe.capture.core.step_state import StepState
from vllm_accprobe.dump.journal.tensor_lines import TensorHead
from vllm_accprobe.dump.recorder.template import TensorTemplate
from vllm_accprobe.dump.stats import StatsCell, moments_at

_STRIDED = torch.strided
_VIEWS = 4096
"""Sizes of tensors that are remembered."""
Sites = dict[str, "Site"]
"""By role: what is known of one tap's tensors."""


class Site:
    """What was decided of the tensors of one role: holds for ``dtype``, ``shape`` and ``rows`` rows in the step."""

    __slots__ = ("bytes_at", "dense", "dtype", "dtype_name", "lazy", "nbytes", "rows", "shape", "template")

    def __init__(
        self, tensor: torch.Tensor, rows: int, template: TensorTemplate, bytes_at: Callable[[int], Any]
    ) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.rows = rows
        self.template = template
        self.dtype_name = template.dtype
        self.lazy = template.dtype in LAZY
        self.nbytes = template.nbytes
        self.bytes_at = bytes_at
        self.dense: torch.Tensor | None = None
        """Where strided tensors are brought together, for as long as they are looked at."""


class Express:
    """The common way of one sink's tensors.

    layout_of(tap, role, shape): what a line says of how a tensor is split. decide(state, role, shape): the row space of
    a tensor and its row dimension.
    """

    def __init__(
        self,
        sink: Sink,
        layout_of: Callable[[str, str, torch.Size], dict[str, Any] | None],
        decide: Callable[[StepState, str, torch.Size], tuple[Space | None, int]],
    ) -> None:
        self._layout_of = layout_of
        self._sink = sink
        self._decide = decide
        self._hash = xxhash.xxh3_128_hexdigest
        self._views: dict[int, Callable[[int], Any]] = {}  # making the type costs more than hashing the bytes

    def take(
        self,
        state: StepState,
        sites: Sites,
        tap: str,
        cls: str,
        role: str,
        call: int,
        tensor: torch.Tensor,
        before: str | None = None,
    ) -> str | None:
        """Stores ``tensor`` and queues its line; its hash, or None when this is not the place for it. ``before``: the
        hash of what it was before the call, for a role ``inplace.*``; if it still is, there is no line."""
        site = sites.get(role)
        if (
            site is None
            or state.rows != site.rows
            or tensor.dtype is not site.dtype
            or tensor.shape != site.shape
            or tensor.layout is not _STRIDED
        ):
            site = self._site(state, tap, cls, role, tensor, before is not None)
            if site is None:
                sites.pop(role, None)
                return None
            sites[role] = site
        if site.lazy and (tensor.is_conj() or tensor.is_neg()):
            return None
        sink = self._sink
        if not tensor.is_contiguous():
            if site.dense is None:
                site.dense = sink.scratch.dense(site.shape, site.dtype)
            tensor = site.dense.copy_(tensor)
        address = tensor.data_ptr()
        digest: str = self._hash(site.bytes_at(address))
        if digest == before:
            return digest
        seq = state.seq
        state.seq = seq + 1
        sink.tensors += 1
        key = digest + site.dtype_name
        cell = sink.seen.get(key)
        if cell is None:
            cell = sink.seen[key] = StatsCell(None, digest, site.dtype_name)
            if sink.keep:
                sink.writer.tensor((site.template, state.number, call, seq, cell), address)
                return digest
            cell.sums = moments_at(address, site.nbytes, site.dtype_name)
        sink.writer.line((site.template, state.number, call, seq, cell))
        return digest

    def _site(
        self, state: StepState, tap: str, cls: str, role: str, tensor: torch.Tensor, mutated: bool
    ) -> Site | None:
        """The decision for tensors like this one, or None for those of the general way."""
        dtype = DTYPE_NAMES.get(tensor.dtype)
        shape = tensor.shape
        if dtype is None or tensor.layout is not torch.strided or not tensor.nbytes:
            return None
        space, dim = self._decide(state, role, shape)
        if space is not None and shape[dim] != space.src:
            return None
        rows, layout = None if space is None else space.name, self._layout_of(tap, role, shape)
        head = TensorHead(state.number, tap, cls, role, 0, 0, rows, dim, layout, mutated)
        nbytes = tensor.nbytes
        bytes_at = self._views.get(nbytes)
        if bytes_at is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            bytes_at = self._views[nbytes] = (ctypes.c_char * nbytes).from_address
        return Site(tensor, state.rows, TensorTemplate(head, dtype, tuple(shape), nbytes), bytes_at)
