"""What a replay changes about a comparison: who is blamed, and who is not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from report_examples import pair

from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.pair import NONE_JUDGED
from vllm_accprobe.comparison.result import Comparison, Pair
from vllm_accprobe.comparison.row_table import RowTable
from vllm_accprobe.judge.profile import Habit
from vllm_accprobe.judge.statistic import PROVED, SIBLING_OUTLIER
from vllm_accprobe.opcheck.floors.pooled import OutlierLayer, Pooled
from vllm_accprobe.opcheck.proof.apply_proof import ReplayResult, decide, narrowed, with_replayed
from vllm_accprobe.opcheck.proof.explained import Explained
from vllm_accprobe.opcheck.proof.make_proof import prove
from vllm_accprobe.opcheck.run.result_row import COLUMNS, CheckResult


def checked(tap, status="fail", severity=10.0, rows=4, seq=0):
    facts = dict.fromkeys(COLUMNS) | {
        "tap": tap, "cls": "C", "role": "output.0", "rank": 0, "step": 0, "call": 0, "seq": seq, "dtype": "bfloat16",
        "shape": (4, 8), "rows": rows, "checked": rows, "unchecked_because": "", "created": 0.02, "measured": severity,
        "allowed": 1.0, "request": "a", "position": 3, "status": status, "message": "why",
    }  # fmt: skip
    return CheckResult(**facts)


WEIGHT = Pair("w", "w", None, 0, "bfloat16", "bfloat16", (4, 8), status="pass", tap="first", role="param.weight")


def explained(*taps, role="output.0", rows=range(1)):
    """As if both sides' tensors without rows had been checked in these steps."""
    steps = {"": [(rows.start, rows.stop)]}
    return Explained({f"{tap}/{role}#0": steps for tap in taps}, {})


def comparison(*origins, verdict="pass"):
    both = "bfloat16", "bfloat16"
    names = enumerate(("first", "second", "third"))
    pairs = [Pair(t, t, 0, 0, *both, (4, 8), status="pass", tap=t, role="output.0", order=i) for i, t in names]
    pairs.append(WEIGHT)
    entries = [{"module": o, "evidence": "jump", "shape": "all rows"} for o in origins]
    return Comparison("g", "m", {}, {}, pairs, {}, None, entries, {}, verdict, [], [], {})


def test_an_origin_says_which_floor_it_breaks_by_how_much_and_how_likely_that_is() -> None:
    proved = replace(checked("second"), tier="proved", chance=0.0)
    likely = replace(checked("third"), tier="beyond chance", chance=1e-9, measured=4.0)
    first, second = judged(comparison(), [], [proved, likely]).origins
    assert (first["module"], first["tier"], first["times"], first["chance"]) == ("second", "proved", 10.0, 0.0)
    assert (second["tier"], second["times"], second["chance"]) == ("beyond chance", 4.0, 1e-9)
    assert first["layers"] is None


def test_what_is_wrong_in_every_layer_says_so_and_the_first_place_is_named_first() -> None:
    taps = [f"model.layers.{n}.norm" for n in range(3)]
    every = [checked(tap, seq=9 - n) for n, tap in enumerate(taps)]
    found = comparison()
    placed = enumerate(zip(found.pairs[:3], taps, strict=True))
    found = replace(found, pairs=[replace(p, tap=t, order=n) for n, (p, t) in placed])
    result = judged(found, [], every)
    assert [o["module"] for o in result.origins] == taps
    assert [o["layers"] for o in result.origins] == [{"in": 3, "of": 3}] * 3
    result = judged(found, [], [*every[:2], replace(every[2], status="pass", measured=0.5)])
    assert [o["layers"] for o in result.origins] == [None, None]


def test_what_is_unlike_its_kin_is_blamed_only_where_nobody_breaks_a_floor_of_his_own() -> None:
    p = Pooled("third", "C", "output.0", 0, "bfloat16", 2.0, 1e4, 0.0, 1e-5, 400, 5, 0.01)
    odd = [OutlierLayer(p, 1.4, 1e-5, 3)]
    rows = [checked("first", "pass"), checked("third", "pass")]
    (origin,) = decide(comparison(), ReplayResult.from_json(prove([], rows, outliers=odd).to_json())).origins
    assert (origin["module"], origin["tier"], origin["times"]) == ("third", "outlier among sibling layers", 1.4)
    assert "1.4 times those of 3 other layers' C" in origin["shape"]
    (origin,) = decide(comparison(), prove([], [checked("first"), rows[1]], outliers=odd)).origins
    assert origin["module"] == "first"


