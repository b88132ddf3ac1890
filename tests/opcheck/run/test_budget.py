"""Which calls a replay takes when it has not the time for all, and what is told of the rows that it leaves out."""

from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.opcheck.calls import records
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.references.attention import attend
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run import budget, check_calls, pair
from vllm_accprobe.opcheck.run.budget import Planner, Speed, Wishes
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS

LAYERS, HEADS, HEAD = 3, 2, 16
WIDTH = HEADS * HEAD
PROMPTS = {0: 150, 1: 70}
SPEED = Speed(1e-6, 0.0)


def write(root: Path, batches: list[list[tuple[int, int, int]]], wrong: tuple[int, int] | None = None) -> Calls:
    """Layers of a norm, a linear layer, and attention; the values follow from request and position alone. wrong:
    (request, position) of a row of the last linear layer that is 20 % off."""
    g = torch.Generator().manual_seed(7)
    whole = {r: torch.randn(n + 4, WIDTH, generator=g).bfloat16() for r, n in PROMPTS.items()}
    scale = torch.rand(WIDTH, generator=g).bfloat16() + 0.5
    weight = torch.randn(WIDTH, WIDTH, generator=g).bfloat16()
    m = Maker(root)
    for k in range(LAYERS):
        m.module(f"layers.{k}.norm", "RMSNorm", eps=1e-6)
        m.module(f"layers.{k}.proj", "ColumnParallelLinear", tp_size=1)
        m.module(f"layers.{k}.attn", "Attention", num_heads=HEADS, num_kv_heads=HEADS, head_size=HEAD, scale=0.25)
    for r, n in PROMPTS.items():
        m.request(r, n)
    for k in range(LAYERS):
        m.param(f"layers.{k}.norm", "RMSNorm", weight=scale)
        m.param(f"layers.{k}.proj", "ColumnParallelLinear", weight=weight)
    for step, spans in enumerate(batches):
        m.step(step, spans, "prefill" if sum(n for *_, n in spans) > 2 else "decode")
        x = torch.cat([whole[r][pos : pos + n] for r, pos, n in spans])
        normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
        out = []
        for r, pos, n in spans:
            q = whole[r][: pos + n].double().view(-1, HEADS, HEAD)
            out.append(attend(q[pos:], q, q, 0.25, torch.arange(pos, pos + n))[0].reshape(n, -1))
        for k in range(LAYERS):
            y = x.double() @ weight.double().T
            for at, place in enumerate((r, pos + i) for r, pos, n in spans for i in range(n)):
                if place == wrong and k == LAYERS - 1:
                    y[at] *= 1.2
            m.call(f"layers.{k}.norm", "RMSNorm", {"x": x}, normed.bfloat16())
            m.call(f"layers.{k}.proj", "ColumnParallelLinear", {"input_": x}, y.bfloat16())
            m.call(f"layers.{k}.attn", "Attention", {"query": x, "key": x, "value": x}, torch.cat(out).bfloat16())
    return Calls(open_dump(m.close()), None)


GOLDEN = [[(0, 0, 150), (1, 0, 70)], *([(0, 150 + k, 1), (1, 70 + k, 1)] for k in range(4))]
MINE = [[(0, 0, 100)], [(0, 100, 50), (1, 0, 70)], *([(1, 70 + k, 1), (0, 150 + k, 1)] for k in range(4))]
WRONG = (1, 33)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[Calls]:
    root = tmp_path_factory.mktemp("budget")
    return [write(root / "golden", GOLDEN), write(root / "mine", MINE, WRONG)]


def checked(sides: list[Calls], monkeypatch: pytest.MonkeyPatch, **more: object) -> list[pair.ReplaySide]:
    monkeypatch.setattr(pair, "may_fork", lambda: False)
    return pair.check_both(sides, default_references(), [], lambda done, of: None, **more)  # type: ignore[arg-type]


def rows_of(batches: list[list[tuple[int, int, int]]], task: pair.Task) -> set[tuple[int, int]]:
    assert task.places is not None
    found = set()
    for (step, _), runs in task.places.items():
        rows = [(r, pos + i) for r, pos, n in batches[step] for i in range(n)]  # type: ignore[index]
        found |= {row for a, b in runs or ((0, len(rows)),) for row in rows[a:b]}
    return found


