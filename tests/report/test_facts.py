"""The verdict in one sentence, whatever it rests on."""

import math
import shlex
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
from report_examples import DIVERGENCE, ORIGIN, comparison, pair, realistic

from vllm_accprobe.judge.statistic import BEHIND_A_ROUTER, BEYOND_CHANCE, PROVED, SIBLING_OUTLIER
from vllm_accprobe.report import facts, markdown, terminal
from vllm_accprobe.report.facts import LONGEST, glob_of, line_of, path_word


def test_an_infinite_error_is_said_in_words():
    result = comparison(
        verdict="fail",
        origins=[ORIGIN | {"created": float("inf")}],
        first_divergence=DIVERGENCE | {"metric": "nonfinite", "value": float("inf"), "limit": 0.0},
    )
    assert facts.headline(result).endswith(
        "position 17 (decode), NaN or Inf on one side only, or values that differ and must be equal"
    )
    assert terminal.first_divergence(result)[0].endswith("position 17 (decode), where origin 1 is")
    result = replace(result, first_divergence=result.first_divergence | {"module": "upstream"})
    assert terminal.first_divergence(result)[0].endswith("position 17 (decode), NaN or Inf on one side only")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"first_divergence": DIVERGENCE | {"rank": None, "request": None}},
         "FAIL: no single operator stands out as the origin; the error is first seen at model.layers.3.mlp.down_proj/"
         "output.0, step 4, position 17 (decode), row relative L2 0.21, limit 0.016 (13x)"),
        ({"pairs": [pair(status="fail"), pair()]}, "FAIL: 1 pair of 2 differ beyond the standard"),
        ({"tokens": {"compared": 9, "flipped": [{}, {}]}},
         "FAIL: 2 sampled tokens flipped without a near tie, and no captured tensor explains it"),
        ({}, "FAIL: the comparison failed; see the notes"),
    ],
)  # fmt: skip
def test_failure_without_an_origin(changes, expected):
    assert facts.headline(comparison(verdict="fail", **changes)) == expected


def test_a_token_that_passes_as_a_near_tie_is_not_endlessly_beyond_its_limit():
    other = {"measure": "exact", "limit": 0.0, "worst_row_rel_l2": 0.9}
    assert facts.severity(pair(tap="sampler", role="output.token", status="pass", **other)) == 1.0
    assert facts.severity(pair(tap="sampler", role="output.token", status="fail", **other)) == float("inf")
    assert facts.severity(pair(status="pass", nonfinite_mismatch=1)) == float("inf")


# --- which floor an origin breaks, how likely that is, and in how many layers: the sentences, whole ---


PROVEN = {"tier": PROVED, "times": 3.1, "chance": 0.0}
LUCKLESS = {"tier": BEYOND_CHANCE, "times": 5.2, "chance": 1e-4}
ODD = {"tier": SIBLING_OUTLIER, "times": 4.0, "chance": 5e-4}


@pytest.mark.parametrize(("says", "sentence", "short"), [
    (PROVEN, "proved: 3.1 times the error bound of its own inputs", "proved, 3.1x"),
    (LUCKLESS, "beyond chance: 5.2 times its floor; rounding alone shows such a thing in 1 of 10,000 comparisons",
     "beyond chance, 5.2x"),
    (ODD, "outlier among sibling layers: 4 times what the same operator does in other layers (1 of 2,000)",
     "outlier among sibling layers, 4x"),
    (ODD | {"evidence": "replay"},
     "outlier among sibling layers: 4 times what the same operator does in its other calls (1 of 2,000)",
     "outlier among sibling layers, 4x"),
    ({"tier": BEHIND_A_ROUTER, "times": 6.6, "chance": None},
     "behind an unseen router: 6.6 times its floor, as rows are that a near tie sends to other experts",
     "behind an unseen router, 6.6x"),
    (PROVEN | {"times": math.inf}, "proved: beyond the error bound of its own inputs", "proved"),
    (PROVEN | {"times": "inf"}, "proved: beyond the error bound of its own inputs", "proved"),
    (LUCKLESS | {"times": None, "chance": None}, "beyond chance: above its floor", "beyond chance"),
    ({"tier": SIBLING_OUTLIER},
     "outlier among sibling layers: more than what the same operator does in other layers",
     "outlier among sibling layers"),
    (LUCKLESS | {"times": 12345.6, "chance": None}, "beyond chance: 12,346 times its floor",
     "beyond chance, 12,346x"),
    ({"tier": "a new\x1bone"}, r"a new\x1bone", r"a new\x1bone"),
    ({}, None, None),
])  # fmt: skip
def test_sentences(says, sentence, short):
    assert facts.sentence(ORIGIN | says) == sentence
    assert facts.short(ORIGIN | says) == short


