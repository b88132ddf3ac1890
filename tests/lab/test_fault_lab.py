"""The laboratory's declarations are sound, and its scores are what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import bench as fault_bench
from lab import cases as fault_cases
from lab import judging as fault_lab
from lab.bench import Bench, capture, in_turn, kernels_of
from lab.cases import CASES, HANDWRITTEN, HELD_OUT, TUNED, Case
from lab.judging import ACROSS, Outcome, Pair, judge, judge_kept, pairs_across, pairs_of
from lab.ways import CLEAN, EASY, WAYS

torch = pytest.importorskip("torch")


def test_as_many_faults_and_clean_pairs_as_promised() -> None:
    assert len(CASES) >= 44
    assert sum(c.subtle for c in CASES) >= 12
    assert sum(c.golden not in EASY for c in CASES) >= len(CASES) / 2
    assert {c.model for c in CASES} == {"qwen2", "llama", "qwen2-moe", "mixtral", "deepseek-v2", "qwen2.5-vl"}
    assert len(CLEAN) >= 15


def test_names_are_unique_and_pairs_differ() -> None:
    assert len({c.name for c in CASES}) == len(CASES)
    assert len(set(CLEAN)) == len(CLEAN)
    assert all({first, second} <= set(WAYS) and first != second for _, first, second in CLEAN)


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
    monkeypatch.setattr(fault_lab, "_compare", lambda golden, mine, replay: result)
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
    monkeypatch.setattr(fault_lab, "_compare", lambda golden, mine, replay: result)
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
