"""A series as lines."""

from series_examples import four_days, hostile_days

from vllm_accprobe.report.series import series_lines
from vllm_accprobe.report.series.dump_entry import not_compared


def test_one_line_per_dump():
    lines = series_lines.lines(four_days())
    assert lines[0] == (
        "FAIL: 2 of 4 dumps differ from golden, first day2: model.layers.3.mlp.down_proj (RowParallelLinear); "
        "1 dump could not be compared"
    )
    assert [line.split()[:2] for line in lines[3:]] == [
        ["day1", "pass"], ["day2", "fail"], ["day3", "unreadable"], ["day4", "fail"],
    ]  # fmt: skip
    assert lines[5].endswith("runs/day3 does not exist")
    assert lines[6].endswith("model.layers.3.mlp.down_proj (RowParallelLinear) (+2 other)")
    assert len({line.index(word) for line, word in zip(lines[3:5], ("pass", "fail"), strict=True)}) == 1


def test_what_is_said_of_good_and_of_unreadable_dumps():
    day1, _, day3, _ = four_days()
    assert series_lines.headline([day1]) == "PASS: 1 dump agrees with golden"
    assert series_lines.headline([day1, day1]) == "PASS: 2 dumps agree with golden"
    assert series_lines.headline([day1, day3]) == (
        "INCOMPLETE: 1 dump could not be compared of 2, the others agree with golden"
    )
    assert series_lines.verdict([day1, day3]) == "incomplete"
    assert series_lines.headline([not_compared("a", "a", 3, "")]) == "INCOMPLETE: 1 dump could not be compared of 1"


def test_markdown_and_github():
    days = four_days()
    lines = series_lines.markdown_lines(days)
    assert lines[0] == "## accprobe: FAIL"
    assert sum(line.startswith("| `day") for line in lines) == 4
    said = series_lines.github_lines(days)
    assert [line.split("::")[1].split(" ")[0] for line in said] == ["error"] * 3
    assert series_lines.github_lines(days[:1])[0].startswith("::notice")
    many = [not_compared(str(i), "", 2, "gone") for i in range(12)]
    assert series_lines.github_lines(many)[-1] == "::notice title=accprobe::2 dumps more%3A series.json".replace(
        "%3A", ":"
    )


def test_names_stay_on_their_line():
    for lines in (series_lines.lines, series_lines.markdown_lines, series_lines.github_lines):
        for line in lines(hostile_days()):
            assert "\x1b" not in line
            assert "\u202e" not in line
