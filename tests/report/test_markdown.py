"""The comparison as Markdown, literally, with names that try to be markup."""

import re

from report_examples import EVIL, hostile
from small_examples import failing

from vllm_accprobe.report import markdown


def test_markdown_of_a_failure():
    assert markdown.markdown_lines(failing()) == [
        "## accprobe: FAIL",
        "",
        "`FAIL: model.layers.3.mlp.down_proj (RowParallelLinear) introduces the error: output.0, request 'a', "
        "position 17 (decode), row relative L2 0.21, limit 0.016 (13x)`",
        "",
        "**Read this first**",
        "",
        "- `golden is float32, mine bfloat16`",
        "",
        "`compared, not checked: files of another tool do not say all that an operator read`",
        "",
        "### Origins",
        "",
        "| # | origin | class | where | created / limit | evidence | shape of the error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 1 | `model.layers.3.mlp.down_proj` | `RowParallelLinear` | `output.0, request 'a', position 17 (decode)` "
        "| 0.21 / 0.016 (13x) | `jump` | `one column, 7 of 64` |",
        "| 2 | `lm_head` | `RowParallelLinear` | `output.0, request 'a', position 17 (decode)` | – / 0.016 | `jump` "
        "|   |",
        "",
        "First divergence: `model.layers.3.mlp.down_proj/output.0, rank 0, step 4, request 'a', position 17 (decode), "
        "where origin 1 is`",
        "",
        "### Failed pairs, worst first",
        "",
        "| × limit | measure | value | limit | step | pair |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 13x | row L2 | 0.21 | 0.016 | 4 | `c/output.0` |",
        "| 1.5x | norm ratio | 1.06 | 0.04 | 0 | `n/output.0` |",
        "",
        "### 1 of 36 sampled tokens flipped",
        "",
        "| request | generated token | golden (margin) | mine (margin) |",
        "| --- | --- | --- | --- |",
        "| `a` | `5` | `3` (0.4) | `4` (0) |",
        "",
        "<details><summary>Coverage</summary>",
        "",
        "| what | how many |",
        "| --- | --- |",
        "| pairs | 2 = 0 pass + 0 fail at 2 origins + 2 propagated + 0 skipped |",
        "| pairs compared | 2 (0 pass, 2 fail) |",
        "| pairs identical | 0 (0 bit-identical) |",
        "| pairs skipped | 0 |",
        "| rows compared | 8 |",
        "| rows only in golden | 0 |",
        "| rows only in mine | 0 |",
        "| taps only in golden | 0 |",
        "| taps only in mine | 0 |",
        "| tokens compared | 36 |",
        "| `left out, no rows in common` | 7 |",
        "",
        "</details>",
    ]


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