def judged(result, golden, mine, known=None):
    return decide(result, ReplayResult.from_json(prove(golden, mine, explained=known).to_json()))


def test_what_replay_proves_is_an_origin_in_data_flow_order_and_fails() -> None:
    result = judged(comparison(), [], [checked("third", seq=1), checked("second", seq=9), checked("first", "pass")])
    assert [(o["module"], o["evidence"]) for o in result.origins] == [("second", "replay"), ("third", "replay")]
    assert result.verdict == "fail"
    assert (result.origins[0]["created"], result.origins[0]["floor"]) == (0.02, pytest.approx(0.002))
    assert result.notes[0] == "replay: 3 outputs of mine checked, 2 modules, each wrong for its own inputs"
    loaded = comparison("first", verdict="fail")  # its operator is right
    loaded.origins[0].update(role="param.weight", evidence="values")
    result = judged(loaded, [], [checked("third", seq=1), checked("second", seq=9), checked("first", "pass")])
    assert [o["module"] for o in result.origins] == ["first", "second", "third"]


@pytest.mark.parametrize(("message", "text"), [
    ("1, not -inf; as without allowed token ids", "the logits are as without allowed token ids"),
    ("3, not 4 (x; with the bias of another request)", "the logits are made with the bias of another request"),
    ("3, not 4", None),
])  # fmt: skip
def test_the_parameters_that_explain_a_sampler_are_its_cause(message: str, text: str | None) -> None:
    wrong = replace(checked("first"), tap="sampler", cls="Sampler", message=message)
    (origin,) = [o for o in judged(comparison(), [], [wrong]).origins if o["module"] == "sampler"]
    assert (origin["cause"] or {}).get("text") == text


@pytest.mark.parametrize(("role", "module"), [("output.top_logits", "<root>"), ("output.token", "sampler")])
def test_wrong_best_logits_are_a_gap_in_front_of_the_sampler(role: str, module: str) -> None:
    result = judged(comparison(), [], [replace(checked("sampler"), role=role)])
    gap = None if module == "sampler" else {"after": "third", "before": "sampler", "contains": ["<root>"]}
    assert [(o["module"], o["gap"]) for o in result.origins] == [(module, gap)]
    for known in (({"sampler"}, set()), (set(), {"<root>"})):  # the root's output says nothing of its logits
        assert narrowed(result, *known).origins == result.origins


def test_what_rounds_toward_zero_is_said_once_for_its_class_and_side() -> None:
    cut = [replace(checked(tap, "pass"), rounding="toward zero") for tap in ("first", "second")]
    result = judged(comparison(), [checked("first", "pass")], [*cut, replace(checked("third", "pass"), cls="D")])
    (said,) = [n for n in result.notes if "toward zero" in n]
    assert said.startswith("replay: rounds toward zero in mine: C (2 of 2 outputs of 2 modules): rounding of a machine")
    assert result.verdict == "pass"


def test_how_both_machines_compute_goes_with_the_proof_and_is_not_noted_again() -> None:
    cut = replace(checked("first", "pass"), rounding="toward zero")
    habit = Habit("rounding", "C", "bfloat16", "rounds toward zero", 1.0, 1, 1, 1)
    proof = prove([], [cut], machines={"golden": (), "mine": (habit,)})
    result = decide(comparison(), ReplayResult.from_json(proof.to_json()))
    assert result.machines == {"golden": [], "mine": [habit.plain()]}
    assert not [n for n in result.notes if "toward zero" in n]
    with pytest.raises(ValueError, match=r"machines\.mine\[0\]\.words is .* not printable text"):
        ReplayResult.from_json(proof.to_json().replace("toward zero", "a" * 1000))


def test_an_error_that_is_a_habit_alone_is_not_blamed_and_is_named() -> None:
    allowed = replace(checked("first", "pass"), habit="adds up in bfloat16, rounded after every term")
    result = comparison("first", verdict="fail")
    result.origins[0].update({"created": 0.02, "role": "output.0"})
    told = judged(result, [], [allowed])
    assert told.origins == []
    said = "replay: first computes as its machine does everywhere (adds up in bfloat16, rounded after every term)"
    assert f"{said} and created no more than that: not blamed" in told.notes
    result.origins[0]["created"] = 0.03
    assert [o["module"] for o in judged(result, [], [allowed]).origins] == ["first"]


