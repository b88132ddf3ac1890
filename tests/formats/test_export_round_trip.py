"""Every record of a dump is there again after `accprobe convert`, in each container: its place, its bits, its call."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump.dumps import put_event
from opcheck.opcheck_dumps import Maker
from support.opchecked import check
from support.peer_dumps import unpack

from vllm_accprobe import Probe
from vllm_accprobe.cli import main
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ROOT_TAP, Layout, OpCall, Record
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.io import containers
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references

KINDS = ("h5", "npz", "safetensors")
NOTED = "h5"
"""The container with room for what a name cannot say: classes, layouts, dtypes, operators' calls."""
Pair = namedtuple("Pair", ["left", "right"])


class Inner(torch.nn.Module):
    """Takes a tuple, a list, names and numbers, and gives nested things."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.eps = 1e-5

    def forward(self, pair: Any, *rest: torch.Tensor, scale: float, mask: torch.Tensor, many: list[Any]) -> Any:
        out = torch.addmm(many[0], pair[0], self.weight, beta=scale)
        out.mul_(2.0)
        both = torch.cat([out, many[1].to(torch.float32)], dim=-1).masked_fill(mask, -float("inf"))
        return out, (rest[0].half(), [both.to(torch.bfloat16), torch.topk(both, 2, dim=-1)]), {"kept": mask}


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.conv = torch.nn.Conv3d(2, 4, (1, 2, 2), stride=(1, 2, 2))

    def forward(self, x: torch.Tensor, picture: torch.Tensor) -> Any:
        mask = torch.zeros(x.shape[0], 12, dtype=torch.bool).index_fill(1, torch.tensor([3]), True)
        first = self.inner((x, x + 1), x, scale=0.5, mask=mask, many=[x, x[:, :4].double()])
        second = self.inner((first[0], x), x, scale=1.0, mask=~mask, many=[x, x[:, ::2].bfloat16()])
        return Pair(second, self.conv(picture)), torch.tensor(3.5), torch.zeros(0, 4)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "dump"
    torch.manual_seed(0)
    model = Outer()
    with Probe(model, dir=str(out), ops=True, parts=("input", "output", "params")), torch.inference_mode():
        for n in (5, 3):
            model(torch.randn(n, 8), torch.randn(1, 2, 3, 4, 4))
    return out


def place(r: Record) -> tuple[Any, ...]:
    return r.rank, r.step, r.tap, r.role, r.call


def called(dump: Dump) -> dict[tuple[Any, ...], OpCall]:
    return {(o.rank, o.step, o.tap, o.call): o for o in dump.ops}


def hold(own: Dump, theirs: Dump, kind: str) -> int:
    """Asserts that nothing is lost and nothing added. Returns how many tensors there are."""
    stored = {place(r): r for r in own.records if r.payload is not None}
    found = {place(r): r for r in theirs.records}
    assert not found.keys() ^ stored.keys()  # thousands: two sets that differ are not laid side by side
    for where, r in stored.items():
        other = found[where]
        assert other.shape == r.shape, where
        if kind == NOTED:
            assert (other.cls, other.layout) == (r.cls, r.layout), where
        if kind != "npz":
            assert other.dtype == r.dtype, where
        values = [d.read(x) for d, x in ((own, r), (theirs, other))]
        if other.dtype != r.dtype:  # npz has no bfloat16 and no 8-bit floats
            values = [widen(v, x.dtype) for v, x in zip(values, (r, other), strict=True)]
        assert values[0].tobytes() == values[1].tobytes(), where
    if kind == NOTED:
        ours, again = called(own), called(theirs)
        assert not again.keys() ^ {k for k in ours if any(place(r)[1:3] == k[1:3] for r in stored.values())}
        for where, op in again.items():
            was = ours[where]
            assert (op.op, op.module, op.args, op.kwargs) == (was.op, was.module, was.args, was.kwargs), where
    return len(stored)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_of_modules_and_operators(captured: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / kind
    assert main(["convert", str(captured), str(out), "--to", kind]) == 0
    own = open_dump(captured)
    roles = {r.role for r in own.records}
    assert {"input.pair.0", "input.mask", "output.1.0", "param.weight", "inplace.input.0"} <= roles, sorted(roles)
    assert hold(own, open_dump(out), kind) > 100


def test_what_opcheck_says_of_an_export_is_what_it_says_of_the_dump(captured: Path, tmp_path: Path) -> None:
    out = tmp_path / NOTED
    assert main(["convert", str(captured), str(out), "--to", NOTED]) == 0
    said = []
    for path in (captured, out):
        rows = check(Calls(open_dump(path), None), default_references())
        # Only the dump knows what the root's own code does with its parts, and so which of them it lacks.
        said.append(sorted((r.rank, r.step or 0, r.tap, r.call, r.role, r.status,
                            "" if r.tap == ROOT_TAP else r.message, r.dtype) for r in rows))
    assert said[1] == said[0]
    conv = [s for s in said[1] if s[2] == "conv"]
    assert [s[5] for s in conv] == ["pass", "pass"]
    assert sum(s[5] == "pass" for s in said[1] if "::" in s[2]) > 20


@pytest.mark.parametrize("tool", ["a_msprobe_tensor", "d_xray_h5", "mindspore"])
def test_another_tools_dump(tmp_path: Path, tool: str) -> None:
    source = unpack(tool, tmp_path)
    source /= "golden" if tool != "mindspore" else "tensor"
    out = tmp_path / NOTED
    assert main(["convert", str(source), str(out), "--to", NOTED]) == 0
    assert hold(open_dump(source), open_dump(out), NOTED) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_and_shape(tmp_path: Path, kind: str) -> None:
    own = tmp_path / "own"
    m = Maker(own)
    m.module("all", "Everything")
    m.step(0, [(0, 0, 2)])
    raw = np.random.default_rng(3).integers(0, 2, 6 * 16).astype(np.uint8)
    alive = []
    for name, info in DTYPES.items():
        alive.append(raw[: 6 * info.storage.itemsize].copy())
        event = {"event": "tensor", "step": 0, "tap": "all", "class": "Everything", "role": f"input.{name}", "call": 0,
                 "seq": len(alive), "dtype": name, "shape": [2, 3]}  # fmt: skip
        put_event(m.writer, alive[-1], event)
    none = {"empty": torch.zeros(0, 3), "none": torch.zeros(2, 0), "no_ids": torch.zeros(0, dtype=torch.int64)}
    m.call("all", "Everything", {"scalar": torch.tensor(2.5), **none}, torch.zeros(0, 3), rows=None)
    m.close()
    out = tmp_path / kind
    assert main(["convert", str(own), str(out), "--to", kind]) == 0
    assert hold(open_dump(own), open_dump(out), kind) >= 10


# --- names in exports: what is written, and what it is read as ---


REPLICATED = Layout("replicated")


def _record(tap: str, role: str, step: int | None = 0, call: int = 0, cls: str = "Linear", rank: int = 0) -> Record:
    return Record(rank, step, tap, cls, role, call, 0, "float32", (2,), None, 0, None, None, REPLICATED, None)


RECORDS = [
    _record("a.fc", "param.weight", None), _record("a.fc", "input.x"), _record("a.fc", "input.2.1"),
    _record("a.fc", "output.0"), _record("a.fc", "output.0", call=1), _record("a/b", "output.0"),
    _record("a_b", "output.0"), _record("<root>", "output", 10, cls=""),
]  # fmt: skip


def test_keys() -> None:
    written = containers.record_keys(RECORDS)
    assert written == [
        "param/a.fc/param.weight", "0/a.fc/input.x", "0/a.fc/input.2.1", "0/a.fc/output.0", "0/a.fc/output.0#1",
        "0/a_b/output.0", "0/a_b/output.0~2", "10/<root>/output",
    ]  # fmt: skip
    places = [containers.key_place(key) for key in written]
    assert [p and (p.rank, p.step, p.tap, p.role, p.call) for p in places] == [
        (None, None, "a.fc", "param.weight", 0), (None, 0, "a.fc", "input.x", 0), (None, 0, "a.fc", "input.2.1", 0),
        (None, 0, "a.fc", "output.0", 0), (None, 0, "a.fc", "output.0", 1), (None, 0, "a_b", "output.0", 0),
        (None, 0, "a_b", "output.0~2", 0), (None, 10, "<root>", "output", 0),
    ]  # fmt: skip
    several = containers.record_keys([_record("x", "output.0"), _record("x", "output.0", rank=1)])
    assert several == ["rank0/0/x/output.0", "rank1/0/x/output.0"]
    assert containers.key_place(several[1]) == containers.KeyPlace(1, 0, "x", "output.0", 0)
    assert containers.key_place("weights") is None
    assert containers.key_place("0/x/other.0") is None


@pytest.mark.parametrize(("name", "place"), [
    ("blocks.1.norm2.LayerNorm.1.forward_params.weight", ("blocks.1.norm2", "LayerNorm", "param.weight", None)),
    ("blocks.0.fc.ColumnParalleLinear.forward_output.0", ("blocks.0.fc", "ColumnParalleLinear", "output.0", None)),
    ("blocks.0.forward_input.2", ("blocks.0", "", "input.2", None)),
    ("Qwen3_VisionTransformer.0.forward_output.0", ("<root>", "Qwen3_VisionTransformer", "output.0", None)),
    ("lm_head.Linear.0.call3.forward_output.0", ("lm_head", "Linear", "output.0", 3)),
    ("a.Linear.0.backward_input.0", ("backward.a", "Linear", "input.0", None)),
    ("something else", ("something else", "", "output.0", None)),
])  # fmt: skip
def test_places(name: str, place: tuple[Any, ...]) -> None:
    assert containers.dataset_place(name) == place
