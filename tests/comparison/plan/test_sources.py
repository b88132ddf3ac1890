"""Where modules' code is: of both sides, through the file of a comparison, and in what is said of an origin."""

from dataclasses import replace

from synthetic_model import capture, scaled

from vllm_accprobe.comparison import engine, store
from vllm_accprobe.report import terminal, verdict_parts

TAP = "model.layers.1.mlp.act_fn"


def with_sources(dump, **of_class):
    dump.modules = {r: [replace(m, source=of_class.get(m.cls)) for m in ms] for r, ms in dump.modules.items()}
    return dump


def compared():
    golden = with_sources(capture(), SiluAndMul="vllm/activation.py:60", RMSNorm="vllm/layernorm.py:9")
    mine = capture(faults={TAP: scaled(1.1)})
    return engine.compare(golden, with_sources(mine, SiluAndMul="vllm_ascend/activation.py:27", TinyMLP="tiny.py:3"))


def test_both_sides_are_told_where_they_differ_and_one_where_it_alone_is_known(tmp_path):
    result = compared()
    assert result.sources[TAP] == ("vllm/activation.py:60", "vllm_ascend/activation.py:27")
    assert result.sources["model.norm"] == ("vllm/layernorm.py:9", None)
    assert "model.embed_tokens" not in result.sources
    assert verdict_parts.code(result.sources, TAP) == "vllm_ascend/activation.py:27 (golden: vllm/activation.py:60)"
    assert verdict_parts.code(result.sources, "model.norm") == "vllm/layernorm.py:9 (golden)"
    assert verdict_parts.code(result.sources, "model.layers.1.mlp") == "tiny.py:3"
    assert verdict_parts.code(result.sources, "model.embed_tokens") is None
    same = {"a": ("x.py:1", "x.py:1"), "b\n": ("\x1b.py:1", None)}
    assert [verdict_parts.code(same, tap) for tap in same] == ["x.py:1", "\\x1b.py:1 (golden)"]

    (origin,) = result.to_json()["origins"]
    assert origin["source"] == {"golden": "vllm/activation.py:60", "mine": "vllm_ascend/activation.py:27"}
    assert "code: vllm_ascend/activation.py:27 (golden: vllm/activation.py:60)" in terminal.lines(result)
    store.save(result.measured, tmp_path)
    assert engine.rejudge(store.load(tmp_path)).sources == result.sources


def test_no_capture_that_says_it_no_word_of_it():
    result = engine.compare(capture(), capture(faults={TAP: scaled(1.1)}))
    assert result.sources == {}
    assert "source" not in result.to_json()["origins"][0]
    assert not any(line.startswith("code: ") for line in terminal.lines(result))
