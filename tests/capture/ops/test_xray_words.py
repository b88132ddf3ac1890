"""torch_xray's variables: what they are as arguments, and what a server says of them."""

from __future__ import annotations

import pytest

from vllm_accprobe.capture.ops import xray_words
from vllm_accprobe.config import ConfigError


def test_as_arguments() -> None:
    assert xray_words.given({}) == {}
    assert xray_words.given({"X_DEBUG": " ", "X_DEDUP": "0"}) == {"X_DEDUP": False}
    said = {"X_DEBUG": "0x102", "X_DEDUP": "true", "X_DUMP_NUM": "5", "X_OTHER": "9"}
    assert xray_words.given(said) == {"X_DEBUG": 0x102, "X_DEDUP": True, "X_DUMP_NUM": 5}


@pytest.mark.parametrize(("name", "value"), [("X_DEBUG", "yes"), ("X_DEDUP", "perhaps"), ("X_DUMP_NUM", "5.5")])
def test_what_is_no_value_is_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is n"):
        xray_words.given({name: value})
    assert xray_words.advice({name: value}).endswith("it is torch_xray's, and has no effect here")


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ({"X_DEBUG": "0x102"}, "MODE=trace says"),
        ({"X_DEBUG": "0x102", "X_DUMP_NUM": "5"}, "MODE=sample VLLM_ACCPROBE_OPS_CALLS=5 says"),
        ({"X_DEDUP": "True"}, "MODE=dedup VLLM_ACCPROBE_OPS_CALLS=0 says"),
    ],
)
def test_the_new_name(said: dict[str, str], ours: str) -> None:
    assert ours in xray_words.advice(said)
    assert xray_words.advice({}) == ""
