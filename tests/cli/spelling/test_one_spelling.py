"""A walk over all commands: one name is one thing everywhere, lists are given in one way, older names still work."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_dumps import TAPS, make

import vllm_accprobe
from vllm_accprobe.cli import build
from vllm_accprobe.cli.spelling.one_spelling import DIFFERENT, LISTS, OLDER, one_spelling
from vllm_accprobe.cli.spelling.refusal import CommandError


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    command = typer.main.get_command(build()) if command is None else command
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
    else:
        for name, one in inner.items():
            yield from commands(one, (*path, name))


ALL = dict(commands())
OPTIONS = [(name, p) for name, c in ALL.items() for p in c.params if p.param_type_name == "option"]


def by_name() -> dict[str, list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for command, option in OPTIONS:
        for name in option.opts:
            found[name].append((command, option))
    return found


def meaning(option: Any) -> tuple[str, str | None, str]:
    """(flag, number or word; metavar; the first clause of the help). A list is a list whether click gathers it (its
    values are a tuple) or we do, and a path is a word."""
    return _kind(option), option.metavar, re.split(r"[.;:,]", option.help or "")[0]


def _kind(option: Any) -> str:
    if option.is_flag:
        return "flag"
    if option.metavar in LISTS:
        return "list"
    said = repr(getattr(option, "type_descriptor", None) or option.type).lower()
    return "number" if re.search(r"\b(int|float|integer)", said) else "word"


def test_commands_are_found() -> None:
    assert len(ALL) >= 22
    assert "online serve" in ALL
    assert len(OPTIONS) > 200


def test_one_name_is_one_thing() -> None:
    several = {name: {meaning(o) for _, o in found} for name, found in by_name().items()}
    several = {name: said for name, said in several.items() if len(said) > 1}
    assert {n: s for n, s in several.items() if n not in DIFFERENT} == {}
    assert set(DIFFERENT) <= set(several), "no reason is needed for a name that means one thing"


def test_no_older_name_is_documented_where_the_new_one_is() -> None:
    for command in ALL.values():
        names = {n for p in command.params if p.param_type_name == "option" for n in p.opts}
        assert not names & {old for new, olds in OLDER.items() if new in names for old in olds if old != "--limit"}
    assert {n for olds in OLDER.values() for n in olds} & set(by_name()) <= {"--limit", "--task", "--metric"}


def test_an_option_that_is_given_repeatedly_says_how() -> None:
    for command, option in OPTIONS:
        if option.multiple and option.metavar not in LISTS:
            assert "Can be repeated" in option.help, (command, option.opts)
        if option.metavar in LISTS:
            assert "repeated" not in option.help.lower(), (command, option.opts)


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, o in OPTIONS if o.metavar in LISTS])
def test_lists_take_commas_and_repeats_alike(command: str, option: Any) -> None:
    params, name = ALL[command].params, option.opts[0]
    said = [one_spelling(words, params) for words in ([name, "a,b"], [name, "a", name, "b"])]
    assert said[0] == said[1]
    assert said[0] == ([name, "a", name, "b"] if option.multiple else [name, "a,b"])
    if name.startswith("--"):
        assert one_spelling([f"{name}=a", f"{name}=b"], params) == said[0]


def params_of(command: str) -> list[Any]:
    return list(ALL[command].params)


@pytest.mark.parametrize(
    ("command", "given", "found"),
    [
        ("summary", "--step 0-1 --rank=1 --request a", "--steps 0-1 --ranks 1 --requests a"),
        ("summary", "--step 0 --steps 3", "--steps 0,3"),
        ("gentest", "--most 3", "--limit 3"),
        ("labels", "--limit 0.1 --exec --step", "--tolerance 0.1 --exec --step"),
        ("summary", "--limit 0", "--limit 0"),
        ("gate", "--task a,b --metric=c", "--tasks a --tasks b --metrics c"),
        ("run", "--task stats --step 1", "--task stats --steps 1"),
        ("opcheck", "--metric abs,kl", "--metric abs --metric kl"),
        ("size", "--format json", "--json"),
        ("size", "--format=terminal", ""),
        ("compare", "--format json", "--format json"),
        ("summary", "-- --step 0", "-- --step 0"),
    ],
)
def test_older_spellings_go_on(command: str, given: str, found: str) -> None:
    assert " ".join(one_spelling(given.split(), params_of(command))) == found


def test_another_commands_words_are_left() -> None:
    words = ["--rank", "0", "vllm", "--step", "1", "--format", "json"]
    assert one_spelling(words, params_of("errcheck"), interspersed=False) == ["--ranks", "0", *words[2:]]


def test_a_format_that_is_none_is_one_line() -> None:
    with pytest.raises(CommandError, match="--format xml: lines for people, or json"):
        one_spelling(["--format", "xml"], params_of("size"))


def test_both_spellings_choose_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_accprobe.cli import main

    dump, told = make(tmp_path / "d"), []
    for words in (["--step", "0", "--step", "2", "--role", "output.*,input.*"],
                  ["--steps", "0,2", "--roles", "output.*", "--roles", "input.*"]):  # fmt: skip
        assert main(["summary", str(dump), TAPS[0][0], *words]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert TAPS[0][0] in told[0]


def test_words_of_results_have_one_form() -> None:
    """``wrote PATH`` is said by one function, and a verdict for people is PASS or FAIL."""
    package = Path(vllm_accprobe.__file__).parent
    said = {f: f.read_text(encoding="utf-8") for room in ("cli", "report", "opcheck", "gate") for f in
            (package / room).rglob("*.py")}  # fmt: skip
    assert [f for f, text in said.items() if re.search(r"f?[\"'](wrote|written):? \{", text)] == [
        package / "cli/common/json_answer.py"
    ]
    assert [f for f, text in said.items() if re.search(r"f?\"(pass|fail): ", text)] == []
