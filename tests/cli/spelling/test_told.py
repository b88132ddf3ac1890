"""Other tools' spellings: several words behind an option, and options that have another name here."""

from __future__ import annotations

import pytest

from vllm_accprobe.cli.spelling.refusal import CommandError
from vllm_accprobe.cli.spelling.told import TOLD, quiet, spelled

VALUES = ("--dir", "-o", "--type", "-er")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("--type layer tensor -er 1,3", "--type layer,tensor -er 1,3"),
        ("--type model onnx -- bash run.sh --type x y", "--type model,onnx -- bash run.sh --type x y"),
        ("-ids 2, 3_1 -o out", "-ids 2,3_1 -o out"),
        ("-ids 2 bash -ids 3, 4", "-ids 2 bash -ids 3, 4"),
        ("-o tensor --atb bash tensor -seed 3", "-o tensor --atb bash tensor -seed 3"),
        ("--type unknown layer", "--type unknown layer"),
        ("--type=layer tensor", "--type=layer tensor"),
        ("--type", "--type"),
        ("", ""),
    ],
)
def test_words_that_belong_together(given: str, found: str) -> None:
    assert " ".join(spelled("run", given.split(), VALUES)) == found


def test_the_commands_own_words_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["a", "--type", "layer", "tensor", "-seed", "3"]
    assert spelled("summary", words) == words
    assert spelled("run", words) == words  # "a" is what is run


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, told in TOLD.items() for o in told])
def test_what_is_told(command: str, option: str) -> None:
    with pytest.raises(CommandError, match=f"^{option}: "):
        spelled(command, [option, "x"])
    with pytest.raises(CommandError, match=f"^{option}: "):
        spelled(command, [f"{option}=x"])


def test_log_levels() -> None:
    assert [quiet(level) for level in (None, "debug", "INFO", "warning", "warn", "error", "fatal", "critical")] == (
        [False] * 3 + [True] * 5
    )
    with pytest.raises(CommandError, match="--log-level loud: known are debug"):
        quiet("loud")
