"""What ``ait llm opcheck`` is told, in its own spelling, as what ``accprobe opcheck`` does.

``-i``, ``-c``, ``-o``, ``-ids 24_1,2_3_5``, ``-opname self,linear``, ``-metric abs kl``, ``-device``, ``-rerun``. Not
here: options that take several words (common/told.py), which operators are meant (opcheck/atb/chosen.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli.common.options import CommandError, say_notes

INPUT = typer.Option(None, "--input", "-i", metavar="DIR", help="The same as DUMP: ATB's tensors of one execution.")
TABLE = typer.Option(None, "--csv-path", "-c", metavar="FILE", help="ATB's operation_tensors_N.csv: its parameters.")
OPS = typer.Option(
    [], "--ops", "--operation-name", "-opname", metavar="GLOBS",
    help="Classes, operators, paths; '!...' excludes. Of ATB, beginnings: self,linear.",
)  # fmt: skip
IDS = typer.Option(
    "", "--ids", "--operation-ids", "-ids", metavar="IDS",
    help="Calls by opcheck.csv's column id, e.g. 0.0.57,0.1.3; of ATB, operators: 24_1,2_3_5.",
)  # fmt: skip
METRIC = typer.Option(
    [], "--metric", "--precision-metric", "-metric", metavar="WORDS",
    help="Of ATB, more columns of opcheck_result.csv: abs cos_sim kl.",
)  # fmt: skip
DEVICE = typer.Option(None, "--device-id", "-device", metavar="N", help="As ait has it; no card is used.")


@dataclass(frozen=True)
class AitWords:
    """dump: None where none is named; table: of operators; ops: words and globs; calls: rank.step.seq; operations:
    ids as ait has them; metrics: of op_csv.METRICS; atb: whether the dump is one of ATB's."""

    dump: Path | None
    table: Path | None
    ops: tuple[str, ...]
    calls: str
    operations: tuple[str, ...]
    metrics: tuple[str, ...]
    atb: bool

    @property
    def kl(self) -> bool:
        return "kl" in self.metrics

    def job(self) -> dict[str, Any]:
        """The fields of worker.Job that these words fill."""
        table = str(self.table.resolve()) if self.table else ""
        return {"operations": self.operations, "op_csv": table, "within": "abs" in self.metrics}


def read(
    dump: Path | None, same: Path | None, table: Path | None, ops: Sequence[str], ids: str, metrics: Sequence[str],
    device: int | None, rerun: bool,
) -> AitWords:  # fmt: skip
    """The options, looked at together. Raises CommandError."""
    from vllm_accprobe.formats import atb
    from vllm_accprobe.opcheck.atb.chosen import is_id

    if dump is not None and same is not None and dump != same:
        raise CommandError(f"--input: {same}, and {dump} is named as well: choose one")
    dump = dump if dump is not None else same
    is_atb = dump is not None and dump.is_dir() and atb.recognise(dump)
    words = tuple(w for text in ops for part in text.replace("\uff0c", ",").split(",") if (w := part.strip()))
    given = [part.strip() for part in ids.replace("\uff0c", ",").split(",") if part.strip()]
    operations = tuple(i for i in given if is_id(i))
    chosen = _metrics(metrics)
    said = [("--csv-path", table is not None), ("-metric", bool(chosen)), (f"-ids {','.join(operations)}", operations)]
    for name, used in () if is_atb else said:
        if used:
            raise CommandError(f"{name} belongs to dumps of ATB, and {dump or 'what is checked'} is none")
    if is_atb and rerun:
        raise CommandError(
            "--rerun: ATB's operators run on an Ascend card with CANN and ATB only: leave it out, and the dump's own "
            "outputs are checked"
        )
    if table is not None and not table.is_file():
        raise CommandError(f"--csv-path: {table} is no file: name ATB's operation_tensors_N.csv")
    if device is not None:
        say_notes([f"-device {device}: no card is used, references are computed on the CPU"])
    return AitWords(dump, table, words, ",".join(i for i in given if not is_id(i)), operations, chosen, is_atb)


def write_table(words: AitWords, out: Path) -> list[Path]:
    """ait's table beside opcheck.csv, where the dump is one of ATB's: the files that were written."""
    if not words.atb or words.dump is None:
        return []
    from vllm_accprobe.formats import atb
    from vllm_accprobe.opcheck.atb import op_csv

    opened = atb.open(words.dump)  # once more, for its names and parameters
    if words.table is not None:
        opened.parameters.add_table(words.table)
    op_csv.write(out / op_csv.FILE, out / "opcheck.csv", opened, words.metrics)
    return [out / op_csv.FILE]


def _metrics(given: Sequence[str]) -> tuple[str, ...]:
    from vllm_accprobe.opcheck.atb.op_csv import METRICS

    words = [w for text in given for w in text.replace(",", " ").split()]
    if odd := [w for w in words if w not in METRICS]:
        raise CommandError(f"-metric: {odd[0]!r} is none of {', '.join(METRICS)}")
    return tuple(m for m in METRICS if m in words)
