"""The words in which it is said what of vLLM capture touches: a place, the names needed there, and what a loss means.

The problem: capture touches some two hundred names of vLLM, of releases and vendors that nobody can run here, and a
name that is gone is seen only on the machine that has it. The idea: each is declared once, as plain data, with the
releases that have it and what capture cannot do without it; `accprobe doctor --wheel` holds a wheel's source against
that, and a test holds the declaration against the code of capture, in both directions. Not here: the declarations
(engine_names.py, runners.py, layer_names.py, lora.py, weight_names.py, cache_names.py), reading wheels (doctor/wheel).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Release = tuple[int, ...]
"""(0, 11) or (0, 14, 1)."""


@dataclass(frozen=True)
class Need:
    """names: spellings, of which one must be there. loss: what follows where none is, in a few words.

    takes: the first parameters after ``self``, by position. keywords: parameters that it must have, wherever.
    since, until: the releases that have it, the latter not included; None where all have. called: capture wraps it, so
    it must be called as an attribute of its object, or it would never be seen.
    """

    names: tuple[str, ...]
    loss: str
    takes: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    since: Release | None = None
    until: Release | None = None
    called: bool = False

    def due(self, release: Release | None) -> bool:
        """Whether ``release`` has it; None is an unknown release, held to what the newest has."""
        if release is None:
            return self.until is None
        return (self.since is None or release >= self.since) and (self.until is None or release < self.until)


@dataclass(frozen=True)
class VllmPlace:
    """A kind of vLLM's objects, or a module. at: ``module:Class``, or ``module``, where releases have it; the first
    that is there counts. of: (another place, attribute): it is what that attribute is made of. kind: runners
    and workers are also looked for among a vendor's own classes.
    """

    name: str
    at: tuple[str, ...]
    needs: tuple[Need, ...]
    loss: str = ""
    of: tuple[str, str] | None = None
    kind: str = ""
    since: Release | None = None
    until: Release | None = None

    def due(self, release: Release | None) -> bool:
        """Whether ``release`` has such a place at all."""
        return Need((), "", since=self.since, until=self.until).due(release)


V1, V2, WORKER = "V1", "V2", "worker"


def each(names: str, loss: str, *, since: Release | None = None, until: Release | None = None) -> tuple[Need, ...]:
    """A need for each of the names."""
    return tuple(Need((name,), loss, since=since, until=until) for name in names.split())


def one_of(names: str, loss: str, **other: object) -> Need:
    """One need with several spellings."""
    return replace(Need(tuple(names.split()), loss), **other)  # type: ignore[arg-type]
