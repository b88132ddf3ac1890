"""A golden without the module: its rows, in mine's calls, through mine's reference."""

from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.comparison.plan.units import Plan, make_plan
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.proof.explained import Explained, explain, place_of
from vllm_accprobe.opcheck.proof.golden_reads import GoldenReads
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap
from vllm_accprobe.opcheck.run.result_row import CheckResult

ROWS, WIDTH = 12, 64
PLACE = place_of("act", "output.0", 0)
X = torch.randn(ROWS, 2 * WIDTH, generator=torch.Generator().manual_seed(4))


def dump(root: Path, x: torch.Tensor, cls: str, steps: list[tuple[int, int]], wrong: int | None = None) -> Dump:
    """silu(a) b. wrong: a row with another output."""
    m = Maker(root)
    m.module("<root>", "Tiny")
    m.module("act", cls)
    m.request(0, ROWS)
    y = torch.nn.functional.silu(x[:, :WIDTH].float()) * x[:, WIDTH:].float()
    if wrong is not None:
        y[wrong] *= 1.1
    for step, (start, n) in enumerate(steps):
        m.step(step, [(0, start, n)])
        m.call("act", cls, {"x": x[start : start + n]}, y[start : start + n].to(x.dtype))
    return open_dump(m.close())


def found(golden: Dump, mine: Dump) -> Explained:
    references = default_references()

    def replayed(of: Dump) -> list[CheckResult]:
        calls = Calls(of, None)
        return list(check_tap(calls, 0, "act", lambda c: references.evaluate(c.what), Options()))

    def computed(plan: Plan):
        return GoldenReads(golden, mine, None, references, plan).rows

    checked = replayed(golden), replayed(mine)
    assert not explain(golden, mine, checked, [PLACE], (), lambda: make_plan(golden, mine)).rows[PLACE]
    return explain(golden, mine, checked, [PLACE], (), lambda: make_plan(golden, mine), None, computed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_of_a_class_without_reference_is_checked_by_mine_s(tmp_path: Path, dtype: torch.dtype) -> None:
    golden = dump(tmp_path / "golden", X.to(dtype), "Unknown", [(0, ROWS)])
    mine = dump(tmp_path / "mine", (X * 1.02).bfloat16(), "SiluAndMul", [(0, 5), (5, 7)])
    assert found(golden, mine).rows[PLACE] == {"r0": [(0, ROWS)]}


def test_a_golden_that_computed_something_else_explains_nothing_of_that_step(tmp_path: Path) -> None:
    golden = dump(tmp_path / "golden", X, "Unknown", [(0, ROWS)], wrong=3)
    mine = dump(tmp_path / "mine", X.bfloat16(), "SiluAndMul", [(0, 5), (5, 7)])
    result = found(golden, mine)
    assert (result.rows[PLACE], PLACE in result.why) == ({"r0": [(5, ROWS)]}, True)


def test_rows_that_golden_did_not_read_are_not_explained(tmp_path: Path) -> None:
    golden = dump(tmp_path / "golden", X, "Unknown", [(0, 8)])
    mine = dump(tmp_path / "mine", X.bfloat16(), "SiluAndMul", [(0, ROWS)])
    plan = make_plan(golden, mine)
    unit = next(u for u in plan.units if u.key == ("act", "output.0", 0))
    assert len(GoldenReads(golden, mine, None, default_references(), plan).rows(unit)) == 8
    x = X.clone()
    x[2] = float("nan")  # a value that is none shows nothing
    golden = dump(tmp_path / "nan", x, "Unknown", [(0, 8)])
    plan = make_plan(golden, mine)
    unit = next(u for u in plan.units if u.key == ("act", "output.0", 0))
    assert len(GoldenReads(golden, mine, None, default_references(), plan).rows(unit)) == 7
