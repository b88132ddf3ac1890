"""msprobe's configuration of a pre-check: what is taken, what is noted, what is refused; each in one line."""

import json
from pathlib import Path

import pytest

from vllm_accprobe.opcheck.compat import msprobe
from vllm_accprobe.opcheck.compat.msprobe import CheckConfigError

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
