"""``accprobe repair DUMP``. Not here: how (dump/repair.py)."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_accprobe.cli.common.json_answer import answer
from vllm_accprobe.cli.common.options import NothingThere, say_notes


def repair(
    dump: Path = typer.Argument(..., metavar="DUMP", help="Directory that a killed run left behind."),
) -> None:
    """Finish the files that a killed run left behind.

    Exit code 0: all of it is finished, 2: no dump of accprobe, or it is still written, 3: nobody wrote into it."""
    from vllm_accprobe.dump.repair import repair as run
    from vllm_accprobe.formats.common.nearby import own
    from vllm_accprobe.report.text import count

    place, said = own(dump)
    say_notes([said] if said else [])
    done = run(place)
    answer(dump=place, ranks=done)
    for r in done:
        if not r.needed:
            typer.echo(f"rank {r.rank}: closed in order, nothing to do")
            continue
        extra = [f"{r.cut} bytes of a torn line cut off"] if r.cut else []
        extra += [f"{count(r.dropped, 'segment file')} without a whole tensor removed"] if r.dropped else []
        extra = [f"{count(r.segments, 'segment file')} finished", *extra]
        typer.echo(f"rank {r.rank}: {r.tensors} tensors readable; {', '.join(extra)}")
    if not done:
        raise NothingThere(f"{place}: no rank has written anything")
