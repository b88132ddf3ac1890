"""Parameters and buffers: a fingerprint of each, and its payload once per run where there is room.

The problem: different weights explain most "wrong" answers and must be distinguished from wrong arithmetic first, yet
all weights of a large model do not fit into a dump. The idea: statistics and a hash of a fixed sample of elements,
computed where the parameter lies, show a difference; payloads are stored while all of them fit a quarter of the budget.
The weights that count are those of the checkpoint: kernels re-pack them afterwards, each machine's in its own form.

Not here: when that is (vllm/weights.py), the rule for payloads (ProbeConfig.wants_param_payloads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from vllm_accprobe.capture.core.session import DTYPE_NAMES, Session, is_plain
from vllm_accprobe.capture.taps.hooks import chooses
from vllm_accprobe.dump.dtypes import SAMPLE, rounded_hashes
from vllm_accprobe.dump.journal import TensorHead
from vllm_accprobe.dump.journal_writer import digest, template_of
from vllm_accprobe.dump.schema import ROOT_TAP, Stats
from vllm_accprobe.dump.stats import StatsCell, moments_at

_WRAPPED = ".base_layer"
"""Of a layer that LoRA has wrapped after loading: its parameters were recorded under the layer's own path."""


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """(module path, its class, name, tensor) of all parameters and buffers, each storage once."""
    seen: set[tuple[int, int]] = set()
    for path, module in model.named_modules():
        for name, tensor in own_tensors(module):
            key = (tensor.data_ptr(), tensor.numel())
            if tensor.numel() and key in seen:
                continue
            seen.add(key)
            yield path, type(module).__name__, name, tensor


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of ``module`` itself that have memory."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and tensor.device.type != "meta":
            yield name, tensor


class ParameterLines:
    """Writes the ``param`` lines of ``model``, each once: ``layer`` of one module, ``rest`` of all that is left.
    rounded: with the hashes that float32 values have in 16 bits."""

    def __init__(
        self, session: Session, model: torch.nn.Module, say: Callable[[str], None], *, rounded: bool = False
    ):  # fmt: skip
        self._session, self._rounded = session, rounded
        self._model = model
        self._done: set[tuple[str, str]] = set()
        chosen = [tensor for path, cls, _, tensor in named_tensors(model) if chooses(session.config, path, cls)]
        total = sum(tensor.numel() * tensor.element_size() for tensor in chosen)
        self.stored = session.config.wants_param_payloads(total)
        if not self.stored and not session.config.parts and session.config.task == "tensor":
            say(
                f"parameters ({total / 1e9:.1f} GB) are kept as fingerprints: more than a quarter of the budget of "
                f"{session.config.max_gb:g} GB (VLLM_ACCPROBE_PARTS=input,output,params stores them all the same)"
            )

    def layer(self, path: str, module: torch.nn.Module) -> None:
        """The parameters of one module as they are now."""
        for name, tensor in own_tensors(module):
            self._record(path, type(module).__name__, name, tensor)

    def rest(self) -> None:
        """Records all parameters that were not recorded while they were loaded."""
        for path, cls, name, tensor in named_tensors(self._model):
            if (path.removesuffix(_WRAPPED), name) not in self._done:
                self._record(path, cls, name, tensor)

    def whole(self, tap: str, name: str, tensor: torch.Tensor) -> None:
        """A tensor that is not the model's own, which is the same on all ranks: an adapter's, a draft model's."""
        self._record(tap, "", name, tensor)

    def _record(self, path: str, cls: str, name: str, tensor: torch.Tensor) -> None:
        session = self._session
        if (path, name) in self._done or not chooses(session.config, path, cls):
            return
        self._done.add((path, name))
        tap = path or ROOT_TAP
        if not is_plain(tensor):
            session.sink.skip(tap, "not a plain tensor", f"param.{name}")
            return
        shape = tuple(tensor.shape)
        layout = session.layouts.param_event(path, name, shape)
        tensor = tensor.detach()
        dtype = DTYPE_NAMES[tensor.dtype]
        rounded = rounded_hashes(tensor.numpy()) if self._rounded and dtype == "float32" else None
        sample = sample_hash(tensor)
        head = TensorHead(tap, cls, f"param.{name}", layout=layout, sample=sample, once=True, rounded=rounded)
        template = template_of(head, dtype, shape, tensor.nbytes)
        if self.stored:
            session.sink.parameter(template, tensor)
        else:
            session.sink.line((template, None, 0, 0, _fingerprint(tensor, dtype)))


def sample_hash(tensor: torch.Tensor) -> str:
    """xxh3-128 of the sampled elements' bytes. Only the sample leaves the device."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().contiguous().reshape(-1)
    stride = max(1, math.ceil(flat.numel() / SAMPLE))
    sample = flat[::stride].contiguous().cpu()
    return digest([(sample.data_ptr(), sample.nbytes)])


def _fingerprint(tensor: torch.Tensor, dtype: str) -> StatsCell:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return StatsCell(_device_stats(tensor))
    cell = StatsCell(dtype=dtype)
    cell.sums = moments_at(tensor.data_ptr(), tensor.nbytes, dtype)  # one reading, in place of six
    return cell


def _device_stats(tensor: torch.Tensor) -> Stats:
    """Statistics on the tensor's own device, in float32 chunks with float64 totals on the host."""
    count = tensor.numel()
    low, high, total, squares, nan, inf, finite = math.inf, -math.inf, 0.0, 0.0, 0, 0, 0
    flat = tensor.reshape(-1)
    for begin in range(0, count, 1 << 24):
        chunk = flat[begin : begin + (1 << 24)]
        chunk = (chunk.abs() if chunk.is_complex() else chunk).float()
        good = torch.isfinite(chunk)
        clean = torch.where(good, chunk, torch.zeros_like(chunk))
        numbers = torch.stack(
            [good.sum().float(), torch.isnan(chunk).sum().float(), clean.sum(), torch.linalg.vector_norm(clean)]
        ).tolist()
        ends = (
            torch.where(good, chunk, torch.full_like(chunk, math.inf)).min(),
            torch.where(good, chunk, torch.full_like(chunk, -math.inf)).max(),
        )
        finite += int(numbers[0])
        nan += int(numbers[1])
        inf += chunk.numel() - int(numbers[0]) - int(numbers[1])
        total += numbers[2]
        squares += numbers[3] ** 2
        low, high = min(low, float(ends[0])), max(high, float(ends[1]))
    if not finite:
        return Stats(count, None, None, None, None, nan, inf)
    return Stats(count, low, high, total / finite, math.sqrt(squares), nan, inf)
