"""A walk over all commands: one name is one thing everywhere, lists are given in one way, older names still work."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from vllm_accprobe.cli import build, main
from vllm_accprobe.cli.aliases import LISTS, MOVED, of_today
from vllm_accprobe.cli.options import MOST_USED

DIFFERENT: dict[str, str] = {
    "--ops": "VLLM_ACCPROBE_OPS is a switch, which run and inspect have; opcheck's are operators",
    "--tokens": "VLLM_ACCPROBE_TOKENS are ordinals; inspect --size counts tokens",
    "--rows": "inspect names rows of a tensor, opcheck sizes of a batch",
    "--graphs": "VLLM_ACCPROBE_GRAPHS is a switch, which run and errcheck have; doctor proves what the taps in them do",
    "--config": "VLLM_ACCPROBE_CONFIG is a TOML file of settings; opcheck's and online's is msprobe's json",
    "--heal": "VLLM_ACCPROBE_HEAL are modules, which run has; gate heals the one that --localize names",
    "--out": "golden pack and make write a file, all others a folder",
    "-o": "as --out",
    "--seed": "golden draws rows and signs with it",
    "--prompts": "golden pack puts a file into the pack, all others send it",
    "-d": "msprobe's devices, elsewhere --dir",
}
"""Names of more than one meaning, and why."""


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    command = typer.main.get_command(build()) if command is None else command
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
    else:
        for name, one in inner.items():
            yield from commands(one, (*path, name))


ALL = {name: command for name, command in commands() if name not in MOVED}
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
    assert len(ALL) >= 17
    assert "online serve" in ALL
    assert len(OPTIONS) > 200


def test_one_name_is_one_thing() -> None:
    several = {name: {meaning(o) for _, o in found} for name, found in by_name().items()}
    several = {name: said for name, said in several.items() if len(said) > 1}
    assert {n: s for n, s in several.items() if n not in DIFFERENT} == {}
    assert set(DIFFERENT) <= set(several), "no reason is needed for a name that means one thing"


def test_an_option_that_is_given_repeatedly_says_how() -> None:
    for command, option in OPTIONS:
        if option.multiple and option.metavar not in LISTS:
            assert "Can be repeated" in option.help, (command, option.opts)
        if option.metavar in LISTS:
            assert "repeated" not in option.help.lower(), (command, option.opts)


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, o in OPTIONS if o.metavar in LISTS])
def test_lists_take_commas_and_repeats_alike(command: str, option: Any) -> None:
    params, name = ALL[command].params, option.opts[0]
    said = [of_today(command, words, params) for words in ([name, "a,b"], [name, "a", name, "b"])]
    assert said[0] == said[1]
    assert said[0] == ([name, "a", name, "b"] if option.multiple else [name, "a,b"])
    if name.startswith("--"):
        assert of_today(command, [f"{name}=a", f"{name}=b"], params) == said[0]


def test_help_with_many_options_begins_with_those_that_most_need(capsys: pytest.CaptureFixture[str]) -> None:
    """The first screen has 40 lines of 80 columns."""
    shown = {name: [p for p in c.params if p.param_type_name == "option" and not p.hidden] for name, c in ALL.items()}
    assert set(MOST_USED) == {name for name, options in shown.items() if len(options) > 11}
    for name, names in MOST_USED.items():
        assert set(names.split()) <= {o for p in shown[name] for o in p.opts}, name
        assert main([*name.split(), "--help"]) == 0
        screen, _, more = capsys.readouterr().out.partition("\nMore options:\n")
        assert len(screen.splitlines()) <= 40, name
        assert all(f"{o} " in screen or f"{o}," in screen for o in names.split()), name
        assert more.count("\n  -") == len(shown[name]) - len(names.split()), name
