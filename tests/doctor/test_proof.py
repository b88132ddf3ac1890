"""Runs with and without taps: what is proved, what is not, and which module is named.

The engine is a stand-in that writes real dumps (small_engine.py); a real one is in
tests/e2e/test_taps_change_nothing.py.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor import small_engine
from doctor.small_engine import CHANGES, EAGER, FLIPS, TAPS, UNSTEADY
from dump.dumps import put_event

from vllm_accprobe.config import PREFIX
from vllm_accprobe.doctor.graph_proof import (
    CHANGED,
    SAME,
    UNKNOWN,
    Bits,
    Prover,
    Runs,
    Tally,
    TapProof,
    TapRun,
    first_change,
    first_difference,
    lines,
    outcome,
)
from vllm_accprobe.dump.journal_writer import digest
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.writer import RankWriter, write_run_json

FAR = pytest.approx((8 * 0.5**2 / sum(i**2 for i in range(8))) ** 0.5)
"""Half of one in each of eight columns, at the row with the least norm: 0, 1, 2 ... 7."""


def proved(root: Path, said: list[str] | None = None, answer: Any = None, **how: Any) -> TapProof:
    options = {name: how.pop(name) for name in ("full", "bisect") if name in how}

    def serve(run: TapRun) -> Sequence[str]:
        small_engine.main(run.environ)
        return answer(run) if answer else ()

    runs = Runs({name: str(value) for name, value in how.items()}, root)
    said = [] if said is None else said
    return Prover(runs, serve, said.append, lambda: 0.0).prove(**options)


def run_json(proof: TapProof, name: str) -> dict[str, Any]:
    place = next(ran.place for ran in proof.runs if ran.name == name)
    return json.loads((Path(place) / "run.json").read_text())


def test_looking_changes_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    proof = proved(tmp_path, said, full=True)
    assert (proof.verdict, proof.repeats, proof.culprits, proof.notes) == (SAME, True, (), ())
    assert [ran.name for ran in proof.runs] == ["off", "off again", "on", "selected", "full"]
    assert [ran.taps for ran in proof.runs] == [0, 0, 6, 6, 7]
    assert [ran.same for ran in proof.runs] == [None, True, True, True, True]
    on, selected = proof.runs[2], proof.runs[3]
    assert on.outcome is not None
    assert (on.outcome.root.rows, on.outcome.logits.rows, on.outcome.tokens.rows) == (16, 8, 18)
    assert selected.graphs["key"] == on.graphs["key"]
    assert selected.graphs["chosen"] == 3
    steps = {step for _, step in open_dump(selected.place).steps}
    assert steps == {1, 3, 5, 7}
    assert lines(proof)[-1].startswith(
        "looking changed nothing: tokens, logits and the model's output are the same bits"
    )
    assert said[1] == "4 more runs, about 0 s in all"
    assert run_json(proof, "on")["engine"]["graphs"]["changed"] == {
        "tokens": False, "top_logits": False, "logits": False, "root": False, "root_rel_l2": 0.0, "against": "off",
        "repeats": True,
    }  # fmt: skip
    assert "graphs" not in run_json(proof, "off")["engine"]
    file = Path(on.place) / "run.json"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


@pytest.mark.parametrize("tap", TAPS)
def test_the_first_module_whose_tap_changes_the_result_is_named(tmp_path: Path, tap: str) -> None:
    later = TAPS[TAPS.index(tap) + 1 :][-1:]
    proof = proved(tmp_path, **{CHANGES: " ".join([*later, tap])})
    assert (proof.verdict, proof.repeats) == (CHANGED, True)
    (culprit,) = proof.culprits
    assert (culprit.module, culprit.before, culprit.run) == (tap, TAPS.index(tap), "on")
    assert culprit.ran <= 4
    assert culprit.root_rel_l2 == FAR
    changed = run_json(proof, "on")["engine"]["graphs"]["changed"]
    assert (changed["tokens"], changed["root"], changed["logits"], changed["module"]) == (False, True, True, tap)
    assert changed["root_rel_l2"] == proof.runs[2].outcome.root.rel_l2  # type: ignore[union-attr]
    assert any(f"first module whose compiled code changed: {tap} " in line for line in lines(proof))
    assert lines(proof)[-1] == "LOOKING CHANGED THE RESULT: on and selected against off"


def test_behind_another_token_nothing_is_compared(tmp_path: Path) -> None:
    proof = proved(tmp_path, bisect=False, **{CHANGES: TAPS[2], FLIPS: "1"})
    on = proof.runs[2].outcome
    assert on is not None
    # of each request the first token after the prompt is the same, three are not; two rows came of them
    assert (on.tokens.rows, on.tokens.differing, on.behind) == (18, 6, 4)
    assert (on.root.rows, on.root.differing) == (12, 12)
    assert proof.culprits == ()


@pytest.mark.parametrize(("settings", "why"), [
    ({UNSTEADY: 1}, "two runs without taps differ already: this engine does not repeat itself"),
    ({EAGER: 1}, "the engine is eager"),
    ({PREFIX + "GRAPH_TAPS": "no.such"}, "no taps were placed: "),
    ({PREFIX + "STEPS": "90"}, "nothing was captured"),
])  # fmt: skip
def test_nothing_is_proved(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    proof = proved(tmp_path, **settings)
    assert proof.verdict == UNKNOWN
    assert proof.why.startswith(why), proof.why
    assert lines(proof)[-1] == f"nothing could be proved: {proof.why}"


def test_answers_that_differ_count_where_no_dump_tells(tmp_path: Path) -> None:
    proof = proved(tmp_path, answer=lambda run: ["x" if run.name == "selected" else "y"])
    assert (proof.verdict, [ran.same for ran in proof.runs]) == (CHANGED, [None, True, True, False])
    assert "selected: the server's answers differ from off's" in lines(proof)


@pytest.mark.parametrize("count", [1, 2, 3, 20, 600])
def test_halving_finds_where_it_begins(count: int) -> None:
    for begin in {1, 2, count // 2 + 1, count} & set(range(1, count + 1)):
        asked: list[int] = []

        def differs(n: int, begin: int = begin, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n >= begin

        assert first_change(count, differs) == begin
        assert len(asked) <= (count - 1).bit_length()


# --- rows of two dumps are paired by request and position, and only equal is equal ---


def bits(root: Path, **settings: str) -> Bits:
    small_engine.main({PREFIX + "DIR": str(root), **settings})
    return Bits(open_dump(root))


@pytest.mark.parametrize("number", range(len(TAPS)))
def test_the_first_place_whose_values_part(tmp_path: Path, number: int) -> None:
    right = bits(tmp_path / "a")
    wrong = bits(tmp_path / "b", **{CHANGES: TAPS[number]})
    parting = first_difference(right, wrong)
    assert parting is not None
    assert (parting.tap, parting.role, parting.spot.rows, parting.spot.differing) == (TAPS[number], "output.0", 16, 16)
    assert first_difference(right, right) is None


Rows = list[tuple[int, int, int]]
"""(request, first position, rows) of each step's only part."""
ONE_BY_ONE: Rows = [(0, 0, 1), (0, 1, 1), (0, 2, 1)]
TOGETHER: Rows = [(0, 0, 3)]


