"""Makes torch say that this processor is a lesser one, where ``ACCPROBE_TEST_KERNELS`` asks for that; with
``ACCPROBE_TEST_V2`` Triton has a backend for the CPU, which vLLM's V2 runner wants and Triton's interpreter never uses.
``ACCPROBE_TEST_RAISES``: the probe raises after so many tensors. ``ACCPROBE_TEST_CLOCK``: once this file is there,
time.time and time.time_ns are set back by a day.

Python imports this module at its start because the folder is on PYTHONPATH (see ../kernels.py). Nothing is imported
here that a program does not import itself: a finder waits for a module and changes it once it is there.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace

_NO = {
    "avx2": ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported", "_is_amx_tile_supported",
             "_is_amx_fp16_supported"),
    "avx512": ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"),
}  # fmt: skip


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, change: Callable[[ModuleType], None]):
        self.inner, self.change = inner, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.change(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, wanted: str, change: Callable[[ModuleType], None]):
        self.wanted, self.change = wanted, change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if name != self.wanted:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.change)
        return spec


def _lesser(module: ModuleType) -> None:
    for name in _NO[os.environ["ACCPROBE_TEST_KERNELS"]]:
        if hasattr(module, name):
            setattr(module, name, lambda: False)


def _backend(module: ModuleType) -> None:
    module.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def _raises(module: ModuleType) -> None:
    left, take = int(os.environ["ACCPROBE_TEST_RAISES"]), module.Sink.take

    def broken(*args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise ZeroDivisionError("planted in the probe")
        return take(*args, **kwargs)

    module.Sink.take = broken


def _set_back(flag: str) -> None:
    clock, clock_ns = time.time, time.time_ns
    time.time = lambda: clock() - 86_400 * os.path.exists(flag)
    time.time_ns = lambda: clock_ns() - 86_400 * 10**9 * os.path.exists(flag)


if os.environ.get("ACCPROBE_TEST_RAISES"):
    sys.meta_path.insert(0, _Finder("vllm_accprobe.capture.core.session", _raises))
if os.environ.get("ACCPROBE_TEST_CLOCK"):
    _set_back(os.environ["ACCPROBE_TEST_CLOCK"])
if os.environ.get("ACCPROBE_TEST_KERNELS") in _NO:
    sys.meta_path.insert(0, _Finder("torch.cpu", _lesser))
if os.environ.get("ACCPROBE_TEST_V2"):
    sys.meta_path.insert(0, _Finder("triton.backends", _backend))
