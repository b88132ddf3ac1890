"""The comparison as Markdown, literally, with names that try to be markup."""

import re

from report_examples import EVIL, hostile

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
