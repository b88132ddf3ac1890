"""How a machine computes is recognised, is named once with its price, and hides no fault; evidence of it is counts that
add up, survive a csv, and are nothing where a stranger wrote them."""

import json
from pathlib import Path

import machines as m
import pytest
import torch
from support.opchecked import rows_of

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.machine_precision.of_machine import (
    AWAY,
    NEAREST,
    ZERO,
    Evidence,
    EvidencePool,
    candidates_of,
    hits,
    settle,
)
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS

NORM, LINEAR, ACT = "RMSNorm", "ReplicatedLinear", "SiluAndMul"
WIDE, TO_NEAREST = "adds up in float32 or wider", "rounds to nearest"


def failed(rows: list) -> set[str]:
    return {r.tap for r in rows if r.status == FAIL}


@pytest.mark.parametrize(
    ("machine", "operator", "words"),
    [
        (m.HONEST, LINEAR, {WIDE, TO_NEAREST}),
        (m.Machine(last=m.zero), LINEAR, {WIDE, "rounds toward zero"}),
        (m.Machine(last=m.away), LINEAR, {WIDE, "rounds away from zero"}),
        (m.Machine(last=m.stochastic), LINEAR, {"rounds at random (stochastic)"}),
        (m.Machine(linear=m.low(1)), LINEAR, {"adds up in bfloat16, rounded after every term", TO_NEAREST}),
        (m.Machine(linear=m.low(8)), LINEAR, {"adds up in bfloat16, rounded after every 8 terms", TO_NEAREST}),
        (m.Machine(linear=m.split(2)), LINEAR, {"splits its sums into 2 parts, each rounded to bfloat16", TO_NEAREST}),
        (m.Machine(linear=m.split(4)), LINEAR, {"splits its sums into 4 parts, each rounded to bfloat16", TO_NEAREST}),
        (m.Machine(norm=m.twice_norm), NORM,
         {"rounds the normalised value to bfloat16 before the result", TO_NEAREST}),
        (m.Machine(act=m.twice_act), ACT, {"rounds the activation to bfloat16 before the result", TO_NEAREST}),
        (m.Machine(last=m.flush, size=2.0**-128), LINEAR,
         {"gives 0 for results below 2^-126, the smallest normal number", WIDE, TO_NEAREST}),
    ],
)  # fmt: skip
def test_a_machine_is_recognised(machine: m.Machine, operator: str, words: set[str], tmp_path: Path) -> None:
    rows, found = m.settled(m.dump(tmp_path / "dump", machine, {NORM: "norm", LINEAR: "linear", ACT: "act"}[operator]))
    told = {w for w in m.said(found, operator) if " right to " not in w}
    assert told == words
    assert failed(rows) == set()
    by_words = {h.words: h for h in found.habits}
    for w in words:
        assert by_words[w].layers == 4
        assert by_words[w].outputs >= 0.95 * by_words[w].of


@pytest.mark.parametrize(
    ("odd", "usual", "tap", "words"),
    [
        (m.Machine(last=m.zero), m.HONEST, "layers.2.proj",
         "rounds toward zero, where the other 3 layers round to nearest"),
        (m.Machine(linear=m.low(1)), m.HONEST, "layers.2.proj",
         "adds up in bfloat16, rounded after every term, where the other 3 layers add up in float32 or wider"),
        (m.Machine(linear=m.low(1), last=m.zero), m.Machine(last=m.zero), "layers.2.proj", "adds up in bfloat16"),
    ],
)  # fmt: skip
def test_a_layer_that_departs_is_blamed(odd, usual, tap, words, tmp_path):
    rows, _ = m.settled(m.dump(tmp_path / "dump", m.one_of(odd, usual), "linear"))
    assert failed(rows) == {tap}
    assert all(words in r.message for r in rows if r.status == FAIL)


