"""The laboratory's declarations are sound, and its scores are what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fault_lab
import pytest
from accprobe_fault_rows import Rows
from accprobe_faults import parse
from fault_cases import CASES, Case
from fault_lab import Bench, Outcome, judge_kept, markdown, row, totals
from fault_ways import CLEAN, EASY, WAYS

torch = pytest.importorskip("torch")


def test_as_many_faults_and_clean_pairs_as_promised() -> None:
    assert len(CASES) >= 44
    assert sum(c.subtle for c in CASES) >= 12
    assert sum(c.golden not in EASY for c in CASES) >= len(CASES) / 2
    assert {c.model for c in CASES} == {"qwen2", "llama", "qwen2-moe", "mixtral", "deepseek-v2", "qwen2.5-vl"}
    assert len(CLEAN) >= 15


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_each_declaration_can_be_planted(case: Case) -> None:
    assert {case.golden, case.mine} <= set(WAYS)
    for fault in parse(json.dumps(case.faults)):
        Rows(torch.nn.Identity(), fault.rows)
    assert all(case.expected)


def test_names_are_unique_and_pairs_differ() -> None:
    assert len({c.name for c in CASES}) == len(CASES)
    assert len(set(CLEAN)) == len(CLEAN)
    assert all({first, second} <= set(WAYS) and first != second for _, first, second in CLEAN)


FOUND = Outcome("a", "qwen2", "serial", "mixed", ("x",), "fail", "x", rank=1, found=True, factor=3.0, worded=True)
MISSED = replace(FOUND, name="b", culprit="y", rank=2, worded=False)
PASSED = replace(FOUND, name="c", verdict="pass", culprit="", rank=0, worded=None, seen="output.0 1.2")
CLEAN_PAIR = Outcome("clean qwen2", "qwen2", "serial", "tp2", (), "pass")


def test_right_and_wrong() -> None:
    assert FOUND.right
    assert not MISSED.right
    assert not PASSED.right
    assert not replace(FOUND, found=False).right  # the second of two faults is missing
    assert CLEAN_PAIR.right
    assert not replace(CLEAN_PAIR, verdict="fail").right
    assert not replace(CLEAN_PAIR, verdict="error: DumpError: gone").right


def test_totals() -> None:
    t = totals([FOUND, MISSED, PASSED, CLEAN_PAIR], subtle=["a", "c"], same_kind=["serial"])
    assert (t.faults, t.failed, t.first, t.subtle, t.subtle_first) == (3, 2, 1, 2, 1)
    assert (t.other_golden, t.worded, t.words, t.clean, t.alarms) == (0, 1, 2, 1, 0)
    assert not t.good


@pytest.mark.parametrize(
    ("found", "second_place", "passed", "alarms", "good"),
    [
        (40, 0, 0, 0, True),
        (38, 2, 0, 0, True),
        (38, 1, 1, 0, True),
        (37, 3, 0, 0, False),
        (38, 0, 2, 0, False),
        (40, 0, 0, 1, False),
        (11, 1, 0, 0, False),
    ],
)
def test_what_is_good_enough(found: int, second_place: int, passed: int, alarms: int, good: bool) -> None:
    outcomes = [FOUND] * found + [MISSED] * second_place + [PASSED] * passed
    outcomes += [replace(CLEAN_PAIR, verdict="fail")] * alarms
    assert totals(outcomes, []).good is good


def test_the_table_and_what_is_said_about_a_miss() -> None:
    assert row(MISSED) == ("BAD", "b", "qwen2", "serial → mixed", "fail", "y (true: x)", "2 of 0", "3", "")
    page = markdown([FOUND, replace(PASSED, at="12:00:00")], "2 faults")
    assert "| ok | a | qwen2 | serial → mixed | fail | x | 1 of 0 | 3 |  |" in page
    told = "- **BAD** c (serial → mixed): expected x; output.0 1.2; run 0 s, judged in 0.0 s at 12:00:00"
    assert page.splitlines()[-1] == told
    assert "expected x" not in markdown([FOUND, PASSED], "2 faults", details=False)


def test_saved_outcomes_replace_older_ones_of_the_same_pair(tmp_path: Path) -> None:
    order = ["b", "a"]
    fault_lab.save(tmp_path, [FOUND, MISSED, CLEAN_PAIR, replace(FOUND, name="no longer declared")], order)
    every = fault_lab.save(tmp_path, [replace(FOUND, factor=9.0)], order)
    assert [(o.name, o.factor) for o in every] == [("b", 3.0), ("a", 9.0), ("clean qwen2", 0.0)]


def test_what_is_seen_around_a_module() -> None:
    def pair(role: str, worst: float | None, status: str = "pass", tap: str = "x") -> SimpleNamespace:
        return SimpleNamespace(tap=tap, role=role, worst_row_rel_l2=worst, status=status)

    pairs = [
        pair("input.0", 2**-8),
        pair("input.0", 2**-9),
        pair("output.0", 2**-6, "fail"),
        pair("output.0", 1, tap="y"),
    ]
    assert fault_lab.around(SimpleNamespace(pairs=pairs), "x") == "input.0 1, output.0 4 FAIL"
    assert fault_lab.around(SimpleNamespace(pairs=pairs), "z") == "z was not compared"


class FakeHost:
    """Writes a dump's first file instead of running an engine, and counts."""

    made: list[str]

    def capture(self, model: Path, asks: object, *, out: Path, **how: object) -> None:
        self.made.append(out.name if out.parent.name == "_runs" else f"{out.parent.name}/{out.name}")
        out.mkdir(parents=True)
        (out / "run.json").write_text("{}")

    def close(self) -> None:
        pass


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path)
    host = FakeHost()
    host.made = []
    monkeypatch.setattr(bench, "_host", lambda kind: host)
    monkeypatch.setattr(bench, "model", lambda name: tmp_path / name)
    bench.host = host  # type: ignore[attr-defined]
    return bench


