"""The probe on a plain torch model: every value that a by-hand run sees stands in the dump; nothing else changes. Rows,
statistics, filters and bytes that are stored once: test_same_bytes.py."""

from pathlib import Path

import numpy as np
import pytest
import torch
from capture.toy import Toy

from vllm_accprobe import DumpConfig, Probe, register_hook
from vllm_accprobe.config import ConfigError, ProbeConfig
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import Record

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


def one(dump: Dump, tap: str, role: str, step: int | None = 0, call: int = 0) -> Record:
    found = [r for r in dump.records if (r.tap, r.role, r.step, r.call) == (tap, role, step, call)]
    assert len(found) == 1, [r.name for r in dump.records if r.tap == tap]
    return found[0]


def values(dump: Dump, tap: str, role: str, **where: int) -> torch.Tensor:
    return torch.from_numpy(np.array(dump.read(one(dump, tap, role, **where))))


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_every_value_of_a_forward_is_in_the_dump(tmp_path: Path, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``staged`` takes the way that tensors of a device take, ring and thread included."""
    if staged:
        from vllm_accprobe.capture.core import recording as room

        original = room.Sink
        monkeypatch.setattr(room, "Sink", lambda *args, **kwargs: original(*args, **kwargs, staged=True))
    model = Toy()
    with torch.inference_mode():
        expected = model(IDS)["logits"]
        with Probe(model, dir=str(tmp_path / "d")):
            captured = model(IDS)["logits"]
        after = model(IDS)["logits"]
    assert torch.equal(expected, captured)
    assert torch.equal(expected, after)

    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    with torch.inference_mode():
        hidden = model.embed(IDS).flatten(0, 1)
        both = model.layers[0].qkv(hidden)
    query, key = both[:, :8], both[:, 8:]
    positions = torch.arange(4).repeat(2)
    assert torch.equal(values(dump, "embed", "output.0"), hidden)
    assert torch.equal(values(dump, "layers.0", "input.hidden_states"), hidden)
    assert torch.equal(values(dump, "layers.0", "input.positions"), positions)
    # the shared instance is two taps; its inputs are those before it changed them in place
    assert torch.equal(values(dump, "layers.0.rotary", "input.query"), query)
    assert torch.equal(values(dump, "layers.0.rotary", "input.key"), key)
    assert torch.equal(values(dump, "layers.0.rotary", "output.0"), query * 2)
    assert torch.equal(values(dump, "layers.0.rotary", "inplace.key"), key + positions[:, None])
    assert one(dump, "layers.0.rotary", "inplace.key").mutated
    assert one(dump, "layers.1.rotary", "output.1").rows == "tokens"
    # the class whose call goes past hooks is seen, and what is inside it
    assert torch.equal(values(dump, "layers.0.extra", "output.0"), values(dump, "layers.0.extra.inner", "output.0"))
    assert torch.equal(values(dump, "<root>", "output.logits"), expected.flatten(0, 1))
    assert one(dump, "<root>", "input.input_ids").shape == (8,)
    assert torch.equal(values(dump, "layers.0.qkv", "param.weight", step=None), model.layers[0].qkv.weight.detach())
    assert {(s.tap, s.reason) for s in dump.skips} == {("layers", "a container, never called")}


def test_an_exception_in_the_probe_never_reaches_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    probe = Probe(model, dir=str(tmp_path / "d"))
    assert probe.session is not None

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("planted")

    before = model(IDS)["logits"]
    probe.session.sink.take = broken  # type: ignore[method-assign]
    assert torch.equal(model(IDS)["logits"], before)
    assert torch.equal(model(IDS)["logits"], before)
    probe.close()
    said = [record.getMessage() for record in caplog.records if "planted" in record.getMessage()]
    assert len(said) == 1
    assert "capture is off, serving goes on" in said[0]
    dump = open_dump(tmp_path / "d")
    assert "planted" in dump.errors[0]["message"]
    assert "planted" in dump.stops[0].reason
    assert {r.step for r in dump.records if r.step is not None} == {0}  # what came before is there


def test_an_exception_of_the_model_passes_through(tmp_path: Path) -> None:
    model = Toy()
    with Probe(model, dir=str(tmp_path / "d")):
        with pytest.raises(IndexError):
            model(torch.tensor([[99, 1]]))
        model(IDS)
    dump = open_dump(tmp_path / "d")
    assert one(dump, "<root>", "output.logits", step=1).rows == "tokens"


def test_a_directory_is_never_mixed(tmp_path: Path) -> None:
    model = Toy()
    Probe(model, dir=str(tmp_path / "d")).close()
    with pytest.raises(ConfigError, match="already holds a dump"):
        Probe(model, dir=str(tmp_path / "d"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^dir=.*/file/d: Not a directory; name a directory that can be written$"):
        Probe(model, dir=str(tmp_path / "file" / "d"))


def test_the_seeds_spelling(tmp_path: Path) -> None:
    model = Toy()
    probe = register_hook(
        model, DumpConfig(dump_path=str(tmp_path / "d"), module_list=[torch.nn.LayerNorm], tensor_part=1)
    )
    model(IDS)
    probe.close()
    assert {r.name for r in open_dump(tmp_path / "d").records if r.step is not None} == {"norm/output.0"}
    with pytest.raises(ConfigError, match="hook_type=grad"):
        register_hook(model, ProbeConfig(), hook_type="grad")


def test_nothing_captured_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    with Probe(model, dir=str(tmp_path / "d"), modules="no.such.module"):
        model(IDS)
    assert "NOTHING was captured in 1 calls" in caplog.text


def test_a_spent_budget_ends_the_capture_and_not_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    with Probe(model, dir=str(tmp_path / "d"), max_gb=0.0001, parts="output"):
        before = model(IDS)["logits"]
        for _ in range(200):
            assert torch.equal(model(IDS)["logits"], before)
    dump = open_dump(tmp_path / "d")
    assert "budget" in dump.stops[0].reason
    assert "budget" in caplog.text
    assert sum(f.stat().st_size for f in (tmp_path / "d" / "rank0000").glob("*.jsonl")) < 110_000
    for record in dump.records:
        if record.payload is not None:
            dump.read(record)


def test_a_probe_is_not_armed() -> None:
    with pytest.raises(ConfigError, match="armed=0 is for a served engine"):
        Probe(torch.nn.Linear(2, 2), armed=False)
