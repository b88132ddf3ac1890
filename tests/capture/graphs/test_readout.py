"""The next forward begins at once, and the disk is slower than the model: what the taps held is whole or counted.

Real threads and a real dump; the disk stands still until a gate opens. ``direct`` is a host engine's way, ``ring`` a
device's, with plain copies for want of a device.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.session import Session, Sink
from vllm_accprobe.capture.graphs.placement import Placed, plan, watching
from vllm_accprobe.capture.graphs.readout import DROPPED, UNSEEN, GraphReadout
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import Request, Segment, Step
from vllm_accprobe.dump.writer import WriterThread, write_run_json

ROWS, WIDE, STEPS, OPENS = 64, 4096, 36, 32
"""A step has 1.3 MB; the writer's blocks (24 MiB) and the ring (4 MiB before them) hold some of the first steps. The
gate opens behind step OPENS, or after a while."""
TAPS = ["down", "last"]


class RowParallelLinear(torch.nn.Module):
    """By its name; cheap, for it is the disk that shall be slow."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, -(-self.features // x.shape[1]))[:, : self.features] * 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = RowParallelLinear(WIDE)
        self.last = RowParallelLinear(WIDE // 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(x))


def of_step(number: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, nothing is written."""
    opened, real = threading.Event(), WriterThread.write

    def write(self: WriterThread, batch: Any) -> None:
        opened.wait(20)
        real(self, batch)

    monkeypatch.setattr(WriterThread, "write", write)
    yield opened
    opened.set()


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield Model()


def computed(
    model: torch.nn.Module, root: Path, full: str, staged: bool, budget: int, rows: int = ROWS,
    steps: int = STEPS, gate: threading.Event | None = None, unseen: tuple[int, ...] = (),
) -> Any:  # fmt: skip
    """A dump of so many steps, and what the model's modules gave back in each. unseen: steps whose forward nobody sees
    begin."""
    with watching(model, [""]) as seen:
        model(of_step(0))
    write_run_json(root, {"tool": "test"})
    config = ProbeConfig.from_kwargs(dir=str(root), graphs=True, graph_full=full)
    sink = Sink(config, root, 0, {}, print, staged=staged)
    sink.reserve(4 << 20)
    space = {"rows": 0}

    def rows_of(part: str, n: int) -> Space:
        kept = space["rows"]
        return Space("tokens", kept, kept, [(0, kept)], [Segment(0, 0, kept, 0)])

    session = Session(config, sink, Layouts({}, 0, 1), print, rows_of)
    placed = Placed(plan(seen, lambda path, cls: False, rows, budget), lambda path, cls: True, torch.device("cpu"))
    readout = GraphReadout(session, placed)
    want = []
    requests = [Request(0, "r", "r", "00", rows)]
    space["rows"] = rows
    for number in range(steps):
        x = of_step(number, rows)
        down = model.down.forward(x)
        want.append({"down": down, "last": model.last.forward(down)})
        session.begin(Step(number), requests, True)
        if number not in unseen:
            readout.aim(rows)
        model(x)
        readout.take()
        readout.take()  # as execute_model's end says it again
        readout.rest()
        session.end()
        if gate is not None and number == OPENS:
            gate.set()
            time.sleep(0.5)
    placed.remove()
    sink.close("test")
    dump = open_dump(root)
    assert dump.problems == dump.errors == []
    return dump, want


def kept(dump: Any, want: list[dict[str, torch.Tensor]]) -> Counter[str]:
    """How many steps of each tap are in the dump; all of them are what the model computed in that step."""
    found: Counter[str] = Counter()
    for record in dump.records:
        tensor = want[record.step][record.tap]
        if record.payload is None:
            assert record.stats.l2 == pytest.approx(float(tensor.double().norm()), rel=1e-5)
        else:
            assert np.array_equal(dump.read(record).view(np.float32), tensor.numpy())
        found[record.tap] += 1
    return found


WAYS = pytest.mark.parametrize("staged", [False, True], ids=["direct", "ring"])


@WAYS
def test_nothing_is_lost_while_the_model_waits(model: Any, gate: threading.Event, tmp_path: Path, staged: bool) -> None:
    waiter = threading.Timer(0.7, gate.set)
    waiter.start()
    dump, want = computed(model, tmp_path, "wait", staged, 1 << 24)
    assert gate.is_set(), "all of it found room, nobody had to wait"
    assert not dump.skips
    assert kept(dump, want) == dict.fromkeys(TAPS, STEPS)


@WAYS
def test_all_that_is_dropped_is_counted(model: Any, gate: threading.Event, tmp_path: Path, staged: bool) -> None:
    dump, want = computed(model, tmp_path, "drop", staged, 1 << 24, gate=gate)
    found = kept(dump, want)
    assert {s.reason for s in dump.skips} == {DROPPED}
    dropped = {s.tap: s.count for s in dump.skips}
    assert {tap: found[tap] + dropped[tap] for tap in TAPS} == dict.fromkeys(TAPS, STEPS)
    assert dropped["down"] == dropped["last"], "a step is dropped whole"
    steps = [record.step for record in dump.records if record.tap == "down"]
    assert steps[0] == 0
    assert steps[-1] == STEPS - 1, "it goes on when there is room again"


@WAYS
def test_numbers_need_no_room_on_the_disk(model: Any, gate: threading.Event, tmp_path: Path, staged: bool) -> None:
    dump, want = computed(model, tmp_path, "drop", staged, 1000, gate=gate)
    assert not dump.skips
    assert kept(dump, want) == dict.fromkeys(TAPS, STEPS)
    assert all(record.payload is None for record in dump.records)


@WAYS
def test_of_a_step_that_is_larger_than_all_room_what_fits(model, gate, tmp_path, staged):
    threading.Timer(0.7, gate.set).start()  # a single tensor that is larger than everything is waited for
    dump, want = computed(model, tmp_path, "drop", staged, 1 << 27, rows=1600, steps=6)
    found, dropped = kept(dump, want), {s.tap: s.count for s in dump.skips}
    assert {tap: found[tap] + dropped.get(tap, 0) for tap in TAPS} == dict.fromkeys(TAPS, 6)
    assert found["down"] > 0
    assert sum(dropped.values()) > 0


def test_a_forward_that_nobody_saw_begin_is_a_counted_skip_and_no_row(model: Any, tmp_path: Path) -> None:
    """vllm-ascend 0.13 replays its model whole, and calls nothing that is wrapped."""
    dump, want = computed(model, tmp_path, "wait", False, 1 << 24, steps=6, unseen=(0, 2, 3))
    assert kept(dump, want) == dict.fromkeys(TAPS, 3)
    assert {record.step for record in dump.records} == {1, 4, 5}
    assert {(s.tap, s.reason, s.count) for s in dump.skips} == {(tap, UNSEEN, 3) for tap in TAPS}
