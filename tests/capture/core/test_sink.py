"""The sink: row maps that the device corrects, rows along any dimension, lines that wait. What else it stores, and what
it may not: ../test_same_bytes.py."""

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_accprobe.capture.core import rows as rowmaps
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.session import LANGUAGE, VISION, Session, Sink, Site, StepState
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.journal import REQUEST
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import Request, Segment, Step
from vllm_accprobe.dump.writer import write_run_json


@pytest.fixture(params=[False, True], ids=["direct", "staged"])
def sink(tmp_path: Path, request: pytest.FixtureRequest) -> Sink:
    """The second way is that of a device's tensors: ring, clone and thread, with plain copies for want of a device."""
    write_run_json(tmp_path, {"tool": "test"})
    made = Sink(ProbeConfig(), tmp_path, 0, {}, lambda reason: None, staged=request.param)
    for number in range(2):
        made.line(REQUEST.to_line(Request(number, f"r{number}", f"r{number}-x", "00", 4)))
    made.step(Step(0))
    return made


def taker(sink: Sink, space: Space | None = None) -> Callable[..., None]:
    """Takes tensors of a step whose token rows are those of ``space``: (role, tensor)."""
    session = Session(ProbeConfig(), sink, Layouts({}, 0, 1), lambda line: None, lambda part, rows: space)
    state, sites = StepState(0, True), {}

    def take(role: str, tensor: torch.Tensor) -> None:
        session.take(state, sites, "m", "M", role, 0, tensor, LANGUAGE)

    return take


def closed(sink: Sink, path: Path) -> Dump:
    sink.close("test")
    dump = open_dump(path)
    assert dump.problems == []
    return dump


def read(dump: Dump, role: str) -> np.ndarray:
    return dump.read(next(r for r in dump.records if r.role == role))


def test_positions_and_ids_come_from_the_device_at_that_moment(sink: Sink, tmp_path: Path) -> None:
    """Asynchronous speculation: the scheduler guessed position 9 for the second request; the device knows it is 7."""
    ids, positions = torch.tensor([5, 6, 8], dtype=torch.int32), torch.tensor([0, 1, 7])
    tokens = Space(
        "tokens", 3, 3, [(0, 3)], [Segment(0, 0, 2, 0), Segment(1, 9, 1, 2, "decode")], ids=ids, positions=positions
    )
    logits = Space("logits", 2, 2, [(0, 2)], [Segment(0, 1, 1, 0), Segment(1, 9, 1, 1, "decode")], token_rows=[1, 2])
    tokens.floors = logits.floors = {0: 4, 1: 4}
    sink.rows(0, tokens)
    sink.rows(0, logits)
    ids.zero_()  # the engine uses its buffers again in the next step
    positions.zero_()
    dump = closed(sink, tmp_path)
    found = dump.rows[0, 0, "tokens"]
    assert found.ids == (5, 6, 8)
    assert [s.pos for s in found.segments] == [0, 7]
    found = dump.rows[0, 0, "logits"]
    assert found.ids == (6, 8)
    assert [s.pos for s in found.segments] == [1, 7]


@pytest.mark.parametrize(
    ("said", "floors"),
    [
        ([0, 0, 0, 0, 0], {}),  # M-RoPE: a buffer that nobody fills
        ([0, 0, 0, 0, 0], {0: 4, 1: 4}),  # the same with drafts
        ([0, 1, 7, 8, 9], {}),  # without drafts the scheduler does not guess
        ([0, 1, 3, 4, 5], {0: 4, 1: 4}),  # before the request's own first token
        ([0, 1, 10, 11, 12], {0: 4, 1: 4}),  # more than it was given
        ([0, 1, 7, 9, 8], {0: 4, 1: 4}),  # not one after the other: another order of the rows
    ],
)
def test_positions_that_cannot_be_are_not_believed(sink, tmp_path, said, floors, monkeypatch):
    """The first request's two prompt tokens, and three rows of the second at 9 to 11."""
    lines: list[str] = []
    monkeypatch.setattr(rowmaps, "say", lines.append)
    tokens = Space(
        "tokens", 5, 5, [(0, 5)], [Segment(0, 0, 2, 0), Segment(1, 9, 3, 2, "decode")],
        ids=torch.arange(5), positions=torch.tensor(said), floors=floors,
    )  # fmt: skip
    sink.rows(0, tokens)
    sink.rows(1, tokens)
    dump = closed(sink, tmp_path)
    assert [s.pos for s in dump.rows[0, 0, "tokens"].segments] == [0, 9]
    (skip,) = dump.skips
    wrong = 2 if said[1] == 0 else 1  # segments, in each of two steps
    assert (skip.tap, skip.role, skip.count) == ("<root>", "positions", 2 * wrong)
    assert skip.reason == "the runner's positions could not be, the scheduler's were taken"
    (line,) = lines
    assert "the scheduler's are taken" in line


def test_only_the_kept_rows_are_stored_along_any_dimension(sink: Sink, tmp_path: Path) -> None:
    space = Space("tokens", 5, 8, [(0, 1), (3, 5)], [Segment(0, 0, 1, 0), Segment(1, 0, 2, 3)])
    take = taker(sink, space)
    dense, wide = torch.arange(40.0).view(8, 5), torch.arange(24.0).view(3, 8)
    strided = torch.arange(80).view(8, 10)[:, ::2]
    take("output.dense", dense)
    take("output.wide", wide)
    take("output.strided", strided)
    dense.zero_()  # what the model does afterwards must not matter
    dump = closed(sink, tmp_path)
    kept = [0, 3, 4]
    assert np.array_equal(read(dump, "output.dense"), np.arange(40.0, dtype=np.float32).reshape(8, 5)[kept])
    assert np.array_equal(read(dump, "output.wide"), np.arange(24.0, dtype=np.float32).reshape(3, 8)[:, kept])
    assert np.array_equal(read(dump, "output.strided"), np.arange(80).reshape(8, 10)[kept, ::2])


