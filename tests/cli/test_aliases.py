"""Older names of ours and other tools': each works, in one line says what it is today, and is in no --help."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from vllm_accprobe.cli import COMMANDS, aliases, build, main
from vllm_accprobe.cli.aliases import INSTEAD, MOVED, OLDER, OTHERS, SAME, is_quiet, of_today
from vllm_accprobe.refusals import CommandError

ALL: dict[str, Any] = typer.main.get_command(build()).commands  # type: ignore[attr-defined]


def today(command: str, words: str) -> str:
    return " ".join(of_today(command, words.split(), ALL[command].params, command not in ("run", "errcheck")))


@pytest.mark.parametrize(
    ("command", "typed", "found"),
    [
        ("inspect", "--step 0-1 --rank=1 --request a", "--steps 0-1 --ranks 1 --requests a"),
        ("summary", "--step 0 --steps 3", "--steps 0,3"),
        ("gentest", "--most 3", "--limit 3"),
        ("compare", "--limit 0.1 --exec --step", "--tolerance 0.1 --exec --step"),
        ("inspect", "--limit 0", "--limit 0"),
        ("eval-diff", "--task a,b --metric=c", "--tasks a --tasks b --metrics c"),
        ("gate", "--dig --dig-gb 3", "--localize --localize-gb 3"),
        ("send", "--along d", "--teacher-force d"),
        ("run", "--task stats --step 1", "--task stats --steps 1"),
        ("opcheck", "--metric abs,kl", "--metric abs --metric kl"),
        ("opcheck", "-d 0 1 2 -j -n 32", "-d 0,1,2 --jit_compile --jobs 32"),
        ("opcheck", "-d npu:0 npu:1 dump", "-d npu:0,npu:1 dump"),
        ("opcheck", "-opname self -ids 24_1 --out_path o -j 2", "--ops self --ids 24_1 --out o -j 2"),
        ("doctor", "--format json", "--json"),
        ("doctor", "--format=terminal", ""),
        ("compare", "--format json -mf m", "--format json --op-mapping-file m"),
        ("inspect", "-- --step 0", "-- --step 0"),
        ("errcheck", "--rank 0 vllm --step 1 --format json", "--ranks 0 vllm --step 1 --format json"),
        ("run", "--type layer tensor -er 1,3", "--atb-type layer,tensor --atb-range 1,3"),
        ("run", "--type model onnx -- bash run.sh --type x y", "--atb-type model,onnx -- bash run.sh --type x y"),
        ("run", "-ids 2, 3_1 -o out", "--atb-ids 2,3_1 --dir out"),
        ("run", "-ids 2 bash -ids 3, 4", "--atb-ids 2 bash -ids 3, 4"),
        ("run", "-o tensor --atb bash tensor -seed 3", "--dir tensor --atb bash tensor -seed 3"),
        ("run", "--type unknown layer", "--atb-type unknown layer"),
        ("run", "--type=layer tensor", "--atb-type layer tensor"),
        ("run", "--type", "--atb-type"),
        ("run", "a --type layer tensor -seed 3", "a --type layer tensor -seed 3"),
        ("inspect", "", ""),
    ],
)
def test_words_of_today(command: str, typed: str, found: str) -> None:
    assert today(command, typed) == found


def test_the_page_lists_all_older_names() -> None:
    page = (Path(__file__).parents[2] / "docs/migration.md").read_text(encoding="utf-8")
    listed = set(re.findall("`(.+?)`", page.partition("## Our own older names")[2].partition("\n## ")[0]))
    assert {*MOVED, *(old for names in OLDER.values() for old in names)} <= listed


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, options in INSTEAD.items() for o in options])
def test_an_option_without_counterpart_says_what_does_the_same(command: str, option: str) -> None:
    for words in (f"{option} x", f"{option}=x" if option.startswith("--") else option):
        with pytest.raises(CommandError, match=f"^{option}: "):
            today(command, words)


def test_a_format_or_a_level_that_is_none_is_one_line() -> None:
    with pytest.raises(CommandError, match="--format xml: lines for people, or json"):
        today("doctor", "--format xml")
    levels = (None, "debug", "INFO", "warning", "warn", "error", "fatal", "critical")
    assert [is_quiet(level) for level in levels] == [False] * 3 + [True] * 5
    with pytest.raises(CommandError, match="--log-level loud: known are debug"):
        is_quiet("loud")


def test_each_name_of_another_tool_is_an_option_of_ours() -> None:
    for command, names in SAME.items():
        options = {name: p for p in ALL[command].params for name in (*p.opts, *p.secondary_opts)}
        assert set(names.values()) <= set(options)
        assert not set(names) & set(options)


def test_no_help_has_an_alias(capsys: pytest.CaptureFixture[str]) -> None:
    words = {old for olds in aliases.OLDER.values() for old in olds if old not in ("--limit", "--task", "--metric")}
    words |= {name for names in SAME.values() for name in names if name not in ("-o", "-n", "--type", "--output")}
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        typed = capsys.readouterr().out.replace(",", " ").split()
        assert not words & set(typed), command
    assert main(["--help"]) == 0
    assert not set(MOVED) & {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}


@pytest.mark.parametrize("names", OTHERS, ids=" ".join)
@pytest.mark.parametrize("before", [(), ("-f", "pytorch"), ("-f", "mindspore")], ids=" ".join)
def test_another_tools_command_names_ours(names, before, capsys):
    assert OTHERS[names].split()[:1] == ["accprobe"]
    assert OTHERS[names].replace(",", "").split()[1] in COMMANDS
    assert names[0] not in COMMANDS
    assert main([*before, *names, "-api_info", "./dump.json"]) == 2
    said = capsys.readouterr()
    assert said.err == f"accprobe: {' '.join(names)} is here: {OTHERS[names]} (docs/migration.md)\n"
    assert said.out == ""
