"""Planted faults: the module that makes the error is named, at the token where it does, and nobody else is."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from synthetic_model import PROMPTS, MemoryDump, Tiny, capture, scaled

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.pair import NONE_JUDGED, SKIP
from vllm_accprobe.comparison.plan.unit import SAMPLER, TOKEN, TOP_LOGITS
from vllm_accprobe.comparison.result import NothingCompared
from vllm_accprobe.dump.schema import DECODE, PREFILL, Mask, SamplingParameters
from vllm_accprobe.judge.near_ties import NOT_COMPARED, UNROUTED, UPSTREAM
from vllm_accprobe.report import html, markdown, terminal

LEAVES = [
    "model.embed_tokens",
    "model.layers.0.input_layernorm",
    "model.layers.1.self_attn.qkv_proj",
    "model.layers.1.self_attn.attn",
    "model.layers.0.self_attn.o_proj",
    "model.layers.2.post_attention_layernorm",
    "model.layers.1.mlp.gate_up_proj",
    "model.layers.2.mlp.act_fn",
    "model.layers.2.mlp.down_proj",
    "model.norm",
    "logits_processor",
]


def modules(result):
    return [o["module"] for o in result.origins]


FURTHER = ("qkv_proj", "post_attention_layernorm", "gate_up_proj", "model.norm")
"""A projection and a norm are among the others."""


@pytest.mark.parametrize(
    "tap", [pytest.param(tap, marks=pytest.mark.extra) if tap.endswith(FURTHER) else tap for tap in LEAVES]
)
def test_a_leaf_is_named_alone(golden, tap):
    """Within the noise of another machine."""
    result = compare(golden, capture(chunk=4, faults={tap: scaled(1.08)}, noise=2.0**-11))
    assert result.verdict == "fail"
    assert modules(result) == [tap]
    origin = result.origins[0]
    first = 9 if tap == "logits_processor" else 0  # logits exist at the last token of the prompt only
    assert (origin["role"], origin["evidence"]) == ("output.0", "jump")
    assert (origin["position"], origin["phase"]) == (first, "prefill") or origin["request"] != "a"
    assert origin["created"] > origin["floor"]
    assert result.first_divergence["module"] == tap


def one_element(values, positions, decode):
    values[:, 7] += 0.6 * np.sqrt((values**2).mean(axis=1))
    return values


def larger_head(w):
    w["lm_head"][:] *= 1.25


GATE, ACT, OUT, QKV = (f"model.layers.{tap}" for tap in (
    "1.mlp.gate_up_proj", "0.mlp.act_fn", "0.self_attn.o_proj", "2.self_attn.qkv_proj"))  # fmt: skip
LAST = "model.layers.2.mlp.down_proj"


@pytest.mark.parametrize(("made", "named", "first"), [
    # What a parent does between its children is the parent's.
    ({"faults": {"layers.1:residual": scaled(1.1)}}, ["model.layers.1"],
     {"role": "model.layers.1.post_attention_layernorm/input.x"}),
    ({"faults": {"layers.1:output": scaled(1.1)}}, ["model.layers.1"], {"role": "output.0"}),
    ({"faults": {ACT: scaled(1.2, lambda at, decode: decode)}, "chunk": 4}, [ACT], {"phase": "decode"}),
    ({"faults": {GATE: one_element}}, [GATE], {}),
    # Two independent faults, in the order of the data flow.
    ({"faults": {LAST: scaled(1.3, lambda at, decode: at == 1), OUT: scaled(1.3, lambda at, decode: at == 5)}},
     [OUT, LAST], {"position": 5}),
    # A scale that the last norm removes explains no token.
    ({"faults": {"layers.2:output": scaled(16.0), "logits_processor": scaled(1.08)}},
     ["logits_processor", "model.layers.2"], {}),
    # A weight of a module that never runs explains its user.
    ({"weights": larger_head}, ["lm_head"], {"role": "param.weight"}),
    ({"tp": 2, "faults": {QKV: scaled(1.1)}, "chunk": 4}, [QKV], {}),
])  # fmt: skip
def test_who_is_named(golden, made, named, first):
    result = compare(golden, capture(**made))
    assert modules(result) == named
    assert {name: result.origins[0][name] for name in first} == first
    assert first.get("phase") != "decode" or result.origins[0]["position"] in map(len, PROMPTS.values())


def test_one_position_and_what_follows_from_it(golden):
    fault = scaled(1.5, lambda at, decode: at == 4)
    result = compare(golden, capture(faults={"model.layers.1.mlp.down_proj": fault}, chunk=3))
    assert modules(result) == ["model.layers.1.mlp.down_proj"]
    assert (result.origins[0]["position"], result.origins[0]["rows"]) == (4, 3)  # of three requests
    later = [p for p in result.pairs if p.tap == "model.layers.2.self_attn.attn" and p.role == "output.0"]
    assert max(p.worst_row_rel_l2 for p in later) > 0  # consequences through attention, not blamed


def not_a_number(chosen):
    """A Fault: NaN in one element of the rows that ``chosen(positions)`` names."""

    def fault(values, positions, decode):
        values[chosen(positions), 0] = np.nan
        return values

    return fault


def test_every_step_from_numbers_to_nan_is_an_origin_whatever_came_before(golden):
    faults = {
        "model.layers.0.mlp.down_proj": scaled(1.5),  # wrong in every row from here on
        "model.layers.1.self_attn.o_proj": not_a_number(lambda at: at == 5),
        "model.layers.2.mlp.down_proj": not_a_number(lambda at: at <= 6),  # from position 5 on NaN comes in already
    }
    result = compare(golden, capture(faults=faults))
    assert modules(result) == list(faults)
    assert [o["nonfinite"] for o in result.origins] == [0, 3, 15]
    assert [(o["position"], o["evidence"]) for o in result.origins[1:]] == [(5, "values"), (0, "values")]
    counted = (
        "2 operators turn finite inputs into NaN or infinity, in 18 rows: "
        "model.layers.1.self_attn.o_proj (3), model.layers.2.mlp.down_proj (15)"
    )
    assert terminal.lines(result)[0] == f"note: {counted}"
    assert result.to_json()["notes"] == [counted]
    assert any(counted in line for line in markdown.markdown_lines(result)[:8])
    page = html.page(result)
    assert counted in page[: page.index("<table")]


def test_nan_that_a_weight_brings_is_no_step(golden):
    def weights(w):
        w["model.layers.1.mlp.down_proj"][3, 5] = np.nan

    result = compare(golden, capture(weights=weights))
    assert modules(result) == ["model.layers.1.mlp.down_proj"]
    assert result.origins[0]["nonfinite"] == 0
    assert not any("NaN" in note for note in result.notes)


def test_nan_of_golden_alone_is_no_step_of_mine(golden):
    faulty = capture(faults={"model.layers.1.self_attn.o_proj": not_a_number(lambda at: at == 3)})
    result = compare(faulty, golden)
    assert modules(result) == ["model.layers.1.self_attn.o_proj"]
    assert result.origins[0]["nonfinite"] == 0


FORBIDDEN = list(range(0, 64, 2))
GREEDY = SamplingParameters(temperature=0.0, digest="greedy")
PENALISED = SamplingParameters(temperature=0.0, repetition=1.7, digest="1.7")
OTHERS = replace(PENALISED, repetition=1.0, allowed=tuple(range(1, 64, 2)), digest="odd")


def masked(forbidden=FORBIDDEN, digest="0" * 32, **more):
    return {"mask": {11: (Mask(("a grammar",), digest), forbidden)}, **more}


def penalised(logits, ids, prompt, size=1.7):
    """Repetition, of the prompt and all that was generated."""
    out = np.asarray(logits, np.float32).copy()
    seen = sorted(set(ids))
    out[seen] = np.where(out[seen] > 0, out[seen] / np.float32(size), out[seen] * np.float32(size))
    return out


def asks(process, what=PENALISED):
    return {"asks": what, "process": process}


PENALTIES = asks(penalised)
FORGETFUL = asks(lambda z, ids, n: penalised(z, ids[:n], n))  # the same without what was generated
LOUDER = asks(lambda z, ids, n: penalised(z, ids, n) + 0.5)  # changes no order, and follows from no processor
ODD_ONLY = asks(lambda z, ids, n: np.where(np.arange(64) % 2 == 0, -np.inf, z), OTHERS)
WRONG = {"asks": GREEDY, "sampler": lambda best, at: np.where(at == 11, (best + 7) % 64, best)}
SAMPLED = {
    "follows from a fault": ({}, {"faults": {"model.norm": lambda v, p, d: v[:, ::-1]}}, ["model.norm"],
                             {"logits differ beyond the limit"}, ""),
    "a grammar of mine": ({}, masked(), [], {"logits were masked"},
                          "logits were masked by a grammar in mine only (request 'a', generated token 3"),
    "a grammar of golden": (masked(), {"mask": {}}, [], {"logits were masked"},
                            "logits were masked by a grammar in golden only"),
    "one grammar": (masked(), masked(), [], set(), ""),
    "wrong under one grammar": (masked(), masked(sampler=lambda best, at: np.where(at == 11, 2, best)), ["sampler"],
                                {"sampler"}, ""),
    # The same grammar, by its hash, and another set of tokens left.
    "a mask that is not applied": (masked(), masked([]), ["sampler"], {"sampler"}, ""),
    "another grammar": (masked(), masked([], "1" * 32), [], {"logits were masked"},
                        "logits were masked by a grammar on both sides, otherwise in mine than in golden"),
    "penalties": (PENALTIES, PENALTIES, [], set(), ""),
    "penalties of the prompt alone": (
        PENALTIES, FORGETFUL, ["sampler"], None, "logits processor: penalties; as if nothing had been generated yet"),
    "golden's penalties": (FORGETFUL, PENALTIES, ["sampler"], {"logits processor of golden"}, "in golden: "),
    "a wrong processor and no flip": (PENALTIES, LOUDER, ["sampler"], set(),
                                      "Sampler: what reached it does not follow from the model's logits"),
    "other parameters": (
        PENALTIES, ODD_ONLY, [], {"other sampling parameters"}, "request 'a', and 2 more requests: other sampling "
        "parameters (repetition 1.7 in golden, 1.0 in mine; allowed): flipped tokens are not judged"),
    # Without the request's parameters its tokens would count as drawn at random.
    "golden's sampler": (WRONG, {"asks": GREEDY}, ["sampler"], {"sampler of golden"}, "in golden: greedy, and token "),
}  # fmt: skip
"""What the two sides do; the origins; why tokens flip; words of a note, or of the origin's class and shape."""


