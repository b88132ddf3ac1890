"""Neighbours in words, literally."""

import math

from report_examples import ORIGIN, comparison

from vllm_accprobe.comparison.verdict.neighbours import Edge, OriginNeighbours
from vllm_accprobe.report import terminal, verdict_parts

FED = (
    Edge("model.act", "output.0", "input.x", 0.0, 0.0, "identical", "both", 1),
    Edge("model.qkv", "output.0", "input.key", 0.001, 0.21, "pass", "order", 2),
    Edge("model.down", "param.weight", "param.weight", 0.0, 0.0, "identical", "own", 3),
)
FEEDS = (
    Edge("model.norm", "input.x", "", 0.3, 13.4, "fail", "golden", 4),
    Edge("model.mlp", "output.0", "", math.inf, math.inf, "fail", "order", 5),
    Edge("model.end", "output.0", "", None, None, "skip", "order", None),
    Edge("model.other", "output.0", "", 0.0, 0.0, "identical", "mine", 6),
)


def with_around(*around):
    result = comparison(origins=[ORIGIN] * len(around), verdict="fail")
    object.__setattr__(result, "neighbours", list(around))
    return result


def test_a_line_each_side_of_the_culprit_alone():
    other = OriginNeighbours("b", "output.0", FED, (), (0, 0))
    result = with_around(OriginNeighbours("model.down", "output.0", FED, FEEDS, (0, 2)), other)
    assert verdict_parts.neighbour_lines(result) == [
        "fed by: model.act/output.0 (identical); its input.key (0.21x its limit); its param.weight (identical)",
        "feeds: model.norm/input.x, which only golden hands on as it is (13x its limit); model.mlp/output.0 (beyond "
        "any limit); model.end/output.0 (not compared); 3 more in compare.json",
    ]
    shown = terminal.lines(result)
    assert [line for line in shown if line.startswith(("fed by: ", "feeds: "))] == verdict_parts.neighbour_lines(result)


def test_equal_neighbours_say_their_error_once():
    weights = tuple(Edge("m", f"param.{n}", f"param.{n}", 0.0, 0.0, "identical", "own", 1) for n in ("weight", "bias"))
    assert verdict_parts.neighbour_lines(with_around(OriginNeighbours("m", "output.0", weights, ()))) == [
        "fed by: its param.weight, its param.bias (identical)"
    ]


def test_equal_statistics_are_no_proof_of_equal_values():
    assert verdict_parts.error(Edge("m", "output.0", "", 0.0, 0.0, "pass", "order", 1)) == "no error seen"


def test_nothing_is_said_where_nothing_was_compared():
    unknown = OriginNeighbours("m", "output.0", (FEEDS[2],), (FEEDS[2],))
    for around in ([], [None], [unknown]):
        assert verdict_parts.neighbour_lines(with_around(*around)) == []


def test_all_of_it_in_one_sentence_and_hostile_names_as_text():
    bad = Edge("a\x1b[31m\n<b>", "output.0\u202e", "", 0.1, 2.0, "fail", "both", 1)
    around = OriginNeighbours("m\n", "output.0", FED[:2], (bad,))
    assert verdict_parts.described(around) == (
        "m\\n/output.0: fed by model.act/output.0 (identical), its input.key, made after model.qkv/output.0 (0.21x its "
        "limit); feeds a\\x1b[31m\\n<b>/output.0\\u202e (2x its limit)"
    )
    assert all(line.isprintable() for line in verdict_parts.neighbour_lines(with_around(around)))
