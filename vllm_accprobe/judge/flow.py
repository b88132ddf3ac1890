"""The order in which data flows through the taps, and which tap stands inside which.

The problem: "first" must mean first in the flow of data, but no single step shows every tap: images, logits and
sampling come and go. The idea: the sequence numbers of one step order its taps; taps that first appear in a later step
are put right before the known tap that follows them there, or else right behind the one that they follow. Whether rows
mix is told from the class: attention and its like do, and so does everything that contains one; what is plainly row by
row does not; the unknown is taken to mix, because that accuses nobody wrongly.
Not here: errors (verdict.py), blame (origin.py), the layers passed (unseen.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.dump.schema import ROOT_TAP, Module

Key = tuple[str, str, int]
"""(tap, role, call)."""
_MIXES = re.compile(r"attention|attn|mamba|ssm|conv|recurrent|retention|rwkv|delta|mixer|lstm|gru", re.I)
_ROWWISE = re.compile(
    r"linear|norm|embed|rotary|rope|act|silu|gelu|relu|mul|mlp|feedforward|ffn|moe|expert|router|gate|logits|sampler"
    r"|lmhead|dropout|identity",
    re.I,
)


def flow_order(records: Iterable[tuple[int, int, int, Key]]) -> list[Key]:
    """Orders keys from (step, rank, seq, key) of every record that has a step."""
    moments: dict[tuple[int, int], list[tuple[int, Key]]] = {}
    for step, rank, seq, key in records:
        moments.setdefault((step, rank), []).append((seq, key))
    ordered: list[Key] = []
    known: set[Key] = set()
    for moment in sorted(moments):
        if all(key in known for _, key in moments[moment]):
            continue
        sequence = list(dict.fromkeys(key for _, key in sorted(moments[moment], key=lambda item: item[0])))
        fresh: list[Key] = []
        for key in sequence:
            if key not in known:
                fresh.append(key)
            elif fresh:
                # Before what follows: the vision tower before the model, a later pipeline stage before the end.
                at = ordered.index(key)
                ordered[at:at] = fresh
                fresh = []
        if fresh:
            previous = [k for k in sequence[: sequence.index(fresh[0])] if k in known]
            at = ordered.index(previous[-1]) + 1 if previous else len(ordered)
            ordered[at:at] = fresh
        known.update(sequence)
    return ordered


def add_parameters(
    ordered: Sequence[Key], parameters: Iterable[tuple[str, str]], modules: Sequence[Module]
) -> list[Key]:
    """Puts each (tap, role) of a parameter before its tap's first tensor, or, for a tap that never ran as a module,
    behind the last tensor of the module that stands before it in the model's tree."""
    by_tap: dict[str, list[Key]] = {}
    for tap, role in parameters:
        by_tap.setdefault(tap, []).append((tap, role, 0))
    if not by_tap:
        return list(ordered)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, (tap, _, _) in enumerate(ordered):
        first.setdefault(tap, i)
        last[tap] = i
    put: dict[float, list[Key]] = {}
    place = -1.0
    index = [m.tap for m in sorted(modules, key=lambda m: m.index)]
    for tap in index + [t for t in by_tap if t not in set(index)]:
        if tap in by_tap:
            put.setdefault(first[tap] - 0.5 if tap in first else place + 0.25, []).extend(by_tap.pop(tap))
        if tap in last and tap != ROOT_TAP:
            place = float(last[tap])
    out = [(float(i), key) for i, key in enumerate(ordered)]
    out += [(at, key) for at, keys in put.items() for key in keys]
    return [key for _, key in sorted(out, key=lambda item: item[0])]  # stable: what is put at one place keeps its order


@dataclass
class Tree:
    """The taps of one dump that have tensors. parent: nearest enclosing tap; children likewise; all in flow order.

    A tap encloses those whose paths begin with its own, and a neighbour that runs while it runs (the logits processor
    calls lm_head)."""

    classes: Mapping[str, str]
    parent: dict[str, str | None] = field(default_factory=dict)
    children: dict[str | None, list[str]] = field(default_factory=dict)
    mixing: dict[str, bool] = field(default_factory=dict)

    @staticmethod
    def of(taps: Sequence[str], classes: Mapping[str, str], spans: Mapping[str, tuple[int, int]] | None = None) -> Tree:
        """spans: for taps with inputs and outputs, the places of the first and the last of them in the flow."""
        tree = Tree(classes)
        known = set(taps)
        for tap in taps:
            tree.parent[tap] = _parent(tap, known)
        for tap, up in list(tree.parent.items()):
            if up is not None and spans:
                around = [s for s in taps if s != tap and tree.parent[s] == up and _during(spans, tap, s)]
                if around:
                    tree.parent[tap] = min(around, key=lambda s: spans[s][1] - spans[s][0])
        for tap in taps:
            tree.children.setdefault(tree.parent[tap], []).append(tap)
        for tap in sorted(dict.fromkeys(taps), key=lambda t: -len(tree.above(t))):
            cls = classes.get(tap, "")
            inside = any(tree.mixing[c] for c in tree.children.get(tap, ()))
            tree.mixing[tap] = inside or mixes(tap, cls)
        return tree

    def above(self, tap: str) -> list[str]:
        """The taps that enclose ``tap``, nearest first."""
        out = []
        up = self.parent.get(tap)
        while up is not None:
            out.append(up)
            up = self.parent.get(up)
        return out


def _during(spans: Mapping[str, tuple[int, int]], tap: str, other: str) -> bool:
    """Whether ``tap`` ran while ``other`` ran."""
    if tap not in spans or other not in spans:
        return False
    return spans[other][0] < spans[tap][0] and spans[tap][1] < spans[other][1]


def _parent(tap: str, known: set[str]) -> str | None:
    if tap == ROOT_TAP:
        return None
    return next((up for up in (*enclosing(tap), ROOT_TAP) if up in known), None)


def mixes(tap: str, cls: str) -> bool:
    """Whether a row of the output depends on other rows of the input."""
    what = cls or tap.rpartition(".")[2].replace("_", "")
    plain = re.search(r"norm|linear|embed|rotary|rope", what, re.I)
    if _MIXES.search(what) and not plain:
        return True
    return not _ROWWISE.search(what)
