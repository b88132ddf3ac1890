"""The configuration of torchair: what is refused here, and, where torchair's sources are at hand, what it tells GE."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_accprobe import torchair_dump
from vllm_accprobe.config import ConfigError

SWITCHES = '{"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}'
ROOT = Path(__file__).resolve().parents[1]


def given() -> Any:
    """A configuration with torchair's three places, to be set up further."""
    debug = SimpleNamespace(graph_dump=SimpleNamespace(_path=None), data_dump=SimpleNamespace(_path=None))
    return SimpleNamespace(debug=debug, dump_config=SimpleNamespace(), fusion_config=SimpleNamespace())


def test_without_torchair_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torchair", None)
    monkeypatch.chdir(tmp_path)
    for function in (torchair_dump.get_ge_dump_config, torchair_dump.get_fx_dump_config):
        with pytest.raises(ConfigError, match=r"^torchair is not installed here \(.*it comes with torch_npu"):
            function()
    assert list(tmp_path.iterdir()) == []


def test_what_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fusion_switch.json").write_text(SWITCHES)
    config = given()
    made = torchair_dump.get_ge_dump_config(
        "dump", "output", "fusion_switch.json", dump_token=[0, 2], dump_layer=["Add", "Conv_1"], compiler_config=config
    )
    assert made is config
    (where,) = (tmp_path / "dump").iterdir()
    assert where.name.startswith("dump_2")
    assert vars(config.dump_config) == {
        "enable_dump": True, "dump_mode": "output", "dump_path": str(where), "dump_step": "0|2",
        "dump_layer": "Add Conv_1",
    }  # fmt: skip
    assert vars(config.debug.graph_dump) == {"_path": str(where), "type": "txt"}
    assert config.fusion_config.fusion_switch_file == str(tmp_path / "fusion_switch.json")
    assert vars(torchair_dump.get_fx_dump_config(compiler_config=given()).debug.data_dump) == {
        "_path": None, "type": "npy",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dump_mode": "outputs"}, "dump_mode=outputs: write one of input, output, all"),
        ({"dump_token": "1"}, "dump_token='1': write a list of executions"),
        ({"dump_token": [-1]}, r"dump_token=\[-1\]"),
        ({"dump_layer": ["a;b"]}, r"dump_layer=\['a;b'\]: write a list"),
        ({"fusion_switch_file": "none.json"}, "fusion_switch_file=none.json: No such file"),
        ({"fusion_switch_file": "empty.json"}, 'fusion_switch_file=empty.json: write {"Switch"'),
        ({"dump_path": "empty.json"}, "dump_path=empty.json: nothing can be written"),
        ({"compiler_config": object()}, "compiler_config=object has no debug"),
    ],
)
def test_refused_in_a_line(words: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(ConfigError, match=said):
        torchair_dump.get_ge_dump_config(**{"compiler_config": given(), **words})
    assert [p.name for p in tmp_path.iterdir()] == ["empty.json"]


def test_against_torchair_s_own_code() -> None:
    """ACCPROBE_TORCHAIR names a folder that holds torchair/, as scripts/torchair_source.py takes it from the wheel."""
    folder = os.environ.get("ACCPROBE_TORCHAIR")
    if not folder:
        pytest.skip("set ACCPROBE_TORCHAIR to a folder that holds torchair/ (torch_npu's wheel, torch_npu/dynamo)")
    command = [sys.executable, str(ROOT / "scripts" / "torchair_source.py"), "--torchair", folder]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "GE: ge.exec.enableDump = 1\n" in done.stdout
    assert "GE: ge.fusionSwitchFile = HOME/fusion_switch.json\n" in done.stdout
    assert "36 pairs: fail" in done.stdout
