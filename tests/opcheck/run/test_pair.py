"""Two dumps checked at once: calls evaluated together, and by two processes, give the rows of calls one by one."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli.test_killed_commands import left_behind
from opcheck.opcheck_dumps import Maker
from support.opchecked import check

from vllm_accprobe.children import ONE_THREAD
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.opcheck.calls import batches, module_index
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.reference import Call, Expected, reference
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run import pair
from vllm_accprobe.opcheck.run.check_calls import Options
from vllm_accprobe.opcheck.run.result_row import FAIL, CheckResult

STEPS = (1, 1, 5, 1, 3, 1, 1, 2)
"""Rows of each step."""
WIDTH = 96
CLASSES = ("RMSNorm", "ColumnParallelLinear", "SiluAndMul", "LayerNorm")


def write(root: Path, wrong: int | None = None) -> Calls:
    """Calls of each class in each step; ``wrong``: the step in which the linear's second column is 2 % off."""
    g = torch.Generator().manual_seed(3)
    m = Maker(root)
    for cls in CLASSES:
        m.module(cls.lower(), cls, eps=1e-6, tp_size=1)
    m.request(0, sum(STEPS))
    weight = torch.randn(2 * WIDTH, WIDTH, generator=g).bfloat16()
    scale, shift = (torch.rand(WIDTH, generator=g).bfloat16() + 0.5 for _ in range(2))
    m.param("rmsnorm", "RMSNorm", weight=scale)
    m.param("columnparallellinear", "ColumnParallelLinear", weight=weight, bias=torch.ones(2 * WIDTH).bfloat16())
    m.param("layernorm", "LayerNorm", weight=scale, bias=shift)
    at = 0
    for step, n in enumerate(STEPS):
        m.step(step, [(0, at, n)])
        at += n
        x, res = (torch.randn(n, WIDTH, generator=g).bfloat16() for _ in range(2))
        total = x.double() + res.double()
        normed = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
        m.call("rmsnorm", "RMSNorm", {"x": x, "residual": res}, normed.bfloat16(), total.bfloat16())
        y = x.double() @ weight.double().T + 1.0
        if step == wrong:
            y[:, 1] *= 1.02
        m.call("columnparallellinear", "ColumnParallelLinear", {"input_": x}, y.bfloat16())
        a, b = y.bfloat16().double().chunk(2, -1)
        m.call("siluandmul", "SiluAndMul", {"x": y.bfloat16()}, (a * a.sigmoid() * b).bfloat16())
        z = torch.nn.functional.layer_norm(x.double(), (WIDTH,), scale.double(), shift.double(), 1e-6)
        m.call("layernorm", "LayerNorm", {"input": x}, z.bfloat16())
    return Calls(open_dump(m.close()), None)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[Calls]:
    root = tmp_path_factory.mktemp("pair")
    return [write(root / "golden"), write(root / "mine", wrong=3)]


def one_by_one(sides: list[Calls]) -> list[list[CheckResult]]:
    plain = [Options(measured=False, budget=calls.budget()) for calls in sides]
    return [list(check(c, default_references(), options=o)) for c, o in zip(sides, plain, strict=True)]


def told(done: int, of: int) -> None:
    pass


def assert_alike(both: list[pair.ReplaySide], theirs: list[list[CheckResult]]) -> None:
    ours = [side.rows for side in both]
    assert all(p.ratio < 1.5 for p in both[0].pooled), both[0].pooled
    assert {p.tap for p in both[0].pooled} == {p.tap for p in both[1].pooled} | {"columnparallellinear"}
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(STEPS) * 5
        for a, b in zip(mine, other, strict=True):  # sums of more rows are taken in another order
            assert a.measured == pytest.approx(b.measured, rel=1e-6)
            assert a.created == pytest.approx(b.created, rel=1e-6)
            assert a.allowed == pytest.approx(b.allowed, rel=1e-6)
            assert (a.chance is None) == (b.chance is None)
            same = {"measured": 0.0, "created": 0.0, "allowed": 1.0, "chance": None}
            assert replace(a, **same) == replace(b, **same)
    assert [(r.tap, r.step, r.column) for r in ours[1] if r.status == FAIL] == [("columnparallellinear", 3, 1)]
    assert not any(r.status == FAIL for r in ours[0])


