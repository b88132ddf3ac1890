"""Statistics inside a graph: the host's numbers are those of a dump of statistics, bit for bit, and a device's are
near them; a line is only taken for the choice that it was made for. No device here: its code runs on CPU tensors."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.session import LANGUAGE, Session, Sink, StepState
from vllm_accprobe.capture.graphs.graph_ops import (
    _stats_device,
    _stats_each_device as _each_device,
    choose_stats,
    read_line,
    stats_buffer,
    stats_selection,
    tap_stats,
    tap_stats_each,
)
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import Segment, Step
from vllm_accprobe.dump.stats import StatsCell

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("operator", [tap_stats, _stats_device], ids=["host", "device"])
ROWS = 40


def bad(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[3, 0], x[3, 1], x[17, 2], x[39, 0] = math.nan, math.inf, -math.inf, math.inf
    return x


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    x = torch.randn(ROWS, 96) * 3
    return {
        "bfloat16": x.bfloat16(), "float16": x.half(), "float32": x, "float64": x.double(), "bad": bad(x.bfloat16()),
        "bad float32": bad(x), "float8": x.to(torch.float8_e4m3fn), "int64": (x * 1000).long(), "bool": x > 0,
        "wide": torch.randn(ROWS, 70_000).bfloat16(), "heads": x.view(ROWS, 8, 12), "strided": x.t().contiguous().t(),
        "complex": torch.complex(x, -x), "conj": torch.complex(x, -x).conj(),
    }  # fmt: skip


RANGES = {"all": [(0, ROWS)], "first": [(0, 7)], "some": [(2, 5), (9, 10), (16, 40)], "the last": [(39, 40)]}


def measured(operator: Any, x: torch.Tensor, ranges: list[tuple[int, int]], serial: int = 5) -> Any:
    buffer, select = stats_buffer(CPU), stats_selection(64, CPU)
    choose_stats(select, serial, ranges)
    operator(x, buffer, select)
    return read_line(buffer, serial, x.dtype, x.shape[1:])


@pytest.mark.parametrize("rows", RANGES)
def test_the_host_says_what_a_dump_of_statistics_says(rows: str, tmp_path: Path) -> None:
    ranges, kinds = RANGES[rows], tensors()
    sink = Sink(ProbeConfig.from_kwargs(dir=str(tmp_path), task="stats"), tmp_path / "dump", 0, {}, print)
    sink.step(Step(0))
    space = Space("tokens", ROWS, ROWS, ranges, [Segment(0, 0, ROWS, 0, "prefill")])
    session = Session(ProbeConfig(), sink, Layouts({}, 0, 1), print, lambda part, rows: space)
    state = StepState(0, True)
    for kind, x in kinds.items():
        session.take(state, {}, kind, "Up", "output.0", 0, x, LANGUAGE)
    sink.close("test")
    records = open_dump(tmp_path / "dump").records
    assert [r.tap for r in records] == list(kinds)
    for want in records:
        got = measured(tap_stats, kinds[want.tap], ranges)
        assert (got.rows, got.hash) == (want.shape[0], want.hash), want.tap
        cell = StatsCell(None, got.hash)
        cell.sums = got.sums
        assert cell.value == want.stats, want.tap


@pytest.mark.parametrize("rows", RANGES)
def test_a_device_says_nearly_the_same_and_no_hash(rows: str) -> None:
    ranges = RANGES[rows]
    for kind, x in tensors().items():
        want, got = measured(tap_stats, x, ranges), measured(_stats_device, x, ranges)
        assert (got.rows, got.hash) == (want.rows, None), kind
        n, low, high, total, squares, nan, inf = got.sums
        assert (n, low, high, nan, inf) == (*want.sums[:3], *want.sums[5:]), kind
        real = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()
        magnitudes = sum(float(torch.nan_to_num(real[a:b].abs(), 0, 0, 0).sum()) for a, b in ranges)
        assert total == pytest.approx(want.sums[3], rel=0, abs=1e-6 * magnitudes), kind
        assert math.sqrt(squares) == pytest.approx(math.sqrt(want.sums[4]), rel=1e-5), kind


@BOTH
def test_nothing_finite_at_all(operator: Any) -> None:
    x = torch.full((3, 2), math.nan)
    x[1] = -math.inf
    assert measured(operator, x, [(0, 3)]).sums == (0, math.inf, -math.inf, 0.0, 0.0, 4, 2)


@BOTH
def test_a_line_is_of_one_choice_one_dtype_and_one_width(operator: Any) -> None:
    buffer, select = stats_buffer(CPU), stats_selection(8, CPU)
    x = torch.ones(6, 2)

    def line(serial: int, dtype: torch.dtype = torch.float32, width: int = 2) -> Any:
        return read_line(buffer, serial, dtype, (width,))

    operator(x, buffer, select)
    assert line(1) is None, "it is off"
    choose_stats(select, 1, [(0, 4)])
    operator(x, buffer, select)
    assert line(1).rows == 4
    assert line(2) is line(1, torch.bfloat16) is line(1, width=3) is None
    choose_stats(select, 2, [(1, 2)])
    assert line(2) is None, "the graph has not run its tap"
    operator(x, buffer, select)
    assert line(2).rows == 1
    choose_stats(select, 3, [(5, 7)])
    operator(x, buffer, select)
    assert line(3) is None or line(3).rows == 1, "there is no such row"


@BOTH
def test_what_is_no_tensor_of_numbers_leaves_the_line_as_it_is(operator: Any) -> None:
    buffer, select = stats_buffer(CPU), stats_selection(8, CPU)
    choose_stats(select, 1, [(0, 1)])
    operator(torch.ones(2, 2).to_sparse(), buffer, select)
    assert not buffer.any()


@pytest.mark.parametrize("operator", [tap_stats_each, _each_device], ids=["host", "device"])
def test_each_call_of_a_forward_has_a_line(operator: Any) -> None:
    buffer, select, cursor = stats_buffer(CPU, 2), stats_selection(8, CPU), torch.zeros(1, dtype=torch.int64)
    for serial in (1, 2):
        cursor.zero_()
        choose_stats(select, serial, [(0, serial)])
        for call in (1, 2, 3):  # one more than there were when the tap was placed
            operator(torch.full((4, 2), float(10 * serial + call)), buffer, select=select, cursor=cursor)
        assert int(cursor) == 3
        found = [read_line(line, serial, torch.float32, (2,)) for line in buffer]
        assert [(line.rows, line.sums[1]) for line in found if line] == [
            (serial, 10 * serial + 1), (serial, 10 * serial + 2),
        ]  # fmt: skip
