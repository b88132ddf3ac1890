"""The references themselves, one file per family of operators; each names its formula's source.

A family is any module here with a function that is marked with ``@reference`` or ``@device_kernel``: exact formulas,
and below them what a device has in their place. A new one is one new file, in the folder of its family.
Not here: how a call finds its reference (opcheck/reference_table.py), the table of all, other packages' too
(opcheck/registry.py).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

from vllm_accprobe.opcheck.reference_table import References, marked


def families() -> list[ModuleType]:
    """The modules, imported now, in the order of names: they need torch."""
    found = (importlib.import_module(m.name) for m in pkgutil.walk_packages(__path__, f"{__name__}."))
    return [module for module in found if marked(module)]


@functools.cache
def ours() -> References:
    """A table of all of them."""
    return References(families())