def test_what_is_allowed_for_passes_by_its_habit_and_strict_allows_nothing(tmp_path: Path) -> None:
    checked = rows_of(m.dump(tmp_path / "dump", m.Machine(linear=m.low(1)), "linear"))
    rows, found = settle(checked)
    excused = [r for r in rows if "as this machine computes" in r.message]
    assert len(excused) == len([r for r in rows if r.cls == LINEAR])
    assert all(r.status == PASS and r.severity <= 1 for r in excused)
    (habit,) = (h for h in found.habits if h.kind == "accumulator")
    assert habit.price == 64.0  # 128 terms, half a rounding each
    strict, _ = settle(checked, strict=True)
    cut = rows_of(m.dump(tmp_path / "cut", m.Machine(last=m.zero), "linear"), standard="strict")
    assert failed(strict) == failed(cut) == {f"layers.{n}.proj" for n in range(4)}


def test_an_operator_that_stands_alone_may_have_the_habit_of_another(tmp_path: Path) -> None:
    for name, usual, wrong in (("alone", m.HONEST, {"lm_head"}), ("alike", m.Machine(linear=m.low(1)), set())):
        path = m.dump(tmp_path / name, usual, "linear", head=m.Machine(linear=m.low(1)))
        assert failed(m.settled(path)[0]) == wrong


U = 2.0**-8
EVERYWHERE = {
    "a scale": m.Machine(linear=lambda x, w, b: 1.03 * (x @ w.T) + b),
    "a scale within a truncation": m.Machine(linear=lambda x, w, b: (1 - 0.7 * U) * (x @ w.T + b)),
    "no bias": m.Machine(linear=lambda x, w, b: x @ w.T),
    "a term too few": m.Machine(linear=lambda x, w, b: x[:, :-1] @ w[:, :-1].T + b),
    "a scale in a low sum": m.Machine(linear=lambda x, w, b: m.low(1)(x, 1.05 * w, b)),
    "a column": m.Machine(linear=lambda x, w, b: (x @ w.T + b) * (1 + 0.1 * (torch.arange(128) == 9))),
    "a mask": m.Machine(linear=lambda x, w, b: (x @ w.T + b) * (torch.arange(128) != 9)),
    "epsilon": m.Machine(norm=lambda x, w, eps: m.HONEST.norm(x, w, 100 * eps)),
    "a mean over too few": m.Machine(norm=lambda x, w, eps: m.HONEST.norm(x, w, eps) * (127 / 128) ** 0.5**0.5),
    "another activation": m.Machine(act=lambda a, b: a * torch.sigmoid(1.702 * a) * b),
}


FURTHER = ("a scale within a truncation", "a scale in a low sum", "a mask")
"""One of a scale and one of a column are among the others."""


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=pytest.mark.extra) if w in FURTHER else w for w in EVERYWHERE]
)
def test_nothing_else_is_excused_for_being_everywhere(what: str, tmp_path: Path) -> None:
    for machine in (EVERYWHERE[what], m.wide(EVERYWHERE[what])):
        checked = rows_of(m.dump(tmp_path / str(machine.dtype), machine))
        rows, found = settle(checked)
        kept, _ = settle(checked, strict=True)
        unsettled = {r.tap for r in kept if r.status == FAIL}
        assert failed(rows) == unsettled
        # in bfloat16 these three are within an operator's limits here, habit or no habit
        if (
            what not in ("a scale within a truncation", "a mean over too few", "epsilon")
            or machine.dtype == torch.float32
        ):
            assert len(unsettled) >= 4
        assert not [h for h in found.habits if h.kind in ("split", "subnormals", "function") and h.price]


@pytest.mark.parametrize(
    ("operator", "bits", "dtype", "words", "least"),
    [
        *((NORM, bits, dtype, "its reciprocal square root", bits + 2)
          for bits, dtype in ((11, torch.float32), (12, torch.float32), (10, torch.bfloat16))),
        *((ACT, bits, dtype, "its activation's function", bits + 5)
          for bits, dtype in ((12, torch.float32), (17, torch.float32), (10, torch.bfloat16))),
    ],
)  # fmt: skip
def test_an_approximated_function_is_measured(operator, bits, dtype, words, least, tmp_path):
    made = {"norm": m.rsqrt_norm(bits)} if operator == NORM else {"act": m.exp_act(bits)}
    rows, found = m.settled(m.dump(tmp_path / "dump", m.Machine(dtype=dtype, **made), next(iter(made))))
    (habit,) = (h for h in found.habits if h.kind == "function")
    assert habit.words.startswith(f"approximates {words}: off by 2^-1")
    which = "rsqrt" if operator == NORM else "activation"
    assert 2.0**-least < found.units[f"{operator} {str(dtype).removeprefix('torch.')} {which}"] < 2.0**-bits
    assert failed(rows) == set()


