"""What a dump's own ledger found fails an opcheck, whatever its operators computed from it."""

from pathlib import Path

from vllm_accprobe.dump.journal import StateFinding
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.opcheck.run.check_calls import cache_rows
from vllm_accprobe.opcheck.run.result_row import FAIL
from vllm_accprobe.opcheck.run.table import lines, totals


def test_a_finding_is_a_failing_row_of_the_first_layer() -> None:
    dump = Dump(Path("somewhere"), {})
    how = "request 'b' (adapter a2) reads block 0 (positions 0 to 31), which request 'a' (adapter a1) wrote"
    found = StateFinding(8, "foreign", "kv", 0, "", 4, 1, "b", how, None, 0, 31, "a", first="layers.0.attn")
    dump.states = [(1, found)]
    (row,) = cache_rows(dump)
    assert (row.tap, row.cls, row.role, row.status, row.rank) == ("layers.0.attn", "cache", "cache", FAIL, 1)
    assert (row.request, row.position) == ("b", 0)
    assert row.message.startswith("the cache, not the kernel: ")
    assert row.message.endswith(how)
    assert totals([row]).statuses[FAIL] == 1
    first, second, *_ = lines([row], totals([row]))
    assert first.startswith("FAIL: the cache, not the kernel: a prefix hit of another context: step 8")
    assert second.startswith("  layers.0.attn  cache: the cache, not the kernel")
    assert not any("as loaded" in line for line in (first, second))
