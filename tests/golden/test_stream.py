"""A streamed golden is, to the bit, a capture of the whole model; a killed run continues; strangers' files are refused.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import make

torch = pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

from vllm_accprobe import Probe  # noqa: E402
from vllm_accprobe.cli import main  # noqa: E402
from vllm_accprobe.comparison.engine import compare  # noqa: E402
from vllm_accprobe.comparison.pair import FAIL, Pair  # noqa: E402
from vllm_accprobe.dump.reader import Dump, open_dump  # noqa: E402
from vllm_accprobe.formats.io import pack_file  # noqa: E402
from vllm_accprobe.gate.sending import replies  # noqa: E402
from vllm_accprobe.golden.answers import unpacked  # noqa: E402
from vllm_accprobe.golden.pack_sketches import open_pack  # noqa: E402
from vllm_accprobe.golden.prompts import MAX_TOKENS  # noqa: E402
from vllm_accprobe.golden.stream import ANSWERS, TOP, streamed  # noqa: E402
from vllm_accprobe.refusals import CommandError  # noqa: E402

DRAW = random.Random(1)
PROMPTS = [[DRAW.randrange(8, 250) for _ in range(n)] for n in (1, 23, 97)]
WEIGHTS = ("model.safetensors",)
PARTS = ("input", "output", "params")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """By the process that runs these tests, not by all that collect them."""
    global transformers, LAYER
    import transformers

    LAYER = transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer.forward


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make("qwen2", tmp_path_factory.mktemp("model") / "qwen2", tie_word_embeddings=True)
    without_head(model)
    return model


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes the checkpoint."""

    def changed(model: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(model / "model.safetensors")
        change(found)
        save_file(found, model / "model.safetensors", {"format": "pt"})

    return changed


without_head = tensors(lambda found: found.pop("lm_head.weight"))


def quiet(line: str) -> None:
    assert "\n" not in line


class Killed(BaseException):
    """Ends a run as a signal does."""


def dying(at: str) -> Callable[[str], None]:
    """Progress that ends the run at the line that has ``at``."""

    def told(line: str) -> None:
        if at in line:
            raise Killed

    return told


def whole(model: Path, out: Path, scored: list[int], **how: Any) -> Any:
    """A capture of the same prompts of the whole model, in the usual way; the model."""
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **how).eval()
    with Probe(net, dir=str(out), parts=PARTS), torch.no_grad():
        for ids, n in zip(PROMPTS, scored, strict=True):
            net(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=n)
    return net


def lines(dump: Dump) -> dict[Any, Any]:
    """All that a dump says of each tensor, but where its bytes lie, and sums, whose order depends on that."""
    assert dump.problems == []
    found = {}
    for r in dump.records:
        if r.payload is not None:
            np.asarray(dump.read(r))
        key = (r.tap, r.role, r.step, r.call)
        assert key not in found
        found[key] = (r.hash, r.dtype, r.shape, r.rows, r.cls, r.mutated, r.payload is None, r.sample, r.stats.count,
                      None if r.step is None else r.seq)  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("name", "changes", "experts"),
    [
        ("qwen2", {"tie_word_embeddings": True}, None),  # its head's tensor is removed
        ("qwen2", {"tie_word_embeddings": True, "vocab_size": 512}, None),  # and this one has its own all the same
        ("gemma3", {}, None),  # windows, a tied head, normalised queries
        ("qwen2-moe", {}, None),
        ("qwen2-moe", {}, 1),  # one expert at a time
        ("deepseek-v2", {}, None),  # latent attention
    ],
    ids=["tied", "untied", "windows", "experts", "streamed-experts", "mla"],
)
def test_it_is_the_whole_model_to_the_bit(
    tmp_path: Path, name: str, changes: dict[str, Any], experts: int | None
) -> None:
    model, streams = make(name, tmp_path / "model", **changes), experts == 1
    if changes and "vocab_size" not in changes:
        without_head(model)
    whole(model, tmp_path / "whole", [1, 1, 1], **({"experts_implementation": "eager"} if streams else {}))
    done = streamed(model, PROMPTS, tmp_path / "streamed", progress=quiet, parts=PARTS, expert_bytes=experts)
    first, second = open_dump(tmp_path / "whole"), open_dump(tmp_path / "streamed")
    golden, mine = lines(first), lines(second)
    if streams:  # no fingerprint of what is never there as a whole
        left_out = {key for key in golden if key not in mine}
        assert {key[1] for key in left_out} == {"param.gate_up_proj", "param.down_proj"}
        golden = {key: value for key, value in golden.items() if key not in left_out}
    assert mine == golden
    assert second.requests == first.requests
    assert [s for s in second.skips if "no fingerprint" not in s.reason] == first.skips
    assert done.tensors == second.ends[0].tensors
    assert not (tmp_path / "streamed.stream").exists()