@pytest.mark.parametrize(("part", "name", "shape"), [(VISION, "vision/1", (5, 3)), (LANGUAGE, "tokens", (3, 5)),
                                                     (LANGUAGE, "tokens", (3, 3))])  # fmt: skip
def test_positions_have_their_rows_where_the_model_has_them(sink, tmp_path, part, name, shape):
    """Of patches, as LLaVA-OneVision-2 passes them, in front; of M-RoPE behind."""
    rows = shape[0] if part == VISION else shape[1]
    space = Space(name, rows, rows, [(0, 2)], [Segment(0, 0, 2, 0)])
    session = Session(ProbeConfig(), sink, Layouts({}, 0, 1), lambda line: None, lambda part, rows: space)
    positions = torch.arange(shape[0] * shape[1]).view(shape)
    sink.step(Step(0))
    session.take(StepState(0, True), {}, "m", "M", "input.patch_positions", 0, positions, part)
    kept = positions[:2] if part == VISION else positions[:, :2]
    assert np.array_equal(read(closed(sink, tmp_path), "input.patch_positions"), kept.numpy())


def test_steps_whose_rows_take_turns_share_decisions_and_keep_their_own_rows(sink: Sink, tmp_path: Path) -> None:
    forms = [[(0, 1), (3, 5)], [(1, 2)], [(0, 5)], *([(0, k)] for k in range(1, 5)), [(2, 3)], [(3, 4)], [(2, 4)]]
    spaces: list[Space] = []
    session = Session(ProbeConfig(), sink, Layouts({}, 0, 1), lambda line: None, lambda part, rows: spaces[-1])
    sites: dict[str, Site] = {}
    made: dict[int, list[Site]] = {}
    order = [0, 1, 2] * 3 + [*range(len(forms))] + [0]
    for step, which in enumerate(order):
        segments = [Segment(0, start, stop - start, start) for start, stop in forms[which]]
        spaces.append(Space("tokens", 5, 5, list(forms[which]), segments))
        sink.step(Step(step))
        state = StepState(step, True)
        for dtype in (torch.float32, torch.bfloat16):
            tensor = (torch.arange(20.0).view(5, 4) + step).to(dtype)
            session.take(state, sites, "m", "M", "output.0", 0, tensor, LANGUAGE)
        made.setdefault(which, []).append(sites["output.0"])
    assert all(len({id(site) for site in made[which][:3]}) == 1 for which in range(3))
    kept = [id(site) for site in sites["output.0"].earlier.values()]
    assert len(kept) == 8  # however many there were: memory is flat
    assert [id(made[which][-1]) in kept for which in (1, 9)] == [False, True]  # the oldest ones went
    dump = closed(sink, tmp_path)
    records = sorted(dump.records, key=lambda r: (r.step, r.dtype))
    assert len(records) == 2 * len(order)
    for record in records[1::2]:
        rows = [row for start, stop in forms[order[record.step]] for row in range(start, stop)]
        whole = np.arange(20.0, dtype=np.float32).reshape(5, 4) + record.step
        assert np.array_equal(dump.read(record), whole[rows]), record


@pytest.mark.parametrize("sink", [False], indirect=True)
def test_lines_without_payload_keep_their_place_and_wait_for_the_steps_end_at_most(sink: Sink, tmp_path: Path) -> None:
    take, same = taker(sink), torch.ones(4)
    for number in range(3):
        take(f"output.{number}", same)  # the first one's bytes are the others'
    assert len(sink.writer.pending) == 2
    take("output.new", torch.zeros(4))
    assert not sink.writer.pending  # a payload goes behind them
    take("output.last", same)
    sink.end_step()
    assert not sink.writer.pending
    for number in range(200):
        take(f"output.many{number}", same)
    assert len(sink.writer.pending) < 64
    dump = closed(sink, tmp_path)
    names = ["0", "1", "2", "new", "last", *(f"many{number}" for number in range(200))]
    assert [r.role for r in dump.records] == [f"output.{name}" for name in names]


@pytest.mark.parametrize("sink", [False], indirect=True)
def test_pending_lines_beyond_the_budget_end_the_capture(sink: Sink, tmp_path: Path) -> None:
    take, same = taker(sink), torch.ones(4)
    take("output.0", same)
    take("output.1", same)
    sink.writer._budget = 0
    sink.end_step()
    sink.close("test")
    dump = open_dump(tmp_path)
    assert dump.problems == ["rank 0: capture stopped early: budget of 0 bytes spent"]
    assert [r.role for r in dump.records] == ["output.0"]


def test_a_thousand_forms_of_a_tensor_leave_nothing_behind(tmp_path: Path) -> None:
    sink = Sink(ProbeConfig(task="statistics"), tmp_path, 0, {}, lambda reason: None)
    take, zeros = taker(sink), torch.zeros(3000)

    def objects(rows: range) -> int:
        for n in rows:
            take("output.0", zeros[:n])
            sink.step(Step(n))
        assert sink.writer.flush()
        gc.collect()
        return len(gc.get_objects())

    more = -objects(range(100, 1000)) + objects(range(1000, 2000))
    sink.close("test")
    assert more < 1000
