"""Runs with and without taps: what is proved, what is not, and which module is named.

The engine is a stand-in that writes real dumps (small_engine.py); a real one is in
tests/e2e/test_taps_change_nothing.py.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from doctor import small_engine
from doctor.small_engine import CHANGES, EAGER, FLIPS, TAPS, UNSTEADY

from vllm_accprobe.config import PREFIX, ConfigError
from vllm_accprobe.doctor.graph_proof import (
    CHANGED,
    SAME,
    UNKNOWN,
    Prover,
    Runs,
    TapProof,
    TapRun,
    first_change,
    lines,
    placed,
    to_json,
)
from vllm_accprobe.dump.reader import open_dump

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


def test_the_full_set_is_told_and_looked_into_where_asked_for(tmp_path: Path) -> None:
    wrong = {CHANGES: "model.norm"}
    proof = proved(tmp_path / "a", full=True, **wrong)
    assert (proof.verdict, proof.culprits) == (SAME, ())
    assert "the full set does change them (root rel_l2 0.12)" in lines(proof)[-1]
    proof = proved(tmp_path / "b", full=True, bisect=True, **wrong)
    assert [(one.run, one.module, one.before) for one in proof.culprits] == [("full", "model.norm", 6)]
    assert run_json(proof, "full")["engine"]["graphs"]["changed"]["module"] == "model.norm"


def test_fewer_of_the_full_set_are_taps_of_the_full_set(tmp_path: Path) -> None:
    proof = proved(tmp_path, **{PREFIX + "MODULES": "!nothing"})
    assert (proof.verdict, proof.notes) == (SAME, ())
    on, selected = proof.runs[2:]
    assert (on.graphs["set"], on.taps, on.graphs["key"]) == ("full", 7, selected.graphs["key"])


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


def test_users_settings_that_place_no_taps_are_refused(tmp_path: Path) -> None:
    for name, value in (("GRAPH_MB", "0"), ("PARTS", "params")):
        with pytest.raises(ConfigError, match=name):
            Runs({PREFIX + name: value}, tmp_path)


def test_what_json_says(tmp_path: Path) -> None:
    said = json.loads(json.dumps(to_json(proved(tmp_path, **{CHANGES: TAPS[0]})), allow_nan=False))
    assert list(said) == ["schema", "verdict", "why", "repeats", "runs", "culprits", "notes"]
    assert said["verdict"] == "changed"
    assert said["culprits"] == [{"run": "on", "module": TAPS[0], "before": 0, "runs": 2, "root_rel_l2": FAR}]
    on = said["runs"][2]
    assert (on["name"], on["taps"], on["chosen"], on["same"], on["changed"]["root"]) == ("on", 6, 6, False, True)
    assert said["runs"][0]["changed"] is None


@pytest.mark.parametrize("count", [1, 2, 3, 20, 600])
def test_halving_finds_where_it_begins(count: int) -> None:
    for begin in {1, 2, count // 2 + 1, count} & set(range(1, count + 1)):
        asked: list[int] = []

        def differs(n: int, begin: int = begin, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n >= begin

        assert first_change(count, differs) == begin
        assert len(asked) <= (count - 1).bit_length()


def test_the_order_of_modules_that_were_not_recorded(tmp_path: Path) -> None:
    proof = proved(tmp_path, **{PREFIX + "MODULES": TAPS[4]})
    on = open_dump(proof.runs[2].place)
    assert placed(on, proof.runs[2].graphs) == TAPS
    assert placed(on, {"pieces": [["a"], ["c", "d"]], "between": ["b"]}) == ["a", "b", "c", "d"]
    assert placed(on, {}) == [TAPS[4]]
