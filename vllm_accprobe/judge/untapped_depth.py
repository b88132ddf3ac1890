"""How many layers the data has been through at a tap, and how many of them nobody saw since the tap before.

The problem: limits grow with the layers passed, and an operator may add only so much; but the dump of a compiled engine
has taps at the model's root and behind it, with a whole model of unseen operators in between, and a capture of some
modules has gaps. The idea: a layer is a numbered block (``layers.3``). It is passed when one of its taps comes, in
either dump; one that neither a tap nor the other dump shows is passed by what comes behind it in the model's tree. A
layer without a compared tap, passed since the last compared tap, is a gap in front of this one. What may be created
in a gap of n layers is what may pile up in n layers (standards.Standard.total_limits): each layer's roundings are
independent, and so is each rounding that a compiler leaves out or adds, which differs between the two runs like any
other; independent errors add in quadrature, so that the limit grows with sqrt(1 + n).
Not here: the limits (standards/limits.py), the order of the flow (flow.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.dump.schema import ROOT_TAP, Module
from vllm_accprobe.judge.flow import Key

_NOWHERE, _BEHIND = 1e18, 1e19
"""Places: of what the tree does not hold, and of what comes behind even that."""
_BLOCK = re.compile(r"^(.*?\.)?(\d+)(?=\.|$)")


def block_of(tap: str) -> str | None:
    """The outermost numbered block in which a tap stands: ``model.layers.3`` of ``model.layers.3.mlp``."""
    match = _BLOCK.match(tap)
    return match.group(0) if match else None


class Layers:
    """The layers of one dump, and how many of them each of its keys has behind it.

    ordered: keys in order of the flow. modules: the model's tree, as far as it was selected. unseen: taps that ran
    without being seen (see `unseen_taps`)."""

    def __init__(self, ordered: Sequence[Key], modules: Sequence[Module], unseen: Iterable[str] = ()):
        seen = {b for tap, role, _ in ordered if not _is_param(role) and (b := block_of(tap))}
        self._index = {m.tap: m.index for m in modules}
        self._unseen: dict[str, float] = {}
        for tap in unseen:
            block = block_of(tap)
            if block is not None and block not in seen:
                at = float(self._index.get(tap, _NOWHERE))
                self._unseen[block] = min(at, self._unseen.get(block, _NOWHERE))
        self._passed: dict[Key, frozenset[str]] = {}
        now: frozenset[str] = frozenset()
        for key in ordered:
            now = self._after(now, key)
            self._passed[key] = now

    def _after(self, now: frozenset[str], key: Key) -> frozenset[str]:
        tap, role, _ = key
        # A block counts as passed for its own taps too; a parent's parameters and inputs come before.
        if _is_param(role):
            return now
        own = block_of(tap)
        more = {own} if own is not None else set()
        if self._unseen:
            place = _place(tap, role, self._index)
            more |= {b for b, at in self._unseen.items() if at < place or (own is not None and _earlier(b, own))}
        return now if more <= now else now | more

    def passed(self, key: Key) -> frozenset[str]:
        """The layers that the data has entered at ``key``; those of an unknown key are none."""
        return self._passed.get(key, frozenset())


def gaps(passed: Sequence[frozenset[str]], taps: Sequence[str], counts: Sequence[bool]) -> list[int]:
    """For each compared tensor, in order of the flow, how many layers without a compared tap were passed since the one
    before. counts: False for parameters, which have no place in the flow: 0."""
    compared = {block_of(tap) for tap, yes in zip(taps, counts, strict=True) if yes}
    out, before = [], 0
    known: dict[frozenset[str], int] = {}
    for layers, yes in zip(passed, counts, strict=True):
        if not yes:
            out.append(0)
            continue
        if layers not in known:
            known[layers] = len(layers - compared)
        out.append(max(known[layers] - before, 0))
        before = max(known[layers], before)
    return out


def _is_param(role: str) -> bool:
    return role.startswith("param.")


def unseen_taps(dump: Any) -> list[str]:
    """Taps of a dump that ran and were not seen: not selected, or inside of what torch.compile made one piece of."""
    out = {s.tap for s in dump.skips if s.reason.startswith("not selected")}
    compiled = {s.tap for s in dump.skips if s.reason.startswith("compiled")}
    if compiled:
        taps = {m.tap for modules in dump.modules.values() for m in modules} | {s.tap for s in dump.skips}
        out |= {t for t in taps if not compiled.isdisjoint((t, *enclosing(t)))}
    return sorted(out)


def _earlier(block: str, other: str) -> bool:
    """Whether two blocks stand in one container, ``block`` first."""
    (here, _, n), (there, _, m) = block.rpartition("."), other.rpartition(".")
    return here == there and int(n) < int(m)


def _place(tap: str, role: str, index: Mapping[str, int]) -> float:
    """Where a tap stands in the model's tree: the root's outputs and the sampler behind everything (even what has no
    place), a tap that is not in the tree before everything."""
    if tap == ROOT_TAP:
        return -1.0 if role.startswith("input") else _BEHIND
    if "." not in tap and tap not in index:
        return _BEHIND
    return float(next((index[t] for t in (tap, *enclosing(tap)) if t in index), -1))
