"""Blocks of odd code, captured and checked: right ones never fail, and what is wired otherwise than written does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.proof.make_proof import covers
from vllm_accprobe.opcheck.reference import RECEIVED, Call, Reference, reference
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, PASS, SKIP, CheckResult

D = 16
"""As many as there are rows, so that no shape says which dimension is meant."""


class Writer(nn.Module):
    def forward(self, x):
        x.mul_(2.0)
        return x + 1


class Wide(nn.Module):
    def forward(self, x):
        return x.float()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = (nn.Linear(D, n, bias=False) for n in (D, D, 1))
        self.writer, self.wide, self.flat, self.last = Writer(), Wide(), nn.Flatten(0), nn.Identity()
        self.heads = nn.Parameter(torch.rand(4) + 0.5)
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(3))


class Residual(Block):
    def forward(self, x):
        y = x + self.a(x)
        return y + self.b(y)


class Written(Block):
    """A part writes into what another receives later."""

    def forward(self, x):
        y = self.a(x)
        z = self.writer(y)
        return self.b(y) + z


class WrittenLater(Block):
    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        return self.writer(y) + z


class Gated(Block):
    """One number a row."""

    def forward(self, x):
        gate = self.flat(self.gate(x))
        return self.b(x) * gate.unsqueeze(-1)


class Heads(Block):
    """One number a head, of as many heads as each has columns."""

    def forward(self, x):
        return self.last(self.a(x).view(-1, 4, 4) * self.heads.view(4, 1))


class Coarse(Block):
    """Its output is wider than what was computed."""

    def forward(self, x):
        y = self.last((x + self.a(x)) * 0.7 + self.b(x))
        return self.wide(y)


class Switch(Block):
    """An optional input that is no tensor."""

    def forward(self, x, use=True):
        y, z = self.a(x), self.b(x)
        if use is not None:
            z = z + y
        return z


class Turns(Block):
    def forward(self, x):
        for k, layer in enumerate(self.layers):
            if k > 0:
                x = layer(x) + x
            else:
                x = layer(x)
        return self.b(x.reshape(-1, D))


class FirstRow(Block):
    """Item 0 of a part that gives one tensor: its first row, for all rows."""

    def forward(self, x):
        return x + self.a(x)[0]


class FirstOfBatch(Block):
    def forward(self, x):
        return x + self.b(x + self.a(x)[0, ...])[0, ...]


class FirstOfOwn(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return self.a(x) + self.table[0, ...]


class Perhaps(nn.Linear):
    def forward(self, x) -> tuple[torch.Tensor] | torch.Tensor:
        y = super().forward(x)
        return (y,) if self.bias is not None else y


class FirstOfPerhaps(Block):
    def __init__(self) -> None:
        super().__init__()
        self.a = Perhaps(D, D, bias=False)

    def forward(self, x):
        return x + self.a(x)[0]


def test_a_reference_of_what_parts_received_that_fails_is_an_error_row(tmp_path: Path) -> None:
    @reference(RECEIVED)
    def broken(call: Call) -> None:
        raise ZeroDivisionError("broken")

    rows = [r for r in rows_of(Residual(), tmp_path / "d", alone=True, more=broken) if r.tap == ROOT_TAP]
    assert [(r.role, r.status) for r in rows] == [("output.0", PASS), ("b/input.input", ERROR)]
    assert "ZeroDivisionError: broken" in rows[1].message


class OneBatch(Block):
    def forward(self, x):
        return self.b(x[None, ...])[0, ...] + self.a(x)


def rows_of(
    block: nn.Module, root: Path, run: Callable[..., torch.Tensor] | None = None,
    *, alone: bool = False, more: Reference | None = None,
) -> list[CheckResult]:  # fmt: skip
    """opcheck's rows of a model that holds ``block``, or of it ``alone``; run: what runs in place of its code; more: a
    reference besides ours."""
    torch.manual_seed(0)
    model = (block if alone else nn.Sequential(block)).bfloat16().eval()
    function = type(block).forward
    right = function.__code__
    with Probe(model, dir=str(root)), torch.no_grad():
        function.__code__ = right if run is None else run.__code__
        try:
            model(torch.randn(D, D).bfloat16())
        finally:
            function.__code__ = right
    calls, references = Calls(open_dump(root), None), default_references()
    if more is not None:
        references.add(more)
    return [row for rank, tap, _ in calls.taps()
            for row in check_tap(calls, rank, tap, lambda c: references.evaluate(c.what), Options())]  # fmt: skip


@pytest.mark.parametrize("kind", [Residual, Written, WrittenLater, Gated, Heads, Coarse, Switch, Turns, FirstRow,
                                  FirstOfBatch, FirstOfOwn, FirstOfPerhaps, OneBatch])  # fmt: skip
def test_a_right_block_does_not_fail(kind: type[Block], tmp_path: Path) -> None:
    rows = rows_of(kind(), tmp_path / "d")
    assert not [(r.role, r.message) for r in rows if r.status == FAIL]
    assert any(r.status == PASS for r in rows)


def _other_residual(self, x):
    y = x + self.a(x)
    return y + self.b(x)


def _other_written(self, x):
    y = self.a(x)
    z = self.b(x)
    return self.writer(y) + z


def _other_heads(self, x):
    return self.last(self.a(x).view(-1, 4, 4) * 2) * self.heads.view(4, 1)


def _other_coarse(self, x):
    y = self.last((x + self.a(x)) * 0.7 - self.b(x))
    return self.wide(y)


def _other_turns(self, x):
    for layer in self.layers:
        x = layer(x) + x * 0.9
    return self.b(x)


def _other_batch(self, x):
    return self.b(x[None, ...])[0, ...] - self.a(x)


@pytest.mark.parametrize("alone", [False, True], ids=["inside", "root"])
@pytest.mark.parametrize(("kind", "run", "role"), [
    (Residual, _other_residual, "b/input.input"), (WrittenLater, _other_written, "b/input.input"),
    (Heads, _other_heads, "output.0"), (Coarse, _other_coarse, "last/input.input"),
    (Turns, _other_turns, "layers.2/input.input"), (OneBatch, _other_batch, "output.0"),
])  # fmt: skip
def test_a_block_that_is_wired_otherwise_fails(
    kind: type[Block], run: Callable[..., torch.Tensor], role: str, alone: bool, tmp_path: Path
) -> None:
    rows = rows_of(kind(), tmp_path / "d", run, alone=alone)
    assert role in [r.role for r in rows if r.status == FAIL]


def test_what_a_part_received_is_unchecked_where_its_formula_declines(tmp_path: Path) -> None:
    rows = rows_of(Written(), tmp_path / "d", alone=True)
    found = [r for r in rows if r.tap == ROOT_TAP]
    assert [(r.role, r.status, r.checked) for r in found] == [("output.0", PASS, D), ("b/input.input", SKIP, 0)]
    assert found[1].message == "a part of the block changed what it received"
    assert covers(found, ())[ROOT_TAP].checked == 0
