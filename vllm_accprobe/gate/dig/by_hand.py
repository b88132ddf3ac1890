"""A dig that a person does: the commands, where a side cannot be started from here.

The problem: golden stands on a GPU in another room, and this machine has a URL of it, or only its folder. The idea: the
same capture is a few settings in front of each side's own command, because a request's name tells its pass; the same
prompts in the same passes are one `accprobe send --teacher-force`. Commands may hold keys, so COMMAND stands for them.
Not here: what is captured (choose.py).
"""

from __future__ import annotations

import shlex
from pathlib import Path

from vllm_accprobe.arm_file import literal
from vllm_accprobe.gate.dig.choose import DigPlan


def lines(plan: DigPlan, golden: Path, gigabytes: float) -> list[str]:
    """golden: the folder along which both sides are sent."""
    found = []
    for side in ("golden", "mine"):
        found += [
            f"{side}, on its machine (COMMAND: what serves it there; end it with SIGTERM or Ctrl-C when all is sent):",
            f"  {settings(plan, side, gigabytes)} COMMAND",
            f"  {shlex.join(['accprobe', 'send', '--teacher-force', str(golden), '--url', 'URL'])} --out {side}-dig",
        ]
    return [*found, "anywhere:", "  accprobe compare golden-dump mine-dump --out compare"]


def settings(plan: DigPlan, side: str, gigabytes: float) -> str:
    """The environment of a side's command."""
    requests = ",".join(literal(name) for window in plan.windows for name in window.requests)
    first, last = min(w.first for w in plan.windows), max(w.last for w in plan.windows)
    given = {
        "": "1", "_FORCE": "1", "_DIR": f"{side}-dump", "_MAX_GB": f"{gigabytes:g}", "_REQUESTS": requests,
        "_TOKENS": f"{first}-{last}" if last > first else str(first),
    }  # fmt: skip
    return " ".join(f"VLLM_ACCPROBE{name}={shlex.quote(value)}" for name, value in given.items())