@pytest.mark.parametrize(("golden", "mine", "named", "why", "words"), SAMPLED.values(), ids=SAMPLED)
def test_whose_fault_a_flipped_token_is(golden, mine, named, why, words):
    result = compare(capture(**golden), capture(**mine))
    assert modules(result) == named
    assert result.verdict == ("fail" if named else "pass")
    if why is not None:
        assert {f["why"] for f in result.tokens["flipped"]} == why
    texts = [*result.notes, *(f"{o['class']}: {o['shape']}" for o in result.origins)]
    assert all(any(part in text for text in texts) for part in words.split("; as if ") if words), texts


def test_tokens_sampled_at_random_are_not_judged():
    def dice(best, at):
        return (best + at) % 64

    def other(best, at):
        return (best + 2 * at) % 64

    result = compare(capture(sampler=dice), capture(sampler=other))
    assert result.verdict == "pass"
    assert {f["why"] for f in result.tokens["flipped"]} == {"sampled at random"}
    assert result.notes == ["3 requests were not sampled greedily: their flipped tokens are not judged"]
    tokens = Counter((p.status, p.message) for p in result.pairs if (p.tap, p.role) == (SAMPLER, TOKEN))
    unjudged = "not judged: sampled at random"
    assert tokens[SKIP, unjudged] == result.coverage["skipped"][unjudged] > 0
    assert result.coverage["skipped"]["flipped tokens: sampled at random"] == 3