def test_calls_in_parts_and_outputs_in_pieces_have_the_rows_of_whole_ones(sides, monkeypatch):
    whole = checked(sides, monkeypatch)
    monkeypatch.setattr(pair, "MOST", 1 << 11)
    monkeypatch.setattr(records, "_FEWEST", 8)
    monkeypatch.setattr(check_calls, "_AT_ONCE", 1 << 8)
    cut = checked(sides, monkeypatch)
    for a, b in zip(whole, cut, strict=True):
        assert len(a.rows) == len(b.rows)
        for x, y in zip(a.rows, b.rows, strict=True):
            assert (x.tap, x.role, x.step, x.shape, x.rows, x.checked, x.status, x.replayed) == (
                y.tap, y.role, y.step, y.shape, y.rows, y.checked, y.status, y.replayed
            )  # fmt: skip
            assert y.created == pytest.approx(x.created, rel=1e-6)
        assert [p.rows for p in a.pooled] == [p.rows for p in b.pooled]
        assert [p.ratio for p in a.pooled] == pytest.approx([p.ratio for p in b.pooled], rel=1e-6)
    [bad] = [r for r in cut[1].rows if r.status == FAIL]
    assert (bad.tap, bad.request, bad.position) == ("layers.2.proj", "r1", 33)


def test_all_is_done_where_there_is_the_time_and_begins_at_once_where_there_is_plenty(sides: list[Calls]) -> None:
    planner = Planner(sides, [], 1, SPEED)
    for limit in (None, 2.0 * planner.seconds):
        plan = planner.plan(limit)
        assert (plan.whole, plan.calls, plan.of) == (True, plan.of, (len(GOLDEN) + len(MINE)) * 3 * LAYERS)
        assert all(t.places is None for t in plan.tasks)
    assert planner.fits(None)
    assert planner.fits(10.0 * planner.seconds)
    assert not planner.fits(2.0 * planner.seconds)


def test_every_tap_of_both_sides_is_drawn_with_the_same_rows(sides, monkeypatch):
    monkeypatch.setattr(budget, "STRETCH", 16)
    planner = Planner(sides, [], 1, SPEED)
    plan = planner.plan(0.9 * planner.seconds)
    assert not plan.whole
    tasks = [t for t in plan.tasks if t.drawn]
    assert len(tasks) == 2 * 3 * LAYERS
    assert [(t.side, t.tap) for t in tasks[:4]] == [(0, "layers.0.norm"), (1, "layers.0.norm"), (0, "layers.0.proj"),
                                                    (1, "layers.0.proj")]  # fmt: skip
    taken = [rows_of((GOLDEN, MINE)[t.side], t) for t in tasks]
    assert all(rows == taken[0] for rows in taken)
    assert {r for r, _ in taken[0]} == set(PROMPTS)
    assert any(p >= 150 for r, p in taken[0] if r == 0)
    assert any(p < 150 for r, p in taken[0] if r == 0)
    assert 0 < len(taken[0]) < sum(PROMPTS.values()) + 8
    assert plan.seconds <= 0.9 * planner.seconds


