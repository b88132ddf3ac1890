"""Places that hold another tensor in another release of vLLM, under the same name.

The problem: up to 0.18 a mixture's experts give out the shared experts' result and the routed ones' apart
(SharedFusedMoE), and the block adds them; later releases add inside, so that ``experts/output.0`` of the two is not one
thing. The idea: where one side has both and the other has one, their sum is what is compared; a rule like that of a
mapping file, made for just these taps. Not here: how rules work (mapping.py, bridge.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_accprobe.align.mapping import RoleRule, Rules, Source, TapRule
from vllm_accprobe.dump.schema import Record

_APART = "SharedFusedMoE"
_LABEL = "output.0+output.1 (shared and routed experts) ← output.0"


def experts_apart(golden: Iterable[Record], mine: Iterable[Record]) -> tuple[Rules, bool] | None:
    """(rules; whether golden is the side that gives them out apart), None where there is no such tap."""
    one, other = _outputs(golden), _outputs(mine)
    for apart, whole, swapped in ((other, one, False), (one, other, True)):
        taps = [t for t, (cls, roles) in apart.items() if cls == _APART and len(roles) == 2 and _has_one(whole.get(t))]
        if taps:
            return Rules("vLLM's releases", exact={tap: (_rule(tap),) for tap in taps}), swapped
    return None


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
