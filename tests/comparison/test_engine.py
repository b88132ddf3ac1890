"""Dumps on disk, without payloads, with nothing in common; the form of the result; tasks that end in any order."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from synthetic_model import MemoryDump, capture, scaled, write

from vllm_accprobe.comparison import row_table as spreads
from vllm_accprobe.comparison.distributed import LOST, Died, in_order
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.measure.measurer import ROW_COUNT
from vllm_accprobe.comparison.plan.make_plan import make_plan
from vllm_accprobe.comparison.result import CompareError, NothingCompared
from vllm_accprobe.dump.schema import Image, RowSpace, Segment


@pytest.fixture(scope="module")
def faulty():
    return capture(chunk=4, faults={"model.layers.1.mlp.down_proj": scaled(1.1)})


@pytest.fixture(scope="module")
def on_disk(golden, faulty, tmp_path_factory):
    root = tmp_path_factory.mktemp("dumps")
    return write(golden, root / "golden"), write(faulty, root / "mine")


def test_the_real_reader_gives_the_same_result(golden, faulty, on_disk):
    memory, disk = compare(golden, faulty), compare(*on_disk)
    assert disk.origins == memory.origins
    assert disk.coverage == memory.coverage
    assert [replace(p, order=0) for p in disk.pairs] == [replace(p, order=0) for p in memory.pairs]


def test_pairs_carry_the_numbers_of_their_rows(golden):
    def fault(values, positions, decode):
        values[positions == 2, 5] += 3.0
        return values

    result = compare(golden, capture(together=False, faults={"model.norm": fault}))
    pair = next(p for p in result.pairs if p.tap == "model.norm" and p.role == "output.0" and p.rows == 10)
    assert (pair.mine, pair.shape, pair.phase, pair.status) == ("model.norm/output.0", (10, 32), "prefill", "fail")
    assert (pair.worst_request, pair.worst_position, pair.max_abs_index) == ("a", 2, (2, 5))
    assert pair.max_abs_mine - pair.max_abs_golden == pair.max_abs_err == pytest.approx(3.0, rel=0.01)
    assert pair.mean_abs_err == pytest.approx(pair.max_abs_err / 320)
    assert (pair.decode_rel_l2, pair.prefill_rel_l2) == (None, pair.worst_row_rel_l2)
    assert pair.worst_row_rel_l2 == pytest.approx(3 / 32**0.5, rel=0.02)  # a normalised row has norm sqrt(width)


@pytest.mark.parametrize(
    ("mine", "taps", "why"),
    [
        ({"prompts": {"a": [1, 2], "b": [3], "c": [4]}}, None, "same ids but different prompt tokens"),
        ({"prompts": {"x": [1, 2]}}, None, "no request of one dump has the same prompt"),
        ({}, "nowhere.*", "matches no tap that both dumps have; the nearest: model"),
    ],
)
def test_nothing_to_compare_is_said_in_one_line(golden, mine, taps, why):
    with pytest.raises(NothingCompared, match=why) as error:
        compare(golden, capture(**mine), taps=taps)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("probe", "ends"),
    [({"enabled": True, "parts": []}, True), ({"enabled": True, "parts": ["output", "params"]}, True),
     ({"enabled": True, "parts": ["params"]}, False), (None, False)],
)  # fmt: skip
def test_equal_parameters_of_engines_that_computed_nothing_are_no_pass(golden, tmp_path, probe, ends):
    kept = [r for r in golden.records if r.role.startswith("param.")]
    assert kept
    run = dict(golden.run) | ({} if probe is None else {"probe": probe})
    dead = replace(golden, records=kept, rows={}, requests={}, steps={}, run=run)
    if not ends:
        assert compare(dead, dead).verdict == "pass"
        return
    with pytest.raises(NothingCompared, match="but parameters, which agree: no dump has a step"):
        compare(dead, dead)


def test_a_row_map_that_disagrees_with_its_tensors_is_not_trusted(golden):
    broken = capture(together=False)
    key = (0, 0, "tokens")
    space = broken.rows[key]
    broken.rows[key] = RowSpace(0, "tokens", 99, (*space.segments, Segment(0, 50, 1 << 26, 10)), space.ids)
    result = compare(golden, broken)
    assert result.coverage["skipped"][ROW_COUNT] > 0
    assert result.verdict == "pass"
    broken.rows[key] = RowSpace(0, "tokens", 99, (*space.segments[:-1], Segment(77, 9, 1, 9)), space.ids)
    assert compare(golden, broken).verdict == "pass"  # a row of an unknown request belongs to nobody


def test_the_plan_reads_no_tensor_but_the_sampled_tokens(golden, faulty):
    golden.reads = faulty.reads = 0
    lines = make_plan(golden, faulty).lines()
    assert "requests: 3 paired by id and prompt" in lines
    assert "names: 40 taps paired by name" in lines
    assert golden.reads == sum(r.role == "output.token" for r in golden.records)


def vision(group, values):
    """A dump with a vision tower: images of 4 and 2 rows, batched as ``group`` says."""
    dump = MemoryDump("memory")
    sizes = {"cat": 4, "dog": 2}
    for i, (name, n) in enumerate(sizes.items()):
        request = capture(prompts={name: [5, 6, 7]}).requests[(0, 0)]
        dump.requests[(0, i)] = replace(request, req=i, id=name, internal_id=name, images=(Image(name, 1, n // 2),))
    for step, images in enumerate(group):
        at, segments, rows = 0, [], []
        for name in images:
            segments.append(Segment(list(sizes).index(name), 0, sizes[name], at, "prefill", 0))
            at += sizes[name]
            rows.append(values[name])
        dump.rows[(0, step, "vision/2")] = RowSpace(step, "vision/2", at, tuple(segments))
        dump.add(0, step, "visual.blocks.0", "input.x", np.concatenate(rows), "float32", 1, "vision/2")
        dump.add(0, step, "visual.blocks.0", "output.0", np.concatenate(rows) * 2, "float32", 2, "vision/2", row_dim=0)
        lengths = np.cumsum([0, *(sizes[n] for n in images)])
        dump.add(0, step, "visual.blocks.0", "input.cu_seqlens", lengths, "int32", 0, None)
    return dump


def test_images_pair_by_content_however_they_were_batched():
    rng = np.random.default_rng(1)
    values = {"cat": rng.standard_normal((4, 8)), "dog": rng.standard_normal((2, 8))}
    one = vision([["cat", "dog"]], values)
    two = vision([["dog"], ["cat"]], values)
    result = compare(one, two)
    assert result.verdict == "pass"
    assert result.coverage["rows_compared"] == 6
    assert result.coverage["skipped"]["tensor without rows in a step with another batch"] == 2
    assert compare(one, vision([["cat", "dog"]], values)).coverage["skipped"] == {}
    wrong = {**values, "dog": values["dog"] + 0.1}
    bad = compare(one, vision([["dog"], ["cat"]], wrong))
    assert (bad.origins[0]["request"], bad.origins[0]["role"]) == ("dog", "input.x")


def test_the_worst_pairs_come_with_how_their_errors_are_spread(on_disk):
    result = compare(*on_disk)
    assert result.spreads
    told = {result.pairs[s.pair].tap for s in result.spreads}
    assert result.origins[0]["module"] in told
    for s in result.spreads:
        pair = result.pairs[s.pair]
        assert s.read <= s.rows <= pair.rows
        # Of an input, only rows beyond the limit are remembered.
        assert s.rows == pair.rows or not pair.role.startswith("output")
        assert s.golden.sum() == s.mine.sum() == s.read * s.width
        assert s.positions.max() == pytest.approx(max(
            e for p, e in zip(result.rows.pair.tolist(), result.rows.error.tolist(), strict=True) if p == s.pair
        ))  # fmt: skip
    failed = sum(p.status == "fail" and p.rows > 0 for p in result.pairs)
    assert len(result.spreads) + sum(result.without_spread.values()) >= failed


def test_of_taps_that_were_asked_for_outputs_that_pass_have_a_spread_too(on_disk):
    whole = compare(*on_disk)
    near = [p for p in whole.pairs if p.status == "pass" and p.role.startswith("output") and p.rows and not p.identical]
    tap = near[0].tap
    assert not any(whole.pairs[s.pair].tap == tap and whole.pairs[s.pair].status == "pass" for s in whole.spreads)
    asked = compare(*on_disk, taps=f"{tap},{whole.origins[0]['module']}")  # alone it would be an origin itself
    told = [asked.pairs[s.pair] for s in asked.spreads]
    assert [(p.tap, p.role, p.step) for p in told if p.status == "pass"] == [
        (p.tap, p.role, p.step) for p in near if p.tap == tap
    ]
    assert not any(p.identical for p in told)


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        ({"MAX_BYTES": 0}, "above 0 MB"),
        ({"LEAST_BYTES": 0, "SHARE": 10**9}, "beyond a 1000000000th of the bytes that were compared"),
        ({"MAX_SPREAD_PAIRS": 3}, "after the 3 worst"),
    ],
)
def test_what_has_no_spread_is_counted_by_its_reason(on_disk, monkeypatch, bound, why):
    whole = compare(*on_disk)
    for name, value in bound.items():
        monkeypatch.setattr(spreads, name, value)
    result = compare(*on_disk)
    assert len(result.spreads) == bound.get("MAX_SPREAD_PAIRS", 0)
    assert {s.pair for s in result.spreads} <= {s.pair for s in whole.spreads}
    lost = len(whole.spreads) - len(result.spreads)
    assert lost > 0
    assert result.without_spread[why] >= lost
    assert sum(result.without_spread.values()) == lost + sum(whole.without_spread.values())


class Played:
    """Ends tasks in a random order; ``deaths``: how often each task's worker dies."""

    who = "workers of the test"
    ahead = 6

    def __init__(self, deaths: dict[int, int], at_once: int = 4, seed: int = 0):
        self.left, self.at_once, self.random = Counter(deaths), at_once, random.Random(seed)
        self.begun: list[int] = []
        self.running: list[int] = []
        self.given = 0
        self.furthest = 0

    def start(self, number: int, task: str) -> bool:
        if len(self.running) >= self.at_once:
            return False
        self.furthest = max(self.furthest, number - self.given)
        self.begun.append(number)
        self.running.append(number)
        return True

    def ended(self) -> tuple[int, bytes | Died]:
        number = self.running.pop(self.random.randrange(len(self.running)))
        if self.left[number]:
            self.left[number] -= 1
            return number, Died("was unplugged")
        return number, f"task {number}".encode()


@pytest.mark.parametrize("seed", range(5))
def test_answers_come_in_the_order_of_tasks_and_none_begins_far_ahead(seed: int) -> None:
    crew = Played({0: LOST, 7: 1}, seed=seed)
    found = []
    for answer in in_order(crew, [str(i) for i in range(30)]):
        found.append(answer.decode())
        crew.given += 1
    assert found == [f"task {i}" for i in range(30)]
    assert Counter(crew.begun) == Counter(range(30)) + Counter({0: LOST, 7: 1})
    assert crew.furthest < crew.ahead


def test_an_empty_dump(golden, tmp_path):
    with pytest.raises(NothingCompared, match="holds no tensors"):
        compare(golden, MemoryDump(tmp_path, problems=["rank 0 was not closed"]))
    with pytest.raises(CompareError, match="does not exist"):
        compare(golden, tmp_path / "nowhere")
    with pytest.raises(CompareError, match="unknown standard 'lax': known are accprobe, strict"):
        compare(golden, golden, standard="lax")
