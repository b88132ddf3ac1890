"""The generated cases can be planted, are the same everywhere, and fill both halves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from accprobe_fault_rows import Rows
from accprobe_faults import parse

from lab.cases import CASES, HANDWRITTEN, HELD_OUT, TUNED, half
from lab.generated import EVERY, EVERYWHERE, GENERATED, NEAR, SIZES
from lab.ways import ACROSS, CLEAN, MORE_CLEAN, WAYS

torch = pytest.importorskip("torch")


def test_the_half_is_the_names_hash_and_nothing_else() -> None:
    # sha256("a") begins with ca, sha256("d") with 18, sha256("abc") with ba, sha256("kind") with b2 (sha256sum)
    assert [half(name) for name in ("a", "d", "abc", "kind")] == [HELD_OUT, TUNED, HELD_OUT, TUNED]
    assert {half(case.name, case.group) for case in CASES} == {TUNED}
    assert half("a", HANDWRITTEN) == TUNED


def test_each_half_of_each_group_is_as_large_as_it_should_be() -> None:
    counted = Counter((case.group, half(case.name, case.group)) for case in GENERATED)
    assert {(g, h): n for (g, h), n in counted.items() if g in SIZES} == {
        (group, part): n for group, parts in SIZES.items() for part, n in parts.items()
    }
    for group, least in (("kind", 60), ("trained", 40), ("two", 30), ("near", 30)):
        assert counted[group, HELD_OUT] >= least
    assert len(EVERYWHERE) == 10


def test_names_are_unique_and_say_what_is_planted() -> None:
    names = [case.name for case in EVERY]
    assert len(set(names)) == len(names)
    for case in GENERATED:
        if case.group in ("kind", "trained", "near"):
            (fault,) = case.faults
            assert f"{fault['kind']}-" in case.name
            assert f"{fault['factor']:g}" in case.name


def test_each_declaration_can_be_planted() -> None:
    """Of the cases written by hand, too."""
    for case in (*CASES, *GENERATED):
        assert {*case.goldens, case.mine} <= set(WAYS), case.name
        for fault in parse(json.dumps(case.faults)):
            Rows(torch.nn.Identity(), fault.rows)
        assert case.expected, case.name
        assert all(case.expected), case.name


def test_the_same_cases_in_another_process() -> None:
    """Not by the order of a set, which changes with the process."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), str(here.parents[1] / "scripts")])
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    env["PYTHONPATH"] = os.pathsep.join([path, env.get("PYTHONPATH", "")])
    code = "from lab import generated as g; print(*[repr(c) for c in g.GENERATED], sep='\\n')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    assert told.splitlines() == [repr(case) for case in GENERATED]


def test_all_sorts_of_faults_and_all_models_in_both_halves() -> None:
    for part in (TUNED, HELD_OUT):
        cases = [case for case in GENERATED if half(case.name, case.group) == part]
        assert len({case.model for case in cases if case.group in ("kind", "near")}) == 6
        assert len({case.model for case in cases if case.group == "trained"}) == 5
        kinds = {fault["kind"] for case in cases if case.group == "kind" for fault in case.faults}
        assert {"scale", "product", "eps", "act", "attn", "coarse", "low_sum", "angle", "cache"} <= kinds


def test_goldens_of_each_group() -> None:
    by_group = {group: [case for case in GENERATED if case.group == group] for group in (*SIZES, "everywhere")}
    assert {case.goldens for case in by_group["kind"]} == {("serial", "float32")}
    assert {case.goldens for case in by_group["two"] + by_group["near"]} == {("float32",)}
    assert {case.golden for case in by_group["trained"]} == {"float32"}
    assert {way for case in by_group["trained"] for way in case.also} == {"tp2", "v2"}
    assert {case.golden for case in by_group["everywhere"]} == {"serial", "float32"}


def test_two_faults_are_in_different_layers_and_both_have_a_name() -> None:
    for case in GENERATED:
        if case.group == "two":
            first, second = (fault["module"] for fault in case.faults)
            assert first != second
            assert not set(case.expected) & set(case.seconds)
            assert case.seconds


def test_a_near_fault_is_twice_what_rounding_leaves() -> None:
    """Measured again: what bfloat16 leaves of rows of normal numbers."""
    rows = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0))
    error = (rows.to(torch.bfloat16).float() - rows).norm() / rows.norm()
    assert pytest.approx(2 * float(error), rel=0.05) == NEAR


def test_clean_pairs_are_enough_and_differ() -> None:
    pairs = CLEAN + MORE_CLEAN
    assert len(pairs) >= 60
    assert len(ACROSS) >= 20
    assert len(set(pairs)) == len(pairs)
    assert all({golden, mine} <= set(WAYS) and golden != mine for _, golden, mine in pairs)
    assert {way for model, *ways in pairs if model.startswith("trained") for way in ways} >= {"tp2", "v2", "float32"}
