"""Does a tap inside a compiled graph change what is computed: runs, compared, and the module whose tap does.

The problem: a tap is an operator in the middle of what a compiler fuses, so that capturing may change the very numbers
that it shows; and an engine that does not repeat itself would look as if it did. The idea: two runs without taps say
whether bits are a standard at all; then the runs with taps are held against the first. Where bits differ, taps are
placed at the first half of the modules, and so on: the first N leave all bits as they were, and the first N + 1 do not.
That holds whatever the taps do together. Not here: how a run is carried out (carrying.py), what is compared
(same_bits.py), the words (telling.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_accprobe.config import ConfigError
from vllm_accprobe.doctor.graphs.runs import AGAIN, Runs, TapRun
from vllm_accprobe.doctor.graphs.same_bits import Bits, Effect, Parting, decides, first_parting, outcome
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.recorder.amend import amend_graphs
from vllm_accprobe.dump.schema import ROOT_TAP

SAME, CHANGED, UNKNOWN = "same", "changed", "unknown"


@dataclass(frozen=True)
class Ran:
    """A run that was carried out. answers: hashes of a server's answers. outcome: against the first run without taps;
    None for that run itself. parting: against ``on``, for a run with other taps or fewer chosen ones."""

    name: str
    place: str
    seconds: float
    graphs: dict[str, Any]
    answers: tuple[str, ...] = ()
    outcome: Effect | None = None
    same_answers: bool | None = None
    parting: Parting | None = None

    @property
    def taps(self) -> int:
        """How many were placed."""
        return int(self.graphs.get("taps") or 0)

    @property
    def same(self) -> bool | None:
        """Whether it gave what the first run without taps gave; None where nothing could be compared."""
        known = [x for x in (self.same_answers, self.outcome.same if self.outcome else None) if x is not None]
        return all(known) if known else None


@dataclass(frozen=True)
class Culprit:
    """``module``: taps at the ``before`` modules in front of it change no bit, and with one at it bits change.
    run: which run was looked into; ran: how many runs it took. module "": taps at all places change nothing as long as
    none is chosen."""

    run: str
    module: str
    before: int
    ran: int
    root_rel_l2: float | None


@dataclass(frozen=True)
class TapProof:
    """verdict: SAME, CHANGED, or UNKNOWN with the reason ``why``. repeats: whether two runs without taps agree."""

    verdict: str
    why: str
    runs: tuple[Ran, ...]
    repeats: bool | None = None
    culprits: tuple[Culprit, ...] = ()
    notes: tuple[str, ...] = ()


Serve = Callable[[TapRun], Sequence[str]]
"""Carries out a run to its end, and gives hashes of a server's answers; none for a program."""


class Prover:
    """Carries out the runs of one proof and compares them. say: gets a line whenever something is known."""

    def __init__(self, runs: Runs, serve: Serve, say: Callable[[str], None], clock: Callable[[], float]):
        self._runs, self._serve, self._say, self._clock = runs, serve, say, clock
        self._bits: dict[str, Bits] = {}
        self._ran: list[Ran] = []

    def prove(self, *, full: bool = False, bisect: bool | None = None) -> TapProof:
        """All of it. full: a run with taps at all modules, too. bisect: whether to look for the module whose tap
        changes bits; None: for the user's own taps, and not for the full set. Raises DumpError and what the runs do.
        """
        first = self._do(self._runs.off())
        off = self._bits[first.name].dump
        self._say(f"{3 + full} more runs, about {_minutes((3 + full) * first.seconds)} in all")
        why = _nothing(off)
        if why:
            return self._end(UNKNOWN, why)
        again = self._do(self._runs.off(AGAIN))
        on = self._do(self._runs.on())
        if not on.taps:
            return self._end(UNKNOWN, f"no taps were placed: {_refusal(self._bits[on.name].dump)}", again.same)
        dump = self._bits[on.name].dump
        steps = sorted({step for _, step in dump.steps})
        selected = self._do(self._runs.selected(recorded(dump), steps, everywhere=on.graphs.get("set") == "full"))
        notes = []
        if selected.graphs.get("key") != on.graphs.get("key"):
            notes.append("`selected` has other taps than `on`: choosing modules has compiled the model again")
        every = self._do(self._runs.full()) if full else None
        if again.same is None:
            return self._end(UNKNOWN, "no token, no logits and no output of the model were recorded", None, notes)
        if not again.same:
            why = "two runs without taps differ already: this engine does not repeat itself, so bits are no standard"
            if again.outcome is not None and not again.outcome.batches:
                why += "; their batches differed: send requests one at a time"
            return self._end(UNKNOWN, why, False, notes)
        culprits = []
        wrong = on.same is False or selected.same is False
        if on.same is False and bisect is not False:
            culprits.append(self._culprit(on, notes))
        if every is not None and every.same is False and bisect:
            culprits.append(self._culprit(every, notes))
        found = tuple(one for one in culprits if one is not None)
        return self._end(CHANGED if wrong else SAME, "", True, notes, found)

    # --- one run -----------------------------------------------------------------------------------------------

    def _do(self, run: TapRun) -> Ran:
        began = self._clock()
        answers = tuple(self._serve(run))
        seconds = self._clock() - began
        bits = Bits(open_dump(run.place))
        self._bits[run.name] = bits
        engine = bits.dump.run.get("engine")
        graphs = engine.get("graphs") if isinstance(engine, dict) else None
        ran = Ran(run.name, str(run.place), seconds, graphs if isinstance(graphs, dict) else {}, answers)
        if self._ran:
            first = self._ran[0]
            said = outcome(self._bits[first.name], bits)
            same = answers == first.answers if answers or first.answers else None
            # Fewer chosen ones must show the values that all of them show.
            on = next((bits for name, bits in self._bits.items() if name == "on"), None)
            parting = first_parting(on, bits) if on is not None and on is not bits else None
            ran = replace(ran, outcome=said, same_answers=same, parting=parting)
        self._ran.append(ran)
        self._say(f"{run.name}: {seconds:.0f} s, {ran.taps} taps" + _said(ran))
        return ran

    # --- which module ------------------------------------------------------------------------------------------

    def _culprit(self, changed: Ran, notes: list[str]) -> Culprit | None:
        modules = placed(self._bits[changed.name].dump, changed.graphs)
        try:
            self._runs.first(changed.name, modules)
        except ConfigError as error:
            notes.append(f"which module it is was not looked for: {error}")
            return None
        if not modules:
            return None
        most = (len(modules) - 1).bit_length() + 1
        self._say(
            f"the taps of `{changed.name}` change the result; which of {len(modules)}: at most {most} more runs, about "
            f"{_minutes(most * changed.seconds)}"
        )
        tried: dict[int, Ran] = {}

        def differs(count: int) -> bool:
            if count not in tried:
                tried[count] = self._do(self._runs.first(changed.name, modules[:count]))
            return tried[count].same is False

        count = first_change(len(modules), differs)
        if count == len(modules) and not differs(count):  # not the graph, but what is done with it
            return Culprit(changed.name, "", count, len(tried), None)
        said = tried[count].outcome
        far = None if said is None else said.root.rel_l2
        return Culprit(changed.name, modules[count - 1], count - 1, len(tried), far)

    def _end(
        self, verdict: str, why: str, repeats: bool | None = None, notes: Sequence[str] = (),
        culprits: tuple[Culprit, ...] = (),
    ) -> TapProof:  # fmt: skip
        blamed = {one.run: one.module for one in culprits}
        if repeats is not None:
            for ran in self._ran:
                if ran.taps and ran.outcome is not None:
                    changed = _amended(ran, repeats, blamed.get(ran.name))
                    amend_graphs(self._bits[ran.name].dump.path, {"changed": changed})
        return TapProof(verdict, why, tuple(self._ran), repeats, culprits, tuple(notes))


