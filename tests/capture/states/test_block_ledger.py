"""A ledger over caches in host memory, told of steps as an engine tells it: numbers come at once, or late."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_accprobe.capture.states.ledger import FULL, Arrivals, BlockLedger, Findings, Layer, Pages
from vllm_accprobe.capture.states.schedule import KV, CacheGroup, Schedule
from vllm_accprobe.capture.vllm.step_observer import BlockMoves, EngineStep, NewRequest
from vllm_accprobe.dump.journal import StateFinding, sentence

SIZE, BLOCKS = 4, 12


class Toy:
    """Two layers with a cache [blocks, tokens, 2]; rows are written as an engine's kernel would."""

    def __init__(self, staged: bool, loads: bool = False, inside: bool = True, mode: str = FULL):
        self.caches = [torch.zeros(BLOCKS, SIZE, 2, dtype=torch.int32) for _ in range(2)]
        schedule = Schedule([CacheGroup(KV, SIZE)], BLOCKS, loads)
        self.said: list[StateFinding] = []
        self.layers = [Layer(f"layer.{i}", 0, i, Pages([c], BLOCKS)) for i, c in enumerate(self.caches)]
        findings = Findings(schedule, self.said.append)
        self.ledger = BlockLedger(schedule, [self.layers], mode, findings, Arrivals(staged=staged), inside=inside)
        self.step = -1
        self.wrong_lengths = False

    def run(
        self, counts: dict[str, int], starts: dict[str, int] | None = None, tables: Any = None, more: Any = None,
        finished: tuple[str, ...] = (), skip: int | None = None, in_between: Any = None,
        adapters: dict[str, str] | None = None, **moves: Any,
    ) -> None:  # fmt: skip
        """One step. skip: this row is not written by layer 1. in_between: called when layer 0 has read."""
        self.step += 1
        tables = tables or {}
        new = [NewRequest(name, range(100, 120), 20, (), adapter=(adapters or {}).get(name, "")) for name in tables]
        blocks = BlockMoves(tables, more or {}, **moves)
        step = EngineStep(
            self.step, counts, sum(counts.values()), new, finished, lambda: starts or {}, blocks=lambda: blocks
        )
        self.ledger.begin(step)
        for source, block in moves.get("copies", ()):
            for cache in self.caches:
                cache[block] = cache[source]
        held = [self.ledger.schedule.requests[name] for name in counts]
        slots = torch.cat([torch.from_numpy(self.ledger.schedule.slots(0, one)) for one in held])
        metadata = SimpleNamespace(
            slot_mapping=slots,
            seq_lens=torch.tensor([one.start + one.n + self.wrong_lengths for one in held]),
            block_table=torch.stack(
                [torch.nn.functional.pad(torch.from_numpy(o.tables[0]), (0, 8 - len(o.tables[0]))) for o in held]
            ),
        )
        self.ledger.forward(list(counts), lambda group: (metadata, None))
        for layer, cache in zip(self.layers, self.caches, strict=True):
            if self.ledger.inside:
                self.ledger.bytes.enters(layer)
            for row, slot in enumerate(slots.tolist()):
                if not (layer.number == 1 and row == skip):
                    cache[slot // SIZE, slot % SIZE] = 1000 * self.step + row + layer.number + 1
            if self.ledger.inside:
                self.ledger.bytes.wrote(layer, lambda *of: False)
                self.ledger.bytes.leaves(layer)
            if in_between is not None and layer.number == 0:
                in_between(self.caches)
        self.ledger.computed()
        self.ledger.end_step()

    def close(self) -> list[StateFinding]:
        self.ledger.ended(tuple(self.ledger.schedule.requests))
        self.ledger.arrivals.close()
        self.ledger.findings.flush()
        return self.said


@pytest.fixture(params=[False, True], ids=["host", "device"])
def toy(request: pytest.FixtureRequest) -> Toy:
    return Toy(request.param)


def begun(toy: Toy) -> None:
    """a has 6 tokens in blocks 1 and 2, b has 5 in 3 and 4; then each a further one."""
    toy.run({"a": 6, "b": 5}, tables={"a": [[1, 2]], "b": [[3, 4]]})
    toy.run({"a": 1, "b": 1}, {"a": 6, "b": 5})


def test_what_is_right_is_silent(toy: Toy) -> None:
    begun(toy)
    toy.run({"a": 1}, {"a": 7}, finished=("b",))
    toy.run({"a": 1, "c": 3}, {"a": 8}, tables={"c": [[3]]}, more={"a": [[5]]})
    assert toy.close() == []
    assert toy.ledger.bytes.checked > 20
    assert toy.ledger.events["end of the request"] == 3


def test_bytes_that_nobody_wrote(toy: Toy) -> None:
    begun(toy)
    toy.caches[1][1, 0, 0] ^= 64
    toy.run({"a": 1, "b": 1}, {"a": 7, "b": 6})
    (found,) = toy.close()
    assert (found.kind, found.step, found.layer, found.layers, found.block, found.request) == (
        "changed", 2, "layer.1", 1, 1, "a",
    )  # fmt: skip
    assert (found.low, found.high, found.writer, found.written, found.wrote_low, found.wrote_high) == (
        0, 3, "a", 0, 0, 5,
    )  # fmt: skip


def test_a_row_that_is_not_written(toy: Toy) -> None:
    begun(toy)
    toy.run({"a": 1, "b": 1}, {"a": 7, "b": 6}, skip=1)
    found = toy.close()
    if toy.ledger.arrivals.direct:
        (one,) = found
        assert (one.kind, one.layer, one.block, one.request) == ("stale", "layer.1", 4, "b")
    else:  # a device's write cannot be tried again, when its number is known at last
        assert [one.kind for one in found] in ([], ["stale"])


def test_a_copy_that_comes_late(toy: Toy) -> None:
    begun(toy)
    old = [cache[6].clone() for cache in toy.caches]
    toy.run({"a": 1, "c": 1}, {"a": 7, "c": 4}, tables={"c": [[6, 7]]}, copies=[(1, 6)])
    assert toy.close() == []
    late = Toy(not toy.ledger.arrivals.direct)
    begun(late)
    forward = late.ledger.forward

    def before(names: Any, given: Any) -> None:
        for cache, was in zip(late.caches, old, strict=True):
            cache[6] = was
        forward(names, given)

    late.ledger.forward = before  # type: ignore[method-assign]
    late.run({"a": 1, "c": 1}, {"a": 7, "c": 4}, tables={"c": [[6, 7]]}, copies=[(1, 6)])
    (found,) = [one for one in late.close() if one.block == 6]
    assert (found.kind, found.request, found.layers) == ("late", "c", 2)
    assert found.between == ("copy from block 1 in step 2",)


def test_what_a_connector_brings_late() -> None:
    toy = Toy(False, loads=True)
    toy.run({"a": 2}, {"a": 4}, tables={"a": [[1, 2]]}, in_between=lambda caches: caches[0][1].add_(5))
    toy.run({"a": 1}, {"a": 6})
    (found,) = toy.close()
    assert (found.kind, found.layer, found.block) == ("late", "layer.0", 1)
    assert found.between == ("transfer in step 0",)


def test_a_block_freed_while_it_is_read(toy: Toy) -> None:
    begun(toy)
    toy.run({"a": 1, "b": 1, "c": 2}, {"a": 7, "b": 6}, tables={"c": [[1]]})
    (found,) = toy.close()
    assert (found.kind, found.block, found.request, found.layers) == ("freed", 1, "a", 2)
    assert "assigned to request 'c' in step 2" in found.how


def test_outside_of_the_forward_a_change_at_rest_is_seen() -> None:
    toy = Toy(False, inside=False)
    begun(toy)
    toy.caches[0][1, 0, 0] ^= 64
    toy.run({"a": 1, "b": 1}, {"a": 7, "b": 6})
    assert [(one.kind, one.block) for one in toy.close()] == [("changed", 1)]


@pytest.mark.parametrize("mode", ["events", "sample"])
def test_modes_look_at_less(mode: str) -> None:
    full, less = Toy(False), Toy(False, mode=mode)
    for toy in (full, less):
        begun(toy)
        for step in range(7, 12):
            toy.run({"a": 1}, {"a": step}, more={"a": [[5]]} if step == 8 else None)
    assert full.close() == less.close() == []
    assert 0 < less.ledger.bytes.checked < full.ledger.bytes.checked


def test_owners_alone_need_no_bytes() -> None:
    toy = Toy(False, mode="owners")
    begun(toy)
    toy.caches[1][1, 0, 0] ^= 64  # bytes are not looked at
    toy.run({"a": 1, "b": 1}, {"a": 7, "b": 6})
    assert toy.said == []
    assert toy.ledger.held > 0
    assert (toy.ledger.bytes.hashed, toy.ledger.bytes.checked) == (0, 0)
    toy.run({"a": 1, "b": 1, "c": 2}, {"a": 8, "b": 7}, tables={"c": [[1]]}, more={"a": [[5]]})
    (found,) = toy.close()
    assert (found.kind, found.block, found.request, found.layers, found.first) == ("freed", 1, "a", 2, "layer.0")
    assert (found.writer, found.written) == ("c", 3)


@pytest.mark.parametrize("mode", ["owners", "full"])
def test_a_prefix_of_another_adapter_names_both(mode: str) -> None:
    toy = Toy(False, mode=mode)
    toy.run({"a": 8}, tables={"a": [[1, 2]]}, adapters={"a": "a1"})
    toy.run({"b": 2}, {"b": 8}, tables={"b": [[1, 2, 3]]}, adapters={"b": "a2"}, finished=("a",))
    (found,) = toy.close()
    assert (found.kind, found.low, found.high, found.request) == ("foreign", 0, 7, "b")
    assert sentence(found).endswith(
        "request 'b' (adapter a2) reads blocks 0-1 (positions 0 to 7), which request 'a' (adapter a1) wrote"
    )
    ((one, runs, why),) = toy.ledger.prefixes
    assert (one.name, runs) == ("b", ((0, 8, 0),))
    assert why in sentence(found)


def test_metadata_that_a_vendor_means_otherwise_are_no_findings_of_a_capture() -> None:
    for mode, expected in (("owners", []), ("sample", ["metadata"] * 2)):
        toy = Toy(False, mode=mode)
        toy.wrong_lengths = True
        begun(toy)
        assert [one.kind for one in toy.said][:2] == expected
        assert toy.ledger.strange_metadata == ({(0, "lengths")} if mode == "owners" else set())
