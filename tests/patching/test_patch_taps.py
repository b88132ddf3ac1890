"""Patches on a captured model: taps with rows and values, labels, refusals that are counted, no trace afterwards."""

from pathlib import Path

import numpy as np
import pytest
import torch
from capture import toy
from capture.toy import Toy
from support.patch_text import target

from vllm_accprobe import Probe
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.labelled_pairs import compare_labels
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.patching.install import HOOK

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
BLOCK = target(
    "capture.toy",
    "Block.forward",
    {"name": "q_before", "value": "query", "after": "query, key = self.qkv(hidden_states).split(8, dim=-1)"},
    {"name": "q_rotated", "value": "query", "after": "query, key = self.rotary(positions, query, key)"},
    {"name": "none", "value": "result[1]", "at": "return"},
)
ROTARY = target("capture.toy", "Rotary.forward", {"name": "doubled", "value": "query", "after": "query.mul_(2.0)"})
MISSING = target(
    "capture.toy",
    "Toy.forward",
    {"name": "hidden", "value": "hidden", "after": "hidden = self.embedding(input_ids)"},
) + target(
    "capture.no_such_module",
    "f",
    {"name": "x", "value": "x", "at": "entry"},
)
LABELS = target(
    "capture.toy",
    "Block.forward",
    {"label": "pta", "id": "rotation", "value": "query",
     "after": "query, key = self.qkv(hidden_states).split(8, dim=-1)"},
    {"label": "acl", "id": "rotation", "value": "query", "after": "query, key = self.rotary(positions, query, key)"},
)  # fmt: skip


def captured(tmp_path: Path, *texts: str, model: Toy | None = None, name: str = "d", **how: str) -> Dump:
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"patch{number}.toml")
        files[-1].write_text(text)
    model = model or Toy()
    with torch.inference_mode(), Probe(model, dir=str(tmp_path / name), patches=[str(f) for f in files], **how):
        model(IDS)
    dump = open_dump(tmp_path / name)
    assert dump.problems == []
    assert dump.errors == []
    return dump


def values(dump: Dump, tap: str, role: str = "output.0") -> np.ndarray:
    (record,) = [r for r in dump.records if (r.tap, r.role) == (tap, role)]
    return np.array(dump.read(record))


def test_values_rows_and_modules(tmp_path: Path) -> None:
    codes = toy.Block.forward.__code__, toy.Rotary.forward.__code__
    model = Toy()
    dump = captured(tmp_path, BLOCK, ROTARY, model=model)
    with torch.inference_mode():
        query = model.layers[0].qkv(model.embed(IDS).flatten(0, 1))[:, :8].numpy()
    np.testing.assert_array_equal(values(dump, "layers.0::q_before"), query)
    np.testing.assert_array_equal(values(dump, "layers.0::q_rotated"), query * 2)
    # The shared rotary module has a name in either layer; the value is that of the running one.
    np.testing.assert_array_equal(values(dump, "layers.0.rotary::doubled"), query * 2)
    np.testing.assert_array_equal(values(dump, "layers.1.rotary::doubled"), values(dump, "layers.1.rotary", "output.0"))
    (record,) = [r for r in dump.records if r.tap == "layers.1::q_rotated"]
    assert (record.rows, record.shape, record.cls) == ("tokens", (8, 8), "patch:patch0")
    (module,) = [m for found in dump.modules.values() for m in found if m.tap == "layers.1::q_rotated"]
    assert module.attrs == {"value": "query", "in": "Block.forward"}
    assert {(s.tap, s.reason, s.count) for s in dump.skips if "None" in s.reason} == {
        ("layers.0::none", "None here", 1), ("layers.1::none", "None here", 1),
    }  # fmt: skip
    assert (toy.Block.forward.__code__, toy.Rotary.forward.__code__) == codes
    assert HOOK not in vars(toy)


def test_selection_and_refusals_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump = captured(tmp_path, BLOCK, MISSING, modules="layers.1*")
    assert {r.tap for r in dump.records if "::" in r.tap} == {"layers.1::q_before", "layers.1::q_rotated"}
    reasons = {s.tap: s.reason for s in dump.skips}
    assert reasons["layers.0::q_rotated"] == "not selected by VLLM_ACCPROBE_MODULES"
    assert reasons["patch:patch1:f"] == "this model does not use it"
    assert reasons["patch:patch1:Toy.forward"] == (
        "refused: no statement `hidden = self.embedding(input_ids)`; nearest, line 56: `hidden = self.embed(input_ids)`"
    )
    assert "patch patch1 is refused at capture.toy:Toy.forward" in caplog.text


def test_a_place_that_is_never_reached_is_counted(tmp_path: Path) -> None:
    dump = captured(tmp_path, ROTARY, model=Toy(layers=0))
    assert {(s.tap, s.reason) for s in dump.skips if s.tap.startswith("patch:")} == {
        ("patch:patch0:Rotary.forward", "never reached in a captured step")
    }


def test_two_captures_at_a_time_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "block.toml").write_text(BLOCK)
    (tmp_path / "rotary.toml").write_text(ROTARY)
    one, two = Toy(), Toy()
    with Probe(one, dir=str(tmp_path / "one"), patches=str(tmp_path / "block.toml")):
        with Probe(two, dir=str(tmp_path / "two"), patches=str(tmp_path / "rotary.toml")):
            two(IDS)
        one(IDS)
    dumps = [open_dump(tmp_path / name) for name in ("one", "two")]
    taps = [{r.tap.partition("::")[2] for r in dump.records if "::" in r.tap} for dump in dumps]
    assert taps == [{"q_before", "q_rotated"}, {"doubled"}]
    assert HOOK not in vars(toy)


def test_dumps_with_patches_compare(tmp_path: Path) -> None:
    captured(tmp_path, BLOCK, name="golden")
    captured(tmp_path, BLOCK, name="mine")
    result = compare(tmp_path / "golden", tmp_path / "mine")
    assert result.verdict == "pass"
    assert "layers.1::q_rotated" in {p.tap for p in result.pairs}
    assert result.coverage["taps_only_mine"] == []


def test_labels_without_touching_the_source(tmp_path: Path) -> None:
    """The rotary module doubles its query: golden q against mine 2q is off by exactly one norm of q."""
    result = compare_labels(captured(tmp_path, LABELS))
    assert [p.data_id for p in result.pairs] == ["layers.0.rotation", "layers.1.rotation"]
    for pair in result.pairs:
        assert pair.rel_euclid == pytest.approx(1.0)
        assert pair.cosine == pytest.approx(1.0)


def test_whole_graphs_compile_and_leave_the_taps_out(tmp_path: Path) -> None:
    """vLLM compiles with fullgraph: a patched function must not break the graph."""
    (tmp_path / "block.toml").write_text(BLOCK)
    model = Toy()
    hidden, positions = torch.ones(4, 8), torch.arange(4)
    with torch.inference_mode():
        expected, _ = model.layers[0](hidden, positions=positions)
        with Probe(Toy(layers=0), dir=str(tmp_path / "d"), patches=str(tmp_path / "block.toml")):
            assert HOOK in vars(toy)
            compiled = torch.compile(model.layers[0].forward, fullgraph=True, backend="eager")
            made, _ = compiled(hidden, positions=positions)
    torch.testing.assert_close(made, expected)
