"""Pairs that lines decided, all places together: what each unit alone gives."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe.comparison import engine
from vllm_accprobe.comparison.pair import FAIL
from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.comparison.row_table import RowTable
from vllm_accprobe.comparison.verdict.judging import _Judge, judge
from vllm_accprobe.comparison.verdict.pair_status import decided_alike
from vllm_accprobe.report.table import pair_lines
from vllm_accprobe.standards.limits import Standard

TAP = "model.layers.1.mlp.down_proj"
ONE = {"prompts": {"a": [3, 14, 15, 9, 2], "b": [7, 7, 1]}}


@pytest.fixture(scope="module", params=["equal", "noise", "fault"])
def measured(request, tmp_path_factory):
    """Of dumps without payloads: nothing is read. A fault moves tokens: of one step, tensors have one form."""
    root, kind = tmp_path_factory.mktemp(request.param), request.param
    mine = {"noise": {"noise": 0.001}, "fault": {"faults": {TAP: scaled(1.25)}}}.get(kind, {})
    sides = [capture(**ONE, tokens=1 if kind == "fault" else 3, **more) for more in ({}, mine)]
    paths = [write(dump, root / name, payloads=False) for dump, name in zip(sides, ("golden", "mine"), strict=True)]
    dumps = engine.open_both(*paths)
    return engine._Run(dumps, engine.make_plan(*dumps)).measure()


def said(result: Comparison) -> list[object]:
    rows = [getattr(result.rows, f.name) for f in fields(RowTable) if f.name != "shelf"]
    plain = [x.tolist() if isinstance(x, np.ndarray) else x for x in rows]
    return ["".join(pair_lines(result.table, None)), json.dumps(result.to_json()), repr(plain)]


def test_places_are_judged_together_as_each_alone(measured, monkeypatch):
    assert sum(decided_alike(u.parts) for u in measured.units) > 10
    together = said(judge(measured, Standard()))
    monkeypatch.setattr(_Judge, "_by_lines", lambda *_: False)
    assert together == said(judge(measured, Standard()))


def test_units_that_are_judged_alone_lie_between_others(measured, monkeypatch):
    """As where some values were read: order and rows are the same."""
    together = said(judge(measured, Standard()))
    by_lines = _Judge._by_lines
    monkeypatch.setattr(_Judge, "_by_lines", lambda self, unit: unit.order % 3 > 0 and by_lines(self, unit))
    assert together == said(judge(measured, Standard()))


def test_parts_of_a_saved_comparison_are_judged_alike(measured):
    saved = replace(measured, units=[replace(u, parts=list(u.parts)) for u in measured.units])
    assert said(judge(saved, Standard())) == said(judge(measured, Standard()))


@pytest.mark.filterwarnings("error")
def test_an_error_whose_square_is_no_number_is_judged(measured):
    """As where golden's tensor is all but 0."""
    huge = {"identical": False, "stats": (1e306, 0.0), "figures": ((1.0,) * 4, (0.0,) * 4)}
    units = [replace(u, parts=[replace(p, **huge) for p in u.parts]) if u.key[0] == TAP and not u.is_param else u
             for u in measured.units]  # fmt: skip
    assert judge(replace(measured, units=units), Standard()).verdict == FAIL
