"""The ten worst are ten causes, the page's table and compare.csv hold all pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from report_examples import realistic

from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.report import facts, markdown, terminal


def by_hand(comparison: Comparison) -> dict[str, int]:
    failed = [p.tap for p in comparison.pairs if p.status == "fail"]
    return {tap: failed.count(tap) for tap in failed}


def test_each_cause_is_another_tap_with_its_worst_pair() -> None:
    result = realistic()
    found, taps = facts.causes(result), by_hand(result)
    assert {c.worst.tap: c.more + 1 for c in found} == taps
    assert max(taps.values()) > 1
    for cause in found:
        own = [facts.severity(p) for p in result.pairs if p.tap == cause.worst.tap and p.status == "fail"]
        assert facts.severity(cause.worst) == max(own)


def test_a_second_fault_is_seen_beside_a_large_one() -> None:
    """One tap that fails a thousand times as badly as another, at more steps than the list is long."""
    result = realistic()
    pattern = next(p for p in result.pairs if p.status == "fail")
    large = [replace(pattern, tap="a.large", golden="a.large", mine="a.large", step=s, order=1) for s in range(40)]
    large = [replace(p, measured=1000.0, worst_row_rel_l2=1000.0, measure=None) for p in large]
    small = replace(pattern, tap="b.small", golden="b.small", mine="b.small", order=2)
    both = [{"module": name, "role": pattern.role} for name in ("a.large", "b.small")]
    mixed = replace(result, pairs=[*large, small], origins=both)
    lines = terminal.worst_pairs(mixed)
    assert lines[0] == "2 causes, of 41 failed pairs, worst first:"
    assert "a.large" in lines[2]
    assert lines[2].endswith("and 39 more like it")
    assert "b.small" in lines[3]
    assert "more like it" not in lines[3]
    assert len(lines) == 4
    assert any("2 causes, of 41 failed pairs" in line for line in markdown.markdown_lines(mixed))
    assert any(line.count("`a.large`") and "and 39 more like it" in line for line in markdown.markdown_lines(mixed))


def test_origins_stand_before_what_they_reach() -> None:
    """Twelve taps that an error only reached fail worse than the second origin; that one is on the list."""
    result = realistic()
    pattern = next(p for p in result.pairs if p.status == "fail")

    def failing(tap: str, value: float, order: int) -> Any:
        return replace(pattern, tap=tap, golden=tap, mine=tap, order=order, worst_row_rel_l2=value, measure=None)

    behind = [failing(f"behind.{k}", 500.0, 2 + k) for k in range(12)]
    pairs = [failing("a.first", 1000.0, 1), *behind, failing("b.second", 2.0, 20)]
    origins = [{"module": name, "role": pattern.role} for name in ("a.first", "b.second")]
    lines = terminal.worst_pairs(replace(result, pairs=pairs, origins=origins))
    assert lines[0] == "2 causes and 12 places that they reach, of 14 failed pairs, the 10 worst:"
    assert "a.first" in lines[2]
    assert "b.second" in lines[3]
    unknown = terminal.worst_pairs(replace(result, pairs=pairs, origins=[]))
    assert unknown[0] == "the 10 worst of 14 failed pairs:"
    assert "b.second" not in "".join(unknown)


def test_an_origin_in_several_layers_is_one_cause() -> None:
    result = realistic()
    origin = {"module": "model.layers.0.mlp.down_proj", "layers": {"in": 8, "of": 8}}
    spread = replace(result, origins=[origin])
    form = [p for p in result.pairs if p.status == "fail" and p.tap.endswith(".mlp.down_proj")]
    assert len({p.tap for p in form}) > 1
    found = [c for c in facts.causes(spread) if c.worst.tap.endswith(".mlp.down_proj")]
    assert [c.more + 1 for c in found] == [len(form)]
    apart = [c for c in facts.causes(result) if c.worst.tap.endswith(".mlp.down_proj")]
    assert len(apart) == len({p.tap for p in form})


def test_pairs_that_are_alone_have_none_like_them() -> None:
    result = realistic()
    first = {p.tap: p for p in result.pairs if p.status == "fail"}
    alone = replace(result, pairs=list(first.values())[:4], origins=[])
    found = facts.causes(alone)
    assert facts.title(alone, 10, found) == "failed pairs, worst first"
    assert facts.title(alone, 2, found) == "the 2 worst of 4 failed pairs"
    assert [c.like for c in found] == [""] * 4
