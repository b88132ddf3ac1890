"""``accprobe gate A B --localize --heal``: the culprit is healed in mine's server, and the gate is repeated.

The problem: a comparison names the operator that is wrong first; whether it is the only cause shows when it is right.
The idea: mine's command is started with VLLM_ACCPROBE_HEAL in front of it, and gated against golden's answers and
floors as they are. Where it still fails, both are captured again, now with a healed operator, and the comparison names
what remains; that is healed, too. One operator in several layers is one cause. Each round is a folder, heal-1,
heal-2; the same command goes on.
Not here: healing (heal/), the gate and what follows its failure (gate_run.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_accprobe.cli import gate_run
from vllm_accprobe.gate.localize import Localized
from vllm_accprobe.gate.sides import COMMAND, FOLDER, SendSettings, ServerSide, side
from vllm_accprobe.heal import outcome
from vllm_accprobe.report import facts, servers
from vllm_accprobe.report.text import safe

MOST = 4
"""Chosen: rounds, each of which starts one server, or three."""
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class HealRound:
    """healed: globs, one for each cause; verdict: of the gate with them healed; remains: the module that is named then,
    "" for none; why: what ends the search, "" where the next round follows."""

    healed: tuple[str, ...]
    verdict: str | None
    remains: str
    why: str


@dataclass(frozen=True)
class Healing:
    """What all rounds have in common. what: gate.GateOptions; opened: the gate that has failed."""

    what: Any
    opened: gate_run.Opened
    sending: SendSettings
    gigabytes: float
    say: Callable[[str], None]

    def rounds(self, found: Localized) -> list[HealRound]:
        """found: the culprit, of `gate_run.localize`. Raises CommandError, NothingThere."""
        done: list[HealRound] = []
        healed: tuple[str, ...] = ()
        module, why = culprit(found)
        while not why and len(done) < MOST:
            healed = with_cause(healed, module)
            self.say(f"heal: {', '.join(map(safe, healed))}")
            one = self._round(healed, len(done) + 1)
            done.append(one)
            module, why = one.remains, one.why
        self.say(why or f"heal: {MOST} causes are healed, and more remain")
        if done and done[-1].verdict != "fail":
            chosen = shlex.quote(",".join(healed))
            self.say("what they cost in an evaluation: run it on mine and on the healed server, then compare")
            self.say(f"  accprobe run --heal {chosen} -- COMMAND")
            self.say("  accprobe eval-diff HEALED-RUN MINE-RUN")
        return done

    def _round(self, healed: tuple[str, ...], number: int) -> HealRound:
        place = self.what.out / f"heal-{number}"
        assignment = f"VLLM_ACCPROBE_HEAL={shlex.quote(','.join(healed))}"
        report = f"VLLM_ACCPROBE_DIR={shlex.quote(str((place / 'mine-healed').absolute()))}"
        golden, floor = str(self.opened.golden.path), [str(f.path) for f in self.opened.floors]
        what = replace(self.what, golden=golden, mine=f"{assignment} {report} {self.what.mine}", out=place, floor=floor,
                       floor_dtype="", no_floor=True)  # fmt: skip
        again = gate_run.compare(what, self.sending)
        outcomes = outcome.read(place / "mine-healed")
        for line in outcome.lines(outcomes):
            self.say(f"  {safe(line, 400)}")
        self.say(f"  {servers.headline(again.gate)}")
        verdict = again.gate.numbers
        if not any(n for one in outcomes for n in one.healed.values()):
            return HealRound(healed, verdict, "", f"heal: {', '.join(map(safe, healed))} cannot be healed, see above")
        causes = f"{len(healed)} cause{'s' * (len(healed) > 1)}"
        it = "it" if len(healed) == 1 else "them"
        if verdict == "pass":
            return HealRound(healed, verdict, "", f"with {it} healed the servers agree: {causes}")
        if verdict is None:  # these prompts showed the fault, and could show less only if there were more of them
            why = f"with {it} healed no difference is seen: {causes}, as far as these prompts show"
            return HealRound(healed, verdict, "", why)
        commands = ServerSide(COMMAND, self.what.golden), ServerSide(COMMAND, f"{assignment} {self.what.mine}")
        failed = gate_run.FailedGate(again.golden, again.mine, again.gate.worst, commands)
        found = gate_run.localize(failed, place, self.sending, self.gigabytes, self.say)
        module, why = ("", "no single token is beyond its limit") if found is None else culprit(found)
        if why:
            return HealRound(healed, verdict, module, f"with {it} healed the servers still differ; {why}")
        if covered(module, healed):
            why = (f"and {safe(module)} is still named: it computes what its weights, settings and inputs ask for, or "
                   "it could not be healed in these rows")  # fmt: skip
            return HealRound(healed, verdict, module, f"with {it} healed the servers still differ, {why}")
        self.say(f"a {'second' if len(healed) == 1 else 'further'} one remains: {safe(module)}")
        return HealRound(healed, verdict, module, "")


def culprit(found: Localized) -> tuple[str, str]:
    """(the module that can be healed, why none can)."""
    if found.origin is None:
        return "", "heal: no culprit is named that could be healed"
    module = facts.tap_of(found.origin)
    if found.origin.get("gap"):
        return module, f"heal: what is wrong lies unseen before {safe(module)}, which may be right itself"
    return module, ""


def with_cause(healed: Sequence[str], module: str) -> tuple[str, ...]:
    """``healed`` with one more: of the same operator in other layers a glob takes the place."""
    everywhere = _LAYER.sub("*", module)
    if any(_LAYER.sub("*", one) == everywhere for one in healed):
        return tuple(everywhere if _LAYER.sub("*", one) == everywhere else one for one in healed)
    return (*healed, module)


def covered(module: str, healed: Sequence[str]) -> bool:
    """Whether it is healed already."""
    return any(module == one or ("*" in one and _LAYER.sub("*", module) == one) for one in healed)


def heal(
    what: Any, opened: gate_run.Opened, found: Localized | None, sending: SendSettings, gigabytes: float,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """The ``heal`` of gate's json. what: gate.GateOptions. Raises CommandError, NothingThere."""
    if found is None or what.out is None:
        return []
    kinds = {side(what.golden).kind, side(what.mine).kind}
    if kinds != {COMMAND}:
        kind = "a folder" if FOLDER in kinds else "a URL"
        say(f"heal: {kind} cannot be started with a healed operator: name commands, or use `accprobe run --heal`")
        return []
    return [asdict(one) for one in Healing(what, opened, sending, gigabytes, say).rounds(found)]
