"""Two dumps replayed for `compare`, in a process of its own.

The problem: a comparison must run where there is no torch, start at once, and outlive whatever a replay runs into. The
idea: this program (started as a child, children.py) opens both dumps and estimates what a replay of them takes. Where
that fits into its time easily it begins in parallel with the comparison, else it says ``{"waits": true}`` and reads
what the comparison has found, a line of JSON (budget.Wishes), from its standard input. It replays what is planned,
weighs mine against golden, splits the errors of those who are blamed, and writes lines of JSON to its standard output:
``{"plan": ...}``, ``{"done": n, "of": m}`` on the way and ``{"proof": ...}`` at the end. Anything more on its standard
input ends the replay early, as the end of its time does: what was replayed until then is used. No command of its own:
`accprobe opcheck` is what people use.
Not here: when it runs (replay_process.py), what is planned (opcheck/run/budget.py), what a proof is (apply_proof.py),
how the work is shared (opcheck/run/pair.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import select
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.children import own_stdout
from vllm_accprobe.judge.statistic import RATE as FALSE_ALARM_RATE

_MOST = 64 << 20
"""Characters of a line from the comparison: what it wants is at most some ten thousand names."""

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.records import Calls
    from vllm_accprobe.opcheck.run.result_row import CheckResult


def main() -> int:
    """Exit code 0 when the proof is written, else 2 and one line on stderr."""
    parser = argparse.ArgumentParser(prog="vllm_accprobe.opcheck.proof.replay_child")
    parser.add_argument("golden", type=Path)
    parser.add_argument("mine", type=Path)
    parser.add_argument("--ops", action="append", default=[])
    parser.add_argument("--op-mapping-file", type=Path)
    parser.add_argument("--rate", type=float, default=FALSE_ALARM_RATE)
    parser.add_argument("--seconds", type=float, help="of wall time; all of it by default")
    parser.add_argument("--weights", type=Path)
    arguments = parser.parse_args()
    gc.disable()  # what is imported and opened stays; looking through it again and again takes a fifth of that time
    channel = own_stdout()

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        say(proof=_proof(arguments, say))
    except Exception as error:
        from vllm_accprobe.refusals import explain

        print(explain(error)[0], file=sys.stderr)
        return 2
    return 0


class _Progress:
    """Says how far it is, a hundred times at most: nobody may be reading yet."""

    def __init__(self, say: Any):
        self._say, self._last = say, -1

    def __call__(self, done: int, of: int) -> None:
        if done * 100 // max(of, 1) != self._last:
            self._last = done * 100 // max(of, 1)
            self._say(done=done, of=of)


class _Ends:
    """Whether the time is over: since it is made, or because somebody says so."""

    def __init__(self, seconds: float | None, interrupted: bool = False):
        self._until = None if seconds is None else time.monotonic() + seconds
        self.interrupted = interrupted

    def __call__(self) -> bool:
        # nobody reads it, so that all processes see it
        self.interrupted = self.interrupted or bool(select.select([0], [], [], 0)[0])
        return self.interrupted or (self._until is not None and time.monotonic() >= self._until)

    def seconds(self) -> float:
        """How many are left."""
        return 0.0 if self() else math.inf if self._until is None else self._until - time.monotonic()


def _proof(arguments: argparse.Namespace, say: Any) -> str:
    from vllm_accprobe.align.mapping import load_mapping
    from vllm_accprobe.comparison.notes import other_values
    from vllm_accprobe.comparison.plan.make_plan import make_plan
    from vllm_accprobe.dump.decode import parse
    from vllm_accprobe.dump.reader import model_of
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck.calls.neighbours import lend
    from vllm_accprobe.opcheck.calls.records import Calls
    from vllm_accprobe.opcheck.floors import pooled
    from vllm_accprobe.opcheck.machine_precision import of_machine
    from vllm_accprobe.opcheck.proof import make_proof
    from vllm_accprobe.opcheck.proof.explained import explain
    from vllm_accprobe.opcheck.proof.golden_reads import GoldenReads
    from vllm_accprobe.opcheck.proof.make_proof import covers, split_errors
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run import pair
    from vllm_accprobe.opcheck.run.budget import Planner, Wishes

    ops, rate, mapping = arguments.ops, arguments.rate, arguments.op_mapping_file
    rules = None if mapping is None else load_mapping(mapping)  # the comparison has read it, so that it can be read
    dumps = [open_dump(path) for path in (arguments.golden, arguments.mine)]
    planned = cache(lambda: make_plan(*dumps, mapping=rules))
    models = [arguments.weights or model_of(dump.run) for dump in dumps]
    # A pack holds no weights, and a piece of a checkpoint is taken only where its fingerprint is the capture's.
    sides = [Calls(dumps[0], models[0] or models[1]), Calls(dumps[1], models[1])]
    lend(sides[0], sides[1])
    lend(sides[1], sides[0])
    references = default_references()
    planner = Planner(sides, ops, min(pair.PROCESSES, pair.processors()) if pair.may_fork() else 1)
    waits = planner.waits(arguments.seconds)
    say(waits=waits)
    line = sys.stdin.readline() if waits else "{}"
    stopped = not line.startswith("{")  # by Ctrl-C while the comparison ran
    wishes = Wishes() if stopped else parse(Wishes, line, _MOST)
    plan = planner.plan(arguments.seconds, wishes)
    say(plan={"calls": plan.calls, "of": plan.of, "seconds": plan.seconds})
    begun, ends = time.monotonic(), _Ends(arguments.seconds, stopped)
    gc.freeze()  # and a second process would not share the memory that the collector writes to
    gc.set_threshold(100_000, 50, 50)
    gc.enable()
    (theirs, rates), (rows, own) = pair.check_both(sides, references, ops, _Progress(say), rate, plan.tasks, ends)
    took = time.monotonic() - begun
    done = len({(n, c.rank, c.tap, c.step, c.call) for n, side in enumerate((theirs, rows)) for c in side
                if not c.replayed and c.unchecked_because != pair.LEFT})  # fmt: skip
    partial = sum(bool(c.replayed) for side in (theirs, rows) for c in side)
    left = plan.of - done
    theirs, rows = (_with_left(r, calls, ops, left > 0) for r, calls in zip((theirs, rows), sides, strict=True))
    settled = [of_machine.settle(side) for side in (theirs, rows)]
    theirs, rows = (side for side, _ in settled)
    machines = {side: found.habits for side, (_, found) in zip(("golden", "mine"), settled, strict=True)}
    found = make_proof.wrong(rows)
    alike = make_proof.shared(make_proof.wrong(theirs), found)
    blamed = sorted((c for tap, c in found.items() if tap not in alike), key=lambda c: c.seq)
    splits = split_errors(dumps[0], sides[1], references, blamed, planned)
    constants = other_values(*dumps)
    causes, failures = {}, list[str]()
    if blamed:  # else nothing of this is imported
        from vllm_accprobe.opcheck.causes.examine import explained_by, golden_constants

        chance = sides[1].budget(rate).output
        causes = explained_by(sides[1], references, blamed, rows, golden_constants(constants), chance=chance,
                              problems=failures)  # fmt: skip
    unlike = pooled.unlike(rates, own, sides[1].budget(rate).siblings)
    say(explain=True)
    # A line that ended the replay early may stand before what the comparison wants explained.
    further = next((parse(Wishes, line, _MOST) for line in sys.stdin if line.startswith("{")), Wishes())
    taps = dict.fromkeys([*(p.rpartition("#")[0].rpartition("/")[0] for p in further.places), *further.taps])
    otherwise = make_proof.computed_otherwise((sides[0], sides[1]), references, taps, constants)
    # What the replay has left of its time: none of it passed while the comparison was waited for.
    rest = _Ends(None if arguments.seconds is None else arguments.seconds - took, ends.interrupted)
    explained = explain(
        dumps[0], dumps[1], (theirs, rows), further.places, further.taps, planned, otherwise,
        lambda plan: GoldenReads(dumps[0], sides[1], references, plan, rest.seconds, planner.cost_of_mine).rows,
    )  # fmt: skip
    proof = make_proof.prove(theirs, rows, splits, bool(ops) or left > 0, outliers=unlike, machines=machines,
                        explained=explained, causes=causes)  # fmt: skip
    if left > 0:
        limit = None if ends.interrupted else arguments.seconds
        proof = replace(proof, notes=(_part_note(done, partial, plan.of, took, limit), *proof.notes))
    others = make_proof.effects(sides[1], references, constants)
    return replace(proof, covers=covers(rows, own), constants=others, notes=(*proof.notes, *failures)).to_json()


def _with_left(rows: list[CheckResult], calls: Calls, ops: list[str], some: bool) -> list[CheckResult]:
    """``rows``, and one for each tap some of whose calls were left out: a tap of which not all was seen is not
    right."""
    if not some:
        return rows
    from vllm_accprobe.opcheck.run.pair import LEFT
    from vllm_accprobe.opcheck.run.result_row import unchecked

    seen: dict[tuple[int, str], set[Any]] = {}
    for c in rows:
        if not c.replayed:
            seen.setdefault((c.rank, c.tap), set()).add((c.step, c.call))
    out = list(rows)
    for rank, tap, cls in calls.taps(ops):
        left = calls.places(rank, tap).keys() - seen.get((rank, tap), set())
        if left:
            step, call = min(left, key=lambda p: (p[0] is not None, p[0] or 0, p[1]))
            out.append(unchecked(tap, cls, rank, step, call, 0, f"{len(left):,} calls {LEFT}"))
    return out


def _part_note(done: int, partial: int, of: int, took: float, seconds: float | None) -> str:
    some = f", and some rows of {partial:,} further outputs," if partial else ""
    why = "interrupted" if seconds is None else f"--replay-seconds {seconds:g}"
    note = f"{done:,} of {of:,} calls{some} were replayed in {took:.0f} s ({why})"
    return f"{note}; the others are compared, not checked: --replay checks all"
