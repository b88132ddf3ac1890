"""What the page holds of a pair's spread: small integers, errors as parts of their peak."""

import shlex

import numpy as np
from report_examples import comparison, pair

from vllm_accprobe.comparison.row_table import ValueSpread
from vllm_accprobe.report.html.data import looks_json


def _spread() -> ValueSpread:
    counts = np.arange(5)
    return ValueSpread(0, -1.0, 2.0, counts, counts[::-1], np.array([0.0, 0.5, 2.0, np.inf]), 4, 3, 5,
                       np.array([-1.0, 0.0, 0.25]), 2, 9)  # fmt: skip


def test_spreads_go_by_the_pages_numbers_and_the_command_keeps_what_was_given():
    from dataclasses import replace

    made = replace(comparison(pairs=[pair(), pair()], golden_path="a; rm 'x'"), spreads=(_spread(),))
    assert set(looks_json(made, {0: 3})["spreads"]) == {"3"}
    assert looks_json(made, {1: 0})["spreads"] == {}
    said = replace(made, options=("--op-mapping-file", "m n.yaml", "--taps", "*.mlp", "--standard", "strict"))
    assert shlex.split(looks_json(said, {})["again"]) == [
        "accprobe", "compare", "a; rm 'x'", "mine", "--op-mapping-file", "m n.yaml", "--standard", "strict"
    ]  # fmt: skip
    assert looks_json(made, {})["again"] == "accprobe compare 'a; rm '\"'\"'x'\"'\"'' mine"
