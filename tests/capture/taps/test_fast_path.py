"""The short way through the tap writes what the general way writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.toy import Toy

from vllm_accprobe import Probe
from vllm_accprobe.capture.core.session import FastPath
from vllm_accprobe.dump.reader import Dump, open_dump

CALLS = [
    torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]),
    torch.tensor([[3, 1, 4, 1], [5, 9, 2, 7]]),
    torch.tensor([[8, 2, 8]]),
]


class Odd(torch.nn.Module):
    """Gives tensors that the short way has to decline or to bring together first."""

    def forward(self, x: torch.Tensor, count: int, *, extra: dict[str, torch.Tensor]) -> Any:
        n = x.shape[0] * x.shape[1]
        rows = x.reshape(n, -1)
        return (
            rows.t(),  # strided, rows along dimension 1
            torch.complex(rows, rows).conj().imag,  # a view with a pending negation
            rows.to_sparse(),
            rows[:, :0],  # no bytes
            torch.tensor(count),  # no dimension
            None,
            [rows.double(), {"deep": rows.to(torch.float16)}],
            torch.arange(3 * n).reshape(3, n),
        )


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy()
        self.odd = Odd()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        out = self.toy(input_ids)
        hidden = self.toy.embed(input_ids)
        self.odd(hidden, input_ids.shape[1], extra={"mask": torch.ones(input_ids.numel(), dtype=torch.bool)})
        return out


def capture(root: Path, task: str, mask: torch.Tensor | None = None) -> Dump:
    with Probe(Model(), dir=str(root), task=task) as probe, torch.inference_mode():
        for ids in CALLS:
            probe.model(ids, attention_mask=mask if mask is not None and mask.shape == ids.shape else None)
    return open_dump(root)


def told(dump: Dump) -> list[Any]:
    """All that a dump says, without places in files and in the order of execution."""
    records = []
    for record in dump.records:
        value = {k: v for k, v in dataclasses.asdict(record).items() if k not in ("seq", "payload")}
        records.append((value, dump.read(record).tobytes() if record.payload else None))
    return [records, dump.rows, [(s.tap, s.reason, s.role, s.count) for s in dump.skips], dump.problems]


@pytest.mark.parametrize("task", ["tensor", "stats"])
@pytest.mark.parametrize("padded", [False, True])
def test_both_ways_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, padded: bool) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]) if padded else None
    taken: list[str | None] = []
    original = FastPath.take

    def counting(self: FastPath, *args: Any) -> str | None:
        taken.append(original(self, *args))
        return taken[-1]

    monkeypatch.setattr(FastPath, "take", counting)
    short = capture(tmp_path / "short", task, mask)
    monkeypatch.setattr(FastPath, "take", lambda *_: None)
    general = capture(tmp_path / "general", task, mask)
    assert told(short) == told(general)
    assert len(short.records) > 150
    assert sum(hash is not None for hash in taken) > 100
    assert None in taken
    payloads = [{r.payload for r in dump.records if r.payload} for dump in (short, general)]
    assert len(payloads[0]) == len(payloads[1])  # the same bytes are stored once, whichever way they came
