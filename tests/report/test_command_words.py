"""Words that a shell and our globs take apart as they were meant."""

import shlex
from fnmatch import fnmatchcase

import pytest

from vllm_accprobe.report.facts import LONGEST, glob_of, line_of, path_word

NAMES = ["a.b", "with blank", "it's", "*", "[0]", "a,b", "!not", "-o", "$(rm)", "tab\tbed", "a\nb", "", "\u202eevil"]


@pytest.mark.parametrize("name", NAMES)
def test_a_glob_matches_its_name_and_is_one_of_a_list(name: str) -> None:
    glob = glob_of(name)
    assert fnmatchcase(name, glob)
    assert glob.isprintable()
    assert not glob.startswith(("-", "!"))
    assert glob.split(",") == [glob.strip()]
    assert not fnmatchcase(name + "x", glob)


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_taken_apart_as_it_was_put_together_or_is_none(name: str) -> None:
    line = line_of(["accprobe", "show", name])
    if name.isprintable():
        assert shlex.split(line) == ["accprobe", "show", name]
    else:
        assert line is None


def test_a_line_too_long_to_be_shown_is_none() -> None:
    assert line_of(["x" * LONGEST]) is not None
    assert line_of(["x" * (LONGEST + 1)]) is None


def test_a_path_is_no_option() -> None:
    assert path_word("-rf") == "./-rf"
    assert path_word("/a/-b") == "/a/-b"