def test_an_honest_machine_has_exact_functions(tmp_path: Path) -> None:
    for machine in (m.HONEST, m.wide(m.HONEST)):
        rows, found = m.settled(m.dump(tmp_path / str(machine.dtype), machine))
        assert failed(rows) == set()
        assert all(h.price == 0 for h in found.habits)
        assert [h for h in found.habits if h.kind == "function"]


SOME = Evidence(
    ("once", "low 1"), {0b001001: 50, 0b001000: 30, 0b000010: 3}, ((4, 1),) * 8, 2, (3, 4),
    {"rsqrt": (3.0, 1.0, 0.5, 1.0, 0.25)}, {"low 1": 0.7}, 128,
)  # fmt: skip


def test_it_comes_back_from_its_line() -> None:
    assert Evidence.of_text(SOME.to_text()) == SOME
    assert "\n" not in SOME.to_text()
    assert Evidence().to_text() == ""


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "{}", '{"masks":3}', '{"masks":{"a":1}}', '{"other":1}', '{"ups":[1]}', '{"subnormals":[1,2,3]}',
     '{"would":{"a":"b"}}', "[" * 5000, '{"ways":["' + "a" * 20_000 + '"]}'],
)  # fmt: skip
def test_what_is_none_says_nothing(text: str) -> None:
    assert Evidence.of_text(text) == Evidence()


def test_hits_are_of_the_bits() -> None:
    assert candidates_of(SOME.ways)[3] == ("low 1", NEAREST)
    assert hits(SOME) == {
        ("once", NEAREST): 50, ("once", ZERO): 3, ("once", AWAY): 0,
        ("low 1", NEAREST): 80, ("low 1", ZERO): 0, ("low 1", AWAY): 0,
    }  # fmt: skip


def test_a_way_is_left_where_no_other_is_right_alone_more_often_than_chance() -> None:
    pool = EvidencePool([SOME, SOME])
    assert pool.alive == [("low 1", NEAREST)]
    assert pool.alone(("low 1", NEAREST), ("once", NEAREST)) == 60
    assert (pool.kept, pool.flushed, pool.out) == (6, 8, 4)
    close = Evidence(("once", "low 1"), {0b001001: 50, 0b001000: 6, 0b000001: 4})
    assert set(EvidencePool([close]).alive) == {("once", NEAREST), ("low 1", NEAREST)}
    other = Evidence(("once",), {0b1: 40})  # tried on fewer outputs, a way is compared by those
    assert EvidencePool([close, other]).alone(("once", NEAREST), ("low 1", NEAREST)) == 4


LOW = m.Machine(linear=m.low(1))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["{dump}", "--calibrate", "{out}"], "name a further run"),
        (["{dump}", "{dump}", "--calibrate", "{out}", "--profile"], "one dump"),
        (["{dump}", "{dump}", "--calibrate", "{out}", "--weights", "."], "--weights goes with --profile"),
        (["{dump}/none", "--calibrate", "{out}", "--profile"], "does not exist"),
        (["{dump}", "--calibrate", "{dump}", "--profile"], "dump"),
    ],
)
def test_what_does_not_fit_is_one_line(args, why, tmp_path, capsys):
    path = m.dump(tmp_path / "dump", m.HONEST, "linear")
    assert main(["compare", *(a.format(dump=path, out=tmp_path / "out") for a in args)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_a_comparison_carries_both_machines(tmp_path: Path) -> None:
    golden, mine = (m.dump(tmp_path / n, x, "linear") for n, x in (("golden", m.HONEST), ("mine", LOW)))
    assert main(["compare", str(golden), str(mine), "--replay", "--out", str(tmp_path / "out")]) == 0
    machines = json.loads((tmp_path / "out" / "replay.json").read_text())["machines"]
    words = {side: {h["words"] for h in habits} for side, habits in machines.items()}
    assert words["golden"] == {"rounds to nearest", "adds up in float32 or wider"}
    assert words["mine"] == {"rounds to nearest", "adds up in bfloat16, rounded after every term"}
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["origins"] == []