def test_what_the_comparison_found_comes_first(sides: list[Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "STRETCH", 16)
    planner = Planner(sides, [], 1, SPEED)
    wishes = Wishes(("layers.1",), (("layers.2.proj", 1, 0),))
    plan = planner.plan(0.9 * planner.seconds, wishes)
    first = list(dict.fromkeys(t.tap for t in plan.tasks))
    assert first[:4] == ["layers.1.norm", "layers.1.proj", "layers.1.attn", "layers.2.proj"]
    failed = [t for t in plan.tasks if t.tap == "layers.2.proj" and t.drawn]
    wanted = {(r, pos + i) for r, pos, n in MINE[1] for i in range(n)}
    for t in failed:
        assert wanted <= rows_of((GOLDEN, MINE)[t.side], t)
    rows = checked(sides, monkeypatch, tasks=plan.tasks)[1].rows
    assert {r.tap for r in rows if r.status == FAIL} == {"layers.2.proj"}


def test_rows_that_were_left_out_are_not_checked(sides: list[Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the last rows alone looks back at what no chosen call has computed."""
    task = pair.Task(1, 0, "layers.1.attn", {(1, 0): ((3, 5), (60, 100)), (5, 0): ()})
    whole = {r.step: r for r in checked(sides, monkeypatch)[1].rows if r.tap == task.tap}
    [first, last] = checked(sides, monkeypatch, tasks=[task])[1].rows
    assert (first.rows, first.checked, first.replayed, first.status) == (120, 42, ((3, 5), (60, 100)), PASS)
    assert first.unchecked_because == pair.LEFT
    assert (last.rows, last.checked, last.replayed, last.status) == (2, 2, (), PASS)
    assert last.created == pytest.approx(whole[5].created, rel=1e-6)


def test_of_a_request_that_has_ended_nothing_is_held(tmp_path: Path) -> None:
    calls = write(tmp_path, [[(0, 0, 20)], [(1, 0, 9), (0, 20, 1)], [(1, 9, 1)], [(1, 10, 1)]])
    held = []
    chosen = records.Chosen(calls.places(0, "layers.0.attn"), lambda cls: False, 1 << 20)
    for captured in calls.of(0, "layers.0.attn", chosen=chosen):
        cache = captured.what.extra["cache"]
        held.append(sorted(cache._past.written))
        assert len(list(cache.requests())) == len(calls.dump.rows[0, captured.step, "tokens"].segments)
    assert held == [[0], [0, 1], [1], [1]]


def test_statistics_are_of_what_was_drawn(sides: list[Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    places = {(0, 0): (), (1, 0): ()}
    for drawn, rows in ((None, [220]), (frozenset({(0, 0)}), [100]), (frozenset(), [])):
        task = pair.Task(1, 0, "layers.0.norm", places, drawn)
        found = checked(sides, monkeypatch, tasks=[task])[1]
        assert [r.checked for r in found.rows] == [100, 120]
        assert [p.rows for p in found.pooled] == rows


def test_when_the_time_is_over_what_was_done_is_used(sides: list[Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    left = [3]

    def ends() -> bool:
        left[0] -= 1
        return left[0] < 0

    found = checked(sides, monkeypatch, ends=ends)
    assert [len(side.rows) for side in found] == [3, 0]


def test_constants_that_few_modules_of_a_class_have_otherwise(sides: list[Calls], tmp_path: Path) -> None:
    assert budget.other_constants(sides) == []
    m = Maker(tmp_path)
    for k in range(LAYERS):
        m.module(f"layers.{k}.norm", "RMSNorm", eps=1e-5)
        m.module(f"layers.{k}.attn", "Attention", scale=0.25 if k else 0.5)
    m.request(0, 1)
    assert budget.other_constants([sides[0], Calls(open_dump(m.close()), None)]) == ["layers.0.attn"]


def test_beside_other_work_less_is_planned_and_a_small_pair_is_whole_all_the_same(sides: list[Calls]) -> None:
    alone, beside = (Planner(sides, [], 1, Speed(1e-6, 0.0, slower)) for slower in (1.0, 10.0))
    assert alone.seconds == beside.seconds
    for limit, whole in ((10.0, True), (3.0, False)):
        assert alone.plan(limit * alone.seconds).whole
        assert beside.plan(limit * alone.seconds).whole == whole
    assert beside.plan(3.0 * alone.seconds).seconds <= 3.0 * alone.seconds


def test_beside_other_work_what_the_comparison_found_goes_first(sides: list[Calls]) -> None:
    """The time of a pair that would fit easily ran out at load 25 before the module that was wrong."""
    alone, beside = (Planner(sides, [], 1, Speed(1e-6, 0.0, slower)) for slower in (1.0, 10.0))
    limit = 10.0 * alone.seconds
    assert (alone.waits(limit), beside.waits(limit), beside.waits(None)) == (False, True, False)
    last = alone.plan(limit).tasks[-1].tap
    assert beside.plan(limit, Wishes(suspects=(last,))).tasks[0].tap == last
