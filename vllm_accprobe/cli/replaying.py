"""``accprobe compare --replay``: both dumps' operators run again, and what that proves put into the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_accprobe.cli.options import CommandError, progress

if TYPE_CHECKING:
    from vllm_accprobe.align.mapping import Rules
    from vllm_accprobe.compare.result import Comparison


def decided(result: Comparison, golden: Path, mine: Path, mapping: Rules | None) -> Comparison:
    """``result`` of comparing these dumps with the origins that a replay proves. Raises CommandError without torch."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise CommandError("--replay needs torch: install it beside accprobe (the CPU build will do)")
    from vllm_accprobe.cli.opcheck import _model_of
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck import replay
    from vllm_accprobe.opcheck.calls import Calls
    from vllm_accprobe.opcheck.decide import decide, prove
    from vllm_accprobe.opcheck.propagated import split_errors
    from vllm_accprobe.opcheck.reference import default_references

    dumps = [open_dump(path) for path in (golden, mine)]
    sides = [Calls(dump, _model_of(dump.run)) for dump in dumps]
    references = default_references()
    with progress("replaying", sum(replay.count_taps(calls) for calls in sides)) as done:
        rows = [list(replay.check(calls, references, done=done)) for calls in sides]
    proof = prove(result, rows[0], rows[1])
    return decide(result, proof, split_errors(dumps[0], sides[1], references, proof.blamed, mapping))
