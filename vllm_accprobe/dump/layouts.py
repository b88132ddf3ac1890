"""How one rank's tensor is a part of the whole: said by capture, undone by analysis.

The problem: with several ranks a file holds a slice, a summand or a copy, and nothing in its bytes says which. The
idea: one plain value beside each tensor, enough to put the whole together without knowing the model. Not here: finding
it out (capture/core/layout.py), undoing it (align/shards.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """How this rank's tensor is a part of the whole.

    kind:
      ``replicated``  every rank of the group holds the whole
      ``shard``       the whole is cut along ``dim`` (counted from the end, e.g. -1)
      ``partial``     the whole is the sum over the ranks (a row-parallel product before its all-reduce)
      ``own``         each rank has a tensor of its own, of the images that were dealt to it; its rows say which
      ``unknown``     capture could not tell; analysis compares replicas or guesses from shapes, and says so
    group: ``tp`` or ``ep``: the ranks in question; ``index`` of ``size`` is this rank's place in it.
    parts: for ``shard``: the blocks along ``dim`` in this rank's tensor, in order, as [local size, replicas]. A QKV
      projection has three, q, k and v; ``replicas`` > 1 says that so many neighbouring ranks hold the same block (KV
      heads fewer than ranks). The whole is, block by block, the concatenation over every replicas-th rank.
    valid: for ``shard``: how much of the whole is real along ``dim`` (a vocabulary without its padding), or None.
    """

    kind: str
    group: str = "tp"
    index: int = 0
    size: int = 1
    dim: int | None = None
    parts: tuple[tuple[int, int], ...] = ()
    valid: int | None = None

    def to_event(self) -> dict[str, Any]:
        """The keys of a line's ``layout``; those that are the default may be missing."""
        event: dict[str, Any] = {"kind": self.kind}
        if self.size > 1 or self.kind != "replicated":
            event |= {"group": self.group, "index": self.index, "size": self.size}
        if self.kind == "shard":
            event |= {"dim": self.dim, "parts": [list(p) for p in self.parts]}
            if self.valid is not None:
                event["valid"] = self.valid
        return event

    @classmethod
    def from_event(cls, e: Mapping[str, Any] | None) -> Layout:
        """The layout of a line. Raises KeyError, TypeError and ValueError for what is none."""
        if not e:
            return REPLICATED
        return cls(
            kind=str(e["kind"]),
            group=str(e.get("group", "tp")),
            index=int(e.get("index", 0)),
            size=int(e.get("size", 1)),
            dim=None if e.get("dim") is None else int(e["dim"]),
            parts=tuple((int(n), int(r)) for n, r in e.get("parts", ())),
            valid=None if e.get("valid") is None else int(e["valid"]),
        )


REPLICATED = Layout("replicated")
OWN = "own"
