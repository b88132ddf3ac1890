"""Two dumps replayed for `compare`, in a process of its own.

The problem: a comparison must run where there is no torch, start at once, and outlive whatever a replay runs into. The
idea: this program replays both dumps, weighs mine against golden, splits the errors of those who are blamed, and writes
the Proof as JSON. No command of its own: `accprobe opcheck` is what people use.
Not here: when it is asked for (replaying.py), what a proof is (opcheck/decide.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when the proof is written, else 2 and one line on stderr."""
    parser = argparse.ArgumentParser(prog="vllm_accprobe.cli.prove")
    parser.add_argument("golden", type=Path)
    parser.add_argument("mine", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", action="append", default=[])
    parser.add_argument("--op-mapping-file", type=Path)
    given = parser.parse_args(arguments)
    try:
        _write(given.golden, given.mine, given.out, given.ops, given.op_mapping_file)
    except Exception as error:
        from vllm_accprobe.cli import explain

        print(explain(error)[0], file=sys.stderr)
        return 2
    return 0


def _write(golden: Path, mine: Path, out: Path, ops: list[str], mapping: Path | None) -> None:
    from vllm_accprobe.cli.opcheck import _model_of
    from vllm_accprobe.cli.options import progress
    from vllm_accprobe.comparison.engine import find_mapping
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck import prove, replay
    from vllm_accprobe.opcheck.calls import Calls
    from vllm_accprobe.opcheck.propagated import split_errors
    from vllm_accprobe.opcheck.reference import default_references

    dumps = [open_dump(path) for path in (golden, mine)]
    sides = [Calls(dump, _model_of(dump.run)) for dump in dumps]
    references = default_references()
    with progress("replaying", sum(replay.count_taps(calls) for calls in sides)) as done:
        rows = [list(replay.check(calls, references, ops=ops, done=done)) for calls in sides]
    found = prove.wrong(rows[1])
    alike = prove.shared(prove.wrong(rows[0]), found)
    blamed = sorted((c for tap, c in found.items() if tap not in alike), key=lambda c: c.seq)
    splits = split_errors(dumps[0], sides[1], references, blamed, find_mapping(mapping))
    proof = prove.prove(rows[0], rows[1], splits, partly=bool(ops))
    part = out.with_name(out.name + ".part")
    part.write_text(proof.to_json(), encoding="utf-8")
    part.replace(out)
