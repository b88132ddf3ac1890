"""One dump and its checkpoint: wrong loaded weights are named, constants are corrected."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import save_file

from vllm_accprobe.capture.weights.fingerprint import sums_of
from vllm_accprobe.comparison.config_constants import check_built_of
from vllm_accprobe.dump.journal import Lives, WeightEvent, WeightPrint, pack_rows
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import REPLICATED, Layout, Module, Record, Skip
from vllm_accprobe.opcheck.run.own_findings import NEVER_CALLED, corrected, own_findings
from vllm_accprobe.opcheck.run.result_row import FAIL

CONFIG = {"model_type": "tiny", "num_hidden_layers": 2, "rms_norm_eps": 1e-6}
Edit = Callable[[dict[str, torch.Tensor]], None]


def checkpoint(path: Path) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    found = {}
    for i in range(2):
        for name, rows in (("mlp.gate_proj", 32), ("mlp.up_proj", 32), ("mlp.down_proj", 16)):
            width = 16 if rows == 32 else 32
            found[f"model.layers.{i}.{name}.weight"] = torch.randn(rows, width, generator=g).bfloat16()
        found[f"model.layers.{i}.input_layernorm.weight"] = torch.rand(16, generator=g).bfloat16()
    save_file(found, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return found


def loaded(parts: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """A rank's tensors under the engine's names."""
    out = {}
    for i in range(2):
        p = f"model.layers.{i}"
        n = 32 // size
        halves = [parts[f"{p}.mlp.{k}_proj.weight"][rank * n : (rank + 1) * n] for k in ("gate", "up")]
        out[f"{p}.mlp.gate_up_proj"] = torch.cat(halves).clone()
        out[f"{p}.mlp.down_proj"] = parts[f"{p}.mlp.down_proj.weight"][:, rank * n : (rank + 1) * n].clone()
        out[f"{p}.input_layernorm"] = parts[f"{p}.input_layernorm.weight"].clone()
    return out


def dump(path: Path, edits: dict[int, Edit], size: int = 1, unwritten: str = "", eps: float = 1e-6) -> Dump:
    parts, found = checkpoint(path), Dump(path, {"model": {"path": str(path)}, "parallel": {"pp": [0, 1]}})
    prints: list[WeightPrint] = []
    for rank in range(size):
        tensors = loaded(parts, rank, size)
        edits.get(rank, lambda t: None)(tensors)
        found.modules[rank] = []
        for index, (tap, tensor) in enumerate(tensors.items()):
            tensor = tensor.contiguous()
            sums, norm = sums_of(tensor), tap.endswith("norm")
            cls = "RMSNorm" if norm else "Linear"
            attrs = {"variance_epsilon": eps} if norm else {"tp_size": size, "tp_rank": rank}
            found.modules[rank].append(Module(tap, cls, index, attrs))
            half = tensor.shape[0] // 2
            names = (("gate", 0, half), ("up", half, 2 * half)) if "gate_up" in tap else ()
            layout = REPLICATED
            if size > 1 and not norm:
                dim, n = (-2, half) if names else (-1, tensor.shape[1])
                layout = Layout("shard", "tp", rank, size, dim, ((n, 1), (n, 1)) if names else ((n, 1),))
            role = "param.weight"
            shape = tuple(tensor.shape)
            none = (None, 0, None, None)
            found.records.append(Record(rank, None, tap, cls, role, 0, 0, "bfloat16", shape, *none, layout, None))
            written = () if tap == unwritten else ((0, len(sums.order), 1),)
            order, bag = sums.whole
            more = {"parts": names, "written": written, "rows": pack_rows(sums.short)}
            known = (tap, cls, "weight", "loaded", "bfloat16", shape, order, bag, 0)
            prints.append(WeightPrint(rank, 0, *known, **more))  # type: ignore[arg-type]
    found.lives = Lives([WeightEvent(rank, 0, "load", 0) for rank in range(size)], prints)
    return found


GATE_UP, NORM = "model.layers.{}.mlp.gate_up_proj", "model.layers.1.input_layernorm"
NOT = f"{GATE_UP}.weight is not the checkpoint's: "


def turned(t: dict[str, torch.Tensor]) -> None:
    w = t[GATE_UP.format(1)]
    w.copy_(w.roll(len(w) // 2, 0))


def of_the_other_rank(t: dict[str, torch.Tensor]) -> None:
    w = t[GATE_UP.format(0)]
    with TemporaryDirectory() as root:
        w.copy_(loaded(checkpoint(Path(root)), 0, 2)[GATE_UP.format(0)])


def other_form(t: dict[str, torch.Tensor]) -> None:
    for i in range(2):
        t[f"model.layers.{i}.mlp.down_proj"].mul_(-1.37)


@pytest.mark.parametrize(("edits", "size", "unwritten", "says", "unchecked"), [
    ({}, 1, "", [], 0), ({}, 2, "", [], 0), ({0: other_form}, 1, "", [], 2),
    ({0: turned}, 1, "", [NOT.format(1) + "gate and up are exchanged"], 0),
    ({1: turned}, 2, "", [NOT.format(1) + "rank 1's gate and rank 1's up are exchanged"], 0),
    ({1: of_the_other_rank}, 2, "", [NOT.format(0) + "all rows of rank 1 are the checkpoint's rows 16 before"], 0),
    ({0: lambda t: t[NORM].fill_(1)}, 1, NORM,
     [f"{NORM}.weight was never written by loading: as initialised, though the checkpoint has it"], 0),
], ids=["right", "two ranks", "form of no layer", "parts", "one rank", "other rank", "never written"])  # fmt: skip
def test_what_was_loaded(tmp_path, edits, size, unwritten, says, unchecked):
    found = own_findings(dump(tmp_path, edits, size, unwritten), tmp_path)
    assert ([f.says for f in found.loaded], found.unchecked.total()) == (says, unchecked)
    if not edits:
        assert found.held == 6 * size
        assert not list(found.rows())
        assert "config.json: " in found.lines()[0]


def test_constants_that_config_json_asks_for_are_checked_with(tmp_path: Path) -> None:
    found = dump(tmp_path, {}, eps=1e-5)
    (row, *_) = own_findings(found, tmp_path).rows()
    assert row.status == FAIL
    assert row.message == (
        "built otherwise than config.json asks: model.layers.0.input_layernorm (RMSNorm): variance_epsilon is 1e-05, "
        "config.json asks for 1e-06 (rms_norm_eps), in all 2 such modules"
    )
    modules = {rank: {m.tap: m for m in ms} for rank, ms in found.modules.items()}
    (note,) = corrected(modules, check_built_of(found, tmp_path))
    assert "checked with what config.json asks for (variance_epsilon 1e-06), not as built" in note
    assert modules[0]["model.layers.1.input_layernorm"].attrs["variance_epsilon"] == 1e-6
    found.run["model"]["overrides"] = ["rms_norm_eps"]
    assert not check_built_of(found, tmp_path).mismatches


def test_modules_with_weights_that_nobody_called_are_named(tmp_path: Path) -> None:
    found = dump(tmp_path, {})
    found.skips.append(Skip("model.layers.0.input_layernorm", NEVER_CALLED))
    assert own_findings(found, tmp_path).notes == [
        "1 module with weights was never called, so that what is computed with them is not checked: "
        "model.layers.0.input_layernorm (RMSNorm)"
    ]


def test_a_checkpoint_that_cannot_be_read_is_a_note(tmp_path: Path) -> None:
    found = dump(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    out = own_findings(found, tmp_path)
    assert out.loaded == []
    assert any("cannot be read" in n for n in out.notes)


HEADS = {"head_size": 4, "num_heads": 2, "num_kv_heads": 1}
EVEN_FIRST = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 13, 14, 15]
"""Rows of two heads of q, one of k and one of v."""


@pytest.mark.parametrize(("order", "attrs", "tap", "says"), [
    (EVEN_FIRST, HEADS, "model.layers.0.self_attn.qkv_proj", ""),
    (EVEN_FIRST[:4] + list(range(4, 8)) + EVEN_FIRST[8:], HEADS, "model.layers.0.self_attn.qkv_proj", "is not"),
    (list(range(8)) + EVEN_FIRST[8:], HEADS, "model.layers.0.self_attn.qkv_proj", "is not"),
    ([*EVEN_FIRST[:12], 12, 14, 13, 15], HEADS, "model.layers.0.self_attn.qkv_proj", "is not"),
    (EVEN_FIRST, {}, "model.layers.0.self_attn.qkv_proj", "unchecked"),
    (EVEN_FIRST, {**HEADS, "head_size": 1 << 60}, "model.layers.0.self_attn.qkv_proj", "unchecked"),
    (list(range(16)), HEADS, "vision_model.layers.0.self_attn.qkv_proj", ""),
    (EVEN_FIRST, HEADS, "vision_model.layers.0.self_attn.qkv_proj", "is not"),
])  # fmt: skip
def test_llama_4_s_rows_are_those_that_its_loader_makes(tmp_path, order, attrs, tap, says):
    whole = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts = {f"{tap.removesuffix('qkv_proj')}{n}_proj.weight": t.contiguous()
             for n, t in zip("qkv", whole.split([8, 4, 4]), strict=True)}  # fmt: skip
    save_file(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama4"}))
    found = Dump(tmp_path, {"model": {"path": str(tmp_path), "class": "Llama4ForCausalLM"}, "parallel": {"pp": [0, 1]}})
    cls, sums = "QKVParallelLinear", sums_of(whole[torch.tensor(order)].contiguous())
    found.modules[0] = [Module(tap, cls, 0, attrs)]
    known = (tap, cls, "weight", "loaded", "bfloat16", (16, 8), *sums.whole, 0)
    print_ = WeightPrint(0, 0, *known, written=((0, len(sums.order), 1),), rows=pack_rows(sums.short))
    found.lives = Lives([WeightEvent(0, 0, "load", 0)], [print_])
    own = own_findings(found, tmp_path)
    assert [says in f.says for f in own.loaded] == [True] * (says == "is not")
    assert (own.held, sum(own.unchecked.values())) == (int(not says), int(says == "unchecked"))
