"""Every standard there is, one file each, known alike to compare (of dumps and of tables) and opcheck.

The problem: a rule that has to be added in several places is forgotten in one. The idea: a file of this package has
``STANDARDS``, some `NamedStandard`s; the files are found by scanning, another package's by its entry point in the group
``vllm_accprobe.standards``, imported only for a name that is none of ours. Needs neither torch nor numpy. Not here:
measuring (kernels/, opcheck/measures.py), who applies a rule (comparison/notes.py, opcheck/).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

from vllm_accprobe.standards.declaration import MACHINES, OUTPUT, PAIRS, NamedStandard

GROUP = "vllm_accprobe.standards"
"""The group of entry points; each names a module that has STANDARDS."""
COMMANDS = {PAIRS: "compare", OUTPUT: "opcheck", MACHINES: "compare of two tables"}
"""The command whose ``--standard`` takes what judges each."""


class UnknownStandard(ValueError):
    """A name that is no standard's, or one that cannot judge what is requested; the one line lists those that can."""


def find(name: str, what: str) -> NamedStandard:
    """The standard ``name``, which judges ``what`` (PAIRS, OUTPUT or MACHINES). Raises UnknownStandard."""
    found = built_in().get(name)
    known = built_in() if found is not None else built_in() | further()
    found = known.get(name)
    if found is not None and found.judges(what):
        return found
    text = f"unknown standard {name!r}: known are {', '.join(_that(known.values(), what))}"
    if found is not None:
        elsewhere = " and ".join(command for kind, command in COMMANDS.items() if found.judges(kind))
        text += f"; {name} is known to {elsewhere} only"
    raise UnknownStandard(text)


def names(what: str) -> tuple[str, ...]:
    return _that(built_in().values(), what)


def _that(known: Iterable[NamedStandard], what: str) -> tuple[str, ...]:
    chosen = sorted((s for s in known if s.judges(what)), key=lambda s: (not s.ours, s.name))
    return tuple(s.name for s in chosen)


@cache
def built_in() -> dict[str, NamedStandard]:
    """By name, those of this package's files. Raises ValueError for two of one name."""
    modules = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return _gathered((f"{__name__}.{name}", importlib.import_module(f"{__name__}.{name}")) for name in modules)


@cache
def further() -> dict[str, NamedStandard]:
    """By name, those of other packages. Raises UnknownStandard for one that cannot be imported."""
    from importlib.metadata import entry_points

    def loaded() -> Iterable[tuple[str, object]]:
        for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
            try:
                yield point.value, point.load()
            except Exception as error:  # another package's code: whatever it raises
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                raise UnknownStandard(f"{point.value}, which brings standards, cannot be imported: {why}") from None

    return _gathered(loaded())


def _gathered(modules: Iterable[tuple[str, object]]) -> dict[str, NamedStandard]:
    found: dict[str, NamedStandard] = {}
    places: dict[str, str] = {}
    for place, module in modules:
        for standard in getattr(module, "STANDARDS", ()):
            if standard.name in found:
                raise ValueError(f"two standards are called {standard.name!r}: in {places[standard.name]} and {place}")
            found[standard.name], places[standard.name] = standard, place
    return found
