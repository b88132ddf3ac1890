"""What a verdict covers, how the machines compute, and what lies next to an origin: whole sections."""

import math
from dataclasses import replace
from typing import Any

import pytest
from report_examples import ORIGIN, comparison, pair

from vllm_accprobe.comparison.verdict.neighbours import Edge, OriginNeighbours
from vllm_accprobe.report import markdown, terminal, verdict_parts
from vllm_accprobe.report.html import page

# --- what a verdict covers: the table by class, and that comparing is not checking ---


CLASSES = [
    {"class": "Attention", "calls": 3, "rows": 23, "checked": 20, "compared": 2, "unseen": 0,
     "smallest": {"row": 0.003, "column": 0.0075, "one_row": 0.011}},
    {"class": "<b>", "calls": 1, "rows": 5, "checked": 0, "compared": 5, "unseen": 2, "smallest": None},
    {"class": "Sampler", "calls": 1, "rows": 1, "checked": 1, "compared": 0, "unseen": 0,
     "smallest": {"row": 0.0, "column": 0.0, "one_row": 0.0}},
]  # fmt: skip
OURS = {"tool": "accprobe", "probe": {"task": "tensor"}}


def passed(**more):
    made = comparison(verdict="pass", golden_run=OURS, mine_run=OURS, origins=[], first_divergence=None,
                      pairs=[pair(status="pass")], notes=[])  # fmt: skip
    return replace(made, coverage=made.coverage | {"by_class": CLASSES}, **more)


def test_a_pass_says_by_class_what_it_covers():
    total = "21 of 29 rows of operators checked, 7 compared only, 1 neither; 2 modules not seen"
    assert verdict_parts.totals(passed()) == total
    assert verdict_parts.table(passed()) == [
        ("3", "23", "20", "2", "0", "0.3%", "0.75%", "1.1%", "Attention"),
        ("1", "5", "0", "5", "2", "–", "–", "–", "<b>"),
        ("1", "1", "1", "0", "0", "any", "any", "any", "Sampler"),
    ]
    assert "&lt;b&gt;" in page(passed())


def test_compared_is_not_checked():
    made = passed()
    said = terminal.lines(made)
    at = next(i for i, line in enumerate(said) if line.startswith("PASS: "))
    assert said[at + 1 : at + 3] == [
        "compared, not checked: no operator was computed again from what it read (a replay needs torch); "
        "this would check:",
        f"  accprobe compare {made.golden_path} {made.mine_path} --replay",
    ]
    assert f"    accprobe compare {made.golden_path} {made.mine_path} --replay" in markdown.markdown_lines(made)
    assert "Compared, not checked:" in page(made)
    assert made.to_json()["not_checked"]["command"].endswith("--replay")
    assert verdict_parts.head(replace(made, replayed="partly"))[0].startswith("checked in part: 21 of 29 rows: ")
    assert verdict_parts.head(replace(made, replayed="whole")) == []
    assert replace(made, replayed="whole").to_json()["not_checked"] is None


def test_what_cannot_be_checked_says_so():
    foreign = replace(passed(), golden_run={"tool": "msprobe"})
    said = "compared, not checked: files of another tool do not say all that an operator read"
    assert verdict_parts.head(foreign) == [said]
    bare = replace(passed(), mine_run=OURS | {"probe": {"task": "stats"}})
    assert verdict_parts.head(bare)[0].startswith("compared, not checked: mine holds no inputs with their values")
    assert "PARTS=input,output,params" in verdict_parts.head(bare)[1]
    alone = replace(passed(), golden_run=OURS | {"probe": {"task": "tensor", "parts": ["output"]}})
    assert verdict_parts.head(alone)[1] == f"  accprobe opcheck {alone.mine_path}"


# --- how the two machines compute: whole sections, differences first ---


def habit(operator: str, words: str, price: float = 0.0, kind: str = "rounding") -> dict[str, Any]:
    found = {"kind": kind, "operator": operator, "dtype": "bfloat16", "words": words, "price": price}
    return found | {"outputs": 24, "of": 26, "layers": 4}


NEAREST, ZERO = habit("Attention", "rounds to nearest"), habit("Attention", "rounds toward zero", 1.0)
LINEAR = [habit(f"Linear{i}", "rounds to nearest") for i in range(6)]
EXP, TANH, RSQRT, ERF = (
    habit("Attention", f"{f} right to 2^-9", kind="function") for f in ("exp", "tanh", "rsqrt", "erf")
)
FREE = habit("QKVParallelLinear", "adds up in float32 or wider", kind="accumulator")
TWICE = habit("RMSNorm", "rounds the normalised value to bfloat16 before the result", 0.5, "twice")
DIFFER = "mine rounds toward zero in Attention (bfloat16): costs up to 1 unit; golden rounds to nearest"


