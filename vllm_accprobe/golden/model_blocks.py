"""A transformers model without memory for its parameters, and its blocks: what is read, computed and freed as one.

The problem: a model must be built, and its layers found, without a line for each architecture. The idea: it is built
from config.json by transformers' own class, while parameters that its modules register lose their memory; buffers,
which checkpoints often lack, are computed. Layers are the items of the outermost ModuleList with most parameters; every
other subtree with parameters is a block, too. Not here: tensors of the files (checkpoint.py), passes (stream.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vllm_accprobe.capture.padded_batch import language_path
from vllm_accprobe.golden.checkpoint import block_of
from vllm_accprobe.refusals import CommandError, one_line

_WORK_ROWS = 40
"""Rows of a hidden state's width that a layer needs for each token while it is computed, chosen: three MLP products of
up to 5.5 widths, attention's four, and copies."""
_FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn))
_LARGE = 1 << 26
"""Elements of a tensor that no buffer has; chosen."""
_WIDE = 1 << 28
"""Chosen: bytes of an embedding or a head from which on it is read by rows."""
_BASE = 8e8
"""Memory of torch and transformers, measured."""


def built(folder: Path, dtype: torch.dtype) -> tuple[Any, tuple[int, int] | None]:
    """(the model of config.json in ``folder``, the blocks of its fp8 weights). Raises CommandError."""
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise CommandError(f"transformers {transformers.__version__}: a streamed golden needs transformers 5")
    transformers.utils.logging.disable_progress_bar()
    file = folder / "config.json"
    if not file.is_file():
        raise CommandError(f"{folder} has no config.json; name a model's folder")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as e:  # whatever a stranger's file makes it raise
        why = f"transformers {transformers.__version__} cannot use it without code of its own, which is not run"
        raise CommandError(f"{file}: {why}: {one_line(e)}") from None
    block = None
    if (method := getattr(config, "quantization_config", None)) is not None:
        try:
            block = block_of(method)
        except CommandError as e:
            raise CommandError(
                f"{folder} is quantised ({e}): only weights in fp8 (fp8, compressed-tensors float-quantized) are read; "
                "name the checkpoint that was quantised, in bfloat16"
            ) from None
        del config.quantization_config  # its layers are built as those of any other, and get what the numbers stand for
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    auto = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
    if auto is None:
        raise CommandError(f"{file}: transformers has no language model for {config.model_type}")
    try:
        with _without_memory():
            return auto.from_config(config, dtype=dtype, trust_remote_code=False).eval(), block
    except Exception as e:
        raise CommandError(f"{file}: no model can be built from it: {one_line(e)}") from None


def encoder(folder: Path) -> Callable[[str], list[int]]:
    """Text → token ids, by the model's own tokenizer. Raises CommandError."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as e:  # whatever a stranger's files make it raise
        raise CommandError(f"{folder}: no tokenizer ({one_line(e)}): name prompts with token_ids") from None
    return lambda text: list(tokenizer(text)["input_ids"])


class _LargeOnMeta(TorchFunctionMode):
    """A layer's experts may be larger than the memory even before they are registered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            size = kwargs.get("size", args)
            size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            if math.prod(n for n in size if isinstance(n, int)) > _LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def _without_memory() -> Iterator[None]:
    before = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        before(module, name, parameter)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        torch.nn.Module.register_parameter = before  # type: ignore[method-assign]


class ModelBlocks:
    """modules: path → module, in the model's order; layers: those of them that are layers; resident: path → module of
    those that contain blocks, whose own parameters stay in memory. Raises CommandError where there are no layers."""

    def __init__(self, model: Any):
        self._itemsize = next(p.dtype.itemsize for p in model.parameters())
        self.modules: dict[str, torch.nn.Module] = {}
        self.resident: dict[str, torch.nn.Module] = {}
        layers = _layers_of(model)
        self._walk("", model, layers)
        self.layers = [path for path in self.modules if path.startswith(layers + ".")]
        self.tied = _tied(model)
        self.streamed: dict[str, tuple[str, ...]] = {}
        """Block → its parameters that are read one expert at a time."""
        self.by_rows: dict[str, str] = {}
        """Block → its matrix that is read by rows."""

    def stream_rows(self, plain: Callable[[str], str]) -> None:
        """Of embeddings and heads with more than `_WIDE` bytes, rows are read alone. plain: as CheckpointTensors'."""
        for path, module in self.modules.items():
            name = f"{path}.weight"
            kinds = isinstance(module, (torch.nn.Embedding, torch.nn.Linear)) and path not in self.layers
            if kinds and self.nbytes(path) > _WIDE and (plain(name) or plain(self.tied.get(name, ""))):
                self.by_rows[path] = name

    def stream_experts(self, larger: int) -> None:
        """Of blocks that need more than ``larger`` bytes, parameters of all experts are read one expert at a time."""
        for path, module in self.modules.items():
            parameters = module.named_parameters(prefix=path)
            stacked = tuple(name for name, p in parameters if p.dim() == 3 and ".experts." in name)
            if stacked and self.nbytes(path) > larger:
                self.streamed[path] = stacked

    def _walk(self, path: str, module: torch.nn.Module, layers: str) -> None:
        above = path == "" or (layers + ".").startswith(path + ".")
        if not above and not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            self.modules[path] = module
            return
        self.resident[path] = module
        for name, child in module.named_children():
            if next(child.parameters(), None) is not None:
                self._walk(f"{path}.{name}" if path else name, child, layers)

    def nbytes(self, path: str) -> int:
        """Memory of a block's parameters while they are read: two of an expert that is read alone, and the copies from
        which the largest one is joined."""
        if path in self.by_rows:
            return _WIDE
        alone, total, largest = self.streamed.get(path, ()), 0, 0
        for name, parameter in self.modules[path].named_parameters(prefix=path):
            size = parameter.numel() * self._itemsize
            total += 2 * size // parameter.shape[0] if name in alone else size
            largest = max(largest, size if parameter.dim() == 3 and name not in alone else 0)
        return total + largest

    def memory(self, stored: Callable[[str], int], tokens: list[int], scored: int, width: int, vocabulary: int) -> int:
        """Bytes that a run over prompts of so many tokens needs. stored: bytes of a block in the files, which are
        mapped while they are read; scored: most rows of logits at a time."""
        rows = 3 * sum(tokens) + _WORK_ROWS * max(tokens)
        most = max(self.nbytes(path) + stored(path) for path in self.modules)
        return most + (rows * width + 4 * scored * vocabulary) * self._itemsize + int(_BASE)

    def linear_bytes(self) -> int:
        """Bytes for each row of all that the layers' linear maps give."""
        inside = (m for path in self.layers for m in self.modules[path].modules() if isinstance(m, torch.nn.Linear))
        return sum(m.out_features for m in inside) * self._itemsize


def _layers_of(model: torch.nn.Module) -> str:
    language = language_path(model)
    within = f"{language}." if language else ""
    lists = {p: m for p, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and p.startswith(within)}
    outer = {p: m for p, m in lists.items() if not any(p.startswith(other + ".") for other in lists)}
    if not outer:
        raise CommandError(f"{type(model).__name__} has no list of layers")
    return max(outer, key=lambda path: sum(p.numel() for p in outer[path].parameters()))


def _tied(model: torch.nn.Module) -> dict[str, str]:
    """Name of a parameter that is another one → that one's."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            tied[name] = known
    return tied


def available_memory() -> int:
    """Bytes that this process may take without swapping."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) << 10 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