@pytest.mark.parametrize(
    ("change", "excused"),
    [
        ({}, True),
        ({"created": 0.03}, False),  # more than its own rounding: a weight that is not golden's
        ({"role": "input.x"}, False),
        ({"module": "third"}, False),  # right for its own inputs, and rounds to nearest
    ],
)
def test_an_error_that_is_truncation_alone_is_not_blamed(change: dict[str, object], excused: bool) -> None:
    """A comparison, whose limits are those of rounding to nearest, blames what its replay saw to be honest."""
    found = comparison(verdict="fail")
    origin = {"module": "second", "role": "output.0", "created": 0.018, "evidence": "jump", "shape": ""} | change
    beyond = [replace(p, status="fail") if p.tap == origin["module"] else p for p in found.pairs]
    equal = replace(WEIGHT, tap="second", role="input.x", step=0, identical=True)
    found = replace(found, origins=[origin], pairs=[*beyond, equal], first_divergence={"module": origin["module"]})
    rows = [checked(tap, "pass") for tap in ("first", "second", "third")]
    rows[1] = replace(rows[1], rounding="toward zero")
    result = judged(found, [], rows, explained(*["second"] * excused))
    assert (result.origins == []) == excused == (result.verdict == "pass")
    assert any("created no more than that: not blamed" in n for n in result.notes) == excused
    wrong = replace(rows[1], status="fail")
    assert judged(found, [], [rows[0], wrong, rows[2]]).verdict == "fail"


def test_a_cache_of_8_bits_is_told_apart_from_what_is_beyond_it() -> None:
    held = {"cache": ("fp8_e4m3", 0.05, 0.042, 1.9)}
    golden = [checked("first", "pass"), checked("second", "pass")]
    right, wrong = (replace(checked("first", status), **held) for status in ("pass", "fail"))
    other = checked("second", "pass")
    result = judged(comparison("first"), golden, [right, other])
    (said,) = [n for n in result.notes if "fp8_e4m3" in n]
    assert (
        "mine's cache is fp8_e4m3 in 1 attention: that rounding alone moves a row of their outputs by up to 0.05"
        in said
    )
    assert "gives 0.042 there and allows 1.9), and beyond it mine is right for its own inputs: no wrong state" in said
    result = judged(comparison("first"), golden, [wrong, other])
    assert [o["module"] for o in result.origins] == ["first"]
    assert any("what first differs by is not that rounding" in n for n in result.notes)
    both = judged(comparison(), [replace(golden[0], **held), golden[1]], [right, other])
    assert not any("fp8_e4m3" in n for n in both.notes)
    with pytest.raises(ValueError, match=r"caches\.first is \[.*\], not a list of 5"):
        ReplayResult.from_json(prove([], [right]).to_json().replace("0.042", '"x"').replace('"mine", ', ""))


def test_the_proved_stand_before_the_inferred_and_keep_their_words() -> None:
    found = comparison("first", "third", verdict="fail")
    result = judged(found, [], [checked("first", "pass"), checked("third")])
    assert [(o["module"], o["evidence"]) for o in result.origins] == [("third", "replay"), ("first", "jump")]
    assert result.origins[0]["shape"] == "all rows"


@pytest.mark.parametrize(("theirs", "blamed"), [(9.0, False), (4.0, False), (3.0, True), (0.0, True)])
def test_what_golden_does_as_well_is_told_and_not_blamed(theirs: float, blamed: bool) -> None:
    golden = [checked("first", severity=theirs)] if theirs else []
    result = judged(comparison(), golden, [checked("first", severity=10.0)])
    assert bool(result.origins) == blamed == (result.verdict == "fail")
    assert any("not blamed" in n for n in result.notes) != blamed


def test_a_golden_that_is_wrong_alone_is_said() -> None:
    result = judged(comparison(), [checked("second")], [replace(checked("second"), status="pass")])
    assert (result.verdict, result.origins) == ("pass", [])
    assert any("in golden only, first second" in n for n in result.notes)


def beyond(found, *taps):
    """``found``, in which these are beyond their limits and nobody stands out."""
    pairs = [replace(p, status="fail") if p.tap in taps and p.role != "param.weight" else p for p in found.pairs]
    return replace(found, pairs=pairs, verdict="fail", notes=[messages.NOBODY], first_divergence={"module": taps[0]})


