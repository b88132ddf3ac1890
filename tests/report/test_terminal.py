"""The whole report on a terminal, literally."""

import io

from report_examples import DIVERGENCE, EVIL, ORIGIN, comparison, hostile, pair, realistic

from vllm_accprobe.gate.localize import LocalizePlan, LocalizeTarget, Window
from vllm_accprobe.report import facts, terminal
from vllm_accprobe.report.servers import planned

SENTENCE = (
    "FAIL: model.layers.3.mlp.down_proj (RowParallelLinear) introduces the error: output.0, request 'a', "
    "position 17 (decode), row relative L2 0.21, limit 0.016 (13x)"
)


def test_whole_report_of_a_failure():
    pairs = [
        pair(tap="a", status="pass", identical=True, bit_identical=True, order=0),
        pair(tap="b", status="fail", worst_row_rel_l2=0.032, order=1, worst_request="a", worst_position=17, step=4),
        pair(tap="c", status="fail", worst_row_rel_l2=0.21, cosine=0.977951, order=2, mine="c2/output.0"),
        pair(tap="d", status="fail", nonfinite_mismatch=2, worst_row_rel_l2=0.001, order=3, step=None, limit=None),
        pair(tap="n", status="fail", measure="row_norm_ratio", measured=1.06, allowed=0.04, worst_row_rel_l2=0.01,
             order=9, message="row norm is 1.06 times the golden's (allowed 1 ± 0.04); merged from 2 ranks"),
        pair(tap="e", status="skip", message="no rows in common", limit=None, worst_row_rel_l2=None, order=4),
    ]  # fmt: skip
    result = comparison(
        pairs=pairs,
        verdict="fail",
        origins=[ORIGIN, ORIGIN | {"module": "lm_head", "class": "", "created": None, "request": None}],
        first_divergence=DIVERGENCE,
        notes=["the weights differ: 1 of 57 parameters"],
        plan=["names: 5 exact"],
        coverage={
            "rows_compared": 1200,
            "rows_only_golden": 16,
            "rows_only_mine": 0,
            "taps_only_golden": [],
            "taps_only_mine": ["x", "y", "z", "w"],
            "skipped": {"b": 2, "a": 2, "no rows in common": 7},
        },
        tokens={
            "compared": 36,
            "flipped": [
                {"request": "a", "ordinal": 5, "golden": 311, "mine": 42, "golden_margin": 0.41, "mine_margin": None}
            ],
        },
    )
    assert terminal.lines(result) == [
        "note: the weights differ: 1 of 57 parameters",
        "",
        SENTENCE,
        "compared, not checked: files of another tool do not say all that an operator read",
        "",
        "evidence: its output is further off than its inputs explain (error passed on from its inputs: 0.0021)",
        "1 other independent origin, in data-flow order:",
        "  2. lm_head: output.0, position 17 (decode), the values differ",
        "",
        "first divergence: model.layers.3.mlp.down_proj/output.0, rank 0, step 4, request 'a', position 17 (decode), "
        "where origin 1 is",
        "",
        "failed pairs, worst first:",
        "  x limit     measure  value     limit    cosine  step  pair",
        "        ∞      row L2  0.001         –         1     –  d/output.0; 2 NaN/Inf mismatches",
        "      13x      row L2   0.21     0.016  0.977951     0  c/output.0 ↔ c2/output.0",
        "       2x      row L2  0.032     0.016         1     4  b/output.0; request 'a', position 17",
        "     1.5x  norm ratio   1.06  1 ± 0.04         1     0  n/output.0; merged from 2 ranks",
        "",
        "1 of 36 sampled tokens flipped (margin: first logit minus second):",
        "  request 'a', generated token 5: golden 311 (margin 0.41), mine 42 (margin –)",
        "",
        "coverage:",
        "  pairs: 6 = 1 pass + 0 fail at 2 origins + 4 propagated + 1 skipped",
        "  pairs compared: 5 (1 pass, 4 fail)",
        "  pairs identical: 1 (1 bit-identical)",
        "  pairs skipped: 1",
        "  rows compared: 1,200",
        "  rows only in golden: 16",
        "  rows only in mine: 0",
        "  taps only in golden: 0",
        "  taps only in mine: 4",
        "  tokens compared: 36",
        "  only in mine: x",
        "  only in mine: y",
        "  only in mine: z",
        "  … 1 more only in mine: compare.json, coverage.taps_only_mine",
        "  pairs skipped, no rows in common: 1",
        "  left out, no rows in common: 6",
        "  left out, a: 2",
        "  left out, b: 2",
    ]
    assert terminal.lines(result, terminal.QUIET) == [
        "note: the weights differ: 1 of 57 parameters",
        "",
        SENTENCE,
    ]
    full = terminal.lines(result, terminal.FULL)
    assert full[-3:] == ["", "plan:", "  names: 5 exact"]
    assert "  only in mine: w" in full


def test_only_ten_worst_causes_and_how_to_see_the_rest():
    result = realistic()
    section = terminal.worst_pairs(result)
    failed = [p for p in result.pairs if p.status == "fail"]
    found = len({p.tap for p in failed})
    assert 10 < found < len(failed)
    behind = f"1 cause and {found - 1} places that it reaches"
    assert section[0] == f"{behind}, of {len(failed):,} failed pairs, the 10 worst:"
    assert len(section) == 13
    assert section[-1] == f"  … {found - 10:,} more: compare.html, or compare.csv where status is fail"
    listed = facts.causes(result)
    assert [c.own for c in listed] == [True] + [False] * (found - 1)
    severities = [facts.severity(c.worst) for c in listed[1:]]
    assert severities == sorted(severities, reverse=True)
    assert max(facts.severity(c.worst) for c in listed) == max(map(facts.severity, result.pairs))


def test_names_cannot_steer_the_terminal():
    text = "\n".join(terminal.lines(hostile(), terminal.FULL))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\x1b[31m\u202e" in text


def test_render_prints_the_lines_and_no_markup():
    from rich.console import Console

    out = io.StringIO()
    result = comparison(verdict="fail", origins=[ORIGIN | {"module": "[bold]x[/bold]" + "y" * 150}], notes=[EVIL])
    terminal.render(result, Console(file=out, width=40))
    assert out.getvalue().splitlines() == terminal.lines(result)


# --- what is said before a dig: which token, what is captured and what not. (Its end: gate/dig/test_culprit.py.) ---


def test_what_is_captured() -> None:
    windows = (Window(0, ("s",), 0, 0, (2000,)), Window(1, ("a", "b"), 1, 7, (40, 50)))
    plan = LocalizePlan(LocalizeTarget("a", 7, 1046, 0.2345, 1), windows, ("one", "all"), ("1 of 3 requests",))
    assert planned(plan) == [
        "dig: token 7 of a (position 1,046, pass 1, all), 0.234 nats apart",
        "  captured: s; tokens 0, at most 2,000 rows, every module",
        "  captured: a.pass1, b.pass1; tokens 1-7, at most 14 rows, every module",
        "  not captured: 1 of 3 requests",
    ]
