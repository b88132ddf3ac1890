"""Options that take several words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_accprobe.cli.common.several import spread

OPTIONS = (
    SimpleNamespace(opts=["--metric", "-metric"], metavar="[abs|kl]..."),
    SimpleNamespace(opts=["--out"], metavar="DIR"),
    SimpleNamespace(opts=["dump"], metavar=None),
)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("DUMP -metric abs kl -o out", "DUMP -metric abs -metric kl -o out"),
        ("-metric abs DUMP", "-metric abs DUMP"),  # what is none of the words stays what it is
        ("--metric kl --metric abs", "--metric kl --metric abs"),
        ("-metric", "-metric"),
        ("--out abs kl", "--out abs kl"),
        ("-metric abs -- kl", "-metric abs -- kl"),
        ("-metric abs DUMP kl", "-metric abs DUMP kl"),
    ],
)
def test_words_behind_an_option(given: str, read: str) -> None:
    assert spread(OPTIONS, given.split()) == read.split()
