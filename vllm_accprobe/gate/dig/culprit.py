"""What the comparison of a dig says: the culprit, its token, and whether the fault showed while it was captured.

The problem: a capture changes a server (it is slower, and eager unless told otherwise), so a comparison that finds
nothing may have looked at a server without the fault. The idea: the answers that came back while it was captured are
measured as the gate's were; where the target's gap is gone, that is said, and why it may be.
Not here: comparing (comparison/), sentences (report/servers/dig_lines.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.dig.choose import DigPlan
from vllm_accprobe.gate.dig.recapture import Dig
from vllm_accprobe.gate.measure.token_gaps import gaps
from vllm_accprobe.gate.sending import steps as steps_log
from vllm_accprobe.gate.sending.replies import Sent

SHOWS = 0.5
"""Chosen: of the gate's gap at the target; a captured run batches otherwise, and rounding moves a gap by less."""
_PASS = ".pass"
EAGER = b"the engine is made eager"
"""What the plugin says (plugin.py)."""
_START = 1 << 20


@dataclass(frozen=True)
class Dug:
    """verdict, origin: of compare.json, origin None where nothing is one; others: how many more. gap: at the target
    while captured, None where it is not known. token: the culprit's place as (prompt, pass, ordinal), None where it is
    none of a request that was sent. eager: mine was made eager for the capture. look: commands."""

    plan: DigPlan
    verdict: str
    origin: Mapping[str, Any] | None
    others: int
    gap: float | None
    token: tuple[str, int, int] | None
    eager: bool
    look: tuple[str, ...]

    @property
    def shows(self) -> bool | None:
        """Whether the difference was there while captured; None where that is not known."""
        return None if self.gap is None else self.gap >= SHOWS * self.plan.target.gap

    def to_json(self) -> dict[str, Any]:
        """The ``dig`` of gate's json."""
        where = None if self.token is None else dict(zip(("prompt", "pass", "ordinal"), self.token, strict=True))
        return {
            "plan": self.plan.to_json(), "verdict": self.verdict, "culprit": self.origin, "token": where,
            "other_origins": self.others, "gap_while_captured": self.gap, "eager": self.eager, "look": list(self.look),
        }  # fmt: skip


def dug(dig: Dig, compared: Path, golden: Sent) -> Dug:
    """compared: the folder of the comparison. golden: the gate's, whose prompts the culprit's request is one of. Raises
    OSError, ValueError."""
    said = json.loads((compared / "compare.json").read_bytes())
    origins = said.get("origins") or []
    origin = origins[0] if origins else None
    return Dug(
        dig.plan, str(said.get("verdict")), origin, max(len(origins) - 1, 0), _gap(dig), _token(origin, golden),
        made_eager(dig.sent("mine") / "engine-0.log"), commands(dig.dump("golden"), dig.dump("mine"), dig.root),
    )  # fmt: skip


def made_eager(log: Path) -> bool:
    """Whether the engine would have compiled or captured graphs, had it not been captured: it says so at its start."""
    try:
        with log.open("rb") as f:
            return EAGER in f.read(_START)
    except OSError:
        return False


def commands(golden: Path, mine: Path, out: Path) -> tuple[str, ...]:
    """To look further."""
    words = [
        ("accprobe", "compare", golden, mine, "--out", out / "compare", "--verbose"),
        ("accprobe", "opcheck", mine, "--out", out / "opcheck"),
        ("accprobe", "gentest", mine, "--failed", "--out", out / "gentest"),
    ]
    return tuple(shlex.join(map(str, line)) for line in words)


def _gap(dig: Dig) -> float | None:
    """As the gate's: root mean square over the tokens that golden lists."""
    target = dig.plan.target
    index = len(dig.plan.words) - 1
    sides = [dig.replies(side).passes for side in ("golden", "mine")]
    pair = [p[index].get(target.name) if index < len(p) else None for p in sides]
    if pair[0] is None or pair[1] is None:
        return None
    found, _, _ = gaps(pair[0], pair[1])
    return next((t.distance for t in found if t.position == target.position), None)


def _token(origin: Mapping[str, Any] | None, golden: Sent) -> tuple[str, int, int] | None:
    if origin is None or type(origin.get("position")) is not int:
        return None
    asked = str(origin.get("request"))
    for index in range(len(golden.passes)):
        name = asked.removesuffix(f"{_PASS}{index}") if index else asked
        reply = golden.passes[0].get(name)
        if reply is not None and reply.prompt_token_ids and steps_log.request_id(name, index) == asked:
            return name, index, max(int(origin["position"]) - len(reply.prompt_token_ids) + 1, 0)
    return None