def test_goldens_are_shared_and_kept_runs_are_used_again(bench: Bench, tmp_path: Path) -> None:
    one = Case("one", "qwen2.5-vl", {"kind": "nan", "module": "m"})
    two = Case("two", "qwen2.5-vl", {"kind": "zero", "module": "m"})
    for case in (one, two, one):
        bench.pair(case)
    made = bench.host.made  # type: ignore[attr-defined]
    assert made == ["qwen2.5-vl-serial", "one/mine", "two/mine"]
    assert (tmp_path / "one" / "golden" / "run.json").exists()
    # Another fault of the same name is another run.
    bench.pair(replace(one, fault={"kind": "add", "module": "m"}))
    assert made[3:] == ["one/mine"]


def test_only_what_was_kept_is_judged(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("one", "qwen2", {"kind": "nan", "module": "m"})
    bench.pair(case)
    origins = [
        {"module": "other", "created": 1.0, "floor": 0.5},
        {"module": "m", "created": 3.0, "floor": 0.5, "shape": "only rows of decode"},
    ]
    result = SimpleNamespace(verdict="fail", origins=origins, pairs=[])
    monkeypatch.setattr(fault_lab, "_compare", lambda golden, mine, replay: result)
    done: list[Outcome] = []
    cases = [replace(case, words=("decode",)), replace(case, name="not kept")]
    judge_kept(tmp_path, cases, [("qwen2", "serial", "mixed")], done.append)
    assert [o.name for o in done] == ["one"]
    assert (done[0].culprit, done[0].rank, done[0].factor, done[0].worded) == ("other", 2, 6.0, True)


@pytest.mark.parametrize("replay", [False, True])
def test_a_pair_is_judged_as_the_command_does(tmp_path: Path, replay: bool) -> None:
    """Real dumps, a fault in one of two layers: with the replay it is the replay that names it."""
    from vllm_accprobe import Probe

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    x = torch.randn(8, 64)
    for side in ("golden", "mine"):
        with Probe(model, dir=str(tmp_path / side)):
            model(x)
        forward = model[1].forward
        model[1].forward = lambda given, forward=forward: forward(given) * 1.25
    found = fault_lab.judge(CASES[0], tmp_path / "golden", tmp_path / "mine", replay=replay)
    assert (found.verdict, found.culprit) == ("fail", "1")