@pytest.mark.parametrize(("also", "verdict"), [("", "pass"), ("second", "fail")])
def test_what_is_only_large_is_acquitted_where_every_pair_of_it_is_explained(also: str, verdict: str) -> None:
    found = beyond(comparison(), "first", also)
    result = judged(found, [], [checked("first", "pass"), checked("third", "pass")], explained("first", "third"))
    assert (result.verdict, result.origins) == (verdict, [])
    if verdict == "pass":
        assert {p.status for p in result.pairs} == {"pass"}
        assert "1 pairs of 1 modules are beyond" in result.notes[0]
        assert messages.NOBODY not in result.notes
        assert result.first_divergence is None
    else:
        assert messages.NOBODY in result.notes
        said = "replay: 1 of 2 pairs beyond their limits are not explained, first second: it was not replayed"
        assert result.notes[0] == said


def test_a_module_that_is_right_for_its_own_inputs_is_not_acquitted_by_that() -> None:
    """Right rows on mine's side alone, another reason to fail, other steps, other roles, other weights."""
    found = beyond(comparison(), "first")
    rows = [checked(t, "pass") for t in ("first", "second", "third")]
    assert judged(found, [], rows).verdict == "fail"
    assert judged(found, [], rows, explained("first", rows=range(1, 9))).verdict == "fail"
    assert judged(found, [], rows, explained("first", role="output.1")).verdict == "fail"
    assert judged(replace(found, notes=[]), [], rows, explained("first")).verdict == "fail"
    other = replace(found, pairs=[*found.pairs[:-1], replace(WEIGHT, status="fail")])
    assert judged(other, [], rows, explained("first")).verdict == "fail"
    assert judged(found, [], rows, explained("first")).verdict == "pass"


def test_rows_are_explained_one_by_one() -> None:
    """A row beyond its limit that was not checked on both sides keeps the verdict; one below its limit does not."""

    def table(*ratios):
        n = len(ratios)
        names = np.zeros(n, np.int32)
        return RowTable(("a",), names, names, np.arange(n), np.zeros(n, bool), np.float32(ratios), np.float32(ratios))

    found = beyond(comparison(), "first")
    found = replace(found, pairs=[replace(p, rows=4) for p in found.pairs[:3]] + [WEIGHT])
    known = Explained({"first/output.0#0": {"a": [(0, 2), (3, 4)]}}, {"first/output.0#0": "no history"})
    rows = [checked("first", "pass")]
    assert judged(replace(found, rows=table(2, 0, 0.5, 3)), [], rows, known).verdict == "pass"
    result = judged(replace(found, rows=table(2, 0, 1.5, 3)), [], rows, known)
    assert (result.verdict, result.notes[0].rpartition("first: ")[2]) == ("fail", "no history")


def test_equal_inputs_and_another_output_are_no_enlarged_rounding() -> None:
    def given(**same):
        place = {"tap": "first", "role": "input.x", "status": "pass"}
        return [replace(WEIGHT, step=step, **place, identical=identical) for step, identical in same.values()]

    rows, known = [checked("first", "pass")], explained("first")
    for inputs, verdict in (
        (given(a=(0, True)), "fail"),
        (given(a=(0, False)), "pass"),
        (given(a=(0, True), b=(1, False)), "fail"),  # what a later step reads is not what this one read
    ):
        found = beyond(comparison(), "first")
        found = replace(found, pairs=[*found.pairs, *inputs])
        assert judged(found, [], rows, known).verdict == verdict


@pytest.mark.parametrize("outer", ["model", "<root>"])
def test_a_cache_of_another_format_is_another_input(outer: str) -> None:
    """Equal keys and values come back otherwise; what contains such an attention has equal inputs, too."""
    held = {"cache": ("fp8_e4m3", 0.05, 0.042, 1.9)}
    right, around = checked("model.attn", "pass"), checked(outer, "pass")
    found = beyond(comparison(), "first", "second")
    pairs = [replace(p, tap=t) for p, t in zip(found.pairs[:2], ("model.attn", outer), strict=True)]
    pairs = [replace(p, mine=f"{p.tap}/output.0") for p in pairs]
    inputs = [replace(WEIGHT, tap=p.tap, role="input.x", status="pass", identical=True, step=p.step) for p in pairs]
    found = replace(found, pairs=[*pairs, *inputs, WEIGHT])
    known = explained("model.attn", outer)
    told = judged(found, [right, around], [replace(right, **held), around], known)
    assert (told.verdict, told.first_divergence) == ("pass", None)
    for cache in ({}, held):  # of one format on both sides
        side = [replace(right, **cache), around]
        told = judged(found, side, side, known)
        assert (told.verdict, told.notes[0]) == (
            "fail",
            "replay: 1 of 2 pairs beyond their limits are not explained, first model.attn/output.0: its inputs are "
            "equal to the bit",
        )


