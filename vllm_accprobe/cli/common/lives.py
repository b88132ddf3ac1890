"""Weights over their life, as lines: what happened to them, and what one dump alone shows to be wrong.

The problem: whether a reload was seen at all, and what it left, is asked before any comparison. The idea: a line for
each finding, one for each event; all events in detail for `show DUMP weights`, a line in all for `summary`. Not here:
what a finding is (judge/weights/), two dumps (compare).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_accprobe.dump.weights.weight_life import Lives

_FINDINGS, _ADAPTERS = 5, 20


def told(lives: Lives | None, whole: bool = False) -> list[str]:
    """[] of a dump that tells nothing of its weights. whole: all findings and events."""
    from vllm_accprobe.judge.weights.histories import side_of, spoken
    from vllm_accprobe.judge.weights.within import faults_within
    from vllm_accprobe.report.text import count, safe

    if lives is None or not lives.events:
        return []
    side = side_of(lives)
    found = faults_within(side, "")
    shown = found if whole else found[:_FINDINGS]
    out = [f"the weights, not the kernel: {safe(f.says, 1000)}, rank {f.rank}" for f in shown]
    if len(shown) < len(found):
        out.append(f"... {len(found) - len(shown):,} more findings about weights: `show DUMP weights` has all")
    prints = Counter((p.rank, p.life) for p in lives.prints)
    for rank, events in sorted(side.events.items()):
        wrong = Counter(f.number for f in found if f.rank == rank)
        names = [safe(spoken(e, events), 200) for e in events]
        if not whole:
            more = f" and {len(names) - _ADAPTERS:,} more" if len(names) > _ADAPTERS else ""
            what = count(sum(wrong.values()), "finding") if wrong else "nothing wrong by this dump alone"
            out.append(f"weights, rank {rank}: {what}; {', '.join(names[:_ADAPTERS])}{more}")
            continue
        for e, name in zip(events, names, strict=True):
            forms = count(prints[rank, e.number], "fingerprint")
            line = f"weights, rank {rank}: {name}, before step {e.step}: {forms} of {e.nbytes:,} bytes"
            line += f" in {e.seconds:.3f} s"
            line += f"; {count(wrong[e.number], 'finding')}" if wrong[e.number] else ""
            out.append(line + (f"; {safe(e.detail)}" if e.detail else ""))
    return out
