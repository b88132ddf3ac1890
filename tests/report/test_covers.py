"""What a verdict covers: the table by class, and that comparing is not checking."""

from dataclasses import replace

from report_examples import comparison, pair

from vllm_accprobe.report import markdown, terminal, verdict_parts
from vllm_accprobe.report.html import page

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
    said = terminal.lines(passed())
    at = next(i for i, line in enumerate(said) if line.startswith(verdict_parts.COVERS_TITLE))
    assert said[at + 1].split() == " ".join(verdict_parts.HEAD).split()
    assert said[at + 2].split()[-1] == "Attention"
    assert any("| `Attention` |" in line for line in markdown.markdown_lines(passed()))
    shown = page(passed())
    assert '<td class=num>0.75%</td>' in shown
    assert "&lt;b&gt;" in shown
    failed = terminal.lines(replace(passed(), verdict="fail"))
    assert f"covered: {total} (compare.json, coverage.by_class)" in failed


def test_compared_is_not_checked():
    made = passed()
    said = terminal.lines(made)
    at = next(i for i, line in enumerate(said) if line.startswith("PASS: "))
    assert said[at + 1 : at + 3] == [
        "compared, not checked: no operator was computed again from what it read (needs torch); this would check:",
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
