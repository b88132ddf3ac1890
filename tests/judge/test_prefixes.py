"""A place whose list of sources begins with the last one's goes on from there: the same blame, at linear cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.align.data_flow import OUTPUT, DataFlow, Tree
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.judge import upstream
from vllm_accprobe.judge.origins import find_origins
from vllm_accprobe.judge.tensor_errors import TensorErrors
from vllm_accprobe.judge.upstream import LONG, Influence, Prefixes
from vllm_accprobe.standards.limits import Standard

ROWS = RowSet(np.arange(4))


def flat(n: int, *, bad: bool, jump: int) -> tuple[list[TensorErrors], Tree]:
    """Outputs of ``n`` taps that nobody encloses, as other tools' dumps have them; from ``jump`` on errors are larger.
    bad: all exceed their limits."""
    rng = np.random.default_rng(0)
    taps = [f"op{i}" for i in range(n)]
    traces = []
    for i, tap in enumerate(taps):
        rel = 1e-3 * (1 + rng.random(4)) * (50 if i >= jump else 1)
        traces.append(TensorErrors(tap, "output.0", 0, OUTPUT, i, 1e-4 if bad else 1e-2, ROWS, ROWS.keys, rel, rel=rel,
                            gain=rel * rng.choice([-1, 1], 4), rounding=2**-9, width=64))  # fmt: skip
    return traces, Tree.of(taps, {})


def found(traces: list[TensorErrors], tree: Tree) -> list[Any]:
    return [(c.tap, c.keys.tolist(), c.err.tolist(), c.explained.tolist(), c.chance, c.steps.tolist(),
             None if c.stats is None else (c.stats.before.tolist(), c.stats.gain_before.tolist()))
            for c in find_origins(DataFlow(traces, tree), Standard(), {})]  # fmt: skip


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_the_blame_is_that_of_asking_for_each_pair(bad: bool, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, tree = flat(60, bad=bad, jump=40)
    # taps that run again, later than others
    traces += [replace(t, call=c, order=t.order + 30 * c) for c in range(1, calls) for t in traces[::3]]
    quick = found(traces, tree)
    monkeypatch.setattr(upstream, "LONG", 1 << 30)
    assert quick == found(traces, tree)
    assert "op40" in [one[0] for one in quick]


@pytest.mark.parametrize("bad", [False, True])
def test_what_is_asked_grows_as_the_taps_do(bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    of = Influence.of

    def counted(*given: Any) -> np.ndarray:
        nonlocal asked
        asked += 1
        return of(*given)

    monkeypatch.setattr(Influence, "of", counted)
    monkeypatch.setattr(Influence, "again", lambda self, source, what, *rest: counted(self, source, *rest))
    counts = []
    for n in (100, 200):
        asked = 0
        found(*flat(n, bad=bad, jump=1 << 30))
        counts.append(asked)
    assert counts[1] < 2.5 * counts[0], counts  # pair by pair it is four times


def test_a_list_that_is_another_or_holds_the_place_itself_is_not_gone_on_from() -> None:
    traces, _ = flat(3 * LONG, bad=False, jump=1 << 30)
    sink, first, longer = traces[-1], traces[:LONG], traces[: LONG + 2]
    known: Prefixes[str] = Prefixes()
    known.keep(("a",), first, sink, "of the first")
    assert known.begun(("a",), longer, sink) == (LONG, "of the first")
    assert known.begun(("b",), longer, sink) == (0, None)
    assert known.begun(("a",), first[:-1], sink) == (0, None)
    assert known.begun(("a",), [traces[0], *traces[2:]], sink) == (0, None)
    assert known.begun(("a",), longer, traces[3]) == (0, None)
    known.keep(("c",), first, first[2], "never kept")
    assert known.begun(("c",), longer, sink) == (0, None)
