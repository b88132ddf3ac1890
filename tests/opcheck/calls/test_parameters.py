"""Parameters from a checkpoint: a rank's piece; and from which step on the dump's are no longer those of a call."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vllm_accprobe.capture.taps import params as captured
from vllm_accprobe.dump.journal import LOADED, LORA, PACKED, Lives, WeightEvent, WeightPrint
from vllm_accprobe.dump.schema import Layout, Record, Stats
from vllm_accprobe.opcheck.calls import parameters
from vllm_accprobe.opcheck.calls.parameters import Checkpoint, ModuleParameters, Share, WeightsSince
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.parts import param_if

HIDDEN = 16


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = {"q_proj": (16, HIDDEN), "k_proj": (4, HIDDEN), "v_proj": (4, HIDDEN), "o_proj": (HIDDEN, 16)}
    found = {f"model.a.{n}.weight": torch.randn(*s, generator=g).bfloat16() for n, s in shapes.items()}
    return found | {"lm_head.weight": torch.randn(10, HIDDEN, generator=g).bfloat16()}


@pytest.fixture
def checkpoint(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Checkpoint:
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint(tmp_path)


def test_a_rank_has_its_rows_its_columns_and_its_key_heads(checkpoint, tensors):
    q, k, v, o = (tensors[f"model.a.{n}_proj.weight"] for n in "qkvo")
    for rank in range(2):
        own = checkpoint.get("model.a.qkv_proj", "weight", Share((12, HIDDEN), rank, 2))
        assert torch.equal(own, torch.cat([x.chunk(2)[rank] for x in (q, k, v)]))
        own = checkpoint.get("model.a.o_proj", "weight", Share((HIDDEN, 8), rank, 2))
        assert torch.equal(own, o.chunk(2, 1)[rank])
        own = checkpoint.get("lm_head", "weight", Share((8, HIDDEN), rank, 2))
        padded = torch.cat((tensors["lm_head.weight"], torch.zeros(6, HIDDEN).bfloat16()))
        assert torch.equal(own, padded.chunk(2)[rank])
    for rank in range(8):  # two key heads of two rows for eight ranks
        own = checkpoint.get("model.a.qkv_proj", "weight", Share((6, HIDDEN), rank, 8))
        assert torch.equal(own, torch.cat((q.chunk(8)[rank], k.chunk(2)[rank // 4], v.chunk(2)[rank // 4])))
    whole = torch.cat((q, k, v))
    assert torch.equal(checkpoint.get("model.a.qkv_proj", "weight", Share((24, HIDDEN))), whole)
    assert torch.equal(checkpoint.get("model.a.qkv_proj", "weight"), whole)
    assert checkpoint.get("model.a.qkv_proj", "weight", Share((13, HIDDEN), 0, 2)) is None


@pytest.mark.parametrize(("config", "tap", "order"), [
    ({"model_type": "bloom", "n_head": 2}, "h.0.query_key_value", [0, 3, 1, 4, 2, 5]),
    ({"model_type": "falcon", "num_attention_heads": 4, "new_decoder_architecture": True, "num_kv_heads": 1},
     "h.0.query_key_value", [0, 1, 2, 3, 4, 5]),
    ({"model_type": "falcon", "num_attention_heads": 2}, "h.0.query_key_value", [0, 3, 1, 4, 2, 5]),
    ({"model_type": "gpt_neox", "num_attention_heads": 2}, "h.0.query_key_value", [0, 1, 2, 3, 4, 5]),
    ({"model_type": "gpt2"}, "h.0.attn.c_attn", None),
], ids=lambda v: str(v["model_type"]) if isinstance(v, dict) else "")  # fmt: skip
def test_a_parameter_in_the_form_of_vllms_loader(config, tap, order, tmp_path):
    """Rows of queries, keys and values of each head, as all queries, all keys, all values; a transposed matrix."""
    stored = torch.arange(12.0).reshape(6, 2)
    save_file({f"{tap}.weight": stored}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = stored.t() if order is None else stored[order]
    for share in (None, Share(tuple(wanted.shape))):
        assert torch.equal(Checkpoint(tmp_path).get(tap, "weight", share), wanted)


def record(t: torch.Tensor) -> Record:
    low, high = (float(x) for x in t.aminmax())
    stats = Stats(t.numel(), low, high, 0.0, 0.0, 0, 0)
    return Record(0, None, "a", "Linear", "param.weight", 0, 0, "bfloat16", tuple(t.shape), None, 0, stats, None,
                  Layout("replicated"), None, captured.sample_hash(t))  # fmt: skip


@pytest.mark.parametrize(
    "ask", [lambda p: "weight" in p, lambda p: p.get("weight"), lambda p: param_if(Call("a", "", params=p), "weight")]
)
def test_a_parameter_with_a_fingerprint_alone_is_not_one_that_is_absent(ask) -> None:
    """A norm would else be checked as one without a weight."""
    dump = SimpleNamespace(records=[record(torch.ones(4).bfloat16())], skips=[])
    params = ModuleParameters(dump, None, {}, lambda r: None).of(0, "a")
    with pytest.raises(Declined, match="parameter weight was not captured"):
        ask(params)
    assert params.get("bias") is None


def test_what_was_loaded_is_known_by_its_fingerprint(tensors: dict[str, torch.Tensor]) -> None:
    assert parameters._SAMPLE == captured.SAMPLE
    t = tensors["model.a.q_proj.weight"]
    assert parameters._same_fingerprint(t, record(t))
    other = t.clone()
    other[3, 5] += 1
    assert not parameters._same_fingerprint(other, record(t))
    large = torch.randn(200, 100, generator=torch.Generator().manual_seed(2)).bfloat16()
    other = large.clone()
    other.view(-1)[1] = 100.0  # between two numbers of the sample
    assert captured.sample_hash(other) == captured.sample_hash(large)
    assert not parameters._same_fingerprint(other, record(large))


DOWN, NORM = "model.layers.0.mlp.down_proj", "model.norm"
A, B, N, P = {(DOWN, LOADED): "a"}, {(DOWN, LOADED): "b"}, {(NORM, LOADED): "n"}, {(DOWN, PACKED): "p"}
OTHER = {(DOWN, PACKED): "other"}
TURNS = ("load", 0, A | N), ("reload", 3, B | N), ("sync", 5, A), ("sync", 7, B)


def life(*events):
    """events: (kind, step, {(tap, form): order})."""
    lives = Lives()
    for n, (kind, step, prints) in enumerate(events):
        for (tap, form), order in prints.items():
            lives.prints.append(WeightPrint(0, n, tap, "", "weight", form, "bfloat16", (4, 4), order, order))
        lives.events += [WeightEvent(0, n, kind, step)] if kind else []
    return WeightsSince(lives)


@pytest.mark.parametrize(("events", "tap", "rank", "expected"), [
    (TURNS, DOWN, 0, "...xx..xxx"),  # until the first values are back
    (TURNS, NORM, 0, ".........."),
    (TURNS, DOWN, 1, ".........."),
    ((("load", 0, A), ("sync", 2, B), ("sync", 4, N)), DOWN, 0, "..xxxxxxxx"),  # the last event does not mention it
    ((("load", 0, A | P), ("wake", 2, P)), DOWN, 0, ".........."),
    ((("load", 0, A | P), ("wake", 2, OTHER)), DOWN, 0, "..xxxxxxxx"),  # packed, where nobody saw it loaded
    ((("load", 0, A | P), ("wake", 2, OTHER | A)), DOWN, 0, ".........."),
    ((("load", 0, A), (LORA, 2, B)), DOWN, 0, ".........."),  # an adapter is no weight of the model
    ((("load", 0, A), ("sync", 3, B), ("sync", 3, A)), DOWN, 0, ".........."),  # before one step the last one counts
    ((("", 1, B),), DOWN, 0, ".........."),  # a print without its event
])  # fmt: skip
def test_the_steps_whose_weights_are_not_those_of_the_dump(events, tap, rank, expected):
    since = life(*events)
    assert "".join("x" if since.why_not(rank, (tap,), step) else "." for step in range(10)) == expected


def test_what_changed_the_weights_is_said():
    since = life(*TURNS)
    assert since.why_not(0, (NORM, DOWN), 4) == (
        "a reload before step 3 changed its weights; the dump holds those before"
    )
    assert since.why_not(0, (DOWN,), None) == ""
