"""Untrusted JSON as typed values: what each type takes, and the one line that refuses the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import pytest

from vllm_accprobe.dump.decode import (
    Count,
    DecodeError,
    Size,
    Text,
    at_most,
    decode,
    fits,
    load,
    object_at,
    one_of,
    parse,
    value_at,
    words,
)


class Pair(NamedTuple):
    name: str
    size: float | None


class Told(TypedDict):
    matters: bool | None


@dataclass(frozen=True)
class Whole:
    name: Annotated[str, words(5)]
    count: Count = 0
    sizes: tuple[Size, ...] = ()
    two: tuple[int, str] = (0, "")
    inner: Whole | None = None
    by_name: Mapping[str, int] = field(default_factory=dict)
    by_number: Mapping[int, int] = field(default_factory=dict)
    by_place: Mapping[tuple[str, int], int] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    told: Told | None = None
    kind: Annotated[str, one_of(("a", "b"))] = "a"
    names: Annotated[frozenset[str], at_most(2)] = frozenset()
    anything: Any = None


def test_all_of_it_is_read() -> None:
    text = """{"name": "x", "count": 3, "sizes": [1, 0.5], "two": [1, "b"], "inner": {"name": "y"}, "by_name": {"a": 1},
        "by_number": {"-3": 4}, "by_place": [[["a", 1], 2]], "pairs": [["p", null], ["q", NaN]],
        "told": {"matters": null}, "kind": "b", "names": ["m", "n"], "anything": [{}], "schema": 2}"""
    found = parse(Whole, text, 1000, {"schema": 2})
    assert math.isnan(found.pairs.pop()[1] or 0)
    assert found == Whole(
        "x", 3, (1.0, 0.5), (1, "b"), Whole("y"), {"a": 1}, {-3: 4}, {("a", 1): 2}, [Pair("p", None)],
        {"matters": None}, "b", frozenset(("m", "n")), [{}],
    )  # fmt: skip
    assert type(found.sizes[0]) is float


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "it is [], not an object"),
        ({}, "it has no name"),
        ({"name": "x", "more": 1}, "more is not known here"),
        ({"name": 3}, "name is 3, not text"),
        ({"name": "\x1b[2J"}, r"name is '\x1b[2J', not printable text of 5 characters"),
        ({"name": "x", "count": True}, "count is True, not a whole number"),
        ({"name": "x", "count": -1}, "count is -1, not a number from 0 to 9.0072e+15"),
        ({"name": "x", "sizes": 3}, "sizes is 3, not a list"),
        ({"name": "x", "sizes": [1, "2"]}, "sizes[1] is '2', not a number"),
        ({"name": "x", "sizes": [True]}, "sizes[0] is True, not a number"),
        ({"name": "x", "sizes": [math.nan]}, "sizes[0] is nan, not a number from 0"),
        ({"name": "x", "sizes": [math.inf]}, "sizes[0] is inf, not a number from 0"),
        ({"name": "x", "two": [1]}, "two is [1], not a list of 2"),
        ({"name": "x", "two": ["1", "b"]}, "two[0] is '1', not a whole number"),
        ({"name": "x", "inner": {"name": "y", "inner": 3}}, "inner.inner is 3, not an object"),
        ({"name": "x", "by_name": []}, "by_name is [], not an object"),
        ({"name": "x", "by_name": {"k": None}}, "by_name.k is None, not a whole number"),
        ({"name": "x", "by_name": {"\x1b[2J": None}}, r"by_name.'\x1b[2J' is None, not a whole number"),
        ({"name": "x", "by_number": {"a": 1}}, "a key of by_number is 'a', not a whole number"),
        ({"name": "x", "by_place": {}}, "by_place is {}, not a list"),
        ({"name": "x", "by_place": [[["a"], 1]]}, "by_place[0][0] is ['a'], not a list of 2"),
        ({"name": "x", "pairs": [["p", "q"]]}, "pairs[0][1] is 'q', not a number"),
        ({"name": "x", "told": {}}, "told has no matters"),
        ({"name": "x", "told": {"matters": 1}}, "told.matters is 1, not true or false"),
        ({"name": "x", "kind": "c"}, "kind is 'c', not one of a, b"),
        ({"name": "x", "names": ["1", "2", "3"]}, "names is ['1', '2', '3'], not at most 2 entries"),
    ],
)
def test_the_rest_is_refused_in_one_line_with_its_path(value: object, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Whole, value)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON"), ("[" * 100_000, "it is nested too deep|too large"), (" " * 2000, "it is too large"),
        ('{"name": "x"}', "schema is None, not 2"), ('{"name": "x", "schema": 1}', "schema is 1, not 2"),
        ("3", "schema is 3, not 2"), ('{"name": 1' + "0" * 400 + "}", "not text"), (b"\xff", "it is not JSON"),
        ('{"schema": 2, "name": "x", "sizes": [1' + "0" * 400 + "]}", r"sizes\[0\] is 1000.*, not a number"),
    ],
)  # fmt: skip
def test_a_file_is_refused_with_its_name(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DecodeError, match=rf"f\.json: .*({said})|schema is None"):
        load(Whole, path, 1000, {"schema": 2})
    if len(text) > 2000:
        with pytest.raises(DecodeError, match="too deep"):
            parse(Whole, text, 1 << 20)


def test_what_fits_and_what_is_under_names() -> None:
    for kind, value in ((list[Text], ["a"]), (str | list[str], "a"), (list[int], []), (dict[str, str | int], {"a": 1})):
        assert fits(kind, value)
    for kind, value in ((list[Text], ["a", ""]), (list[Text], "a"), (list[int], [True]), (list[int], None)):
        assert not fits(kind, value)
    run = {"model": {"path": "/m", "config": {}}}
    assert (value_at(run, "model", "path"), value_at(run, "model", "path", "x"), value_at(3, "x")) == ("/m", None, None)
    assert (object_at(run, "model", "config"), object_at(run, "model", "path"), object_at(None)) == ({}, None, None)
