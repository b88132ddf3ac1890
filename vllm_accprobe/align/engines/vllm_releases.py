"""Places that hold another tensor in another release of vLLM, under the same name.

The problem: up to 0.18 a mixture's experts give out the shared experts' result and the routed ones' apart
(SharedFusedMoE), and the block adds them; later releases add inside, so that ``experts/output.0`` of the two is not one
thing. Up to 0.11 the block calls the shared experts itself, and its experts are the routed ones alone. The idea: where
one side has both and the other has one, their sum is what is compared; where one side's are the routed ones alone, they
are held against what the other's routed ones gave inside, or against nothing. Rules like those of a mapping file, made
for just these taps. Not here: how rules work (mapping.py, names.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_accprobe.align.mapping import RoleRule, Rules, Source, TapRule
from vllm_accprobe.dump.schema import Record

_APART = "SharedFusedMoE"
_SHARED = (".shared_expert", ".shared_experts", ".experts._shared_experts._layer")
"""Names of a block's shared experts, below the block."""
_INNER = (".routed_experts.quant_method", ".quant_method")
"""Names of what gives the routed sum inside of experts that add, below them."""
_ROUTED = "output.0 of the routed experts alone ← quant_method's"
_LABEL = "output.0+output.1 (shared and routed experts) ← output.0"


def experts_apart(golden: Iterable[Record], mine: Iterable[Record]) -> tuple[Rules, bool] | None:
    """(rules; whether golden is the side that gives them out apart), None where there is no such tap."""
    one, other = _outputs(golden), _outputs(mine)
    for apart, whole, swapped in ((other, one, False), (one, other, True)):
        taps = [t for t, (cls, roles) in apart.items() if cls == _APART and len(roles) == 2 and _has_one(whole.get(t))]
        if taps:
            return Rules("vLLM's releases", exact={tap: (_rule(tap),) for tap in taps}), swapped
    return None


def routed_alone(golden: Iterable[Record], mine: Iterable[Record]) -> tuple[Rules, bool, frozenset[str]] | None:
    """(rules; whether golden is the side whose experts are the routed ones alone; taps of which the other side has no
    routed sum, whose outputs are nothing to compare), None where both sides add at one place."""
    one, other = _Blocks(golden), _Blocks(mine)
    for alone, whole, swapped in ((other, one, False), (one, other, True)):
        taps = [tap for tap in alone.outside if tap in whole.inside]
        if taps:
            sources = {tap: next((s for s in (tap + i for i in _INNER) if s in whole.outputs), None) for tap in taps}
            exact = {tap: (TapRule(tap, (RoleRule("output.0", (Source(s, "output.0"),)),), _ROUTED),)
                     for tap, s in sources.items() if s}  # fmt: skip
            absent = frozenset(tap for tap, s in sources.items() if not s)
            return Rules("vLLM's releases", exact=exact), swapped, absent
    return None


class _Blocks:
    """outside, inside: taps of experts whose block calls shared ones beside them, or that call them; outputs: taps
    with an output.0."""

    def __init__(self, records: Iterable[Record]):
        first: dict[str, dict[str, int]] = {}  # by tap: role → where it comes first
        for r in records:
            if r.step is not None:
                first.setdefault(r.tap, {}).setdefault(r.role, r.seq)
        self.outputs = {tap for tap, roles in first.items() if "output.0" in roles}
        self.outside: list[str] = []
        self.inside: set[str] = set()
        for tap in [t for t in first if t.endswith(".experts")]:
            block = tap.removesuffix(".experts")
            shared = next((name for name in _SHARED if block + name in self.outputs), None)
            begin = min((seq for role, seq in first[tap].items() if role.startswith("input.")), default=None)
            end = first[tap].get("output.0")
            if shared is None or begin is None or end is None:
                continue
            if begin < first[block + shared]["output.0"] < end:
                self.inside.add(tap)
            else:
                self.outside.append(tap)


def _rule(tap: str) -> TapRule:
    return TapRule(tap, (RoleRule("output.0+output.1", (Source(tap, "output.0"),)),), _LABEL)


def _has_one(found: tuple[str, set[str]] | None) -> bool:
    return found is not None and found[1] == {"output.0"}


def _outputs(records: Iterable[Record]) -> dict[str, tuple[str, set[str]]]:
    """Of taps called experts: class and outputs."""
    found: dict[str, tuple[str, set[str]]] = {}
    for r in records:
        if r.tap.endswith("experts") and r.role.startswith("output."):
            found.setdefault(r.tap, (r.cls, set()))[1].add(r.role)
    return found