def test_a_run_of_nothing_but_tokens_at_random_is_not_compared() -> None:
    """And one whose tokens are all there is to compare is no pass because some of them are equal by chance."""
    sides = [capture(sampler=lambda best, at, k=k: (best + k * (at + 1)) % 64) for k in (1, 2)]
    for side in sides:
        side.records = [r for r in side.records if r.tap == SAMPLER and r.step is not None]
    found = compare(*sides)
    assert {p.status for p in found.pairs if p.role == TOKEN} == {SKIP}
    for side in sides:
        side.records = [r for r in side.records if r.role == TOKEN]
    with pytest.raises(NothingCompared, match="not judged"):
        compare(*sides)


@pytest.mark.parametrize("flipped", [1, 4])
def test_tokens_alone_that_all_flip_without_logits_are_nothing_compared(flipped):
    def dump(**how):
        made = capture(prompts={"a": PROMPTS["a"]}, **how)
        made.records = [r for r in made.records if (r.tap, r.role) == (SAMPLER, TOKEN)]
        return made

    prompt = len(PROMPTS["a"])
    other = dump(sampler=lambda best, at: np.where(at >= prompt + 3 - flipped, best + 1, best))
    if flipped < 4:
        assert compare(dump(), other).verdict == "pass"
        return
    with pytest.raises(NothingCompared, match="nothing could be compared: not judged: no logits recorded"):
        compare(dump(), other)


