"""All rows that opcheck has of a dump's calls."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from support.csv_rows import csv_rows

from vllm_accprobe.cli import main
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap
from vllm_accprobe.opcheck.run.result_row import CheckResult

_PLAIN = Options()


def check(
    calls: Calls, references: References, *, ops: Iterable[str] = (), options: Options = _PLAIN
) -> Iterator[CheckResult]:  # fmt: skip
    """Rows tap by tap. ops: records.wanted's globs."""
    for rank, tap, _ in calls.taps(ops):
        yield from check_tap(calls, rank, tap, lambda c: references.evaluate(c.what), options)


def rows_of(
    root: Path, model: Path | None = None, *, ops: Iterable[str] = (), standard: str = "operator"
) -> list[CheckResult]:  # fmt: skip
    """`check` of a dump by our references. model: the folder of its checkpoint."""
    return list(check(Calls(open_dump(root), model), default_references(), ops=ops, options=Options(standard)))


def opcheck(dump: Path, out: Path, *more: str) -> tuple[int, list[dict[str, str]]]:
    """The command's exit code and rows."""
    code = main(["opcheck", str(dump), "--out", str(out), "-j", "0", *more])
    return code, csv_rows(out / "opcheck.csv")
