"""Every number of the judge has a source and stands in one place."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

import vllm_accprobe.judge as room
from vllm_accprobe.judge import constants, statistic
from vllm_accprobe.standards import limits as of_standards

ROOM = Path(room.__file__).parent
OURS = Path(of_standards.__file__).with_name("ours.py")
CONSTANTS = ROOM / "constants.py", ROOM / "statistic.py", Path(of_standards.__file__)
SOURCES = ("derived:", "measured:", "chosen:")
ELSEWHERE = {
    "constants.py": "they are here",
    "distributions.py": "of a continued fraction and a factorial series; compared with exact sums, they judge nothing",
    "rounding_unit.py": "units of rounding, by dtype",
    "statistic.py": "it is copied with gentest's tests; its own three numbers say where they come from",
    "sampling_rules.py": "MT19937, splitmix64 and a sampler's defaults are facts; what judges is in constants.py",
}
BOUNDS = {  # of memory, of hostile input, of text; and places in an order: they judge nothing
    "calibration.py": {256, 20, 100, 500},
    "profile.py": None,
    "origins.py": {64, 20, 32, 16},
    "near_ties.py": {64, 12, 3},
    "tensor_errors.py": {1e-300, 3, 4, 5},
    "error_pattern.py": {3},
    "ours.py": {3.0, 20},
}
PLAIN = {0, 1, 2, 0.5}


NUMBERS = {
    name
    for module in (of_standards, constants, statistic)
    for name, value in vars(module).items()
    if isinstance(value, (int, float)) and name.isupper()
}


def _documented():
    for here, after in (two for path in CONSTANTS for two in pairwise(ast.parse(path.read_text()).body)):
        if isinstance(here, ast.Assign) and {n.strip("() ") for n in ast.unparse(here.targets[0]).split(",")} & NUMBERS:
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield ast.unparse(here.targets[0]), str(after.value.value) if said else ""


@pytest.mark.parametrize(("names", "said"), list(_documented()))
def test_each_says_where_it_comes_from(names, said):
    assert said.startswith(SOURCES), f"{names}: begin its text with one of {SOURCES}"
    if said.startswith("measured:"):
        assert "scripts/" in said or "accprobe " in said, f"{names}: which script measures it?"


def test_none_is_forgotten():
    assert {n.strip("() ") for names, _ in _documented() for n in names.split(",")} == NUMBERS


@pytest.mark.parametrize("path", [*sorted(ROOM.rglob("*.py")), OURS], ids=lambda p: p.name)
def test_no_number_stands_elsewhere(path):
    if path.name in ELSEWHERE or BOUNDS.get(path.name, set()) is None:
        return
    allowed = PLAIN | BOUNDS.get(path.name, set())
    found = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    ]
    assert [f"line {line}: {value}" for line, value in found if value not in allowed] == []
