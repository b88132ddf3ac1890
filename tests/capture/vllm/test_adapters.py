"""Adapters' weights and draft models in a dump, with vLLM's names for them and without vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

import torch

from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, run_facts, unsplit
from vllm_accprobe.capture.taps.params import ParameterLines
from vllm_accprobe.capture.vllm.modes import UNSEEN, Adapters, adapter_name, record_draft
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import ADAPTER_ANEW


@contextmanager
def recorded(root: Path) -> Iterator[Plain]:
    """A ``session`` that is being recorded, and, once it is closed, its ``dump``."""
    run = run_facts({}, model={"class": "M"}, parallel=unsplit(1), engine={"runner": "tests"})
    parallel = unsplit(1)
    recording = Recording(ProbeConfig(), root, run, Layouts({}, 0, 1), lambda *_: None, rank=0, parallel=parallel)
    now = Plain(session=recording.session, dump=None)
    yield now
    recording.close("closed")
    now.dump = open_dump(recording.root)


class Manager:
    """Reads adapters as vLLM's does: ``files`` by path."""

    def __init__(self, files: dict[str, dict[str, Any]]):
        self.files = files

    def _load_adapter(self, request: Any) -> Any:
        return Plain(loras=self.files[request.lora_path])


def weights(seed: int) -> Any:
    drawn = torch.Generator().manual_seed(seed)
    return Plain(lora_a=torch.randn(2, 4, generator=drawn), lora_b=torch.randn(6, 2, generator=drawn), scaling=0.5)


def test_each_adapter_is_recorded_once_under_its_name(tmp_path: Path) -> None:
    manager = Manager({"x": {"m.q_proj": weights(1)}, "y": {"m.q_proj": weights(2)}})
    plain = manager._load_adapter
    with recorded(tmp_path) as dump:
        lines = ParameterLines(dump.session, torch.nn.Linear(4, 6), print)
        adapters = Adapters(dump.session, lines, Plain(lora_manager=manager))
        for name, path in (("sql", "x"), ("chat", "y"), ("sql", "x"), ("sql", "y")):
            assert manager._load_adapter(Plain(lora_name=name, lora_path=path)).loras
        adapters.close()
        assert manager._load_adapter == plain
    found = {(r.tap, r.role): dump.dump.read(r) for r in dump.dump.records}
    parts = ("lora_a", "lora_b", "scaling")
    assert set(found) == {("m.q_proj", f"param.lora.{name}.{part}") for name in ("sql", "chat") for part in parts}
    assert (found["m.q_proj", "param.lora.sql.lora_a"] == weights(1).lora_a.numpy()).all()
    assert {s.reason for s in dump.dump.skips} == {ADAPTER_ANEW}
    assert {s.role for s in dump.dump.skips} == {"param.lora.sql.lora_a", "param.lora.sql.lora_b"}


def test_an_unknown_manager_is_counted_and_loading_goes_on(tmp_path: Path) -> None:
    with recorded(tmp_path) as dump:
        lines = ParameterLines(dump.session, torch.nn.Linear(4, 6), print)
        Adapters(dump.session, lines, Plain(lora_manager=Plain()))
        strange = Manager({"x": Plain()})  # type: ignore[dict-item]
        Adapters(dump.session, lines, Plain(lora_manager=strange))
        assert strange._load_adapter(Plain(lora_name="sql", lora_path="x"))
        Adapters(dump.session, lines, Plain())
    assert len([s for s in dump.dump.skips if s.tap == "lora"]) == 2
    assert adapter_name(Plain(lora_request=None)) == ""
    assert adapter_name(Plain(lora_request=Plain(lora_name="sql"))) == "sql"


def test_a_draft_models_own_weights_are_recorded_and_its_modules_counted(tmp_path: Path) -> None:
    shared = torch.nn.Embedding(5, 4)
    target = torch.nn.Sequential(shared, torch.nn.Linear(4, 5))
    draft = torch.nn.Sequential(shared, torch.nn.Linear(4, 3))
    with recorded(tmp_path) as dump:
        lines = ParameterLines(dump.session, target, print)
        lines.rest()
        record_draft(dump.session, lines, Plain(drafter=Plain(model=draft)), target)
        record_draft(dump.session, lines, Plain(drafter=Plain()), target)  # n-grams
    names = {(r.tap, r.role) for r in dump.dump.records}
    assert names == {
        ("0", "param.weight"), ("1", "param.weight"), ("1", "param.bias"), ("draft:1", "param.weight"),
        ("draft:1", "param.bias"),
    }  # fmt: skip
    assert [(s.tap, s.reason, s.count) for s in dump.dump.skips] == [("draft:Sequential", UNSEEN, 2)]
