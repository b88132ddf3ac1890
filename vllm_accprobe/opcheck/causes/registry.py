"""The table of all causes that there are: ours, and those of other packages.

A module of this folder with functions that are marked with ``@cause`` is taken; installed packages add theirs by the
entry point group ``vllm_accprobe.causes`` (extensions.py), each a module or a function.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from vllm_accprobe import extensions
from vllm_accprobe.opcheck import causes
from vllm_accprobe.opcheck.causes.api import Counterfactual, marked


class CauseTable:
    """problems: a sentence for each entry point that cannot be used."""

    def __init__(self, found: list[Counterfactual]):
        self.causes = found
        self.problems: list[str] = []

    def of(self, cls: str) -> list[Counterfactual]:
        """The causes that a class of operators may have, in the order in which they stand."""
        return [c for c in self.causes if c.fits(cls)]


@functools.cache
def default_causes() -> CauseTable:
    """Ours in the order of modules' names, then those of installed packages."""
    names = [m.name for m in pkgutil.iter_modules(causes.__path__, f"{causes.__name__}.")]
    table = CauseTable([c for name in names for c in marked(importlib.import_module(name))])
    for extension in extensions.added(extensions.CAUSES, table.problems):
        found = marked(extension.what)
        if not found:
            why = ValueError("it has no function marked with @cause")
            table.problems.append(extensions.unusable("causes", extension.name, why))
        table.causes += found
    return table
