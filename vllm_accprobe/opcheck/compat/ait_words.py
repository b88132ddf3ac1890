"""``ait llm opcheck``'s options, in its own spelling, as what ``accprobe opcheck`` does.

``-i``, ``-c``, ``-o``, ``-ids 24_1,2_3_5``, ``-opname self,linear``, ``-metric abs kl``, ``-device``, ``-rerun``. Not
here: the options' names (cli/aliases.py), which operators are meant (opcheck/atb/chosen.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.opcheck.compat import CompatError


@dataclass(frozen=True)
class AitWords:
    """dump: None where none is named; table: of operators; ops: words and globs; calls: rank.step.seq; operations:
    ids as ait has them; metrics: of op_csv.METRICS; atb: whether the dump is one of ATB's; notes: for the user."""

    dump: Path | None
    table: Path | None
    ops: tuple[str, ...]
    calls: str
    operations: tuple[str, ...]
    metrics: tuple[str, ...]
    atb: bool
    notes: tuple[str, ...] = ()

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
    """The options, read together. Raises CompatError."""
    from vllm_accprobe.formats import atb
    from vllm_accprobe.opcheck.atb.chosen import is_id

    if dump is not None and same is not None and dump != same:
        raise CompatError(f"--input: {same}, and {dump} is named as well: choose one")
    dump = dump if dump is not None else same
    is_atb = dump is not None and dump.is_dir() and atb.recognise(dump)
    words = tuple(w for text in ops for part in text.replace("\uff0c", ",").split(",") if (w := part.strip()))
    listed = [part.strip() for part in ids.replace("\uff0c", ",").split(",") if part.strip()]
    operations = tuple(i for i in listed if is_id(i))
    chosen = _metrics(metrics)
    used_words = [
        ("--csv-path", table is not None),
        ("-metric", bool(chosen)),
        (f"-ids {','.join(operations)}", operations),
    ]
    for name, used in () if is_atb else used_words:
        if used:
            raise CompatError(f"{name} belongs to dumps of ATB, and {dump or 'what is checked'} is none")
    if is_atb and rerun:
        raise CompatError(
            "--rerun: ATB's operators run on an Ascend card with CANN and ATB only: leave it out, and the dump's own "
            "outputs are checked"
        )
    if table is not None and not table.is_file():
        raise CompatError(f"--csv-path: {table} is no file: name ATB's operation_tensors_N.csv")
    notes: tuple[str, ...] = ()
    if device is not None:
        notes = (f"-device {device}: no card is used, references are computed on the CPU",)
    calls = ",".join(i for i in listed if not is_id(i))
    return AitWords(dump, table, words, calls, operations, chosen, is_atb, notes)


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


def _metrics(texts: Sequence[str]) -> tuple[str, ...]:
    from vllm_accprobe.opcheck.atb.op_csv import METRICS

    words = [w for text in texts for w in text.replace(",", " ").split()]
    if unknown := [w for w in words if w not in METRICS]:
        raise CompatError(f"-metric: {unknown[0]!r} is none of {', '.join(METRICS)}")
    return tuple(m for m in METRICS if m in words)