@pytest.mark.parametrize(("golden", "mine", "lines"), [
    ([NEAREST, *LINEAR, habit("RMSNorm", "keeps subnormals", kind="subnormals"),
      habit("SiluAndMul", "adds up in 16 bits", 3.5, "accumulator")],
     [*LINEAR, ZERO, habit("RMSNorm", "flushes subnormals", 1, "subnormals"),
      habit("Attention", "splits its sum in 4", kind="split")],
     [DIFFER, "mine flushes subnormals in RMSNorm (bfloat16): costs up to 1 unit; golden keeps subnormals",
      "mine splits its sum in 4 in Attention (bfloat16); not seen in golden",
      "golden adds up in 16 bits in SiluAndMul (bfloat16): costs up to 3.5 units; not seen in mine",
      "both: rounds to nearest in Linear0, Linear1, Linear2, Linear3 and 2 more (bfloat16)"]),
    # a kernel may approximate two functions; one of the other side's is no counterpart of both
    ([EXP, RSQRT], [EXP, TANH, ERF],
     ["mine: tanh right to 2^-9 in Attention (bfloat16); not seen in golden",
      "mine: erf right to 2^-9 in Attention (bfloat16); not seen in golden",
      "golden: rsqrt right to 2^-9 in Attention (bfloat16); not seen in mine",
      "both: exp right to 2^-9 in Attention (bfloat16)"]),
    ([], [ZERO], ["mine rounds toward zero in Attention (bfloat16): costs up to 1 unit"]),
    # what costs something comes first of what is alike
    ([FREE, TWICE, NEAREST], [FREE, TWICE, ZERO],
     [DIFFER, "both: rounds the normalised value to bfloat16 before the result in RMSNorm (bfloat16): costs up to 0.5 "
      "units", "both: adds up in float32 or wider in QKVParallelLinear (bfloat16)"]),
], ids=["differences first", "several answers to one question", "golden unknown", "what costs first"])  # fmt: skip
def test_how_two_machines_compute(golden, mine, lines):
    assert verdict_parts.machine_lines({"golden": golden, "mine": mine}) == lines


def test_what_differs_is_known_only_where_both_sides_are():
    golden, mine = [NEAREST, LINEAR[0]], [ZERO, LINEAR[0]]
    assert verdict_parts.differing({"golden": golden, "mine": mine}) == [DIFFER]
    assert verdict_parts.differing({"golden": golden, "mine": golden}) == []
    assert verdict_parts.differing({"mine": mine}) == verdict_parts.differing({}) == []


# --- neighbours in words, literally ---


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


def with_neighbours(*near):
    result = comparison(origins=[ORIGIN] * len(near), verdict="fail")
    object.__setattr__(result, "neighbours", list(near))
    return result


def test_a_line_each_side_of_the_culprit_alone():
    other = OriginNeighbours("b", "output.0", FED, (), (0, 0))
    result = with_neighbours(OriginNeighbours("model.down", "output.0", FED, FEEDS, (0, 2)), other)
    assert verdict_parts.neighbour_lines(result) == [
        "fed by: model.act/output.0 (identical); its input.key (0.21x its limit); its param.weight (identical)",
        "feeds: model.norm/input.x, which only golden hands on as it is (13x its limit); model.mlp/output.0 (beyond "
        "any limit); model.end/output.0 (not compared); 3 more in compare.json",
    ]


def test_statistics_prove_nothing_and_where_nothing_was_compared_nothing_is_said():
    assert verdict_parts.error(Edge("m", "output.0", "", 0.0, 0.0, "pass", "order", 1)) == "no error seen"
    unknown = OriginNeighbours("m", "output.0", (FEEDS[2],), (FEEDS[2],))
    for near in ([], [None], [unknown]):
        assert verdict_parts.neighbour_lines(with_neighbours(*near)) == []


def test_hostile_names_are_text():
    bad = Edge("a\x1b[31m\n<b>", "output.0\u202e", "", 0.1, 2.0, "fail", "both", 1)
    near = OriginNeighbours("m\n", "output.0", FED[:2], (bad,))
    assert verdict_parts.described(near) == (
        "m\\n/output.0: fed by model.act/output.0 (identical), its input.key, made after model.qkv/output.0 (0.21x its "
        "limit); feeds a\\x1b[31m\\n<b>/output.0\\u202e (2x its limit)"
    )
    assert all(line.isprintable() for line in verdict_parts.neighbour_lines(with_neighbours(near)))