def first_change(count: int, differs: Callable[[int], bool]) -> int:
    """The smallest n that this finds with differs(n) and not differs(n - 1), given not differs(0) and differs(count):
    log2(count) questions. Each answer stands for itself: nothing is supposed of the numbers that were not asked for."""
    same, changed = 0, count
    while changed - same > 1:
        middle = (same + changed) // 2
        if differs(middle):
            changed = middle
        else:
            same = middle
    return changed


def recorded(dump: Dump) -> list[str]:
    """Modules inside whose outputs the dump has, in order of execution."""
    order: dict[str, int] = {}
    for record in dump.records:
        if record.step is not None and record.role.startswith("output.") and not decides(record.tap):
            order.setdefault(record.tap, record.seq)
    return sorted(order, key=order.__getitem__)


def placed(dump: Dump, graphs: dict[str, Any]) -> list[str]:
    """Modules that have a tap, in order of execution: as they were recorded, where all of them were, else as run.json
    names them piece by piece, with what stands between pieces where it can be told."""
    seen = recorded(dump)
    pieces = graphs.get("pieces")
    if not isinstance(pieces, list):
        return seen
    between = [str(path) for path in graphs.get("between") or ()]
    told: list[str] = []
    for number, piece in enumerate(pieces):
        told += [str(path) for path in piece]
        if len(between) == len(pieces) - 1 and number < len(between):
            told.append(between[number])
    told = list(dict.fromkeys([*told, *between]))
    return [path for path in seen if path in told] if set(told) <= set(seen) else told


def _nothing(dump: Dump) -> str:
    """Why this dump can prove nothing; "" where it can."""
    engine = dump.run.get("engine")
    if isinstance(engine, dict) and engine.get("eager"):
        return "the engine is eager: nothing is compiled, and no taps are in graphs"
    if not dump.records:
        return "nothing was captured; `accprobe doctor` looks for the reason"
    return ""


def _refusal(dump: Dump) -> str:
    return next((skip.reason for skip in dump.skips if skip.tap == ROOT_TAP), "the dump does not say why")


def _amended(ran: Ran, repeats: bool, module: str | None) -> dict[str, Any]:
    """``engine.graphs.changed`` of a run with taps: what they changed."""
    said = ran.outcome
    assert said is not None
    changed: dict[str, Any] = {
        "tokens": differs(said.tokens.same), "top_logits": differs(said.top_logits.same),
        "logits": differs(said.logits.same), "root": differs(said.root.same),
        "root_rel_l2": number(said.root.rel_l2), "against": "off", "repeats": repeats,
    }  # fmt: skip
    return changed | ({"module": module} if module else {})


def differs(same: bool | None) -> bool | None:
    """The opposite; None stays."""
    return None if same is None else not same


def number(value: float | None) -> float | None:
    """As JSON can say it."""
    return value if value is not None and math.isfinite(value) else None


def _said(ran: Ran) -> str:
    return "" if ran.same is None else ", the same bits as off" if ran.same else ", OTHER BITS than off"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
