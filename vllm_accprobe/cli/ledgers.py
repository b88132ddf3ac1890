"""What a dump says of its states and of its weights over their life, as lines, before any comparison.

A line for each finding and one for each rank; `inspect DUMP states` and `inspect DUMP weights` have all of them. Not
here: what a finding is (judge/weights, dump/journal), two dumps (compare).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_accprobe.dump.reader import Dump
    from vllm_accprobe.dump.weights.weight_life import Lives

_FINDINGS, _ADAPTERS = 5, 20


def state_lines(dump: Dump, n: int = 20) -> list[str]:
    """What the run's own ledger of states has found, and checked."""
    from vllm_accprobe.dump.journal.state_lines import sentence
    from vllm_accprobe.report.text import count, safe

    found, totals = getattr(dump, "states", []), getattr(dump, "state_totals", {})
    out = [f"the cache, not the kernel: {safe(sentence(one), 1000)}, rank {rank}" for rank, one in found[:n]]
    total = max(sum(one.findings for one in totals.values()), len(found))
    if total > n:
        out.append(f'... {total - n:,} more findings of the ledger of states: the journals\' lines "state"')
    for rank, one in sorted(totals.items()):
        what = count(one.findings, "finding") if one.findings else "nothing wrong"
        out.append(
            f"states, rank {rank}: {what}; {safe(one.mode)}: {one.layers:,} layers, {one.steps:,} steps, "
            f"{one.checked:,} blocks checked, {one.hashed:,} hashed, {one.held:,} numbers of metadata"
        )
        if one.events:
            out.append("  events: " + ", ".join(f"{v:,} x {safe(k)}" for k, v in sorted(one.events.items())))
        out += [f"  not watched: {v:,} x {safe(k)}" for k, v in one.skipped.items()]
    return out


def weight_lines(lives: Lives | None, whole: bool = False) -> list[str]:
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
        out.append(f"... {len(found) - len(shown):,} more findings about weights: `inspect DUMP weights` has all")
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
