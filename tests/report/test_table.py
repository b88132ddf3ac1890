"""compare.csv read back with the csv module."""

import csv
import math

from report_examples import comparison, pair

from vllm_accprobe.comparison.result import COLUMNS
from vllm_accprobe.report.table import write_csv

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
