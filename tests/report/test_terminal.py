"""What a terminal shows. Whole reports: tests/freeze."""

import io

from report_examples import EVIL, ORIGIN, comparison

from vllm_accprobe.gate.localize import LocalizePlan, LocalizeTarget, Window
from vllm_accprobe.report import terminal
from vllm_accprobe.report.servers import planned


def test_render_prints_the_lines_and_no_markup():
    from rich.console import Console

    out = io.StringIO()
    result = comparison(verdict="fail", origins=[ORIGIN | {"module": "[bold]x[/bold]" + "y" * 150}], notes=[EVIL])
    terminal.render(result, Console(file=out, width=40))
    assert out.getvalue().splitlines() == terminal.lines(result)


def test_what_is_captured_before_a_dig() -> None:
    windows = (Window(0, ("s",), 0, 0, (2000,)), Window(1, ("a", "b"), 1, 7, (40, 50)))
    plan = LocalizePlan(LocalizeTarget("a", 7, 1046, 0.2345, 1), windows, ("one", "all"), ("1 of 3 requests",))
    assert planned(plan) == [
        "dig: token 7 of a (position 1,046, pass 1, all), 0.234 nats apart",
        "  captured: s; tokens 0, at most 2,000 rows, every module",
        "  captured: a.pass1, b.pass1; tokens 1-7, at most 14 rows, every module",
        "  not captured: 1 of 3 requests",
    ]