def test_what_is_inferred_of_a_module_is_not_blamed_where_all_that_it_read_explains_its_rows() -> None:
    def said(result, params=(WEIGHT,), known=None, **origin):
        result.origins[0].update({"role": "output.0", "created": 0.03, "tier": SIBLING_OUTLIER} | origin)
        pairs = [replace(p, status="fail") if p.tap == "first" else p for p in result.pairs[:3]]
        known = known or explained("first")
        return judged(replace(result, pairs=[*pairs, *params]), [], [checked("first", "pass")], known)

    told = said(comparison("first", verdict="fail"))
    assert (told.origins, told.verdict) == ([], "pass")
    assert any("suspected and right for its own inputs, first first" in n for n in told.notes)
    for kept in ({"role": "input.x"}, {"tier": PROVED}, {"setting": "eps is 0.02, golden has 1e-06"}):
        told = said(comparison("first", verdict="fail"), **kept)
        assert ([o["module"] for o in told.origins], told.verdict) == (["first"], "fail")
    for params in ([replace(WEIGHT, status="fail")], [replace(WEIGHT, status="skip")], []):
        assert said(comparison("first", verdict="fail"), params).verdict == "fail"
    assert said(comparison("first", verdict="fail"), known=explained("second")).verdict == "fail"


def test_an_output_that_is_goldens_to_the_bit_is_never_an_origin() -> None:
    found = comparison()
    found = replace(found, pairs=[replace(p, identical=True, bit_identical=True) for p in found.pairs])
    result = judged(found, [], [checked("first")])
    assert (result.origins, result.verdict) == ([], "pass")
    said = "replay: 1 module is wrong for its own inputs, and equal to golden's to the bit, first first: not blamed"
    assert said in result.notes
    # A later step of it, of which no row is judged, is not equal: the replay judges it, in data-flow order.
    unjudged = [replace(p, step=1, status="skip", message=NONE_JUDGED, worst_row_rel_l2=0.0, allowed=0.1, rel_l2=0.2)
                for p in comparison().pairs[:2]]  # fmt: skip
    found = replace(found, pairs=[*found.pairs[1:], *unjudged], coverage={"skipped": {NONE_JUDGED: 2, "other": 1}})
    rows = [replace(checked(tap, seq=9 - i), step=1) for i, tap in enumerate(("first", "second"))]
    result = judged(found, [], rows)
    assert ([o["module"] for o in result.origins], result.verdict) == (["first", "second"], "fail")
    assert [(p.status, p.message.split(" of ")[0]) for p in result.pairs[-2:]] == [("fail", "introduces an error")] * 2
    assert result.coverage["skipped"] == {"other": 1}


def test_a_block_is_not_cleared_by_its_last_child() -> None:
    """What is inside of it must be explained, too: here an input of a child that nothing captured computed."""
    found = comparison("first", verdict="fail")
    found.origins[0].update({"role": "output.0", "created": 0.03, "tier": SIBLING_OUTLIER})
    inner = replace(WEIGHT, tap="first.out_proj", role="input.x", step=0)
    found = replace(found, pairs=[*found.pairs, inner])
    rows = [checked("first", "pass"), checked("first.out_proj", "pass")]
    assert [o["module"] for o in judged(found, [], rows, explained("first")).origins] == ["first"]
    known = {**explained("first").rows, **explained("first.out_proj", role="input.x").rows}
    assert judged(found, [], rows, Explained(known)).origins == []


@pytest.mark.parametrize(("steps", "origins"), [((4, 3), []), ((4, 4), ["first"])])
def test_an_input_inside_that_is_within_its_limits_is_explained_where_all_its_rows_are(steps, origins):
    """The table of rows has none of it, and any of them may differ."""
    found = comparison("first", verdict="fail")
    found.origins[0].update({"role": "output.0", "created": 0.03, "tier": SIBLING_OUTLIER})
    place = {"tap": "first.kv_b_proj", "role": "input.x"}
    inner = [replace(WEIGHT, **place, step=n, status="pass", rows=rows) for n, rows in enumerate(steps)]
    found = replace(found, pairs=[*found.pairs, *inner])
    rows = [checked("first", "pass"), checked("first.kv_b_proj", "pass")]
    known = {**explained("first").rows, "first.kv_b_proj/input.x#0": {"a": [(0, 4)], "b": [(1, 4)]}}
    assert [o["module"] for o in judged(found, [], rows, Explained(known)).origins] == origins


