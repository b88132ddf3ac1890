"""Every shipped patch that a tiny model reaches, in a real engine: its taps, their rows, and the same tokens."""

import re
from typing import Any

import numpy as np
import pytest
from support.captures import FIVE, VISION, Engines, explain
from support.engine import Run
from support.patch_text import target

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import Record

pytestmark = pytest.mark.engine

OLD = target(
    "vllm.model_executor.models.qwen2",
    "Qwen2Attention.forward",
    {"name": "q", "value": "q", "after": "q, k = self.rotary(positions, q, k)"},
) + target(
    "vllm.model_executor.models.qwen2",
    "Qwen2MLP.forward",
    {"name": "gate_up", "value": "gate_up.no_such_attribute", "after": "gate_up, _ = self.gate_up_proj(x)"},
    {"name": "shape", "value": "gate_up", "after": "gate_up, _ = self.gate_up_proj(x)"},
)


def patched(engines: Engines, model: str, **how: Any) -> tuple[Run, Dump]:
    asks = VISION if model == "qwen2.5-vl" else FIVE
    how.setdefault("env", {"VLLM_ACCPROBE_PATCHES": "all"})
    run = engines.run(f"patched-{model}", model, asks, **how)
    assert run.dump is not None
    return run, open_dump(run.dump)


def kinds(dump: Dump) -> dict[str, set[str]]:
    """Names of patch taps → the layers (or other places) that have them."""
    found: dict[str, set[str]] = {}
    for record in dump.records:
        path, mark, name = record.tap.partition("::")
        if mark:
            found.setdefault(name, set()).add(path)
    return found


def values(dump: Dump, record: Record) -> np.ndarray:
    return widen(np.array(dump.read(record)), record.dtype)


def at(dump: Dump, tap: str, role: str = "output.0", step: int = 0) -> Record:
    (found,) = [r for r in dump.records if (r.tap, r.role, r.step, r.call) == (tap, role, step, 0)]
    return found


def refused(dump: Dump) -> list[str]:
    return [s.reason for s in dump.skips if s.reason.startswith("refused")]


def test_qwen2(engines: Engines) -> None:
    run, dump = patched(engines, "qwen2")
    assert run.tokens == engines.run("bare", host="bare").tokens
    assert dump.problems == []
    assert dump.errors == []
    assert refused(dump) == []
    layers = {f"model.layers.{i}" for i in range(len({r.tap for r in dump.records if r.tap.endswith(".mlp")}))}
    found = kinds(dump)
    for name in ("q_rotated", "k_rotated", "v", "heads"):
        assert found[name] == {f"{layer}.self_attn" for layer in layers}, name
    for name in ("attention_before_add", "stream_before_add", "mlp_before_add", "stream_after_attention"):
        assert found[name] == layers, name
    assert found["logits"] == found["logits_processed"] == found["sampled"] == {"sampler"}
    # What attention got is what the taps saw, and the value that it was before is another record.
    attention = "model.layers.1.self_attn"
    for name, role in (("q_rotated", "query"), ("k_rotated", "key"), ("v", "value")):
        mine, theirs = at(dump, f"{attention}::{name}"), at(dump, f"{attention}.attn", f"input.{role}")
        assert (mine.hash, mine.rows, mine.shape[0]) == (theirs.hash, "tokens", 221)
        assert mine.payload == theirs.payload
    assert at(dump, f"{attention}.rotary_emb", "input.query").hash != at(dump, f"{attention}::q_rotated").hash
    # The stream after the addition is the sum, in the arithmetic of a fused add.
    layer = "model.layers.2"
    total = values(dump, at(dump, f"{layer}::attention_before_add")).astype(np.float64)
    total += values(dump, at(dump, f"{layer}::stream_before_add"))
    after = values(dump, at(dump, f"{layer}::stream_after_attention"))
    np.testing.assert_allclose(after, total, rtol=2**-7, atol=1e-6)
    # What is sampled is the best of the processed logits of each request.
    logits = values(dump, at(dump, "sampler::logits_processed"))
    assert at(dump, "sampler::logits_processed").rows == "logits"
    assert list(logits.argmax(-1)) == list(dump.read(at(dump, "sampler::sampled")))


