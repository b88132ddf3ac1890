"""All rows that opcheck has of a dump's calls."""

from collections.abc import Iterable, Iterator

from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap
from vllm_accprobe.opcheck.run.result_row import CheckResult

_PLAIN = Options()


def check(
    calls: Calls, references: References, *, ops: Iterable[str] = (), options: Options = _PLAIN
) -> Iterator[CheckResult]:  # fmt: skip
    """Rows tap by tap. ops: records.wanted's globs."""
    for rank, tap, _ in calls.taps(ops):
        yield from check_tap(calls, rank, tap, lambda c: references.evaluate(c.what), options)