@pytest.mark.parametrize(("chance", "words"), [
    (None, None),
    (math.nan, None),
    (True, None),
    (0.0, "fewer than 1 of 1,000,000,000,000"),
    (3e-9, "1 of 330,000,000"),
    (1.05e-4, "1 of 9,500"),
    (1e-3, "1 of 1,000"),
    (0.09, "1 of 11"),
    (0.3, "30 of 100"),
    (7.0, "100 of 100"),
])  # fmt: skip
def test_a_probability_is_said_as_odds(chance, words):
    assert facts.odds(chance) == words


@pytest.mark.parametrize(("layers", "words"), [
    (None, None),
    ({"in": 4, "of": 4}, "in all 4 layers"),
    ({"in": 3, "of": 4}, "in 3 of 4 layers"),
    ({"in": 1, "of": 4}, None),
    ({"in": "<b>", "of": 4}, None),
    ("all", None),
])  # fmt: skip
def test_layers(layers, words):
    assert facts.layers({"layers": layers}) == words


def test_a_fault_of_every_layer_is_named_so_in_the_verdict():
    result = comparison(verdict="fail", origins=[ORIGIN | {"layers": {"in": 4, "of": 4}}])
    assert facts.headline(result) == (
        "FAIL: model.layers.3.mlp.down_proj (RowParallelLinear) introduces the error in all 4 layers, first here: "
        "output.0, request 'a', position 17 (decode), row relative L2 0.21, limit 0.016 (13x)"
    )


def test_what_an_origin_is_worth_by_chance():
    assert facts.alarms(comparison()) is None
    assert facts.alarms(comparison(by_chance=9e-4)) == (
        "the limits name an origin, of whatever size, in 1 of 1,100 comparisons with rounding alone"
    )
    assert facts.alarms(comparison(by_chance=0.0, false_alarm_rate=0.2)) == (
        "the limits name an origin, of whatever size, in fewer than 1 of 1,000,000,000,000 comparisons with "
        "rounding alone"
    )


# --- the ten worst are ten causes, the page's table and compare.csv hold all pairs ---


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


# --- words that a shell and our globs take apart as they were meant ---


NAMES = ["a.b", "with blank", "it's", "*", "[0]", "a,b", "!not", "-o", "$(rm)", "tab\tbed", "a\nb", "", "\u202eevil"]


@pytest.mark.parametrize("name", NAMES)
def test_a_glob_matches_its_name_and_is_one_of_a_list(name: str) -> None:
    glob = glob_of(name)
    assert fnmatchcase(name, glob)
    assert glob.isprintable()
    assert not glob.startswith(("-", "!"))
    assert glob.split(",") == [glob.strip()]
    assert not fnmatchcase(name + "x", glob)


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_taken_apart_as_it_was_put_together_or_is_none(name: str) -> None:
    line = line_of(["accprobe", "show", name])
    if name.isprintable():
        assert shlex.split(line) == ["accprobe", "show", name]
    else:
        assert line is None


def test_a_line_too_long_to_be_shown_is_none_and_a_path_is_no_option() -> None:
    assert line_of(["x" * LONGEST]) is not None
    assert line_of(["x" * (LONGEST + 1)]) is None
    assert path_word("-rf") == "./-rf"
    assert path_word("/a/-b") == "/a/-b"
