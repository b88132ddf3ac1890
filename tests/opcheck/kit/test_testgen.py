"""The folder that gentest writes: right where the engine was right, wrong where it was wrong, with torch alone. Its
files are frozen (tests/freeze, ``gentest``)."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from opcheck import torch_only
from opcheck.layer_dumps import build
from opcheck.opcheck_dumps import Maker
from support.csv_rows import csv_rows

from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.cli import main
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.compat import xray
from vllm_accprobe.opcheck.kit.testgen import write_case, write_folder
from vllm_accprobe.opcheck.reference import Call, Expected, reference
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run.table import COLUMNS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_only.site(tmp_path_factory.mktemp("only") / "site")


def counts(text: str) -> dict[str, int]:
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text.splitlines()[-1])}


def test_a_clean_capture_passes_with_torch_and_pytest_alone(tmp_path: Path, site: Path) -> None:
    build(tmp_path / "d")
    assert main(["gentest", str(tmp_path / "d"), "--ops", "*", "-n", "8", "--out", str(tmp_path / "t")]) == 0
    (tmp_path / "t/vendor.py").write_text("open('loaded', 'w')\n")
    done = torch_only.run(site, tmp_path / "t", "--seed", "5", "--detail-csv", "cpu.csv", "--load", "vendor")
    assert (tmp_path / "t/loaded").exists()
    assert done.returncode == 0, done.stdout + done.stderr
    # norm, qkv, attention and o_proj once or more in three ways; attention is not drawn, and NobodyKnows is skipped
    assert counts(done.stdout)["passed"] >= 10
    rows = csv_rows(tmp_path / "t/cpu.csv")
    assert tuple(rows[0]) == (*COLUMNS, "min_val", "max_val")
    checked = [r for r in rows if r["status"] == "pass"]
    assert {r["op"] for r in checked} == {"RMSNorm", "QKVParallelLinear", "Attention", "RowParallelLinear"}
    assert all(0.999 < float(r["cosine"]) <= 1 for r in checked)
    copy = shutil.copy(tmp_path / "t/cpu.csv", tmp_path / "copy.csv")
    assert main(["opdiff", str(tmp_path / "t/cpu.csv"), str(copy), "--out", str(tmp_path / "o")]) == 0


def test_a_faulty_capture_fails_and_the_operator_itself_passes(tmp_path: Path, site: Path) -> None:
    build(tmp_path / "d", "layers.0.self_attn.attn")
    assert main(["gentest", str(tmp_path / "d"), "--failed", "--out", str(tmp_path / "t")]) == 0
    assert len(list((tmp_path / "t/cases").glob("*.json"))) == 1
    done = torch_only.run(site, tmp_path / "t")
    assert done.returncode == 1, done.stdout + done.stderr
    assert counts(done.stdout) == {"passed": 1, "failed": 1}
    failure = next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert "test_Attention" in failure
    assert "captured" in failure
    assert "times rounding alone" in done.stdout


def test_what_the_folder_cannot_do_is_one_line(tmp_path: Path, site: Path) -> None:
    build(tmp_path / "d")
    main(["gentest", str(tmp_path / "d"), "--ops", "RMSNorm", "-n", "1", "--out", str(tmp_path / "t")])
    done = torch_only.run(site, tmp_path / "t", "--device", "nowhere")
    assert done.returncode == 4
    assert "--device nowhere:" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--failed"], 3, "no call failed"),
        (["--ids", "x"], 2, "is no id"),
        (["--ops", "*", "--weights", "nowhere"], 2, "no directory"),
    ],
)
def test_the_command_says_what_it_cannot_do(tmp_path, capsys, arguments, code, said):
    build(tmp_path / "d")
    assert main(["gentest", str(tmp_path / "d"), *arguments, "--out", str(tmp_path / "t")]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "d")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/mine.txt").write_text("mine")
    assert main(["gentest", str(tmp_path / "d"), "--ops", "*", "--out", str(tmp_path / "t")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["mine.txt"]


@reference("Odd")
def odd(call: Call) -> Expected:
    return Expected(call.wide("x") * 3.0)


def test_hostile_names_stay_names_and_a_users_reference_is_written_down(tmp_path: Path, site: Path) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    m = Maker(tmp_path / "d")
    tap = "../../etc/'; import os #\n"
    m.module(tap, "Odd")
    m.step(0, [(0, 0, 4)])
    m.call(tap, "Odd", {"x": x}, (x.double() * 3).bfloat16())
    references = References([odd])
    calls = Calls(open_dump(m.close()), None)
    (tmp_path / "t/cases").mkdir(parents=True)
    captured = next(calls.of(0, tap))
    written = write_case(captured, references, tmp_path / "t/cases", 0)
    write_folder([written], tmp_path / "t", "a test")
    assert {p.parent for p in (tmp_path / "t").rglob("0000*")} == {tmp_path / "t/cases"}
    tree = json.loads((tmp_path / f"t/cases/{written.name}.json").read_text())
    assert set(tree["expected"]) == {"output.0"}
    done = torch_only.run(site, tmp_path / "t")
    assert counts(done.stdout) == {"passed": 1, "skipped": 1}, done.stdout + done.stderr


def test_a_dump_of_statistics_becomes_tests_with_drawn_inputs(tmp_path: Path, site: Path) -> None:
    """jprof's way: the words of torch_xray's guide, two machines' csv, and its joined table."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).bfloat16()
    probe = Probe(model, ProbeConfig.from_kwargs(dir=tmp_path / "d", task="stats", ops=True))
    with torch.no_grad():
        model(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).bfloat16())
    probe.close()
    out = tmp_path / "pytests"
    words = ["--cpu_init", "--blacklist", "--factory=load"]
    assert main(["gentest", str(tmp_path / "d"), *words, "--out", str(out)]) == 0
    sheets = [tmp_path / "gpu.csv", tmp_path / "xpu.csv"]
    for found in torch_only.run_each(site, out, [[f"--detail_compare_path={s}", "--seed", "42"] for s in sheets]):
        assert "failed" not in found
        assert "error" not in found
        assert counts(found)["passed"] >= 6
    rows = {r["op"]: r for r in csv_rows(sheets[0])}
    assert {"aten.addmm.default", "aten.gelu.default", "aten.native_layer_norm.default"} <= set(rows)
    assert all("weaker evidence" in r["message"] for r in rows.values() if r["status"] == "pass")
    assert float(rows["aten.gelu.default"]["min_val"]) < 0 < float(rows["aten.gelu.default"]["max_val"])
    joined = tmp_path / "result.csv"
    assert main(["opdiff", *map(str, sheets), str(joined), "--out", str(tmp_path / "diff")]) == 0
    table = csv_rows(joined)
    assert tuple(table[0]) == xray.SUMMARY_COLUMNS
    gelu = next(r for r in table if r["op_name"] == "aten.gelu.default")
    assert (gelu["dtype"], gelu["shape"], gelu["is_pass"]) == ("torch.bfloat16", "[6, 16]", "pass")
    assert float(gelu["min-val"]) == float(rows["aten.gelu.default"]["min_val"])
    assert gelu["xpu_max"] == gelu["gpu_max"] != ""
