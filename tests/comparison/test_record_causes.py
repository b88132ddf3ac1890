"""Modules that were passed over and poolers' rows are found by the bits of their tensors; golden's own ways are not."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.comparison.config_constants import passed_over, pooled
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import REPLICATED, TOKENS, Module, Payload, Record, RowSpace, Segment

HIDDEN = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
PARTS = ((0, 5), (5, 12))
Rows = Callable[[np.ndarray, int], np.ndarray]


class Fake(Dump):
    def __init__(self, modules: Sequence[tuple[str, str]]):
        super().__init__(Path("somewhere"), {})
        self.modules[0] = [Module(tap, cls, n, {}) for n, (tap, cls) in enumerate(modules)]
        self.values: dict[int, np.ndarray] = {}

    def add(self, tap: str, role: str, value: np.ndarray, step: int = 0, hashed: str | None = None) -> None:
        seq = len(self.records)
        self.values[seq] = value
        self.records.append(Record(
            tap=tap, cls="C", role=role, rows=TOKENS if value.ndim > 1 else None, row_dim=0, dtype="float32",
            shape=value.shape, call=0, seq=seq, step=step, rank=0, stats=None,
            hash=hashed or str(hash(value.tobytes())),
            payload=Payload(0, 0, value.nbytes), layout=REPLICATED,
        ))  # fmt: skip

    def read(self, record: Record, out: Any = None) -> np.ndarray:
        return self.values[record.seq]


def layers(passed: int) -> Fake:
    """A layer that returns its inputs in the first ``passed`` of three steps."""
    found = Fake([("model.layers.0", "Layer"), ("model.layers.0.mlp", "MLP")])
    for step in range(3):
        found.add("model.layers.0", "input.hidden_states", HIDDEN, step, "a")
        found.add("model.layers.0", "input.residual", HIDDEN, step, "b")
        for role, own in (("output.0", "a"), ("output.1", "b")):
            found.add("model.layers.0", role, HIDDEN, step, own if step < passed else role)
        found.add("model.layers.0.mlp", "input.x", HIDDEN, step, "c")
        found.add("model.layers.0.mlp", "output.0", HIDDEN, step, "c")
    return found


@pytest.mark.parametrize(("golden", "mine", "said"), [(0, 2, "in 2 of 3 calls"), (0, 0, ""), (1, 3, "")])
def test_a_module_that_returns_its_inputs_is_passed_over_where_goldens_never_does(golden, mine, said):
    found = passed_over((layers(golden), layers(mine)))
    assert list(found) == (["model.layers.0"] if said else [])
    assert all(c["text"].startswith(said) and c["family"] == "address" for c in found.values())


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


WAYS: dict[str, Rows] = {
    "its request's last row (normalised)": lambda h, k: unit(h[PARTS[k][1] - 1]),
    "its request's last row (not normalised)": lambda h, k: h[PARTS[k][1] - 1],
    "its request's row before the last (normalised)": lambda h, k: unit(h[PARTS[k][1] - 2]),
    "its request's first row (normalised)": lambda h, k: unit(h[PARTS[k][0]]),
    "the mean of its request's rows (normalised)": lambda h, k: unit(h[slice(*PARTS[k])].mean(0)),
    "another request's last row (normalised)": lambda h, k: unit(h[PARTS[1 - k][1] - 1]),
    "half of a row": lambda h, k: 0.5 * h[PARTS[k][0]],
}


def pooler(way: Rows) -> Fake:
    found = Fake([("pooler", "DispatchPooler")])
    segments = tuple(Segment(k, 0, stop - first, first) for k, (first, stop) in enumerate(PARTS))
    found.rows[0, 0, TOKENS] = RowSpace(0, TOKENS, 12, segments)
    found.add("pooler", "input.hidden_states", HIDDEN)
    for k in range(2):
        found.add("pooler", f"output.{k}", way(HIDDEN, k))
    return found


@pytest.mark.parametrize("golden", list(WAYS)[:1] + list(WAYS)[3:5])
@pytest.mark.parametrize("mine", WAYS)
def test_a_poolers_rows_are_named_where_both_sides_are_known(golden: str, mine: str) -> None:
    found = pooled((pooler(WAYS[golden]), pooler(WAYS[mine])))
    text = f"each output is made of {mine}; golden's of {golden}"
    assert [c["text"] for c in found.values()] == ([] if mine in (golden, "half of a row") else [text])


def test_nothing_is_said_where_goldens_way_is_not_known() -> None:
    ways = list(WAYS.values())
    assert pooled((pooler(ways[-1]), pooler(ways[0]))) == {}
