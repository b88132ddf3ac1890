"""Tables of results that people name in place of a dump: each is recognised, and what reads it is named."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from vllm_accprobe.cli import main

BASIC = "NPU Name,Bench Name,NPU Dtype,Bench Dtype,NPU Tensor Shape,Bench Tensor Shape"
HEADERS = {
    "compare_result": (f"{BASIC},Cosine,EucDist,MaxAbsErr,Result,Err_message", "msprobe's compare_result"),
    "compare_result, md5": (f"{BASIC},NPU MD5,BENCH MD5,Result,Err_message", "accprobe compare BENCH_DUMP NPU_DUMP"),
    "acc_check": ("API name,Forward Test Success,Backward Test Success,Message", "accuracy_checking_details_*.csv"),
    "acc_check, MindSpore": ("API Name,Forward Test Success,Backward Test Success,Message", "msprobe's acc_check"),
    "compare.csv": ("golden,mine,step,rank,dtype_golden,dtype_mine,shape,cosine", "--rejudge DIR"),
}
"""Name → (the header, what is said of it)."""
DETAILS = "API Name,Bench Dtype,DEVICE Dtype,Shape,Cosine similarity,Status,Message"


def book(path: Path, header: str, inline: bool) -> Path:
    """An xlsx, its texts in the shared list or in the cells."""
    tag = "is" if inline else "si"
    texts = "".join(f'<{tag}><t xml:space="preserve">{name}</t></{tag}>' for name in header.split(","))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("xl/worksheets/sheet1.xml" if inline else "xl/sharedStrings.xml", f"<x>{texts}</x>")
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    code = main(list(words))
    line = capsys.readouterr().err
    assert (code, line.count("\n")) == (2, 1), (code, line)
    return line


@pytest.mark.parametrize("name", HEADERS)
def test_results_are_recognised(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, what = HEADERS[name]
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for file in files:
        file.write_text(f"\ufeff{header}\r\n{',' * header.count(',')}\r\n", encoding="utf-8")
    books = [book(tmp_path / f"{inline}.xlsx", header, inline) for inline in (False, True)]
    one_each = [["inspect", str(file)] for file in (files[0], *books)]
    for words in (*one_each, *(["compare", *map(str, pair), "--out", str(tmp_path / "o")] for pair in (files, books))):
        line = refused(capsys, *words)
        assert what in line, (words, line)


def test_details_are_for_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.csv").write_text(DETAILS + "\n")
    line = refused(capsys, "inspect", str(tmp_path / "d.csv"))
    assert "`accprobe compare GPU.csv NPU.csv` compares two of them" in line


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04torn", b'"' + b"x" * 200_000, bytes(range(256))])
@pytest.mark.parametrize("end", ["csv", "xlsx"])
def test_other_files_are_not(data: bytes, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"x.{end}").write_bytes(data)
    assert "is no file of a kind that is known" in refused(capsys, "inspect", str(tmp_path / f"x.{end}"))
