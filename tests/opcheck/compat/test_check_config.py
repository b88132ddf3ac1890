"""msprobe's pre-check: its configuration, lists and devices, its files and words; its own second stage reads them."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from opcheck.opdiff_files import FIVE, row, write
from support.csv_rows import csv_rows as table
from support.peer_dumps import unpack

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.compat import msprobe
from vllm_accprobe.opcheck.compat.msprobe import CheckConfigError, left_out, names_of

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


TAKEN = {"white_list": ["conv1d"], "black_list": ["linear"], "error_data_path": "./bad", "precision": 6}


@pytest.mark.parametrize("task", ["acc_check", "run_ut"])
def test_a_block_of_config_json(tmp_path: Path, task: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"task": task, "dump_path": "./d", task: {**TAKEN, "is_online": False, "port": 1}}))
    found = msprobe.read_config(file)
    assert (found.white_list, found.black_list) == (("conv1d",), ("linear",))
    assert (found.error_data_path, found.precision) == ("./bad", 6)
    assert [n.partition(":")[0] for n in found.notes] == ["port", "dump_path"]


def test_config_yaml_as_the_documents_have_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("white_list: []\nblack_list: []\nerror_data_path: './'\nprecision: 14\n")
    assert msprobe.read_config(file) == msprobe.CheckConfig()


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"task": "acc_check", "acc_check": {"is_online": True}}, "online serve"),
        ({"task": "tensor", "tensor": {}}, "which captures"),
        ({"white_list": "conv1d"}, "white_list is no list"),
        ({"black_list": [3]}, "black_list is no list"),
        ({"precision": 21}, "from 0 to 20"),
        ({"precision": True}, "from 0 to 20"),
        ({"error_data_path": ""}, "no path"),
        ([], "a JSON object"),
    ],
)
def test_what_is_refused(tmp_path: Path, tree: object, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tree))
    with pytest.raises(CheckConfigError, match=said) as error:
        msprobe.read_config(file)
    assert "\n" not in str(error.value)


def test_damaged_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("{", "[" * 100_000, "\0"):
        file.write_text(text)
        with pytest.raises(CheckConfigError):
            msprobe.read_config(file)
    with pytest.raises(CheckConfigError):
        msprobe.read_config(tmp_path / "nothing.json")
    (tmp_path / "bad.yaml").write_text("a: [\n")
    with pytest.raises(CheckConfigError):
        msprobe.read_config(tmp_path / "bad.yaml")


def test_names_and_lists() -> None:
    assert "linear" in names_of("Functional.linear")
    assert "linear" in names_of("QKVParallelLinear")
    assert "mm" in names_of("aten.mm.default")
    assert left_out("Functional.linear", ["linear"], []) == ""
    assert left_out("Functional.gelu", ["linear"], []) == "not in white_list"
    assert left_out("Functional.linear", ["linear", "gelu"], ["linear"]) == "in black_list"
    assert left_out("Functional.gelu", [], ["linear"]) == ""


def statuses(out: Path) -> Counter[tuple[str, str]]:
    return Counter((r["status"], r["message"].partition(":")[0]) for r in table(out / "opcheck.csv"))


def test_the_lists_of_a_config(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    lists = {"white_list": ["linear", "gelu"], "black_list": ["gelu"], "precision": 3}
    config.write_text(json.dumps({"task": "acc_check", "acc_check": {**lists, "host": "10.0.0.1"}}))
    out = tmp_path / "out"
    words = ["-api_info", str(recorded("tensor")), "-config", str(config), "-o", str(out), "-j", "0"]
    assert main(["opcheck", *words]) == 0
    said = capsys.readouterr()
    assert "host: of an online pre-check, without effect here" in said.err
    found = statuses(out)
    assert found["pass", ""] == 8  # two products, three gradients of each
    assert found["skip", "in black_list"] == 2
    assert sum(found.values()) == 8 + 2 + found["skip", "not in white_list"]
    details = next(out.glob("accuracy_checking_details_*.csv")).read_text()
    assert "1.000," in details
    assert "1.0000," not in details


def test_a_call_stands_for_its_like(recorded: Recorded, tmp_path: Path) -> None:
    home = tmp_path / "dump"
    home.mkdir()
    tree = json.loads(recorded("statistics").read_text())
    record = tree["data"]["Functional.gelu.0.forward"]
    other = json.loads(json.dumps(record))
    other["input_args"][0] |= {"Max": 9.0, "Min": -9.0}
    wider = json.loads(json.dumps(record))
    wider["input_args"][0]["shape"] = [5, 32]
    tree["data"] = {f"Functional.gelu.{k}.forward": r for k, r in enumerate((record, other, wider))}
    (home / "dump.json").write_text(json.dumps(tree))
    assert main(["opcheck", str(home / "dump.json"), "-f", "--out", str(tmp_path / "out"), "-j", "0"]) == 0
    found = statuses(tmp_path / "out")
    assert found["skip", "another call stands for it"] == 1
    assert sum(n for (status, _), n in found.items() if status == "pass") == 2


def test_devices(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = str(recorded("tensor"))
    assert main(["opcheck", dump, "-d", "cpu", "-j", "--jobs", "0", "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr()
    assert "--jit_compile: of an NPU's operators, without effect on cpu" in said.err
    if not torch.accelerator.is_available():
        for named in (["0", "1"], ["npu:0", "npu:1"]):
            assert main(["opcheck", "-api_info", dump, "-d", *named, "--out", str(tmp_path / "b")]) == 2
            assert f"--device {named[0]}: " in capsys.readouterr().err
        assert not (tmp_path / "b").exists()  # no header of a check that never began
    for wrong in ("cpu,cpu", "c/p", ","):
        assert main(["opcheck", dump, "-d", wrong, "--out", str(tmp_path / "c")]) == 2


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
