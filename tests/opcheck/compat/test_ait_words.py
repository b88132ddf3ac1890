"""``accprobe opcheck`` with the words of ``ait llm opcheck``, on made dumps, typed in."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, faulty, normal, wide, write_call
from support.csv_rows import csv_rows

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
    return csv_rows(home / "out/opcheck_result.csv")


def run(words: str) -> int:
    return main(["opcheck", "-j", "0", *words.split()])


def test_without_the_table_products_are_not_supposed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-i dump -o out") == 3
    assert "its parameters are not in the dump" in capsys.readouterr().err


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


def test_where_everything_was_skipped_for_its_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = MadeCall("LinearParallelOperation", {"rank": 0, "rankSize": 2}, [torch.ones(2, 2), torch.ones(2, 2)],
                    [torch.ones(2, 2)])  # fmt: skip
    write_call(tmp_path / "d", call)
    assert main(["opcheck", "-j", "0", "-i", str(tmp_path / "d"), "-o", str(tmp_path / "o")]) == 3
    assert "works over 2 ranks" in capsys.readouterr().err
