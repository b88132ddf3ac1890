"""How the two machines compute: whole sections, differences first."""

from typing import Any

from report_examples import EVIL

from vllm_accprobe.report import verdict_parts


def habit(operator: str, words: str, kind: str = "rounding", **more: Any) -> dict[str, Any]:
    found = {"kind": kind, "operator": operator, "dtype": "bfloat16", "words": words, "price": 0.0}
    return found | {"outputs": 24, "of": 26, "layers": 4} | more


NEAREST = "rounds to nearest"
ZERO = {"words": "rounds toward zero", "price": 1.0}


def test_differences_come_first_and_what_is_alike_is_one_line():
    golden = [habit("Attention", NEAREST), *(habit(f"Linear{i}", NEAREST) for i in range(6))]
    golden.append(habit("RMSNorm", "keeps subnormals", "subnormals", price=0))
    golden.append(habit("SiluAndMul", "adds up in 16 bits", "accumulator", price=3.5))
    mine = [*(habit(f"Linear{i}", NEAREST) for i in range(6)), habit("Attention", **ZERO)]
    mine.append(habit("RMSNorm", "flushes subnormals", "subnormals", price=1))
    mine.append(habit("Attention", "splits its sum in 4", "split"))
    assert verdict_parts.machine_lines({"golden": golden, "mine": mine}) == [
        "mine rounds toward zero in Attention (bfloat16): costs up to 1 unit; golden rounds to nearest",
        "mine flushes subnormals in RMSNorm (bfloat16): costs up to 1 unit; golden keeps subnormals",
        "mine splits its sum in 4 in Attention (bfloat16); not seen in golden",
        "golden adds up in 16 bits in SiluAndMul (bfloat16): costs up to 3.5 units; not seen in mine",
        "both: rounds to nearest in Linear0, Linear1, Linear2, Linear3 and 2 more (bfloat16)",
    ]


def test_what_differs_is_known_only_where_both_sides_are():
    golden, mine = (
        [habit("Attention", NEAREST), habit("Linear", NEAREST)],
        [habit("Attention", **ZERO), habit("Linear", NEAREST)],
    )
    said = ["mine rounds toward zero in Attention (bfloat16): costs up to 1 unit; golden rounds to nearest"]
    assert verdict_parts.differing({"golden": golden, "mine": mine}) == said
    assert verdict_parts.differing({"golden": golden, "mine": golden}) == []
    assert verdict_parts.differing({"mine": mine}) == verdict_parts.differing({}) == []


def test_one_dtype_may_differ_and_the_other_not():
    golden = [habit("Linear", NEAREST), habit("Linear", dtype="float16", **ZERO)]
    mine = [habit("Linear", **ZERO), habit("Linear", dtype="float16", **ZERO)]
    assert verdict_parts.machine_lines({"golden": golden, "mine": mine}) == [
        "mine rounds toward zero in Linear (bfloat16): costs up to 1 unit; golden rounds to nearest",
        "both: rounds toward zero in Linear (float16): costs up to 1 unit",
    ]
    assert verdict_parts.machine_lines({"golden": mine, "mine": golden})[0] == (
        "mine rounds to nearest in Linear (bfloat16); golden rounds toward zero, which costs up to 1 unit"
    )


def test_several_answers_to_one_question_are_not_set_against_each_other():
    """A kernel may approximate two functions; one of the other side's is no counterpart of both."""
    exp = habit("Attention", "exp right to 2^-20 or better", "function", price=0.001)
    tanh, rsqrt = (habit("Attention", f"{f} right to 2^-9", "function") for f in ("tanh", "rsqrt"))
    assert verdict_parts.machine_lines(
        {"golden": [exp, rsqrt], "mine": [exp, tanh, habit("Attention", "erf right to 2^-8", "function")]}
    ) == [
        "mine: tanh right to 2^-9 in Attention (bfloat16); not seen in golden",
        "mine: erf right to 2^-8 in Attention (bfloat16); not seen in golden",
        "golden: rsqrt right to 2^-9 in Attention (bfloat16); not seen in mine",
        "both: exp right to 2^-20 or better in Attention (bfloat16)",
    ]


def test_of_a_side_that_nobody_looked_at_nothing_is_said():
    assert verdict_parts.machine_lines({"golden": [], "mine": [habit("Linear", **ZERO)]}) == [
        "mine rounds toward zero in Linear (bfloat16): costs up to 1 unit"
    ]


def test_rows_hold_every_habit():
    both = {"golden": [habit("Linear", NEAREST, layers=None)], "mine": [habit("Linear", **ZERO)]}
    assert verdict_parts.rows(both) == [
        ("mine", "Linear (bfloat16)", "rounds toward zero", "up to 1 unit", "24 of 26 in 4 modules"),
        ("golden", "Linear (bfloat16)", "rounds to nearest", "", "24 of 26"),
    ]


def test_nothing_known_is_nothing_said():
    assert verdict_parts.machine_lines({}) == verdict_parts.rows({}) == []
    assert verdict_parts.machine_lines({"golden": [], "mine": []}) == []


def test_names_are_one_printable_line():
    (line,) = verdict_parts.machine_lines({"mine": [habit(EVIL, EVIL, EVIL, price=EVIL, dtype=EVIL)]})
    assert line.isprintable()


def test_what_costs_something_comes_first_of_what_is_alike():
    """A native kernel against AVX2's, as `accprobe compare --calibrate --profile` gives them here."""
    free = habit("QKVParallelLinear", "adds up in float32 or wider", "accumulator")
    twice = habit("RMSNorm", "rounds the normalised value to bfloat16 before the result", "twice", price=0.5)
    golden = [free, twice, habit("Attention", NEAREST)]
    assert verdict_parts.machine_lines({"golden": golden, "mine": [free, twice, habit("Attention", **ZERO)]}) == [
        "mine rounds toward zero in Attention (bfloat16): costs up to 1 unit; golden rounds to nearest",
        "both: rounds the normalised value to bfloat16 before the result in RMSNorm (bfloat16): costs up to 0.5 units",
        "both: adds up in float32 or wider in QKVParallelLinear (bfloat16)",
    ]
