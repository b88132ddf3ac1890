"""The laboratory's declarations are sound, and its scores are what they say."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from accprobe_fault_rows import Rows
from accprobe_faults import parse

from lab import faults, judging as fault_lab
from lab.bench import Bench
from lab.cases import CASES, HANDWRITTEN, HELD_OUT, TUNED, Case, half
from lab.generated import EVERYWHERE, GENERATED, NEAR, SIZES
from lab.judging import Outcome, Pair, judge, judge_kept, pairs_of
from lab.totals import Total, page, save, text, totals, wilson
from lab.ways import CLEAN, EASY, WAYS

torch = pytest.importorskip("torch")


def test_as_many_faults_and_clean_pairs_as_promised() -> None:
    assert len(CASES) >= 44
    assert sum(c.subtle for c in CASES) >= 12
    assert sum(c.golden not in EASY for c in CASES) >= len(CASES) / 2
    assert {c.model for c in CASES} == {"qwen2", "llama", "qwen2-moe", "mixtral", "deepseek-v2", "qwen2.5-vl"}
    assert len(CLEAN) >= 15


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


def test_only_what_was_kept_is_judged(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("one", "qwen2", {"kind": "nan", "module": "m"})
    bench.pair(case)
    origins = [
        {"module": "other", "created": 1.0, "floor": 0.5},
        {"module": "m", "created": 3.0, "floor": 0.5, "shape": "only rows of decode"},
    ]
    result = SimpleNamespace(verdict="fail", origins=origins, pairs=[])
    monkeypatch.setattr(fault_lab, "compared", lambda golden, mine, replay: result)
    done: list[Outcome] = []
    cases = [replace(case, words=("decode",)), replace(case, name="not kept")]
    assert judge_kept(pairs_of(tmp_path, cases, [("qwen2", "serial", "mixed")]), done.append) == 2
    assert [o.name for o in done] == ["one"]
    assert (done[0].culprit, done[0].rank, done[0].factor, done[0].worded) == ("other", 2, 6.0, True)
    assert not done[0].first


@pytest.mark.parametrize(
    ("modules", "first", "found"), [(["a", "b"], True, True), (["a"], True, False), (["b", "a"], False, True)]
)
def test_of_two_faults_both_are_asked_for(monkeypatch, modules, first, found):
    case = Case("x", "qwen2", [{"kind": "nan", "module": "a"}, {"kind": "nan", "module": "c"}], second=("b", "c"))
    result = SimpleNamespace(verdict="fail", origins=[{"module": m} for m in modules], pairs=[])
    monkeypatch.setattr(fault_lab, "compared", lambda golden, mine, replay: result)
    outcome = judge(Pair(case, "qwen2", "serial", "mixed", (Path(), Path())))
    assert (outcome.first, outcome.found) == (first, found)


@pytest.mark.parametrize(("replay", "jobs"), [(False, 1), (True, 2)])
def test_a_pair_is_judged_as_the_command_does(tmp_path: Path, replay: bool, jobs: int) -> None:
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
    pair = Pair(CASES[0], "qwen2", "serial", "mixed", (tmp_path / "golden", tmp_path / "mine"), replay)
    done: list[Outcome] = []
    assert judge_kept([pair], done.append, jobs) == 0
    assert (done[0].verdict, done[0].culprit) == ("fail", "1")


# --- the laboratory's sums are what they say, and what is held out stays out of sight ---


FOUND = Outcome("a", "qwen2", "serial", "mixed", ("x",), "fail", "x", rank=1, found=True, factor=3.0, worded=True)
MISSED = replace(FOUND, name="b", culprit="y", rank=2, worded=False)
PASSED = replace(FOUND, name="c", verdict="pass", culprit="", rank=0, worded=None, seen="output.0 1.2")
CLEAN_PAIR = Outcome("clean qwen2", "qwen2", "serial", "tp2", (), "pass", group="clean")


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilsons_interval(hits: int, of: int, low: float, high: float) -> None:
    assert wilson(hits, of) == pytest.approx((low, high), abs=5e-5)


def test_totals_of_one_group() -> None:
    gone = "error: DumpError: gone"
    half_found = replace(FOUND, found=False)  # the second of two faults is missing
    spoilt = [replace(CLEAN_PAIR, verdict=verdict) for verdict in ("fail", gone)]
    every = [FOUND, MISSED, PASSED, half_found, replace(FOUND, verdict=gone), CLEAN_PAIR, *spoilt]
    assert [one.right for one in every] == [True, *[False] * 4, True, False, False]
    (faults, clean) = totals(every)
    assert (faults.faults, faults.fail, faults.first, faults.errors) == (5, 3, 2, 1)
    assert (clean.clean, clean.alarms, clean.missed) == (3, 2, ("2 alarms",))


@pytest.mark.parametrize(("group", "first", "fail", "of", "good"), [
    ("handwritten", 38, 39, 40, True),
    ("handwritten", 37, 39, 40, False),
    ("handwritten", 38, 38, 40, False),
    ("kind/serial", 97, 98, 100, True),
    ("kind/serial", 96, 98, 100, False),
    ("kind/serial", 97, 97, 100, False),
    ("trained/float32", 88, 92, 100, True),
    ("near/float32", 0, 18, 30, True),
    ("near/float32", 0, 17, 30, False),
    ("trained/tp2", 0, 0, 10, True),
])  # fmt: skip
def test_what_is_good_enough(group: str, first: int, fail: int, of: int, good: bool) -> None:
    assert (not Total(group, TUNED, True, of, fail, first).missed) is good


def test_cases_held_out_are_counted_and_not_listed() -> None:
    hidden = replace(FOUND, name="hidden", half=HELD_OUT)
    assert "hidden" not in page([FOUND, hidden])
    assert "| handwritten | held out | yes | 1 of 1" in page([FOUND, hidden])
    assert "hidden" in page([FOUND, hidden], held_out=True)
    assert "held out" in text(totals([hidden]))


def test_saved_outcomes_replace_older_ones_of_the_same_pair_judged_the_same_way(tmp_path: Path) -> None:
    order = ["b", "a"]
    save(tmp_path, [FOUND, MISSED, CLEAN_PAIR, replace(FOUND, name="no longer declared")], order)
    save(tmp_path, [replace(FOUND, replay=False), replace(FOUND, golden="float32")], order)
    every = save(tmp_path, [replace(FOUND, factor=9.0)], order)
    assert [(o.name, o.golden, o.replay, o.factor) for o in every] == [
        ("b", "serial", True, 3.0),
        ("a", "serial", True, 9.0),
        ("a", "serial", False, 3.0),
        ("a", "float32", True, 3.0),
        ("clean qwen2", "serial", True, 0.0),
    ]


# --- the laboratory's command: what it chooses, what it shows, how it ends ---


def _command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["faults.py", *words])
    return faults.main()


def _one(part: str) -> str:
    return next(c.name for c in GENERATED if c.group == "near" and half(c.name, c.group) == part)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of one near case of each half and of nothing else, judged as found but for what a test says."""
    cases = [case for case in GENERATED if case.name in (_one(TUNED), _one(HELD_OUT))]
    for case in cases:
        for run in (tmp_path / "_runs" / f"{case.model}-float32", tmp_path / case.name / "mine"):
            run.mkdir(parents=True, exist_ok=True)
            (run / "run.json").write_text("{}")
    monkeypatch.setattr(fault_lab, "judge", _found)
    return tmp_path