def roots(
    root: Path, steps: Rows, change: Callable[[np.ndarray, int], None] = lambda a, s: None, stats: bool = False
) -> Bits:
    """A dump of the root's output alone: row p holds p, p + 1, p + 2, p + 3."""
    write_run_json(root, {})
    w = RankWriter(root, 0, {}, budget_bytes=1 << 30, block_bytes=1 << 16)
    w.line({"event": "request", "req": 0, "id": "x", "prompt": "ab" * 16, "prompt_len": 3})
    for step, (req, pos, n) in enumerate(steps):
        w.line({"event": "step", "step": step, "batch": {"requests": 1, "tokens": n}})
        segment = {"req": req, "pos": pos, "n": n, "row": 0, "phase": "prefill"}
        w.line({"event": "rows", "step": step, "space": "tokens", "src_rows": n, "segments": [segment],
                "ids": list(range(pos, pos + n))})  # fmt: skip
        values = (np.arange(pos, pos + n, dtype="<f4")[:, None] + np.arange(4, dtype="<f4")).copy()
        change(values, step)
        at = [(values.ctypes.data, values.nbytes)]
        line = {
            "event": "tensor", "step": step, "tap": "<root>", "class": "M", "role": "output.0", "call": 0, "seq": 0,
            "dtype": "float32", "shape": list(values.shape), "rows": "tokens", "row_dim": 0, "hash": digest(at),
        }  # fmt: skip
        if stats:
            w.line(line)
        else:
            put_event(w, values, line)
    w.close("done", {})
    return Bits(open_dump(root))


def set_last(value: float) -> Callable[[np.ndarray, int], None]:
    def change(values: np.ndarray, step: int) -> None:
        values[-1, 0] = value

    return change


def test_other_batches_pair_all_the_same(tmp_path: Path) -> None:
    found = outcome(roots(tmp_path / "a", ONE_BY_ONE), roots(tmp_path / "b", TOGETHER))
    assert (found.root, found.batches, found.same) == (Tally(3, 0, 0.0), False, True)
    assert found.tokens == Tally(3, 0)
    wrong = outcome(
        roots(tmp_path / "c", TOGETHER),
        roots(tmp_path / "d", ONE_BY_ONE, lambda a, s: set_last(9)(a, s) if s == 1 else None),
    )
    assert (wrong.root.rows, wrong.root.differing) == (3, 1)
    # row 1 of (1, 2, 3, 4) has a 9 in place of the 1; all three rows are of one step of the first dump
    assert wrong.root.rel_l2 == pytest.approx(8 / math.sqrt(14 + 30 + 54))


@pytest.mark.parametrize(("ours", "theirs", "differ"), [(-0.0, 0.0, 1), (math.nan, math.nan, 0), (math.inf, 1.0, 1)])
def test_bits_are_compared_and_not_numbers(tmp_path: Path, ours: float, theirs: float, differ: int) -> None:
    pair = (
        roots(tmp_path / "a", TOGETHER, set_last(ours)),
        roots(tmp_path / "b", ONE_BY_ONE, lambda a, s: set_last(theirs)(a, s) if s == 2 else None),
    )
    assert outcome(*pair).root.differing == differ


def test_statistics_tell_by_their_hashes(tmp_path: Path) -> None:
    values = roots(tmp_path / "a", ONE_BY_ONE)
    assert outcome(values, roots(tmp_path / "b", ONE_BY_ONE, stats=True)).root == Tally(3, 0, 0.0)
    other = roots(tmp_path / "c", ONE_BY_ONE, lambda a, s: set_last(9)(a, s) if s == 1 else None, stats=True)
    assert outcome(values, other).root == Tally(3, 1, 0.0)
    # rows of a whole whose values are not there cannot be distinguished
    assert outcome(values, roots(tmp_path / "d", TOGETHER, stats=True)).root.same is None
