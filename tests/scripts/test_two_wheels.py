"""What the two distributions of an index ask for, and that they are one another's exact release."""

from pathlib import Path

import pytest
import tomllib
import two_wheels

TEXT = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")


def test_both_together_ask_for_what_a_checkout_asks_for() -> None:
    here = tomllib.loads(TEXT)["project"]
    capture, whole = (tomllib.loads(text)["project"] for text in two_wheels.project(TEXT))
    exact = f"vllm-accprobe-capture=={here['version']}"
    assert (capture["name"], whole["name"]) == ("vllm-accprobe-capture", "vllm-accprobe")
    assert capture["version"] == whole["version"] == here["version"]
    assert whole["dependencies"][0] == exact
    assert {*capture["dependencies"], *whole["dependencies"]} - {exact} == set(here["dependencies"])
    assert not {*capture["dependencies"]} & {*whole["dependencies"]}
    for large in two_wheels.LARGE:
        assert not any(need.startswith(large) for need in capture["dependencies"])


def test_what_is_large_is_an_extra_and_the_frozen_outputs_stay_at_home() -> None:
    project = tomllib.loads(TEXT)["project"]
    names = {need.split(">")[0] for need in project["dependencies"]}
    assert not {"torch", "vllm", "pandas", "plotly", "scipy"} & names
    assert "plotly>=5.20" in project["optional-dependencies"]["notebook"]
    packed = (Path(__file__).resolve().parents[2] / "MANIFEST.in").read_text().splitlines()
    assert packed.index("graft tests") < packed.index("prune tests/freeze")


def test_plugin_and_command_belong_to_one() -> None:
    capture, whole = (tomllib.loads(text) for text in two_wheels.project(TEXT))
    assert capture["project"]["scripts"] == {"accprobe": "vllm_accprobe.cli:main"}
    assert set(capture["project"]["entry-points"]) == {"vllm.general_plugins", "vllm.platform_plugins"}
    assert not {"scripts", "entry-points"} & set(whole["project"])
    assert whole["tool"]["setuptools"] == {"packages": []}
    assert whole["tool"]["pytest"] == tomllib.loads(TEXT)["tool"]["pytest"]  # nothing else is lost


def test_another_pyproject_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match="dependencies have 2 of"):
        two_wheels.project(TEXT.replace('"numba>=0.61",', ""))
    with pytest.raises(ValueError, match="one was expected"):
        two_wheels.project("[project]\n")
