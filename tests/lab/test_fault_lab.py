"""The laboratory's declarations are sound, and its scores are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accprobe_fault_rows import Rows
from accprobe_faults import parse

from lab import bench as fault_bench
from lab import cases as fault_cases
from lab import faults
from lab import judging as fault_lab
from lab.bench import Bench, capture, in_turn, kernels_of
from lab.cases import CASES, HANDWRITTEN, HELD_OUT, TUNED, Case, half
from lab.generated import EVERY, EVERYWHERE, GENERATED, NEAR, SIZES
from lab.judging import ACROSS, Outcome, Pair, judge, judge_kept, pairs_across, pairs_of
from lab.totals import NEEDED, Total, page, row, save, share, text, totals, wilson
from lab.ways import ACROSS as ACROSS_PAIRS
from lab.ways import CLEAN, EASY, MORE_CLEAN, WAYS

torch = pytest.importorskip("torch")


def test_as_many_faults_and_clean_pairs_as_promised() -> None:
    assert len(CASES) >= 44
    assert sum(c.subtle for c in CASES) >= 12
    assert sum(c.golden not in EASY for c in CASES) >= len(CASES) / 2
    assert {c.model for c in CASES} == {"qwen2", "llama", "qwen2-moe", "mixtral", "deepseek-v2", "qwen2.5-vl"}
    assert len(CLEAN) >= 15


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


def test_a_capture_makes_goldens_first_and_says_what_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Case("one", "qwen2", {"kind": "nan", "module": "m"}, "float32", also=("serial",))
    broken = Case("two", "qwen2", {"kind": "zero", "module": "m"}, "float32")
    monkeypatch.setattr(bench, "pair", _breaks_on(bench.pair, "two"))
    said: list[str] = []
    assert capture(bench, [one, broken], [("qwen2", "serial", "mixed")], said.append) == ["two"]
    made = bench.host.made  # type: ignore[attr-defined]
    assert made == ["qwen2-serial", "qwen2-mixed", "qwen2-float32", "one/mine"]
    assert said[-1] == "two: no engine"


def _breaks_on(make: Any, name: str) -> Any:
    def pair(case: Case) -> Any:
        if case.name == name:
            raise RuntimeError("no engine")
        return make(case)

    return pair


def test_a_host_is_begun_anew_after_some_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closed = [], []

    class Host:
        def __init__(self, *_: object) -> None:
            begun.append(self)

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(fault_bench, "EngineHost", Host)
    bench = Bench(tmp_path)
    hosts = [bench._host("v1") for _ in range(fault_bench.RENEWED + 1)]
    assert hosts[0] is hosts[-3] is not hosts[-1]
    assert (begun, closed) == ([hosts[0], hosts[-1]], [hosts[0]])


def test_the_tuned_half_is_made_first_and_groups_take_turns() -> None:
    cases = [Case(f"{group}-{i}", "qwen2", {}, group=group) for group in ("kind", "near") for i in range(6)]
    order = [(_half(case), case.group) for case in in_turn([*CASES[:1], *cases])]
    tuned = sum(_half(case) == TUNED for case in cases)
    assert {part for part, _ in order[:tuned]} == {TUNED}
    assert {part for part, _ in order[tuned:-1]} == {HELD_OUT}
    assert {group for _, group in order[:2]} == {"kind", "near"}
    assert order[-1] == (TUNED, HANDWRITTEN)


def _half(case: Case) -> str:
    return fault_cases.half(case.name, case.group)


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
def test_of_two_faults_both_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, modules: list[str], first: bool, found: bool
) -> None:
    case = Case("x", "qwen2", [{"kind": "nan", "module": "a"}, {"kind": "nan", "module": "c"}], second=("b", "c"))
    result = SimpleNamespace(verdict="fail", origins=[{"module": m} for m in modules], pairs=[])
    monkeypatch.setattr(fault_lab, "compared", lambda golden, mine, replay: result)
    outcome = judge(Pair(case, "qwen2", "serial", "mixed", (Path(), Path())))
    assert (outcome.first, outcome.found) == (first, found)


def test_one_faulty_run_is_judged_against_each_of_its_goldens(tmp_path: Path) -> None:
    case = Case("one", "qwen2", {}, "serial", also=("float32",), group="kind")
    one, two = pairs_of(tmp_path, [case], [])
    assert one.at == (tmp_path / "_runs" / "qwen2-serial", tmp_path / "one" / "mine")
    assert two.at == (tmp_path / "_runs" / "qwen2-float32", tmp_path / "one" / "mine")


def test_pairs_across_kernels_go_both_ways(tmp_path: Path) -> None:
    roots = tmp_path / "a", tmp_path / "b"
    for root in roots:
        root.mkdir()
    (roots[1] / "kernels").write_text("avx2")
    pairs = pairs_across(roots, (kernels_of(roots[0]), kernels_of(roots[1])), [("qwen2", "serial", "mixed")])
    assert [(p.golden, p.mine, p.kernels) for p in pairs] == [
        ("a:serial", "avx2:mixed", "avx2"),
        ("avx2:serial", "a:mixed", "a"),
    ]
    assert pairs[0].at == (roots[0] / "_runs" / "qwen2-serial", roots[1] / "_runs" / "qwen2-mixed")
    assert {p.group for p in pairs} == {ACROSS}


@pytest.mark.parametrize(("replay", "jobs"), [(False, 1), (True, 1), (True, 2)])
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


def test_right_and_wrong() -> None:
    assert FOUND.right
    assert not MISSED.right
    assert not PASSED.right
    assert not replace(FOUND, found=False).right  # the second of two faults is missing
    assert CLEAN_PAIR.right
    assert not replace(CLEAN_PAIR, verdict="fail").right
    assert not replace(CLEAN_PAIR, verdict="error: DumpError: gone").right


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


def test_nothing_of_nothing_can_be_anything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert share(0, 0) == ""
    assert share(81, 263) == "81 of 263 (0.26 to 0.37)"


def test_groups_goldens_halves_and_ways_of_judging_are_counted_apart() -> None:
    kind = replace(FOUND, group="kind")
    outcomes = [
        kind,
        replace(kind, half=HELD_OUT),
        replace(kind, golden="float32", verdict="pass"),
        replace(kind, replay=False),
        CLEAN_PAIR,
        FOUND,
    ]
    assert [(t.group, t.half, t.replay, t.fail, t.faults) for t in totals(outcomes)] == [
        ("handwritten", TUNED, True, 1, 1),
        ("kind/serial", TUNED, False, 1, 1),
        ("kind/serial", TUNED, True, 1, 1),
        ("kind/serial", HELD_OUT, True, 1, 1),
        ("kind/float32", TUNED, True, 0, 1),
        ("clean", TUNED, True, 0, 0),
    ]


def test_totals_of_one_group() -> None:
    broken = replace(FOUND, verdict="error: DumpError: gone")
    (faults, clean) = totals([FOUND, MISSED, PASSED, broken, CLEAN_PAIR, replace(CLEAN_PAIR, verdict="fail")])
    assert (faults.faults, faults.fail, faults.first, faults.errors) == (4, 2, 1, 1)
    assert (clean.clean, clean.alarms, clean.missed) == (2, 1, ("1 alarms",))


def test_of_two_faults_the_first_and_both_are_counted_apart() -> None:
    two = replace(FOUND, group="two", golden="float32")
    (total,) = totals([two, replace(two, found=False), replace(two, rank=2)])
    assert (total.first, total.twos, total.both) == (2, 3, 2)
    assert total.missed == ("first 2 of 3, needed 0.95", "both named 2 of 3, needed 0.8")


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


def test_every_needed_group_is_one_that_outcomes_can_have() -> None:
    for name in NEEDED:
        group, _, golden = name.partition("/")
        assert replace(FOUND, group=group, golden=golden or "serial").kind == name


def test_the_table_and_what_is_said_about_a_miss() -> None:
    assert row(MISSED) == ("BAD", "b", "qwen2", "serial → mixed", "fail", "y (true: x)", "2 of 0", "3", "")
    told = page([FOUND, replace(PASSED, at="12:00:00")])
    assert "| ok | a | qwen2 | serial → mixed | fail | x | 1 of 0 | 3 |  |" in told
    last = "- **BAD** c (serial → mixed): expected x; output.0 1.2; run 0 s, judged in 0.0 s at 12:00:00"
    assert told.splitlines()[-1] == last
    assert "expected x" not in page([FOUND, PASSED], details=False)


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


def test_cases_held_out_are_counted_but_not_told(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize(("part", "name"), [("tuned", TUNED), ("held-out", HELD_OUT)])
def test_a_half_is_chosen(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str, name: str
) -> None:
    assert _command(monkeypatch, "--judge-only", str(kept), "--half", part) == 0
    table = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("near/float32")]
    assert [[cell.strip() for cell in row if cell][1] for row in table] == [name]
    assert len(json.loads((kept / "results.json").read_text())) == 1


def test_it_ends_1_when_a_group_has_not_what_it_needs(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fault_lab, "judge", lambda pair: replace(_found(pair), verdict="pass", rank=0))
    assert _command(monkeypatch, "--judge-only", str(kept)) == 1
    assert "fail 0 of 1, needed 0.6" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    (["--only", "no such case"], "nothing matches --only 'no such case'"),
    (["--judge-only", "no/such/folder"], "--judge-only no/such/folder is no directory"),
    (["--capture-only"], "--capture-only needs --keep DIR"),
    (["--across", "no/such/folder"], "--across no/such/folder is no directory"),
])  # fmt: skip
def test_bad_usage_is_one_line_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert _command(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_list_names_pairs_of_both_halves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(monkeypatch, "--list", "--group", "kind/float32") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(case.group == "kind" for case in GENERATED)
    assert {line[:8].strip() for line in lines} == {TUNED, HELD_OUT}
    assert all(" float32 " in line for line in lines)


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
    assert len(ACROSS_PAIRS) >= 20
    assert len(set(pairs)) == len(pairs)
    assert all({golden, mine} <= set(WAYS) and golden != mine for _, golden, mine in pairs)
    assert {way for model, *ways in pairs if model.startswith("trained") for way in ways} >= {"tp2", "v2", "float32"}
