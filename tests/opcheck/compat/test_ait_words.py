"""``accprobe opcheck`` with the words of ``ait llm opcheck``, on made dumps, typed in."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, faulty, normal, wide, write_call

from vllm_accprobe.cli import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two layers of a norm, a product and a sum: the second layer's product is wrong. Parameters in a table alone."""
    rng = np.random.default_rng(1)
    lines = ["CaseNum|CaseName|OpName|OpParam|InNum|InDType"]
    for layer in range(2):
        x, gain, w = normal(rng, 5, 16), normal(rng, 16), normal(rng, 8, 16)
        total = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(gain)
        y = bits(wide(x) @ wide(w).T)
        calls = [
            MadeCall("RmsNormOperation", {"layerType": 1, "normParam": {"epsilon": 1e-6}}, [x, gain], [bits(total)]),
            MadeCall("LinearOperation", {"hasBias": False, "transposeB": True}, [x, w], [faulty(y) if layer else y]),
            MadeCall("ElewiseOperation", {"elewiseType": 8}, [x, x], [bits(2 * wide(x))]),
        ]
        for k, call in enumerate(calls):
            write_call(
                tmp_path / "dump", MadeCall(call.kind, None, call.inputs, call.outputs), k, above=f"{layer}_Layer"
            )
            lines.append(f"{k}|x|{call.kind}_{layer}_{k}|{json.dumps(call.param)}|2|float16;float16")
    (tmp_path / "ops.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(home: Path) -> list[dict[str, str]]:
    with (home / "out/opcheck_result.csv").open(encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def run(words: str) -> int:
    return main(["opcheck", "-j", "0", *words.split()])


def test_the_documents_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-i dump/tensors/0_7/0 -c ops.csv -o out") == 1
    assert "1_Layer.1_LinearOperation" in capsys.readouterr().out
    rows = table(home)
    assert list(rows[0]) == [
        "op_id", "op_name", "op_param", "tensor_path", "out_tensor_id", "precision_standard", "excuted_information",
        "precision_result(%)", "max_rel_error", "fail_reason",
    ]  # fmt: skip
    assert [(r["op_id"], r["op_name"], r["excuted_information"]) for r in rows] == [
        ("0_0", "RmsNormOperation", "execution successful"), ("0_1", "LinearOperation", "execution successful"),
        ("0_2", "ElewiseOperation", "execution successful"), ("1_0", "RmsNormOperation", "execution successful"),
        ("1_1", "LinearOperation", "execution failed"), ("1_2", "ElewiseOperation", "execution successful"),
    ]  # fmt: skip
    wrong = rows[4]
    assert (wrong["out_tensor_id"], wrong["precision_standard"]) == ("0", "99.9%(error<0.000976562)")
    assert json.loads(wrong["op_param"]) == {"hasBias": False, "transposeB": True}
    assert wrong["tensor_path"] == "1_Layer/1_LinearOperation"
    assert float(wrong["precision_result(%)"]) == pytest.approx(97.5)  # one of 40 elements
    assert 0.04 < float(wrong["max_rel_error"]) < 0.06
    assert wrong["fail_reason"]


def test_without_the_table_products_are_not_supposed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-i dump -o out") == 3
    assert "its parameters are not in the dump" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("-ids 0_1,1", ["0_1", "1_0", "1_1", "1_2"]),
        ("-opname rms,ELE", ["0_0", "0_2", "1_0", "1_2"]),
        ("-opname rms\uff0cele -ids 1", ["1_0", "1_2"]),
        ("--ops linear", ["0_1", "1_1"]),
        ("--operation-name linear --operation-ids 0", ["0_1"]),
        ("--ops *.1_LinearOperation", ["0_1", "1_1"]),
    ],
)
def test_operators_are_chosen_as_ait_chooses_them(home: Path, words: str, chosen: list[str]) -> None:
    run(f"-i dump -c ops.csv -o out {words}")
    assert [r["op_id"] for r in table(home)] == chosen


@pytest.mark.parametrize("words", ["-metric abs cos_sim kl", "--precision-metric kl --metric abs,cos_sim"])
def test_metrics_are_further_columns(home: Path, words: str) -> None:
    assert run(f"dump -c ops.csv -o out --ops linear {words}") == 1
    right, wrong = table(home)
    more = ("abs_precision_result(%)", "max_abs_error", "cosine_similarity", "kl_divergence")
    assert tuple(right)[9:-1] == more
    assert right[more[0]] == "100" or float(right[more[0]]) < 100  # a float16's step may be above 2**-10
    assert float(wrong[more[0]]) <= 97.5
    assert float(wrong[more[1]]) > 0.04
    assert float(wrong[more[2]]) < 1 < float(right[more[2]]) + 1e-4
    assert min(float(wrong[more[3]]), float(right[more[3]])) >= 0


def test_ait_s_own_verdict(home: Path) -> None:
    assert run("-i dump -c ops.csv -o out --ops linear --standard ait") == 1
    assert [r["excuted_information"] for r in table(home)] == ["execution successful", "execution failed"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("-i dump -rerun", 2, "--rerun: ATB's operators run on an Ascend card with CANN and ATB only"),
        ("-i dump -metric psnr", 2, "-metric: 'psnr' is none of abs, cos_sim, kl"),
        ("-i dump -c none.csv", 2, "--csv-path: none.csv is no file"),
        ("-i dump -c dump/../ops2.csv", 2, "--csv-path"),
        ("-i dump elsewhere", 2, "--input: dump, and elsewhere is named as well: choose one"),
        ("-i dump -ids 1.2", 2, "--ids: '1.2' is no id"),
        ("-i none -ids 1", 2, "-ids 1 belongs to dumps of ATB, and none is none"),
        ("-i dump -c ops.csv -opname nothing -o out", 3, "nothing could be checked: no call matches"),
    ],
)
def test_what_cannot_be_is_one_line(home, capsys, words, code, says):
    assert run(words) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    assert says in said[0]


def test_a_table_that_is_none(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "odd.csv").write_text("a|b\n1|2\n")
    assert run("-i dump -c odd.csv -o out") == 2
    assert "odd.csv is no table of ATB's operators" in capsys.readouterr().err


def test_a_device_is_said_to_be_of_no_use(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("-i dump -c ops.csv -o out -device 3")
    assert "note: -device 3: no card is used" in capsys.readouterr().err


def test_where_everything_was_skipped_for_its_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = MadeCall("LinearParallelOperation", {"rank": 0, "rankSize": 2}, [torch.ones(2, 2), torch.ones(2, 2)],
                    [torch.ones(2, 2)])  # fmt: skip
    write_call(tmp_path / "d", call)
    assert main(["opcheck", "-j", "0", "-i", str(tmp_path / "d"), "-o", str(tmp_path / "o")]) == 3
    assert "works over 2 ranks" in capsys.readouterr().err
