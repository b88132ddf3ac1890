"""Pairs that lines decided, all places together: what each unit alone gives."""

import json
import random
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from synthetic_model import MemoryDump, capture, scaled, write

from vllm_accprobe.align.tokens import NO_ROWS, RowSet
from vllm_accprobe.comparison import engine
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part
from vllm_accprobe.comparison.pair import FAIL
from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.comparison.row_table import RowTable
from vllm_accprobe.comparison.verdict import origin_entries
from vllm_accprobe.comparison.verdict.judging import _Judge, judge
from vllm_accprobe.comparison.verdict.pair_status import decided_alike
from vllm_accprobe.dump.record_table import LazyTable
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


LOGITS, CHOICE = "input.router_logits", "input.topk_ids"


def routed(choice: list[int] | None, values: bool, packed: bool, noise: float = 0.0) -> MemoryDump:
    """With a router's logits and choice of the last row, whose second and third expert are as good. values: of these;
    all else has statistics and hashes. packed: a pack, in which no experts of earlier rows were compared."""
    dump, tap = capture(prompts={"a": [3, 14]}, tokens=3, noise=noise), "model.layers.0.mlp"
    last = max(step for _, step in dump.steps)
    dump.add(0, last, tap, LOGITS, np.array([[2, 1, 1, 0]]), "bfloat16", 12, "tokens")
    if choice:
        dump.add(0, last, tap, CHOICE, np.array([choice]), "int32", 12, "tokens")
    dump.records = [r if values and r.role in (LOGITS, CHOICE) else replace(r, payload=None) for r in dump.records]
    experts = {"top_k": 2, "global_num_experts": 4}
    dump.modules[0] = [replace(m, attrs=experts) if m.tap == tap else m for m in dump.modules[0]]
    dump.run["packed"] = packed
    return dump


AFTER, OTHER, BEHIND = "rows after a router's near tie", "1 row went to other experts", "read earlier rows behind"
EITHER = [0, 1], [0, 2]


@pytest.mark.parametrize(("choices", "values", "packed", "noise", "note"), [
    (EITHER, True, False, 0.0, AFTER),  # what follows is equal, and with noise has statistics
    (EITHER, True, False, 0.001, AFTER),
    (EITHER, False, False, 0.0, OTHER),
    (EITHER, False, True, 0.001, BEHIND),
    ((None, None), False, True, 0.001, BEHIND),
])  # fmt: skip
def test_what_a_router_did_is_judged_as_each_alone(monkeypatch, choices, values, packed, noise, note):
    dumps = engine.open_both(routed(choices[0], values, packed), routed(choices[1], values, packed, noise))
    measured = engine._Run(dumps, engine.make_plan(*dumps)).measure()
    assert sum(decided_alike(u.parts) for u in measured.units) > 10
    together = said(judge(measured, Standard()))
    assert note in str(together[1])
    monkeypatch.setattr(_Judge, "_by_lines", lambda *_: False)
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


def varied(unit: MeasuredUnit, of: random.Random) -> MeasuredUnit:
    """With other parts that lines may have decided, of one form as a table, or of several."""
    form = {
        "feature": of.choice([(4,), (8,), (2, 3), ()]), "note": of.choice(["", "100% joined, by shape"]),
        "dtype_golden": of.choice(["bfloat16", "int32", None]), "dtype_mine": of.choice(["bfloat16", "int32"]),
    }  # fmt: skip
    same, whole, numbers = of.random() < 0.5, of.random() < 0.3, (0.0, 1e-9, 0.01, 0.5, np.inf, np.nan)
    table, parts = of.random() < 0.5, []
    for part in unit.parts:
        rows, n = part.rows, of.choice([0, 1, len(part.rows), len(part.rows)])
        decode = np.array([of.random() < 0.5 for _ in range(n)], bool) if of.random() < 0.3 else rows.decode[:n]
        rows = of.choice([rows, RowSet(rows.keys[:n], decode), RowSet(rows.keys[:n])])
        more = {"identical": same, "stats": None if same else (of.choice(numbers), of.choice(numbers))}
        more |= {"figures": None if same else ((1.0, 0.0, of.random(), 2.0), (1.0, None, 0.5, 2.0))}
        more |= {"nonfinite": of.choice([0, 3]) if same else 0, "zero": of.random() < 0.2, "rank": of.choice([None, 1])}
        more |= {"moment": of.choice([part.moment, part.moment, (0, 99)])}  # of a step that no rows are known of
        if not table:
            more |= {"few": of.random() < 0.1, "replicas": "two" * (of.random() < 0.02), "by": ""}
            form |= {"dtype_mine": of.choice(["bfloat16", "int32"])} if of.random() < 0.1 else {}
        parts.append(replace(part, **form, **more, whole=whole, rows=NO_ROWS if whole else rows))
    every = {f.name: [getattr(p, f.name) for p in parts] for f in fields(Part)}
    alike = {name: every[name][0] for name in (*form, "whole", "identical")}
    own = {name: values for name, values in every.items() if name not in alike}
    return replace(unit, parts=LazyTable(Part, len(parts), own, alike) if table else parts)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_lines_decided_is_judged_together_as_each_alone(measured, monkeypatch, seed):
    of, by_lines, flips, kept = random.Random(seed), _Judge._by_lines, origin_entries.judge_flips, []
    units = [u if u.is_param or of.random() < 0.3 else varied(u, of) for u in measured.units]
    found = []
    for some in (lambda _: True, lambda _: False, lambda unit: unit.order % 3 > 0):
        monkeypatch.setattr(_Judge, "_by_lines", lambda self, unit, some=some: some(unit) and by_lines(self, unit))
        monkeypatch.setattr(
            origin_entries, "judge_flips", lambda _, traces, *more: kept.append(traces) or flips(_, traces, *more)
        )
        found.append(said(result := judge(replace(measured, units=units), Standard())))
    parts = (p for u in units if not u.is_param for p in u.parts if p.identical)
    pairs = (p for p in result.table if p.identical and not p.role.startswith("param."))
    assert Counter((p.nonfinite, p.zero) for p in parts) == Counter((p.nonfinite, p.cosine is None) for p in pairs)
    each = [[[getattr(value, "keys", value) for value in vars(t).values()] for t in traces] for traces in kept]
    assert repr(each[0]) == repr(each[1]) == repr(each[2])
    assert found[0] == found[1] == found[2]
