"""Makes torch say that this processor is a lesser one, where ``ACCPROBE_TEST_KERNELS`` asks for that.

Python imports this module at its start because the folder is on PYTHONPATH (see ../kernels.py). Nothing is imported
here that a program does not import itself: a finder waits for ``torch.cpu`` and changes its answers once it is there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_NO = {
    "avx2": ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported", "_is_amx_tile_supported",
             "_is_amx_fp16_supported"),
    "avx512": ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"),
}  # fmt: skip


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, names: Sequence[str]):
        self.inner, self.names = inner, names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        for name in self.names:
            if hasattr(module, name):
                setattr(module, name, lambda: False)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: Sequence[str]):
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.names)
        return spec


if os.environ.get("ACCPROBE_TEST_KERNELS") in _NO:
    sys.meta_path.insert(0, _Finder(_NO[os.environ["ACCPROBE_TEST_KERNELS"]]))