@pytest.mark.parametrize(
    ("why", "verdict"), [("sampler", "fail"), ("near tie", "pass"), ("logits were masked", "fail")]
)
def test_a_sampler_is_acquitted_only_where_each_side_took_the_best_of_its_own_logits(why: str, verdict: str) -> None:
    found = beyond(comparison(), "first")
    token = replace(found.pairs[0], tap="sampler", role="output.token", status="fail")
    found = replace(found, pairs=[*found.pairs, token], tokens={"flipped": [{"why": why}]})
    rows = [checked("first", "pass"), checked("sampler", "pass")]
    assert judged(found, [], rows, explained("first")).verdict == verdict


GAP = {"after": "m.0.up", "before": "m.0.down", "contains": ["m.0.act", "m.0", "m.0.down"]}


def result(*origins):
    plain = {"golden_path": "", "mine_path": "", "golden_run": {}, "mine_run": {}}
    more = {"pairs": [], "coverage": {}, "first_divergence": None, "tokens": {}, "verdict": "fail", "notes": []}
    return Comparison(**plain, **more, origins=list(origins), plan=[], standard={})


def gaps_of(comparison):
    return [o["gap"] and o["gap"]["contains"] for o in comparison.origins]


@pytest.mark.parametrize(
    ("wrong", "right", "left"),
    [
        ((), (), [["m.0.act", "m.0", "m.0.down"], None]),
        ((), ("m.0.down", "m.0"), [["m.0.act", "m.0"], None]),
        (("m.0.act",), (), [None]),
        (("m.0.down",), (), [None]),
        (("m.1",), (), [["m.0.act", "m.0", "m.0.down"], None]),
    ],
    ids=["nothing", "its end is right", "one inside is wrong", "its end is wrong", "another is wrong"],
)
def test_a_gap_is_narrowed(wrong, right, left):
    found = narrowed(result({"module": "m.0", "gap": GAP}, {"module": "m.1", "gap": None}), wrong, right)
    assert gaps_of(found) == left


AT = {"tap": "m", "status": "fail", "measure": "row_rel_l2", "allowed": 0.1}
ORIGIN = {"module": "m", "role": "output.0", "created": 0.3, "floor": 0.01, "request": "a", "position": 7}


def pairs():
    return [
        pair(
            **AT,
            measured=0.5,
            worst_request="b",
            worst_position=1,
            worst_row_rel_l2=0.2,
            message="row norm is 1.5 times the golden's (allowed 1 ± 0.1); first seen",
        ),
        pair(**AT, measured=0.3, worst_request="a", worst_position=7, worst_row_rel_l2=0.3),
        pair(tap="m", measured=0.01, allowed=0.1),
        pair(tap="n", status="fail", measured=0.5, allowed=0.1, worst_request="a", worst_position=7),
    ]


def changed(origin):
    before = pairs()
    return {i: (p.measure, p.measured, p.allowed) for i, p in enumerate(with_replayed(before, [origin]))
            if p != before[i]}  # fmt: skip


def test_all_failed_pairs_of_the_output_and_none_above_the_blamed_row():
    # the first pair's worst row is 0.2 off, and was not replayed
    assert changed(ORIGIN) == {0: ("created", 0.2, 0.01), 1: ("created", 0.3, 0.01)}
    assert changed(ORIGIN | {"created": 0.1, "position": 8}) == {0: ("created", 0.1, 0.01), 1: ("created", 0.1, 0.01)}
    said = with_replayed(pairs(), [ORIGIN])[0].message
    assert said == "introduces an error of 0.2 (limit 0.01, by replay); first seen"


def test_where_none_failed_the_worst_that_is_not_identical_does():
    passed = [
        pair(tap="m", measured=0.01, allowed=0.1, worst_row_rel_l2=0.01),
        pair(tap="m", measured=0.02, allowed=0.1, worst_row_rel_l2=0.02),
        pair(tap="m", measured=0.0, allowed=0.1, identical=True),
    ]
    found = with_replayed(passed, [ORIGIN])
    assert [(p.status, p.measured) for p in found] == [("pass", 0.01), ("fail", 0.3), ("pass", 0.0)]


def test_what_has_no_limit_or_no_failed_pair_changes_nothing():
    before = pairs()
    for other in ({"floor": 0.0}, {"created": math.inf}, {"created": None}, {"module": "elsewhere"}, {"role": "x"}):
        assert with_replayed(before, [ORIGIN | other]) is before