def test_a_fault_is_named_and_a_patch_that_does_not_fit_is_refused(engines, compared, tmp_path):
    """One run: with patches beside those of the clean run, one of them made for another source, and a fault."""
    clean, _ = patched(engines, "qwen2")
    fault = {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.05}
    (tmp_path / "old.toml").write_text(OLD)
    env = {"VLLM_ACCPROBE_PATCHES": f"qwen2-residual,sampler,{tmp_path / 'old.toml'}"}
    mine = engines.run("patched-fault", env=env, fault=fault)
    assert mine.dump is not None
    dump = open_dump(mine.dump)
    (reason,) = refused(dump)
    assert "nearest, line" in reason
    assert "`q, k = self.rotary_emb(positions, q, k)`" in reason
    assert any("has no attribute 'no_such_attribute'" in s.reason for s in dump.skips)
    assert {"shape", "stream_after_attention", "sampled"} <= set(kinds(dump))
    assert "q_rotated" not in kinds(dump)  # the clean engine of the same process had it; it is gone
    log = engines.host().log.read_text(errors="replace")
    assert "patch old is refused at vllm.model_executor.models.qwen2:Qwen2Attention.forward" in log
    result = compared(clean, mine)
    assert result.verdict == "fail"
    assert result.origins[0]["module"] == "model.layers.2.mlp.down_proj", explain(result)


@pytest.mark.parametrize(
    ("model", "names", "place"),
    [
        ("llama", {"q_rotated", "k_rotated", "v", "heads", "stream_after_attention"}, r"model\.layers\.\d+.*"),
        ("qwen2-moe", {"q_rotated", "router_logits", "topk_ids", "topk_weights"}, r"model\.layers\.\d+.*"),
        ("deepseek-v2", {"latent_normed", "k_rope_in", "q_rotated", "k_rope_rotated", "heads", "topk_ids"},
         r"model\.layers\.\d+.*"),
        ("qwen2.5-vl", {"q_rotated", "k_rotated", "stream_after_attention"},
         r"(visual\.blocks|language_model.*layers)\.\d+.*"),
    ],
)  # fmt: skip
def test_others(engines: Engines, model: str, names: set[str], place: str) -> None:
    run, dump = patched(engines, model)
    assert dump.problems == []
    assert dump.errors == []
    assert refused(dump) == []
    found = kinds(dump)
    assert names <= set(found), sorted(found)
    for name in names:
        assert all(re.fullmatch(place, path) for path in found[name]), found[name]
    assert {len(t) for t in run.tokens} == {6 if model == "qwen2.5-vl" else 8}
    # What a tap saw is what the next module got.
    taken = {"q_rotated": ("attn", "input.query"), "k_rotated": ("attn", "input.key")}
    if model == "deepseek-v2":
        taken = {"q_rotated": ("mla_attn", "input.q"), "k_rope_rotated": ("mla_attn", "input.k_pe"),
                 "latent_normed": ("mla_attn", "input.kv_c_normed"), "heads": ("o_proj", "input.input_")}  # fmt: skip
    for name, (child, role) in taken.items():
        for path in found[name]:
            assert at(dump, f"{path}::{name}").hash == at(dump, f"{path}.{child}", role).hash, (path, name)
    if "topk_ids" in names:
        path = min(found["topk_ids"])
        ids, logits = dump.read(at(dump, f"{path}::topk_ids")), at(dump, f"{path}::router_logits")
        assert logits.rows == "tokens"
        assert ids.shape[0] == logits.shape[0] == 221
        weights = values(dump, at(dump, f"{path}::topk_weights"))
        assert weights.shape == ids.shape
        # Of the chosen experts the largest weight belongs to the largest logit.
        scores = values(dump, logits)
        best = np.take_along_axis(ids, weights.argmax(-1)[:, None], 1)[:, 0]
        np.testing.assert_array_equal(scores.max(-1), scores[np.arange(len(scores)), best])
