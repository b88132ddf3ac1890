"""compare.csv read back with the csv module (all of it: tests/freeze); how all reports spell numbers and places."""

import csv
import math

from report_examples import comparison, pair

from vllm_accprobe.comparison.pair import ratio
from vllm_accprobe.report import table
from vllm_accprobe.report.table import write_csv
from vllm_accprobe.report.text import MISSING, against, capital, count, more, num, place, safe, times


def written(tmp_path, *pairs):
    path = tmp_path / "compare.csv"
    write_csv(comparison(pairs=list(pairs)), path)
    assert [p.name for p in tmp_path.iterdir()] == ["compare.csv"]
    with path.open(encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def test_no_cell_is_a_formula_and_no_name_breaks_the_file(tmp_path):
    row = written(tmp_path, pair(golden='=HYPERLINK("http://x")', mine="\udcff", max_abs_golden=-1.5,
                                 message='a, "b"\nc', rel_l2=math.nan, limit=None))[0]  # fmt: skip
    assert row["golden"] == '\'=HYPERLINK("http://x")'
    assert row["mine"] == r"\udcff"
    assert (row["max_abs_golden"], row["rel_l2"], row["limit"], row["message"]) == ("-1.5", "nan", "", 'a, "b"\nc')


def test_a_column_of_different_texts_is_written_as_each_alone():
    for odd in ("=1", "+1", "-", "@a", "\t", "\r", 'a"b', "a\nb", "a\r", "a,b", "", "5%", None, (1, 2)):
        for at in (0, 50):
            texts = [f"text {i}" for i in range(99)]
            texts[at] = odd
            assert table._cells(True, texts) == list(map(table._text, texts))


# --- strings, numbers and places, as all reports spell them ---


def test_names_are_one_printable_line() -> None:
    assert safe("a\nb\x1b[31m\u202e") == "a\\nb\\x1b[31m\\u202e"
    assert safe("0123456789", 5) == "01…89"


def test_numbers_and_counts() -> None:
    values = (None, True, 1200, math.nan, -math.inf, 0.012345)
    assert [num(value) for value in values] == [MISSING, "True", "1,200", "NaN", "-Inf", "0.0123"]
    assert (count(1, "pair"), count(1200, "pair")) == ("1 pair", "1,200 pairs")
    assert (count(1, "entry", "entries"), count(2, "entry", "entries")) == ("1 entry", "2 entries")
    assert (more(7, 5, "a.json"), more(5, 5, "a.json")) == (["… 2 more: a.json"], [])
    assert (capital("how it is"), capital("")) == ("How it is", "")


def test_values_against_limits_and_places() -> None:
    assert (ratio(0.2, 0.1), ratio(0.2, 0.0), ratio(0.0, 0.0), ratio(None, 1.0)) == (2.0, math.inf, None, None)
    assert (times(0.21, 0.016), times(1.04, 1.0), times(3e7, 1.0), times(1.0, 0.0)) == ("13x", "1.04x", "3e+07x", "")
    assert (against(0.21, 0.016), against(0.21, None)) == ("0.21, limit 0.016 (13x)", "0.21")
    assert place("a", 17, "decode") == "request 'a', position 17 (decode)"
    assert (place(phase="prefill"), place()) == ("prefill", "")
