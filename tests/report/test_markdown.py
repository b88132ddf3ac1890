"""The comparison as Markdown, literally, with names that try to be markup."""

import re

from report_examples import EVIL, ORIGIN, comparison, hostile, pair
from small_examples import failing

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


def test_a_pass_is_a_notice_and_a_failure_without_origin_an_error():
    (line,) = markdown.github_lines(comparison(pairs=[pair()], coverage={"rows_compared": 4}))
    assert line == "::notice title=accprobe::PASS: 1 pair and 4 rows agree within the standard 'accprobe'"
    line, *decide = markdown.github_lines(comparison(verdict="fail", pairs=[pair(status="fail")]))
    assert all(x.startswith("::notice title=accprobe%3A this would decide::") for x in decide)
    assert len(decide) == 1
    assert line == "::error title=accprobe::FAIL: 1 pair of 1 differ beyond the standard"


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
    assert markdown.write_summary(failing()) is None
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert markdown.write_summary(failing()) == str(path)
    assert path.read_text().startswith("before\n## accprobe: FAIL\n")
