"""One plant in eight, drawn by its name, runs by default, and all with ``--all``: each tries all causes of its class.

What a cause says has its own test by name in test_planted.py and its like; a broken frame shows in any of them."""

import hashlib

import pytest

SHARE = 8
SLOW = {"test_known_cause_is_confirmed_in_the_next_layer", "test_golden_value_is_no_fit"}
"""Tests of more than 20 s."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = __file__.rpartition("/")[0]
    for item in items:
        if not str(item.path).startswith(here):
            continue
        left_out = "[" in item.name and hashlib.sha256(item.name.encode()).digest()[0] % SHARE
        if left_out or item.name.partition("[")[0] in SLOW:
            item.add_marker(pytest.mark.extra)