GEMMA_3N = {
    "vocab_size": 256, "vocab_size_per_layer_input": 256, "hidden_size": 64, "hidden_size_per_layer_input": 16,
    "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 16,
    "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_embedding_and_head_are_read_by_rows(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, where a head's columns are computed some at a time; only their weights have no fingerprint."""
    from vllm_accprobe.golden import checkpoint, model_blocks

    model = make("qwen2", tmp_path / "model", tie_word_embeddings=tied)
    if tied:
        without_head(model)
    streamed(model, PROMPTS, tmp_path / "whole", progress=quiet, parts=PARTS)
    monkeypatch.setattr(model_blocks, "_WIDE", 1)
    monkeypatch.setattr(checkpoint, "_ROWS", 96)
    streamed(model, PROMPTS, tmp_path / "rows", progress=quiet, parts=PARTS)
    expected, found = lines(open_dump(tmp_path / "whole")), lines(open_dump(tmp_path / "rows"))
    missing = {key[:2] for key in expected if key not in found}
    assert missing == {("model.embed_tokens", "param.weight"), *([] if tied else [("lm_head", "param.weight")])}
    assert found == {key: value for key, value in expected.items() if key in found}
    answers = [(tmp_path / name / ANSWERS / replies.pass_name(0)).read_bytes() for name in ("whole", "rows")]
    assert answers[0] == answers[1]


FP8 = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": [48, 32]}, "_scale_inv", (48, 32)),
    "tensors": ({"quant_method": "fp8"}, "_scale_inv", None),
    "rows": ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}}, "_scale", 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["blocks", "rows", pytest.param("tensors", marks=pytest.mark.extra)])  # one scale