def _found(pair: Pair) -> fault_lab.Outcome:
    return replace(fault_lab._blank(pair), verdict="fail", culprit=pair.expected[0], rank=1, found=True)


def test_cases_held_out_are_counted_but_not_told(kept, monkeypatch, capsys):
    assert _command(monkeypatch, "--judge-only", str(kept), "--group", "near", "--results", str(kept / "r")) == 0
    said = capsys.readouterr().out
    assert _one(TUNED) in said
    assert _one(HELD_OUT) not in said
    assert "near/float32  held out  yes     1 of 1" in said
    assert _one(HELD_OUT) not in (kept / "r" / "results.md").read_text()
    assert len(json.loads((kept / "r" / "results.json").read_text())) == 2
    assert not (kept / "results.json").exists()
    _command(monkeypatch, "--judge-only", str(kept), "--group", "near", "--show-held-out")
    assert _one(HELD_OUT) in capsys.readouterr().out


def test_it_ends_1_when_a_group_has_not_what_it_needs(kept, monkeypatch, capsys):
    monkeypatch.setattr(fault_lab, "judge", lambda pair: replace(_found(pair), verdict="pass", rank=0))
    assert _command(monkeypatch, "--judge-only", str(kept)) == 1
    assert "fail 0 of 1, needed 0.6" in capsys.readouterr().out


# --- the generated cases can be planted, are the same everywhere, and fill both halves ---


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


def test_a_near_fault_is_twice_what_rounding_leaves() -> None:
    """Measured again: what bfloat16 leaves of rows of normal numbers."""
    rows = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0))
    error = (rows.to(torch.bfloat16).float() - rows).norm() / rows.norm()
    assert pytest.approx(2 * float(error), rel=0.05) == NEAR
