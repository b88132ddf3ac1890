"""DumpConfig and register_hook with all the arguments that ait and msit gave them."""

from pathlib import Path

import pytest
import torch
from capture.toy import Toy

from vllm_accprobe import DumpConfig, Probe, register_hook
from vllm_accprobe.config import ConfigError
from vllm_accprobe.dump.reader import open_dump

IDS = torch.tensor([[3, 1, 4, 1]])


def test_the_default_is_the_prompt_in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = DumpConfig(token_range=None, module_list=None).to_probe()
    assert config.tokens == ((0, 0),)
    assert config.dir == ""
    model = Toy()
    register_hook(model, hook_name="dump_data").close()
    (found,) = (tmp_path / "accprobe").iterdir()
    assert (found / "run.json").exists()


@pytest.mark.parametrize(
    ("arguments", "modules", "parts"),
    [
        ({"tensor_part": 0}, (), ("input",)),
        ({"tensor_part": 1, "dump_weight": True}, (), ("output", "params")),
        ({"module_list": [torch.nn.Linear, "norm"]}, ("Linear", "norm"), ("input", "output")),
        ({"layer_name": "layers.1.*"}, ("layers.1.*",), ("input", "output")),
        ({"dump_last_logits": True}, ("logits",), ("input", "output")),
    ],
)
def test_arguments_map(arguments: dict[str, object], modules: tuple[str, ...], parts: tuple[str, ...]) -> None:
    config = DumpConfig("d", **arguments).to_probe()  # type: ignore[arg-type]
    assert (config.modules, config.parts, config.ops) == (modules, parts, False)


@pytest.mark.parametrize(("value", "line"), [({"tensor_part": 3}, "tensor_part=3"), ({"mode": "layer"}, "mode=layer")])
def test_bad_values(value: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        DumpConfig("d", **value).to_probe()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (({"dump_path": "d"}, {}), "the configuration is a dict, not a DumpConfig or ProbeConfig"),
        ((DumpConfig("d"), {"tokens": "0-4"}), "not both: tokens had no effect"),
        ((DumpConfig("d", api_list=["aten.mm"]), {}), "api_list chooses operators, and mode is 'module'"),
    ],
)
def test_nothing_that_is_given_vanishes(given: tuple[object, dict[str, object]], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        Probe(Toy(), given[0], **given[1])


def test_another_device_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    register_hook(model, DumpConfig(str(tmp_path / "d"), device_id=1))
    model(IDS)
    assert not (tmp_path / "d").exists()
    assert "this device or rank is not selected" in caplog.text


def test_it_says_where_the_dump_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    register_hook(Toy(), DumpConfig(str(tmp_path / "d"))).close()
    assert f"register_hook: the dump goes to {tmp_path / 'd'}" in caplog.text
    with pytest.raises(ConfigError, match="the first argument is a str"):
        register_hook("model", DumpConfig(str(tmp_path / "e")))  # type: ignore[arg-type]


def test_a_probe_without_settings_takes_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `accprobe run --dir D --modules norm -- python script.py` reaches a script's Probe(model)."""
    monkeypatch.setenv("VLLM_ACCPROBE", "1")
    monkeypatch.setenv("VLLM_ACCPROBE_DIR", str(tmp_path / "d"))
    monkeypatch.setenv("VLLM_ACCPROBE_MODULES", "norm")
    model = Toy()
    with Probe(model):
        model(IDS)
    assert {r.tap for r in open_dump(tmp_path / "d").records if r.step is not None} == {"norm"}
