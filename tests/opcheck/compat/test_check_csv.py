"""msprobe's files: their names, headers and words; msprobe's own second stage reads them; and so does our opdiff."""

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.csv_rows import csv_rows as table
from support.peer_dumps import unpack

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.compat import msprobe

Recorded = Callable[[str], Path]
TOOL = (
    "import sys; sys.argv[0] = 'msprobe'; from msprobe.msprobe import main; main()\n"
    "from msprobe.pytorch.api_accuracy_checker.compare.compare_utils import ApiPrecisionCompareColumn as C\n"
    "from msprobe.pytorch.api_accuracy_checker.compare.compare_utils import DETAIL_TEST_ROWS\n"
    "print(*C.get_detail_csv_title(), sep='|'); print(*C.get_result_csv_title(), sep='|')\n"
    "print(*DETAIL_TEST_ROWS[0], sep='|')\n"
)
"""Its second stage, and then the headers of its files."""


def files(out: Path) -> tuple[Path, Path]:
    return next(out.glob("accuracy_checking_result_*.csv")), next(out.glob("accuracy_checking_details_*.csv"))


@pytest.fixture(scope="module")
def checked(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("checked")
    for side in ("npu", "gpu"):
        words = ["opcheck", "-api_info", str(recorded("tensor")), "-o", str(home / side), "-d", "cpu", "--jobs", "0"]
        assert main(words) == 0
    return home


def test_names_headers_and_words(checked: Path) -> None:
    result, details = files(checked / "npu")
    assert re.fullmatch(r"accuracy_checking_result_\d{14}\.csv", result.name)
    assert details.name == result.name.replace("result", "details")
    assert tuple(table(details)[0]) == msprobe.CHECK_DETAILS
    names = [r["API Name"] for r in table(details)]
    assert names[0] == "Functional.linear.0.forward.output.0"
    assert "Functional.linear.0.backward.output.2" in names
    calls = [n.partition(".forward")[0].partition(".backward")[0] for n in names]
    assert [c for i, c in enumerate(calls) if i == 0 or calls[i - 1] != c] == list(dict.fromkeys(calls))
    assert {r["DEVICE Dtype"] for r in table(details)} == {"torch.float32"}
    assert {r["相对误差错误率"] for r in table(details)} == {" "}
    rows = {r["API name"]: r for r in table(result)}
    assert tuple(next(iter(rows.values()))) == msprobe.CHECK_RESULT
    assert rows["Functional.linear.1"]["Forward Test Success"] == "pass"
    assert rows["Functional.linear.1"]["Backward Test Success"] == "pass"


def test_what_was_recorded_forward_alone_is_run_backward_too(tmp_path: Path) -> None:
    """acc_check's meaning: dX, dW and db of every API; an integer's call says that it has none."""
    (dump,) = (unpack("a_msprobe_tensor", tmp_path) / "golden").rglob("dump.json")
    words = ["--ops", "Functional.linear,Torch.diff", "-o", str(tmp_path / "out"), "--jobs", "0"]
    assert main(["opcheck", "-api_info", str(dump), *words]) == 0
    result, details = map(table, files(tmp_path / "out"))
    backward = {r["API name"]: r["Backward Test Success"] for r in result}
    assert (backward.pop("Torch.diff.0"), set(backward.values())) == ("SKIP", {"pass"})
    gradients = Counter(r["API Name"].partition(".backward.")[2] for r in details if "linear" in r["API Name"])
    assert gradients["output.0"] == gradients["output.1"] == len(backward) > gradients["output.2"] > 0


def test_the_real_second_stage_reads_them_and_has_these_headers(checked: Path, tmp_path: Path) -> None:
    sides = [str(files(checked / side)[1]) for side in ("npu", "gpu")]
    words = ["api_precision_compare", "-npu", sides[0], "-gpu", sides[1], "-o", str(tmp_path)]
    command = [sys.executable, "-c", TOOL, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    headers = [tuple(line.split("|")) for line in done.stdout.splitlines()[-3:]]
    assert headers == [msprobe.COMPARE_DETAILS, msprobe.COMPARE_RESULT, msprobe.CHECK_DETAILS]
    details = table(next(tmp_path.glob("api_precision_compare_details_*.csv")))
    assert len(details) == len(table(Path(sides[0])))
    assert {r["比对结果"] for r in details} == {"pass"}
    result = table(next(tmp_path.glob("api_precision_compare_result_*.csv")))
    assert {(r["Forward Test Success"], r["Backward Test Success"]) for r in result} == {("pass", "pass")}


def test_opdiff_reads_them(checked: Path, tmp_path: Path) -> None:
    sides = [str(files(checked / side)[1]) for side in ("gpu", "npu")]
    assert main(["opdiff", *sides, "--out", str(tmp_path / "diff"), "--algorithm", "*=benchmark"]) == 0
    assert {r["status"] for r in table(tmp_path / "diff" / "details.csv")} == {"pass"}


def test_going_on_writes_the_same_files(recorded: Recorded, checked: Path) -> None:
    result, details = files(checked / "npu")
    before = details.read_bytes()
    details.write_bytes(before[:40])
    time.sleep(1.1)  # a new check would have another second in its name
    words = ["-csv_path", str(result), "-d", "cpu", "--jobs", "0"]
    assert main(["opcheck", "-api_info", str(recorded("tensor")), *words]) == 0
    assert details.read_bytes() == before
    assert len(list((checked / "npu").glob("accuracy_checking_*.csv"))) == 2


def test_another_check_is_not_gone_on_with(recorded, checked, capsys):
    result, _ = files(checked / "npu")
    words = ["-csv_path", str(result), "-d", "cpu", "--jobs", "0", "-f", "-save_error_data"]
    assert main(["opcheck", "-api_info", str(recorded("tensor")), *words]) == 2
    assert "begun with other options (--save-failed, --filter_api)" in capsys.readouterr().err
    assert len(list((checked / "npu").glob("accuracy_checking_*.csv"))) == 2  # what was there stays


def test_what_is_no_result_file_is_refused(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opcheck", str(recorded("tensor")), "-csv_path", "result.csv"]) == 2
    assert "accuracy_checking_result_<14 digits>.csv" in capsys.readouterr().err
