"""Calls that are evaluated as one give, to the bit, what each gives alone; others are not put together."""

from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.batches import to_the_bit
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.reference import Call, Expected, reference
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.registry import default_references

STEPS = (4, 1, 8, 4, 1, 3, 8, 4)


def calls(root: Path, width: int) -> Calls:
    """A norm with a residual, a gated activation and a product, in steps of few rows."""
    generator, m = torch.Generator().manual_seed(width), Maker(root)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    m.module("norm", "RMSNorm", variance_epsilon=1e-6)
    m.module("act", "SiluAndMul")
    m.module("up", "ColumnParallelLinear")
    m.param("norm", "RMSNorm", weight=drawn(width))
    m.param("up", "ColumnParallelLinear", weight=drawn(2 * width, width))
    m.request(0, sum(STEPS))
    done = 0
    for step, n in enumerate(STEPS):
        m.step(step, [(0, done, n)])
        done += n
        m.call("norm", "RMSNorm", {"x": drawn(n, width), "residual": drawn(n, width)}, drawn(n, width), drawn(n, width))
        m.call("act", "SiluAndMul", {"x": drawn(n, 2 * width)}, drawn(n, width))
        m.call("up", "ColumnParallelLinear", {"input_": drawn(n, width)}, drawn(n, 2 * width))
    return Calls(open_dump(m.close()), None)


@pytest.mark.parametrize("width", [64, 1024])
def test_to_the_bit(tmp_path: Path, width: int) -> None:
    table, found = default_references(), calls(tmp_path / "d", width)
    together = {}
    for tap in ("norm", "act", "up"):
        given = list(to_the_bit(found.of(0, tap), table))
        assert [c.step for c, _ in given] == list(range(len(STEPS)))
        for captured, outcome in given:
            alone = table.evaluate(captured.what)
            assert isinstance(alone, dict)
            if outcome is None:
                continue
            assert isinstance(outcome, dict)
            assert list(outcome) == list(alone)
            for role, e in alone.items():
                for name in ("value", "noise", "bound"):
                    mine, theirs = getattr(outcome[role], name), getattr(e, name)
                    assert torch.equal(mine, theirs.expand(mine.shape)), (tap, role, name)
        together[tap] = sum(outcome is not None for _, outcome in given)
    assert together["norm"] == together["act"] == len(STEPS)


def test_what_all_calls_of_a_module_have_is_put_together_once(tmp_path: Path) -> None:
    """Its constants, and a norm's epsilon; no call has those of another module."""
    found = calls(tmp_path / "d", 64)
    first, *others = (c.what for c in found.of(0, "norm"))
    assert first.attrs["variance_epsilon"] == 1e-6
    assert all(c.attrs is first.attrs and c.params is first.params for c in others)
    assert all("variance_epsilon" not in c.what.attrs for c in found.of(0, "act"))


def test_what_is_kept_of_a_module_is_its_own(tmp_path: Path) -> None:
    """Its attributes on each rank, and what ran inside of it."""
    x = torch.ones(1, 4)
    for rank in (0, 1):
        m = Maker(tmp_path / "d", rank)
        m.request(0, 1)
        m.step(0, [(0, 0, 1)])
        for block in ("a", "b"):
            m.module(block, "Block", tp_rank=rank)
            m.call(f"{block}.part", "NobodyKnows", {"x": x}, x)
            m.call(block, "Block", {"x": x}, x)
        root = m.close()
    found = Calls(open_dump(root), None)
    for rank in (0, 1):
        for block in ("a", "b"):
            assert next(found.of(rank, block)).what.attrs == {"tp_rank": rank}
            inside = found._neighbours._inside(rank, block, (0, 0))["children"]
            assert [(path, r.rank, r.tap) for path, _, r in inside] == [("part", rank, f"{block}.part")]


def test_rows_that_are_no_multiple_of_what_a_loop_takes_are_alone(tmp_path: Path) -> None:
    found = calls(tmp_path / "d", 40)
    assert [o for _, o in to_the_bit(found.of(0, "act"), default_references())] == [None] * len(STEPS)


def test_of_what_depends_on_the_number_of_rows_nothing_is_put_together(tmp_path: Path) -> None:
    asked: list[int] = []

    @reference("SiluAndMul", by_rows=True)
    def last_digit(call: Call) -> Expected:
        """As a product whose sums of three rows and of single ones are added up in another order."""
        x = call.wide("x")[:, :64]
        asked.append(len(x))
        return Expected(x * (1.0 + 2.0**-52) if len(x) in (1, 3) else x)

    table = References([last_digit])
    given = list(to_the_bit(calls(tmp_path / "d", 64).of(0, "act"), table))
    assert [o is None for _, o in given] == [n in (1, 3) for n in STEPS]
    assert asked == [48, 4, 1, 8, 3, 4]  # all at once in whole blocks, one of each number of rows, and the last
    for captured, outcome in given:
        alone = table.evaluate(captured.what)
        assert outcome is None or torch.equal(outcome["output.0"].value, alone["output.0"].value)


def test_what_the_last_rows_give_is_looked_at(tmp_path: Path) -> None:
    @reference("SiluAndMul", by_rows=True)
    def odd_end(call: Call) -> Expected:
        """As a product whose block of rows is of another length."""
        x = call.wide("x")[:, :64].clone()
        x[31:] *= 1.0 + 2.0**-52
        return Expected(x)

    given = list(to_the_bit(calls(tmp_path / "d", 64).of(0, "act"), References([odd_end])))
    assert given[-1][1] is None
