"""What errcheck, labels and patches compute beside a model is none of its operators."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from capture.toy import Toy
from support.patch_text import target

from vllm_accprobe import Probe, gen_id, labels, set_label
from vllm_accprobe.capture.errcheck import watch as module_call
from vllm_accprobe.capture.errcheck.watch import Watch, WatchedStep
from vllm_accprobe.capture.taps.hooks import Taps
from vllm_accprobe.dump.reader import open_dump

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
PATCH = target(
    "capture.toy",
    "Block.forward",
    {"name": "strided", "value": "query", "after": "query, key = self.qkv(hidden_states).split(8, dim=-1)"},
)


def calls(path: Path, model: torch.nn.Module, prepare: Callable[[torch.nn.Module], object] = lambda m: None,
          **settings: object) -> list[tuple[str, int, str]]:  # fmt: skip
    with Probe(model, dir=str(path), ops=True, **settings), torch.inference_mode():  # type: ignore[arg-type]
        prepare(model)
        model(IDS)
    dump = open_dump(path)
    assert dump.errors == []
    assert [s.reason for s in dump.skips if "operator" in s.reason] == []
    return [(c.tap, c.call, c.op) for c in dump.ops]


@pytest.mark.parametrize("deferred", [False, True], ids=["host", "deferred"])
def test_errcheck_beside_a_capture_of_operators(tmp_path: Path, deferred: bool) -> None:
    alone = calls(tmp_path / "alone", Toy())
    found: list[object] = []
    watch = Watch(("nan", "overflow"), found.append, found.append, deferred=deferred)

    def watched(model: torch.nn.Module) -> None:
        Taps(watch, functools.partial(module_call.watched, watch)).attach(model)
        watch.begin(WatchedStep(0, 8))

    beside = calls(tmp_path / "beside", Toy(), watched)
    watch.end()
    assert beside == alone
    assert found == []
    assert not any("aminmax" in op for _, _, op in beside)


def test_an_alarm_and_what_it_looks_at(tmp_path: Path) -> None:
    def spoil(model: torch.nn.Module) -> None:
        forward = model.layers[1].forward  # type: ignore[union-attr, operator]
        model.layers[1].forward = lambda *a, **k: (forward(*a, **k)[0] * float("nan"), None)  # type: ignore

    alone = calls(tmp_path / "alone", Toy(), spoil)
    found: list[object] = []

    def watched(model: torch.nn.Module) -> None:
        spoil(model)
        watch = Watch(("nan", "overflow"), found.append, lambda text: None)
        Taps(watch, functools.partial(module_call.watched, watch)).attach(model)
        watch.begin(WatchedStep(0, 8))

    assert calls(tmp_path / "beside", Toy(), watched) == alone
    assert len(found) == 1


class Labelled(Toy):
    """Labels a view, which must be copied before it can be kept."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        inner = self.layers[1].forward

        def forward(hidden_states: torch.Tensor, *, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
            if on:
                set_label("pta", gen_id("layer.1"), hidden_states[..., ::2])
            return inner(hidden_states, positions=positions)

        self.layers[1].forward = forward


def test_labels(tmp_path: Path) -> None:
    try:
        assert calls(tmp_path / "on", Labelled(True)) == calls(tmp_path / "off", Labelled(False))
    finally:
        labels.close()


def test_patches(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(PATCH)
    patched = calls(tmp_path / "on", Toy(), patches=str(tmp_path / "p.toml"))
    assert patched == calls(tmp_path / "off", Toy())
