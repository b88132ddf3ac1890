"""compare.csv read back with the csv module."""

import csv
import math

import pytest
from report_examples import comparison, pair

from vllm_accprobe.comparison.pair import ratio
from vllm_accprobe.comparison.result import COLUMNS
from vllm_accprobe.report.table import write_csv
from vllm_accprobe.report.text import MISSING, against, capital, count, more, num, place, safe, times

FIRST = (
    "golden,mine,step,rank,dtype_golden,dtype_mine,shape,cosine,max_abs_err,mean_abs_err,rmse,rel_l2,"
    "max_rel_err,worst_row_rel_l2,worst_row_norm_ratio,nonfinite,nonfinite_mismatch,status,message,"
)


def written(tmp_path, *pairs):
    path = tmp_path / "compare.csv"
    write_csv(comparison(pairs=list(pairs)), path)
    assert [p.name for p in tmp_path.iterdir()] == ["compare.csv"]
    with path.open(encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def test_columns_begin_as_promised(tmp_path):
    assert ",".join(written(tmp_path, pair())[0]).startswith(FIRST)
    assert tuple(written(tmp_path, pair())[0]) == COLUMNS


def test_cells_are_exact(tmp_path):
    row = written(
        tmp_path,
        pair(cosine=1 / 3, rel_l2=math.nan, limit=None, shape=(8, 64), max_abs_index=(0,), message='a, "b"\nc'),
    )[0]
    assert float(row["cosine"]) == 1 / 3
    assert row["rel_l2"] == "nan"
    assert row["limit"] == ""
    assert row["shape"] == "[8, 64]"
    assert row["max_abs_index"] == "[0]"
    assert row["message"] == 'a, "b"\nc'
    assert row["identical"] == "False"


def test_no_cell_is_a_formula_and_no_name_breaks_the_file(tmp_path):
    row = written(tmp_path, pair(golden='=HYPERLINK("http://x")', mine="\udcff", max_abs_golden=-1.5))[0]
    assert row["golden"] == '\'=HYPERLINK("http://x")'
    assert row["mine"] == r"\udcff"
    assert row["max_abs_golden"] == "-1.5"


# --- strings, numbers and places, as all reports spell them ---


def test_names_are_one_printable_line() -> None:
    assert safe("a\nb\x1b[31m\u202e") == "a\\nb\\x1b[31m\\u202e"
    assert safe("0123456789", 5) == "01…89"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, MISSING), (True, "True"), (1200, "1,200"), (math.nan, "NaN"), (-math.inf, "-Inf"), (0.012345, "0.0123")],
)
def test_numbers(value: object, text: str) -> None:
    assert num(value) == text


def test_counts() -> None:
    assert (count(1, "pair"), count(1200, "pair")) == ("1 pair", "1,200 pairs")
    assert (count(1, "entry", "entries"), count(2, "entry", "entries")) == ("1 entry", "2 entries")
    assert (more(7, 5, "a.json"), more(5, 5, "a.json")) == (["… 2 more: a.json"], [])
    assert (capital("how it is"), capital("")) == ("How it is", "")


def test_a_value_against_its_limit() -> None:
    assert (ratio(0.2, 0.1), ratio(0.2, 0.0), ratio(0.0, 0.0), ratio(None, 1.0)) == (2.0, math.inf, None, None)
    assert (times(0.21, 0.016), times(1.04, 1.0), times(3e7, 1.0), times(1.0, 0.0)) == ("13x", "1.04x", "3e+07x", "")
    assert (against(0.21, 0.016), against(0.21, None)) == ("0.21, limit 0.016 (13x)", "0.21")


def test_places() -> None:
    assert place("a", 17, "decode") == "request 'a', position 17 (decode)"
    assert (place(phase="prefill"), place()) == ("prefill", "")
