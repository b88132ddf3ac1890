"""Other tools' commands behind our name: a line that says which of ours is meant."""

from __future__ import annotations

import pytest

from vllm_accprobe.cli import COMMANDS, main
from vllm_accprobe.cli.spelling.other_commands import OTHERS


@pytest.mark.parametrize("names", OTHERS, ids=" ".join)
@pytest.mark.parametrize("before", [(), ("-f", "pytorch"), ("-f", "mindspore")], ids=" ".join)
def test_each_names_a_command_that_is_there(
    names: tuple[str, ...], before: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert OTHERS[names].split()[:1] == ["accprobe"]
    assert OTHERS[names].replace(",", "").split()[1] in COMMANDS
    assert main([*before, *names, "-api_info", "./dump.json"]) == 2
    said = capsys.readouterr()
    assert said.err == f"accprobe: {' '.join(names)} is here: {OTHERS[names]} (docs/migration.md)\n"
    assert said.out == ""


def test_none_is_a_command_of_ours() -> None:
    assert not {names[0] for names in OTHERS} & set(COMMANDS)
