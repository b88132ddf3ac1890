"""torch_xray's variables: what they are as arguments, and what a server says of them."""

from __future__ import annotations

import pytest

from vllm_accprobe.capture.ops import begin_end
from vllm_accprobe.config import ConfigError


def test_as_arguments() -> None:
    assert begin_end.torch_xray_settings({}) == {}
    assert begin_end.torch_xray_settings({"X_DEBUG": " ", "X_DEDUP": "0"}) == {"X_DEDUP": False}
    said = {"X_DEBUG": "0x102", "X_DEDUP": "true", "X_DUMP_NUM": "5", "X_OTHER": "9"}
    assert begin_end.torch_xray_settings(said) == {"X_DEBUG": 0x102, "X_DEDUP": True, "X_DUMP_NUM": 5}


@pytest.mark.parametrize(("name", "value"), [("X_DEBUG", "yes"), ("X_DEDUP", "perhaps"), ("X_DUMP_NUM", "5.5")])
def test_what_is_no_value_is_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is n"):
        begin_end.torch_xray_settings({name: value})
    assert begin_end.advice({name: value}).endswith("it is torch_xray's, and has no effect here")


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ({"X_DEBUG": "0x102"}, "MODE=trace says"),
        ({"X_DEBUG": "0x102", "X_DUMP_NUM": "5"}, "MODE=sample VLLM_ACCPROBE_OPS_CALLS=5 says"),
        ({"X_DEDUP": "True"}, "MODE=dedup VLLM_ACCPROBE_OPS_CALLS=0 says"),
    ],
)
def test_the_new_name(said: dict[str, str], ours: str) -> None:
    assert ours in begin_end.advice(said)
    assert begin_end.advice({}) == ""
