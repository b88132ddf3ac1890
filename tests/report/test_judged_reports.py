"""Tier, chance, habits and what would decide, in every report: whole."""

import re
from dataclasses import replace
from html import unescape

from report_examples import EVIL, ORIGIN, comparison, hostile

import vllm_accprobe.report.html as html
from vllm_accprobe.judge.statistic import BEYOND_CHANCE, SIBLING_OUTLIER
from vllm_accprobe.report import markdown, notebook, terminal

RUN = {
    "tool": "accprobe", "model": {"path": "MODEL", "dtype": "bfloat16"}, "engine": {"runner": "vllm.v1.Runner"},
    "probe": {"task": "tensor", "parts": []},
}  # fmt: skip


def habit(operator, words, price):
    counts = {"outputs": 12, "of": 12, "layers": 4}
    return {"kind": "rounding", "operator": operator, "dtype": "bfloat16", "words": words, "price": price} | counts


def judged():
    odd = {"tier": SIBLING_OUTLIER, "times": 4.0, "chance": 5e-4, "layers": {"in": 4, "of": 4}, "floor": 0.0525}
    luckless = {"tier": BEYOND_CHANCE, "times": 5.2, "chance": 1e-4, "layers": None, "module": "lm_head", "class": ""}
    luckless["floor"] = 0.21 / 5.2
    return comparison(
        verdict="fail",
        origins=[ORIGIN | odd, ORIGIN | luckless | {"shape": "all rows"}],
        by_chance=9e-4,
        machines={"golden": [habit("Attention", "rounds to nearest", 0.0), habit("RMSNorm", "rounds to nearest", 0.0)],
                  "mine": [habit("Attention", "rounds toward zero", 1.0), habit("RMSNorm", "rounds to nearest", 0.0)]},
        golden_run=RUN,
        mine_run=RUN,
        coverage={"rows_compared": 8},
    )  # fmt: skip


def test_names_of_strangers_stay_names():
    """A model's path, a tap and a habit, in each report."""
    odd = {"tier": SIBLING_OUTLIER, "times": 2.0, "chance": 0.1, "layers": {"in": 2, "of": 2}}
    run = RUN | {"model": {"path": EVIL}, "probe": {"task": "tensor", "parts": ["output"]}}
    result = hostile()
    result = replace(
        result, origins=[result.origins[0] | odd], machines={"mine": [habit(EVIL, EVIL, 1.0)]}, golden_run=run,
        mine_run=run,
    )  # fmt: skip
    assert result.would_decide
    page, cell = html.page(result), notebook.repr_html(result)
    for text in (page, cell, "\n".join(terminal.lines(result, terminal.FULL)),
                 "\n".join(markdown.markdown_lines(result))):  # fmt: skip
        assert "\x1b" not in text
        assert "\u202e" not in text
    for text in (page, cell):
        assert "<img" not in text
    assert page.lower().count("</script") == len(html.SCRIPTS) + 2  # two blocks of data
    for line in markdown.github_lines(result):
        assert line.startswith("::")
        assert line.isprintable()
    # Indented by four blanks a line of Markdown is code, whatever it holds, but for a line before it that is not.
    lines = markdown.markdown_lines(result)
    for i, line in enumerate(lines):
        if line.startswith("    "):
            assert lines[i - 1].startswith("    ") or not lines[i - 1]


SENTENCES = (
    "outlier among sibling layers: 4 times what the same operator does in other layers (1 of 2,000)",
    "beyond chance: 5.2 times its floor; rounding alone shows such a thing in 1 of 10,000 comparisons",
    "the limits name an origin, of whatever size, in 1 of 1,100 comparisons with rounding alone",
    "a second run of golden's side, batched in another way, shows what correct runs differ by",
    "accprobe compare golden mine --replay",
    "accprobe compare golden mine --floor golden-floor",
    "mine rounds toward zero in Attention (bfloat16): costs up to 1 unit; golden rounds to nearest",
)
LEFT_OUT = {"markdown": (), "page": (), "annotations": (2, 6), "notebook": (1, 2)}
"""By report, which of them it does not have."""


def test_the_other_reports_have_the_same_sentences():
    reports = {
        "markdown": "\n".join(markdown.markdown_lines(judged())), "page": html.page(judged()),
        "annotations": "\n".join(markdown.github_lines(judged())), "notebook": notebook.repr_html(judged()),
    }  # fmt: skip
    for name, text in reports.items():
        plain = re.sub(r"\s+", " ", unescape(re.sub(r"<script.*?</script>|<[^>]+>", "", text, flags=re.S))).lower()
        assert tuple(i for i, said in enumerate(SENTENCES) if said.lower() not in plain) == LEFT_OUT[name], name
