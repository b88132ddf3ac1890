"""msprobe's files of its second stage: its verdicts on the same rows."""

from pathlib import Path

from opcheck.opdiff_files import FIVE, row, write
from support.csv_rows import csv_rows as table

from vllm_accprobe.cli import main


def test_a_wrong_machine_in_msprobe_s_words(tmp_path: Path) -> None:
    ops = [op for op in FIVE.values() if "convolution" not in op]  # dual-1000 is beyond any bfloat16
    golden = write(tmp_path / "gpu.csv", [row(op) for op in ops])
    mine = write(tmp_path / "npu.csv", [row(op, factor=1.2 if op == "RMSNorm" else 1.0) for op in ops])
    out = tmp_path / "out"
    assert main(["opdiff", "-gpu", str(golden), "-npu", str(mine), "-o", str(out)]) == 1
    details = table(next(out.glob("api_precision_compare_details_*.csv")))
    assert [r["比对结果"] for r in details] == ["error" if op == "RMSNorm" else "pass" for op in ops]
    wrong = next(r for r in details if r["比对结果"] == "error")
    assert (wrong["均方根误差判定结果"], wrong["比对算法"], wrong["ULP误差平均值"]) == ("error", "标杆比对法", " ")
    assert float(wrong["均方根误差比值"]) > 2
    result = table(next(out.glob("api_precision_compare_result_*.csv")))
    assert [r["Forward Test Success"] for r in result].count("error") == 1
    assert {r["Backward Test Success"] for r in result} == {" "}


def test_each_file_is_named_once(tmp_path: Path) -> None:
    golden = write(tmp_path / "gpu.csv", [row("aten.mm.default")])
    assert main(["opdiff", str(golden), "-npu", str(golden)]) == 2
    assert main(["opdiff", "-npu", str(golden)]) == 2