def in_a_process(what: str, root: Path) -> None:
    """Calls a function of this file where a fork is allowed: in a process that has one thread."""
    code = f"import sys, pathlib, test_pair; test_pair.{what}(pathlib.Path(sys.argv[1]))"
    here = Path(__file__)
    path = os.pathsep.join(filter(None, [str(here.parent), str(here.parents[2]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code, str(root)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


forking = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="one process does it all here"
)


def test_the_rows_are_those_of_calls_one_by_one(sides: list[Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "may_fork", lambda: False)
    assert_alike(pair.check_both(sides, default_references(), [], told), one_by_one(sides))


def by_two(root: Path) -> None:
    sides = [Calls(open_dump(root / name), None) for name in ("golden", "mine")]
    seen: list[int] = []

    @reference("SiluAndMul")
    def slow(call: Call) -> Expected:
        time.sleep(0.1)  # leaves something for the other one
        return Expected(call.outputs["output.0"].double())

    table = default_references()
    assert pair.may_fork()
    assert_alike(pair.check_both(sides, table, [], lambda done, of: seen.append(done)), one_by_one(sides))
    assert seen[-1] == 2 * len(CLASSES)
    table.add(slow)
    asked: list[str] = []
    plain = References.evaluate
    References.evaluate = lambda self, call: (asked.append(call.cls), plain(self, call))[1]  # type: ignore[method-assign]
    pair.check_both(sides, table, ["SiluAndMul"], told)
    assert len(asked) == len(STEPS)  # of two taps one


@forking
def test_two_processes_give_the_rows_of_one(sides: list[Calls]) -> None:
    in_a_process("by_two", sides[0].dump.path.parent)


def test_what_one_module_hands_to_another_is_read_once(sides: list[Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    side = sides[0]
    given, other = side.dump.records[:2]
    taken = replace(given, tap="another", role="input.x")  # a dump has equal bytes once
    with side.reads_kept():
        kept = side.read(given)
        assert side.read(taken) is kept
        assert side.read(other) is not kept
        assert side.read(replace(given, shape=given.shape[::-1])).shape == given.shape[::-1]
        with monkeypatch.context() as little:
            little.setattr(module_index, "_SMALL", 8)
            assert side.read(given) is not kept
        assert side.read(given) is kept
        monkeypatch.setattr(side, "_room", 8)  # then what was read before makes room
        side.read(side.dump.records[2])
        assert side.read(given) is not kept
    assert side.read(given) is not side.read(given)


def test_a_module_is_evaluated_once_for_many_calls(sides: list[Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    plain = References.evaluate

    def evaluate(self: References, call: Call) -> object:
        seen.append((call.cls, len(next(iter(call.outputs.values())))))
        return plain(self, call)

    monkeypatch.setattr(References, "evaluate", evaluate)
    monkeypatch.setattr(pair, "may_fork", lambda: False)
    pair.check_both(sides[:1], default_references(), [], told)
    assert sorted(seen) == sorted((cls, sum(STEPS)) for cls in CLASSES)
    monkeypatch.setattr(batches, "_MOST", 3 * WIDTH * 6)
    seen.clear()
    pair.check_both(sides[:1], default_references(), ["SiluAndMul"], told)
    assert [n for _, n in seen] == [2, 6, 5, 2]


def test_a_reference_of_others_is_asked_call_by_call(sides: list[Calls]) -> None:
    """It may look at all rows of a call, as a norm over a batch does."""
    seen = []

    @reference("SiluAndMul")
    def theirs(call: Call) -> Expected:
        seen.append(len(call.outputs["output.0"]))
        return Expected(call.outputs["output.0"].double())

    table = default_references()
    table.add(theirs)
    list(batches.evaluated(sides[0].of(0, "siluandmul"), table))
    assert tuple(seen) == STEPS


def by_one_that_dies(root: Path) -> None:
    here, asked = os.getpid(), []

    @reference("RMSNorm", "SiluAndMul", "LayerNorm", "ColumnParallelLinear")
    def fatal(call: Call) -> Expected:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)  # the other one has its turn
        asked.append(call.cls)
        return Expected(call.outputs["output.0"].double())

    table = default_references()
    table.add(fatal)
    assert pair.may_fork()
    rows = pair.check_both([Calls(open_dump(root / name), None) for name in ("golden", "mine")], table, [], told)
    assert [len(r.rows) for r in rows] == [len(STEPS) * 5] * 2
    assert len(asked) == len(STEPS) * len(CLASSES) * 2


@forking
def test_what_a_second_process_that_died_had_is_checked_again(sides: list[Calls]) -> None:
    in_a_process("by_one_that_dies", sides[0].dump.path.parent)


def test_a_process_with_threads_does_not_fork() -> None:
    """They would be gone in the second one, with whatever they hold."""
    event = threading.Event()
    threads = [threading.Thread(target=event.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert not pair.may_fork()
    finally:
        event.set()
        for thread in threads:
            thread.join()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc")
def test_a_second_process_dies_with_the_first(tmp_path: Path) -> None:
    code = (
        "import time\nfrom vllm_accprobe.opcheck.run import pair\n"
        "with pair._shared(2) as queue: pair._other(queue, lambda k: time.sleep(600), 1); time.sleep(600)"
    )
    words = [sys.executable, "-c", code]
    assert left_behind(words, f"second-{os.getpid()}", {}, signal.SIGKILL, tmp_path, 1) == []


def part(table: References, call: Call, inputs: dict, out: torch.Tensor, rows: slice) -> dict[str, Expected]:
    """What a reference gives for some of the rows."""
    cut = {k: v[rows] for k, v in inputs.items()}
    found = table.evaluate(replace(call, inputs=cut, outputs={"output.0": out[rows]}))
    assert isinstance(found, dict), (call.cls, found)
    return found


def test_every_reference_that_says_so_works_row_by_row() -> None:
    """All rows at once and each by itself: the same values, noises and what else decides."""
    table, g = default_references(), torch.Generator().manual_seed(1)
    names = [n.replace("*", "A") for n in table.names() if table.by_rows(n.replace("*", "A"))]
    assert {"RMSNorm", "RowParallelLinear", "SiluAndMul", "LayerNorm", "ALinear"} <= set(names)
    for name in names:
        x, other = (torch.randn(6, 32, generator=g).bfloat16() for _ in range(2))
        first = {"1" if name == "ParallelLMHead" else "x" if "LayerNorm" not in name else "input": x}
        params = {} if table.find(name).__module__.endswith("activations") else {"weight": torch.rand(32, 32)[0]}
        if table.find(name).__module__.endswith("linear"):
            params = {"weight": torch.randn(8, 32, generator=g).bfloat16(), "bias": torch.ones(8).bfloat16()}
        inputs = {**first, **({"residual": other} if "RMSNorm" in name else {})}

        call = Call("t", name, params=params, attrs={"eps": 1e-6, "approximate": "tanh", "tp_size": 1})
        whole = part(table, call, inputs, x, slice(None))
        for k in range(6):
            for role, e in part(table, call, inputs, x, slice(k, k + 1)).items():
                at = whole[role].value[k : k + 1]

                torch.testing.assert_close(at, e.value, rtol=1e-12, atol=1e-12)
                if e.noise is not None:
                    theirs = whole[role].noise.expand(whole[role].value.shape)[k : k + 1]
                    torch.testing.assert_close(theirs, e.noise.expand(e.value.shape), rtol=1e-6, atol=1e-12)
                assert (e.unit, e.common, e.rows) == (whole[role].unit, whole[role].common, None)