def test_a_checkpoint_in_fp8_is_what_its_numbers_stand_for(tmp_path: Path, kind: str) -> None:
    """To the bit: a float32 checkpoint whose weights are the fp8 numbers times their scales, element by element."""
    config, ending, size = FP8[kind]
    draw = np.random.default_rng(0)
    stored, wide = (make("qwen2-moe", tmp_path / name) for name in ("stored", "wide"))

    def divided(found: dict[str, Any], keep: bool) -> None:
        for key in [k for k in found if k.endswith("proj.weight")]:
            rows, columns = found[key].shape
            block = {None: (rows, columns), 1: (1, columns)}.get(size, size)
            shape = [-(-n // b) for n, b in zip((rows, columns), block, strict=True)]
            scale = np.float32(draw.uniform(0.01, 0.02, shape))
            each = scale[np.arange(rows)[:, None] // block[0], np.arange(columns)[None] // block[1]]
            small = (found[key].float() / torch.from_numpy(each)).to(torch.float8_e4m3fn)
            found[key] = small if keep else small.float() * torch.from_numpy(each)
            if keep:
                found[f"{key}{ending}"] = torch.from_numpy(scale)
                found[f"{key.removesuffix('weight')}input_scale"] = torch.ones(1)

    for model, keep in ((stored, True), (wide, False)):
        draw = np.random.default_rng(0)
        tensors(lambda found, keep=keep: divided(found, keep))(model)  # type: ignore[misc]
    edit(quantization_config=config)(stored)
    for name, model in (("one", stored), ("two", wide)):
        streamed(model, PROMPTS[:2], tmp_path / name, progress=quiet, parts=PARTS)
    assert lines(open_dump(tmp_path / "one")) == lines(open_dump(tmp_path / "two"))
    streamed(stored, PROMPTS[:2], tmp_path / "three", progress=quiet, expert_bytes=1)
    assert open_dump(tmp_path / "three").problems == []


def test_a_matrix_that_is_read_by_rows_is_the_model_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one that is read as a whole: more rows than config.json says are another model's."""
    from vllm_accprobe.golden import model_blocks

    monkeypatch.setattr(model_blocks, "_WIDE", 1)
    model = make("qwen2", tmp_path / "model")
    name = "model.embed_tokens.weight"
    tensors(lambda found: found.update({name: torch.cat([found[name], found[name]])}))(model)
    with pytest.raises(CommandError, match=f"{name} is .* in the files and .* by config.json"):
        streamed(model, PROMPTS, tmp_path / "out", progress=quiet)


def test_layers_that_read_the_keys_of_others(tmp_path: Path) -> None:
    """Gemma 3n: the last two layers attend with keys and values of earlier ones; a killed run has them, too."""
    torch.manual_seed(0)
    net = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**GEMMA_3N))
    net.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    whole(tmp_path / "model", tmp_path / "whole", [1, 1, 1])

    with pytest.raises(Killed):
        streamed(tmp_path / "model", PROMPTS, tmp_path / "streamed", progress=dying("model.layers.4"), parts=PARTS)
    streamed(tmp_path / "model", PROMPTS, tmp_path / "streamed", progress=quiet, parts=PARTS)
    assert lines(open_dump(tmp_path / "streamed")) == lines(open_dump(tmp_path / "whole"))


def _forward(read: Callable[[list[Any]], Any], **more: Any) -> Callable[..., Any]:
    """Of a model whose norm reads what ``read`` makes of the layers' outputs."""

    def forward(self: Any, input_ids: Any, **_: Any) -> Any:
        hidden, seen = self.embed_tokens(input_ids), []
        places = torch.arange(hidden.shape[1])[None]
        rope = self.rotary_emb(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden + 0.0, position_embeddings=rope, position_ids=places, use_cache=False, **more)
            seen.append(hidden)
        return transformers.modeling_outputs.BaseModelOutputWithPast(self.norm(read(seen)))

    return forward


def _adding(self: Any, hidden: Any, cache: list[Any], **how: Any) -> Any:
    cache.append(hidden)
    return LAYER(self, hidden, **how)


@pytest.mark.parametrize(
    ("read", "more", "why"),
    [(lambda seen: seen[-1], {}, ""),
     (lambda seen: seen[-1] + seen[0].mean(), {}, "model.norm reads the output of another layer than the one before"),
     (lambda seen: seen[-1], {"cache": []}, "model.layers.0 adds to the list cache, which another may read")],
)  # fmt: skip
def test_models_whose_layers_read_more_than_the_one_before(
    qwen2: Path, tmp_path: Path, read: Callable[[list[Any]], Any], more: dict[str, Any], why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """YOCO, auxiliary states of EAGLE: the model is refused, before anything wrong is computed."""
    monkeypatch.setattr(transformers.Qwen2Model, "forward", _forward(read, **more))
    if more:
        monkeypatch.setattr(transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer, "forward", _adding)
    if not why:
        streamed(qwen2, PROMPTS, tmp_path / "out", progress=quiet)
        return
    with pytest.raises(CommandError, match=why):
        streamed(qwen2, PROMPTS, tmp_path / "out", progress=quiet)


def test_generated_tokens_chosen_rows_and_log_probabilities(qwen2: Path, tmp_path: Path) -> None:
    """Logits from the prompt's last row on; of the rows, those that are chosen; all tokens are scored."""
    lengths, rows = [1, 20, 90], [[0], [0, 1, 19, 20, 22], [5, 96]]
    streamed(qwen2, PROMPTS, tmp_path / "all", progress=quiet, prompt_lengths=lengths)
    streamed(qwen2, PROMPTS, tmp_path / "some", progress=quiet, prompt_lengths=lengths, rows=rows)
    net = whole(qwen2, tmp_path / "whole", [1, 4, 8])
    every, some, golden = (open_dump(tmp_path / name) for name in ("all", "some", "whole"))
    assert every.requests == some.requests
    assert [r.prompt_len for r in every.requests.values()] == lengths
    for step, (ids, length, chosen) in enumerate(zip(PROMPTS, lengths, rows, strict=True)):
        for tap, role, first in (("model.layers.1.mlp", "output.0", 0), ("lm_head", "output.0", length - 1)):
            found = []
            for dump in (every, some, golden):
                (record,) = (r for r in dump.records if (r.tap, r.role, r.step) == (tap, role, step))
                found.append(np.asarray(dump.read(record)).reshape(-1, record.shape[-1]))
            at = [position - first for position in chosen if position >= first]
            assert np.array_equal(found[0], found[2])
            assert np.array_equal(found[1], found[0][at])
        with torch.no_grad():
            expected = torch.log_softmax(net(input_ids=torch.tensor([ids])).logits[0], -1)
        reply = replies.read(tmp_path / "some" / ANSWERS).passes[0][f"p{step}"]
        assert [*(reply.prompt_token_ids or ()), *(reply.token_ids or ())] == ids
        for row, (token, value, (best, values)) in enumerate(
            zip(ids[1:], reply.logprobs or (), reply.top or (), strict=True)
        ):
            assert value == pytest.approx(float(expected[row, token]), abs=1e-4)
            assert {token, *expected[row].topk(TOP - 1).indices.tolist()} <= set(best or ())
            assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("where", "keep"), [
    ("vllm_accprobe.golden.stream._StreamRun._answer", []), ("vllm_accprobe.golden.make.pack", ["--keep", "kept"]),
    ("vllm_accprobe.golden.make.to_text", []),
])  # fmt: skip
def test_a_pack_whose_making_was_killed_is_continued(
    qwen2: Path, tmp_path: Path, keep: list[str], where: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def die(*args: Any, **how: Any) -> None:
        raise Killed

    monkeypatch.chdir(tmp_path)
    for name, ids in (("one", PROMPTS[1]), ("two", PROMPTS[2][:30])):
        Path(name).write_text(json.dumps({"id": "p", "token_ids": ids}) + "\n")
    made = ["golden", "make", "--float32", "--stream", str(qwen2), "--out", "x.golden", *keep, "--prompts"]
    with monkeypatch.context() as patched:
        patched.setattr(where, die)
        with pytest.raises(Killed):
            main([*made, "one"])
    assert main([*made, "two"]) == 2
    assert "was begun with" in capsys.readouterr().err
    assert main([*made, "one"]) == 0
    assert "block 1 of" not in capsys.readouterr().err
    assert Path("x.golden").is_file()
    assert Path(keep[1] if keep else "x.golden.work").exists() is bool(keep)
    if not keep:
        Path("x.golden.work").mkdir()
        Path("x.golden.work/mine").write_text("mine")
        assert main([*made, "one"]) == 2
        assert "is not of such a run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def expected(qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed."""
    out = tmp_path_factory.mktemp("streamed") / "expected"
    streamed(qwen2, PROMPTS, out, progress=quiet)
    return out


@pytest.mark.parametrize("block", [0, 6])
def test_a_killed_run_continues(
    qwen2: Path, expected: Path, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before block ``block`` is done, after some of its tensors were written; then, what is torn is cut off."""
    from vllm_accprobe.golden import stream

    made, inner = [0], stream._StreamRun._pass

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        if made[0] == 3 * block + 3:
            raise Killed
        return inner(self, *args, **kwargs)

    out = tmp_path / "out"
    monkeypatch.setattr(stream._StreamRun, "_pass", dying)
    with pytest.raises(Killed):
        streamed(qwen2, PROMPTS, out, progress=quiet)
    monkeypatch.undo()
    with (out / "rank0000" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"event":"tensor","tap":"torn' * 50_000)
    (out / "rank0000" / f"seg-{block + 1:05d}.safetensors.part").write_bytes(b"torn")
    with pytest.raises(CommandError, match="resume it"):
        streamed(qwen2, PROMPTS, out, progress=quiet, resume=False)
    said: list[str] = []
    done = streamed(qwen2, PROMPTS, out, progress=said.append)
    assert done.resumed == block
    assert lines(open_dump(out)) == lines(open_dump(expected))
    events = [
        Counter(json.loads(line)["event"] for line in (where / "rank0000" / "journal.jsonl").read_text().splitlines())
        for where in (out, expected)
    ]
    assert events[0] == events[1]
    assert open_dump(out).ends[0].tensors == done.tensors
    assert sorted(os.listdir(out / "rank0000")) == sorted(os.listdir(expected / "rank0000"))
    pass0 = replies.pass_name(0)
    assert (out / ANSWERS / pass0).read_bytes() == (expected / ANSWERS / pass0).read_bytes()


def test_a_run_killed_before_its_first_save_begins_again(
    qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_accprobe.golden import stream

    def die(self: Any) -> None:
        raise Killed

    monkeypatch.setattr(stream._StreamRun, "_save", die)
    with pytest.raises(Killed):
        streamed(qwen2, PROMPTS[:1], tmp_path / "out", progress=quiet)
    monkeypatch.undo()
    assert streamed(qwen2, PROMPTS[:1], tmp_path / "out", progress=quiet).resumed == 0
    (tmp_path / "out.stream").mkdir()  # killed while it was removed: the dump is whole, and stays
    with pytest.raises(CommandError, match="already holds a dump"):
        streamed(qwen2, PROMPTS[:1], tmp_path / "out", progress=quiet)


def test_a_run_that_continues_needs_the_rest_of_the_disk_only(
    qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_accprobe.golden import stream

    needs: list[int] = []
    monkeypatch.setattr(stream._StreamRun, "_check_disk", lambda self, need: needs.append(need))
    with pytest.raises(Killed):
        streamed(qwen2, PROMPTS, tmp_path / "out", progress=dying("block 5"))
    first, needs[:] = needs[0], []
    streamed(qwen2, PROMPTS, tmp_path / "out", progress=quiet)
    assert needs[0] < 0.7 * first


def edit(**values: Any) -> Callable[[Path], None]:
    """Changes config.json."""

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | values))

    return change


def pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def indexed(where: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / "model.safetensors.index.json").write_text(where)

    return change


GATE = "model.layers.1.mlp.gate_proj.weight"
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def blocks(size: int) -> dict[str, Any]:
    return {"weights": {"type": "float", "num_bits": 8, "block_structure": [size, size]}}


@pytest.mark.parametrize(("shape", "of"), [((5,), (5, 1, 1)), ((5, 6), (5, 6, 1)), ((5, 1, 1), (5, 1, 1)),
                                           ((5, 6, 1), (5, 6, 1)), ((5, 2, 3), None)])  # fmt: skip
def test_scales_of_stacked_experts(shape: tuple[int, ...], of: tuple[int, ...] | None) -> None:
    """Of each expert, each row, or each block of 4 rows and 3 columns, whose last are smaller."""
    from vllm_accprobe.golden.checkpoint import dequantised

    stored = torch.arange(5 * 6 * 7).reshape(5, 6, 7).to(torch.float8_e4m3fn)
    scale = torch.arange(1, 1 + np.prod(shape)).reshape(shape).float()
    each = scale.reshape(of) if of else scale[:, np.arange(6)[:, None] // 4, np.arange(7)[None] // 3]
    assert torch.equal(dequantised(stored, scale, (4, 3)), stored.float() * each)




@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(quantization_config={"quant_method": "awq"}), r"is quantised \(awq\)"),
        (edit(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
         r"is quantised \(compressed-tensors pack-quantized\): only weights in fp8"),
        (edit(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 8]}), r"\(blocks of \[0, 8\]\)"),
        (edit(model_type="strange", auto_map={"AutoConfig": "evil.Config"}), "cannot use it"),
        (edit(num_hidden_layers=9), "model.layers.4.* is not in the files"),
        (edit(intermediate_size=64), "is .* in the files and .* by config.json"),
        (pickled, "pytorch_model.bin is a pickle"),
        (indexed('{"weight_map": {"a": "../model.safetensors"}}'), "is no index"),
        (indexed('{"weight_map": {"a": "model-2.safetensors"}}'), "model-2.safetensors is missing"),
        (indexed("[" * 100_000), "is no index"),
        (tensors(lambda t: t.pop(GATE)), f"{GATE} is not in the files"),
        (tensors(lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)})), "is F8_E4M3 and has no scale"),
        (tensors(lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn), f"{GATE}_scale": torch.ones(7, 1)})),
         f"{GATE}.*7, 1. scales of"),
        (tensors(lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn), f"{GATE}_scale": torch.ones(7)})),
         f"{GATE}.*7. scales of"),
        (tensors(lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn),
                                     f"{GATE}_scale": torch.ones(1, dtype=torch.uint8)})), "_scale is U8, no scale"),
        (edit(quantization_config={**COMPRESSED, "config_groups": {"a": 3}}), "otherwise than to 8 bits of float"),
        (edit(quantization_config={**COMPRESSED, "config_groups": {"a": blocks(8), "b": blocks(4)}}), "several sizes"),
        (edit(quantization_config={**COMPRESSED, "transform_config": {"config_groups": {}}}), "are rotated"),
        (tensors(lambda t: t.update({GATE: t[GATE].to(torch.uint16)})), "is U16, of a quantised model"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 64), "cannot be read"),
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    model = make("qwen2", tmp_path / "model")
    change(model)
    with pytest.raises(CommandError, match=message) as refused:
        streamed(model, PROMPTS[:1], tmp_path / "out", progress=quiet)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompts": [[]]}, "prompt 0 has 0 token ids"),
        ({"prompts": [[1 << 20]]}, "outside 0 to"),
        ({"prompts": [[-1]]}, "outside 0 to"),
        ({"prompts": []}, "there is no prompt"),
        ({"prompt_lengths": [0, 1, 1]}, "prompt 0 has 1 token ids, 0 of them"),
        ({"rows": [[0]]}, "3 prompts and 1 lists of rows"),
        ({"dtype": "bfloat16"}, "float32 or float64"),
        ({}, "already holds a dump"),
    ],
)
def test_arguments_that_are_refused(qwen2: Path, tmp_path: Path, more: dict[str, Any], message: str) -> None:
    if not more:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "run.json").write_text("{}")
    with pytest.raises(CommandError, match=message):
        streamed(qwen2, more.pop("prompts", PROMPTS), tmp_path / "out", progress=quiet, **more)


OTHERS: list[tuple[dict[str, Any], Callable[[Path], object] | None, str]] = [
    ({"prompts": PROMPTS[:2]}, None, "begun with other prompts:"),
    ({"dtype": "float64"}, None, "begun with other settings:"),
    ({"rows": [[0], [0], [0]]}, None, "begun with other settings:"),
    ({}, edit(rms_norm_eps=1e-5), "begun with other checkpoint:"),
    ({}, tensors(lambda found: found.update({k: v * 1.5 for k, v in found.items()})), "begun with other checkpoint:"),
]
"""Arguments, what is changed of the model (at last, numbers in files of equal size), what is said."""


def test_a_run_of_other_things_does_not_continue(qwen2: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        streamed(qwen2, PROMPTS, tmp_path / "out", progress=dying("block 2"))
    for number, (more, change, message) in enumerate(OTHERS):
        model = qwen2
        if change is not None:
            model = tmp_path / f"model-{number}"
            shutil.copytree(qwen2, model)
            change(model)
            assert [(model / f).stat().st_size == (qwen2 / f).stat().st_size for f in WEIGHTS] == [True]
        with pytest.raises(CommandError, match=message):
            streamed(model, **{"prompts": PROMPTS, **more}, out=tmp_path / "out", progress=quiet)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [("available_memory", lambda: 1 << 20, "memory are needed"), ("shutil.disk_usage", None, "more are needed")],
)
def test_memory_and_disk_are_checked_before(
    qwen2: Path, tmp_path: Path, attribute: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 10)
    monkeypatch.setattr(f"vllm_accprobe.golden.stream.{attribute}", value or (lambda place: usage))
    with pytest.raises(CommandError, match=message):
        streamed(qwen2, PROMPTS, tmp_path / "out", progress=quiet)
    assert not (tmp_path / "out").exists()
    pack = ["golden", "make", "--float32", "--stream", str(qwen2), "--out", str(tmp_path / "x.golden")]
    assert main(pack) == 2
    assert not list(tmp_path.iterdir())  # nothing of the folder that it would have worked in


def test_the_command(qwen2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "token_ids": [5, 6, 7, 8]}\n{"id": "b", "prompt": "the cat"}\n')
    out = str(tmp_path / "out")
    command = ["golden", "stream", str(qwen2), "--prompts", str(prompts), "--out", out, "--rows", "pack"]
    assert main(command) == 0
    seen = capsys.readouterr()
    assert "7 blocks" in seen.out
    assert "block 7 of 7, lm_head" in seen.err
    assert sorted(replies.read_pass(tmp_path / "out" / ANSWERS, 0)) == ["a", "b"]
    assert main(command) == 2
    assert "already holds a dump" in capsys.readouterr().err
    again = ["golden", "stream", str(qwen2), "--prompts", str(tmp_path / "out" / ANSWERS), "--out", out + "2"]
    assert main(again) == 0
    assert [r.prompt_len for r in open_dump(out + "2").requests.values()] == [1, 1]


def test_a_pack_of_a_streamed_model_has_answers_that_a_server_can_be_sent_along(
    qwen2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [PROMPTS[1], PROMPTS[2]]
    file, pack = tmp_path / "prompts.jsonl", tmp_path / "x.golden"
    file.write_text("".join(json.dumps({"id": f"p{i}", "token_ids": one}) + "\n" for i, one in enumerate(ids)))
    made = ["golden", "make", "--float32", "--stream", str(qwen2), "--out", str(pack), "--prompts", str(file)]
    assert main(made) == 0
    assert main([*made, "--", "--dtype=half"]) == 2  # no server, no options of one
    for more in (["--max-gb", "1"], ["--model", "x"], ["--timeout", "1"], ["--ready-timeout", "2"]):
        capsys.readouterr()
        assert main([*made, *more]) == 2
        assert f"{more[0]} is of a server" in capsys.readouterr().err
    file.write_text('{"id": "short", "token_ids": [5]}\n')
    assert main(made) == 2
    assert "short has one token: a pack needs two or more" in capsys.readouterr().err
    assert not pack.with_name("x.golden.work").exists()
    opened = open_pack(pack, tmp_path / "opened")
    sent, head = unpacked(opened.home / pack_file.PROMPTS, tmp_path / "answers")
    assert (head.arrive, {r.forced for r in sent.passes[0].values()}) == (["one"], {None})  # as a server is sent them
    alone = streamed(qwen2, ids, tmp_path / "alone", progress=lambda line: None)
    scored = replies.read(tmp_path / "alone" / ANSWERS).passes[0].values()
    assert alone.tensors
    assert [r.name for r in sent.passes[0].values()] == ["p0", "p1"]
    for reply, one, whole in zip(sent.passes[0].values(), ids, scored, strict=True):
        cut = len(one) - MAX_TOKENS
        assert (reply.prompt_token_ids, reply.token_ids) == (one[:cut], one[cut:])
        assert reply.logprobs == pytest.approx((whole.logprobs or [])[cut - 1 :], abs=1e-6)
        assert [top[0] for top in reply.top or ()] == [top[0] for top in (whole.top or [])[cut - 1 :]]
    sides = open_dump(opened.dump), _in_bfloat16(qwen2, tmp_path / "bf16")
    assert {p.message for p in _weights(*sides).values()} == {"no payload: judged by hash in 16 bits"}
    sides = sides[0], _in_bfloat16(qwen2, tmp_path / "wrong", "model.layers.1.self_attn.o_proj")
    wrong = [tap for tap, p in _weights(*sides).items() if p.status == FAIL]
    assert wrong == ["model.layers.1.self_attn.o_proj"]


def _in_bfloat16(model: Path, out: Path, wrong: str = "") -> Any:
    """A run in the checkpoint's dtype that keeps fingerprints alone; of the module ``wrong`` two elements of the weight
    are exchanged, which no statistics show."""
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    if wrong:
        flat = net.get_submodule(wrong).weight.data.view(-1)
        flat[[0, 1]] = flat[[1, 0]]
    with Probe(net, dir=str(out), parts=("input", "output")), torch.no_grad():
        net(torch.tensor([PROMPTS[1][:-MAX_TOKENS]]))
    return open_dump(out)


def _weights(golden: Any, mine: Any) -> dict[str, Pair]:
    found = compare(golden, mine)
    return {p.tap: p for p in found.pairs if p.role == "param.weight"}
