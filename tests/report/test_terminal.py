"""The whole report on a terminal, literally."""

import io

from report_examples import EVIL, ORIGIN, comparison, hostile, realistic

from vllm_accprobe.gate.localize import LocalizePlan, LocalizeTarget, Window
from vllm_accprobe.report import facts, terminal
from vllm_accprobe.report.servers import planned


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
