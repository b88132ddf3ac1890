"""The comparison as Markdown and as annotations, with names that try to be markup. Whole ones: tests/freeze."""

import re

from report_examples import EVIL, ORIGIN, comparison, hostile, realistic

from vllm_accprobe.report import markdown


def test_no_name_becomes_markup():
    text = "\n".join(markdown.markdown_lines(hostile()))
    assert "onerror" in text
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert "<img" not in outside
    assert "</script" not in outside
    assert markdown.code("a`b``c") == "```a`b``c```"
    assert markdown.code("`x`") == "`` `x` ``"
    assert markdown.code("a|b") == r"`a\|b`"
    assert "\x1b" not in text
    assert EVIL not in text


# --- annotations on GitHub's log, with names that try to issue commands ---


def test_ten_annotations_of_a_kind_and_the_rest_is_counted():
    lines = markdown.github_lines(comparison(verdict="fail", origins=[ORIGIN] * 13, notes=["x"] * 11))
    assert sum(x.startswith("::error") for x in lines) == 10
    assert lines[-2:] == [
        "::notice title=accprobe::3 origins more: compare.json",
        "::notice title=accprobe::1 note more: compare.json",
    ]


def test_no_name_issues_a_command():
    bad = "x\n::error::y\r%0A::set-env name=A::b"
    result = comparison(verdict="fail", origins=[ORIGIN | {"module": bad, "class": bad}], notes=[bad])
    lines = markdown.github_lines(result)
    assert len(lines) == 2
    for line in lines:
        assert "\n" not in line
        assert "\r" not in line
        assert "%250A" in line
    assert markdown.command("error", "a:b,c%", "d:e,f%") == "::error title=a%3Ab%2Cc%25::d:e,f%25"


def test_summary_is_appended_where_github_says(tmp_path, monkeypatch):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert markdown.write_summary(realistic()) is None
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert markdown.write_summary(realistic()) == str(path)
    assert path.read_text().startswith("before\n## accprobe: FAIL\n")