def test_a_fault_in_a_row_that_another_request_reads_from_the_cache():
    """b reads positions 0-3 from a's cache; a's fault there is not blamed on what b computes later."""
    prompts = {"a": [4, 4, 2, 8, 1, 9], "b": [4, 4, 2, 8, 30, 31]}
    golden = capture(prompts=prompts, together=False)
    fault = scaled(2.0, lambda at, decode: at == 2)
    tiny = Tiny(faults={"model.layers.0.self_attn.o_proj": fault})
    for name, prompt in prompts.items():
        tiny.request(name, prompt)
    tiny.step([("a", 6, [])])
    tiny.share("b", "a", 4)
    result = compare(golden, tiny.finish())
    assert modules(result) == ["model.layers.0.self_attn.o_proj"]
    assert result.origins[0]["request"] == "a"


def _routed(dump: MemoryDump, alone: bool) -> MemoryDump:
    """With chosen experts of prompts' rows. alone: of other rows only the sampler's tensors."""
    prompts = {at[1] for at, of in dump.rows.items() if at[2] == "tokens" and of.segments[0].phase == PREFILL}
    for step in prompts:
        n = dump.rows[0, step, "tokens"].n
        dump.add(0, step, "model.layers.0.mlp", "input.topk_ids", np.tile([1, 3], (n, 1)), "int32", 12, "tokens")
    if alone:
        dump.records = [r for r in dump.records if r.tap == "sampler" or r.step in prompts or r.step is None]
    return dump


@pytest.mark.parametrize(
    ("alone", "factor", "verdict", "why"),
    [(False, 1.5, "fail", UPSTREAM), (False, np.nan, "fail", UPSTREAM), (True, 1.5, "pass", UNROUTED),
     (True, np.nan, "fail", UPSTREAM)],
)  # fmt: skip
def test_best_logits_of_rows_whose_experts_were_not_compared(
    alone: bool, factor: float, verdict: str, why: str
) -> None:
    """Not judged, which is counted and said, where no module of these rows was compared; NaN is."""

    def fault(values: np.ndarray, positions: np.ndarray, decode: np.ndarray) -> np.ndarray:
        return np.where(decode[:, None], np.roll(values * np.float32(factor), 1, axis=1), values)

    dumps = [_routed(capture(together=False, faults=faults), alone) for faults in ({}, {"compute_logits": fault})]
    found = compare(*dumps)
    assert found.verdict == verdict
    assert {flip["why"] for flip in found.tokens["flipped"]} == {why}
    assert found.coverage["skipped"].get(NOT_COMPARED, 0) == (3 if why == UNROUTED else 0)
    assert any("their experts were not compared" in note for note in found.notes) is (why == UNROUTED)
    decoded = {p.role: (p.status, p.message) for p in found.pairs if p.tap == SAMPLER and p.phase == DECODE}
    if why == UNROUTED:  # a pair without a judged row is no pass
        assert decoded == {TOKEN: (SKIP, "not judged: experts not compared"), TOP_LOGITS: (SKIP, NONE_JUDGED)}
        counts = found.counts.skip_reasons
        assert {reason: found.coverage["skipped"].get(reason) for reason in counts} == counts
    else:
        assert SKIP not in {status for status, _ in decoded.values()}
