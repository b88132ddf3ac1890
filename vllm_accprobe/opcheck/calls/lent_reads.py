"""What an operator read, where its inputs were not captured: outputs of others, as the other side's bytes tell.

The problem: taps in compiled graphs hold outputs alone, and an operator without its inputs cannot be run again. The
idea: the other side, an eager golden, says by equal bytes whose output each input is (comparison/plan/links.py); mine's
own output of that name is then what mine's operator read. A call is lent its inputs only where all that golden's call
had can be told. A compiler fuses what is computed element by element and keeps float32 in between: such an operator
read a number that nobody rounded, and its output may be off by what half a unit of each input makes
(reference_table.py); what reads memory, a product or an attention, read what was captured.
Not here: inputs that are slices or sums of outputs, which no bytes tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from vllm_accprobe.comparison.plan.links import STEPS, Makers
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.judge.flow import Key
from vllm_accprobe.opcheck.calls.module_index import ModuleIndex

_FROM_MEMORY = re.compile(r"Linear|Embedding|Attention|Experts|MoE|LogitsProcessor|LMHead")
"""Classes whose kernels are none of the compiler's own, and read their inputs from memory."""
Links = Mapping[tuple[str, int], Mapping[str, Key]]
"""(tap, call) → input role → whose output it is; calls all of whose inputs can be told."""


def lend(giver: ModuleIndex, taker: ModuleIndex) -> int:
    """Adds to ``taker``'s calls the inputs that it did not capture, as far as ``giver`` tells what they are; how many
    calls have got any."""
    blind = [place for place, calls in taker.by_tap.items() if not _any_input(calls.values())]
    if not blind:
        return 0
    links = links_of(giver)
    engine = taker.dump.run.get("engine")
    fused = isinstance(engine, Mapping) and isinstance(engine.get("graphs"), Mapping)
    lent = 0
    for rank, tap in blind:
        cls = taker.cls_of(rank, tap)
        for (step, n), records in taker.by_tap[rank, tap].items():
            found = links.get((tap, n), {})
            made = {role: taker.records_of(rank, m[0], step, m[2]).get(m[1]) for role, m in found.items()}
            if not made or any(r is None or r.payload is None for r in made.values()):
                continue
            first = next(iter(records.values()))
            records |= {
                role: replace(r, tap=tap, cls=first.cls, role=role, call=n) for role, r in made.items() if r is not None
            }
            lent += 1
            if fused and not _FROM_MEMORY.search(cls):
                taker.unrounded.add((rank, tap))
    return lent


def links_of(giver: ModuleIndex) -> Links:
    """By the steps of the dump's lowest rank."""
    rank = min((r for r, _ in giver.by_tap), default=0)
    records: dict[Key, list[Record]] = {}
    first: dict[Key, tuple[int, int]] = {}
    for (r, tap), calls in giver.by_tap.items():
        for (step, n), held in sorted(calls.items()) if r == rank else ():
            for role, record in held.items():
                records.setdefault((tap, role, n), []).append(record)
                first.setdefault((tap, role, n), (step, record.seq))
    order = {key: i for i, key in enumerate(sorted(first, key=lambda k: first[k]))}
    makers = Makers(order, {key: found[:STEPS] for key, found in records.items()})
    inputs: dict[tuple[str, int], dict[str, Key | None]] = {}
    for tap, role, n in order:
        if role.startswith("input."):
            inputs.setdefault((tap, n), {})[role] = makers.maker((tap, role, n))
    return {
        call: {role: maker for role, maker in told.items() if maker is not None}
        for call, told in inputs.items() if all(maker is not None for maker in told.values())
    }  # fmt: skip


def _any_input(calls: Iterable[Mapping[str, Record]]) -> bool:
    return any(role.startswith("input.") for records in calls for role in records)
