"""The same forward leaves the same dump: its journal line by line, and every payload, as `expected/` has them.

Frozen, so that a change of the way from a tap to the disk shows whether it changes what arrives there. Left out is what
differs from run to run: times, process, versions, and where in a segment a payload lies (a block that is a fraction of
a second old ends at a page). All numbers are small integers, so that no kernel rounds them in its own way. Written
again by ACCPROBE_REFREEZE=1.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_accprobe import Probe
from vllm_accprobe.capture.core import recording
from vllm_accprobe.capture.core.session import Session, Sink
from vllm_accprobe.dump.reader import open_dump

EXPECTED = Path(__file__).parent / "expected"
CALLS = [[[3, 1, 4], [5, 9, 2]], [[3, 1, 4], [5, 9, 7]], [[8, 2]]]
MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
        return x.mul_(by)  # in place


class Odd(torch.nn.Module):
    """What lies in no memory as it is written, or is no tensor of rows at all."""

    def forward(self, x: torch.Tensor, count: int, *, extra: dict[str, torch.Tensor]) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        return (
            rows.t(), torch.complex(rows, rows).conj().imag, rows.to_sparse(), rows[:, :0], torch.tensor(count), None,
            [rows.double(), {"deep": rows.to(torch.float16)}], torch.arange(3 * len(rows)).reshape(3, len(rows)),
        )  # fmt: skip


class Exact(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 4)
        self.embed.weight = torch.nn.Parameter((torch.arange(64.0) % 13 - 5).reshape(16, 4))
        self.first, self.odd = Scaled(), Odd()
        self.second = self.first  # one instance, two names

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        x = self.first(x, by=torch.tensor(2.0)) + 1
        x = self.second(x.bfloat16(), by=torch.tensor(2, dtype=torch.bfloat16)).float()
        self.odd(x, input_ids.shape[1], extra={"mask": torch.ones(input_ids.numel(), dtype=torch.bool)})
        return x


CASES: dict[str, dict[str, Any]] = {
    "tensor": {}, "stats": {"task": "stats"}, "padded": {"mask": True},
    "some_rows": {"requests": "call-1,call-2,call-4"},
    "operators": {"ops": True, "steps": "0-1", "parts": "output", "modules": "first,embed"},
    "padded, as a device's": {"staged": True, "mask": True}, "tensor, decided anew each time": {"forgetful": True},
    "stats, decided anew each time": {"forgetful": True, "task": "stats"},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_dump_of_a_forward(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(CASES[name])
    if options.pop("staged", False):
        monkeypatch.setattr(recording, "Sink", functools.partial(Sink, staged=True))
    if options.pop("forgetful", False):
        take = Session.take
        monkeypatch.setattr(Session, "take", lambda self, state, sites, *more: take(self, state, {}, *more))
    mask = MASK if options.pop("mask", False) else None
    model = Exact()
    with Probe(model, dir=str(tmp_path / "dump"), **options):
        for ids in map(torch.tensor, CALLS):
            model(ids, attention_mask=mask if mask is not None and mask.shape == ids.shape else None)
    found, file = lines(tmp_path / "dump"), EXPECTED / f"{name.partition(',')[0]}.jsonl"
    if os.environ.get("ACCPROBE_REFREEZE"):
        file.write_text("\n".join(found) + "\n")
    assert found == file.read_text().splitlines()


def lines(root: Path) -> list[str]:
    """The journal as it must always be."""
    dump = open_dump(root)
    assert dump.problems == []
    places: dict[tuple[int, int], int] = {}
    found = []
    journal = [json.loads(line) for line in (root / "rank0000" / "journal.jsonl").read_text().splitlines()]
    order = sorted({(line["step"], line["seq"]) for line in journal if "seq" in line and "step" in line})
    for line in journal:
        for key in ("time", "pid", "host", "bytes", "source"):
            line.pop(key, None)
        if "step" in line and "seq" in line:  # there may be gaps, of tensors that were compared and not stored
            line["seq"] = order.index((line["step"], line["seq"]))
        for about in [line, *tensors(line)]:
            if "off" in about:
                place = about.pop("seg"), about.pop("off")
                about["payload"] = places.setdefault(place, len(places))
        found.append(json.dumps(line, sort_keys=True, separators=(",", ":")))
    for number, record in enumerate(r for r in dump.records if r.payload is not None):
        found.append(f"{number} {dump.read(record).tobytes()[:64].hex()}")
    return found


def tensors(value: Any) -> list[dict[str, Any]]:
    """The descriptions of tensors in an operator's line."""
    if isinstance(value, dict):
        own = [value["tensor"]] if isinstance(value.get("tensor"), dict) else []
        return own + [t for v in value.values() for t in tensors(v)]
    return [t for v in value for t in tensors(v)] if isinstance(value, list) else []
