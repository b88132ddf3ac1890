"""Two dumps replayed for `compare`, in a process of its own.

The problem: a comparison must run where there is no torch, start at once, and outlive whatever a replay runs into. The
idea: this program (started as a child, children.py) replays both dumps, weighs mine against golden, splits the errors
of those who are blamed, and writes lines of JSON to its standard output: ``{"done": n, "of": m}`` on the way and
``{"proof": ...}`` at the end. No command of its own: `accprobe opcheck` is what people use.
Not here: when it is asked for (replaying.py), what a proof is (opcheck/proof/decide.py), how the work is shared
(opcheck/run/pair.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_accprobe.judge.constants import FALSE_ALARM_RATE


def main() -> int:
    """Exit code 0 when the proof is written, else 2 and one line on stderr."""
    parser = argparse.ArgumentParser(prog="vllm_accprobe.cli.replay.prove")
    parser.add_argument("golden", type=Path)
    parser.add_argument("mine", type=Path)
    parser.add_argument("--ops", action="append", default=[])
    parser.add_argument("--op-mapping-file", type=Path)
    parser.add_argument("--rate", type=float, default=FALSE_ALARM_RATE)
    given = parser.parse_args()
    gc.disable()  # what is imported and opened stays; looking through it again and again takes a fifth of that time
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a kernel prints must not meet the lines

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        say(proof=_proof(given.golden, given.mine, given.ops, given.op_mapping_file, _Told(say), given.rate))
    except Exception as error:
        from vllm_accprobe.cli import explain

        print(explain(error)[0], file=sys.stderr)
        return 2
    return 0


class _Told:
    """Says how far it is, a hundred times at most: nobody may be reading yet."""

    def __init__(self, say: Any):
        self._say, self._last = say, -1

    def __call__(self, done: int, of: int) -> None:
        if done * 100 // max(of, 1) != self._last:
            self._last = done * 100 // max(of, 1)
            self._say(done=done, of=of)


def _proof(golden: Path, mine: Path, ops: list[str], mapping: Path | None, told: _Told, rate: float) -> str:
    from vllm_accprobe.cli.opcheck import _model_of
    from vllm_accprobe.comparison.engine import find_mapping
    from vllm_accprobe.comparison.verdict.constants_differ import other_values
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck.calls.lent_reads import lend
    from vllm_accprobe.opcheck.calls.records import Calls
    from vllm_accprobe.opcheck.floors import peers
    from vllm_accprobe.opcheck.habits import decided
    from vllm_accprobe.opcheck.proof import other_constants, prove
    from vllm_accprobe.opcheck.proof.coverage import covers
    from vllm_accprobe.opcheck.proof.explained import explain
    from vllm_accprobe.opcheck.proof.propagated import split_errors
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run import pair

    dumps = [open_dump(path) for path in (golden, mine)]
    sides = [Calls(dump, _model_of(dump.run)) for dump in dumps]
    lend(sides[0], sides[1])
    lend(sides[1], sides[0])
    references = default_references()
    gc.freeze()  # nor would a second process share the memory that the collector writes to
    gc.set_threshold(100_000, 50, 50)
    gc.enable()
    (theirs, rates), (rows, own) = pair.check_both(sides, references, ops, told, rate)
    settled = [decided.settle(side) for side in (theirs, rows)]
    theirs, rows = (side for side, _ in settled)
    machines = {side: found.habits for side, (_, found) in zip(("golden", "mine"), settled, strict=True)}
    found = prove.wrong(rows)
    alike = prove.shared(prove.wrong(theirs), found)
    blamed = sorted((c for tap, c in found.items() if tap not in alike), key=lambda c: c.seq)
    rules = find_mapping(mapping)
    splits = split_errors(dumps[0], sides[1], references, blamed, rules)
    odd = peers.unlike(rates, own, sides[1].budget(rate).kin)
    wanted = json.loads(sys.stdin.readline() or "{}")
    explained = explain(dumps[0], dumps[1], (theirs, rows), wanted.get("places", ()), wanted.get("taps", ()), rules)
    proof = prove.prove(theirs, rows, splits, bool(ops), odd=odd, machines=machines, explained=explained)
    others = other_constants.effects(sides[1], references, other_values(*dumps))
    return replace(proof, covers=covers(rows, own), constants=others).to_json()
