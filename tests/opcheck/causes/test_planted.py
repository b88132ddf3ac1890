"""Planted faults: each cause planted alone, by torch and not by the cause itself, is said, and no other; of faults of
no family, and of right outputs, nothing is said."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opcheck import planted_addresses, planted_precision
from opcheck.cause_calls import (
    HEAD,
    HEADS,
    KV,
    ROWS,
    TABLE,
    WIDTH,
    attention,
    captured,
    drawn,
    experts,
    explained,
    gate,
    gated,
    given,
    honest,
    layer_norm,
    linear,
    names,
    norm,
    product,
    with_output,
    wrong_experts,
    wrong_rotary,
)
from support.truncated import truncated

from vllm_accprobe.opcheck.causes import addresses
from vllm_accprobe.opcheck.causes.api import FACTOR, Guess, Trial, cause, default_causes, marked
from vllm_accprobe.opcheck.causes.examine import Causes
from vllm_accprobe.opcheck.causes.search import Proof
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.attention import alibi_slopes


def rms(x: Any, weight: Any, eps: float) -> Any:
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def wrong_norm(eps: float = 1e-5, add: float = 1.0, one: float = 0.0, weigh: float = 1.0, cls: str = "RMSNorm") -> Call:
    one += 1.0 if cls == "GemmaRMSNorm" else 0.0
    return given(norm(cls=cls), lambda x, r, w: (rms(x + add * r, weigh * w + one, eps), x + add * r),
                 "x", "residual", "weight")  # fmt: skip


def norm_of(y: Callable[[Any, Any], Any]) -> Call:
    """A norm without residual that gives ``y(x, weight)``, float64."""
    return given(norm(residual=False), y, "x", "weight")


def by_root(root: Callable[[Any], Any]) -> Call:
    return norm_of(lambda x, w: x / root(x) * w)


def wrong_layer(y: Callable[[Any, Any, Any], Any], rows: int = ROWS) -> Call:
    return given(layer_norm(rows=rows), y, "input", "weight", "bias")


def neighbours_scales() -> Call:
    """A product with weights of 8 bits, whose rows' input scales are those of the rows before."""
    call = linear()
    weight, bias = call.params["weight"].double(), call.params["bias"].double()
    scale = (weight.abs().amax(1, keepdim=True) / 127.0).float()
    params = {**call.params, "weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}
    size = call.inputs["input_"].double().abs().amax(1, keepdim=True)
    return other_output(replace(call, params=params), lambda y: (y - bias) * (size.roll(1, 0) / size) + bias)


def other_output(call: Call, y: Callable[[Any], Any]) -> Call:
    """``call`` with its right output changed before it is rounded."""
    found = TABLE.evaluate(call)
    assert isinstance(found, dict)
    return with_output(call, y(found["output.0"].value), *(found[r].value for r in found if r == "output.1"))


def zeroed(first: int, stop: int) -> Callable[[Any, Any], tuple[Any, Any]]:
    def change(k: Any, v: Any) -> tuple[Any, Any]:
        k[first:stop], v[first:stop] = 0, 0
        return k, v

    return change


def four_bits(t: Any) -> Any:
    """bfloat16, then the nearest number of four bits."""
    step = 2.0 ** (t.bfloat16().double().abs().clamp(min=1e-30).log2().floor() - 3)
    return (t.bfloat16().double() / step).round() * step


def by_place(call: Call) -> Call:
    """Its inputs as those of a forward that takes ``*args``."""
    return replace(call, inputs={str(k): t for k, t in enumerate(call.inputs.values())})


def other_scores(tied: int) -> Call:
    """Experts weighed by sigmoids. tied: rows whose second and third logit are so close that softmax, to which their
    difference is larger, has a reference for them, and sigmoid has none."""
    call = experts()
    logits = call.extra["router_logits"].double()
    top = logits.topk(3, -1)
    logits[:tied].scatter_(1, top.indices[:tied, 2:], top.values[:tied, 1:2] - 2.0**-6)
    scores = torch.sigmoid(logits)
    ids = logits.topk(2, -1).indices
    weights = scores.gather(1, ids)
    inputs = {**call.inputs, "topk_ids": ids, "topk_weights": (weights / weights.sum(-1, keepdim=True)).float()}
    return honest(replace(call, inputs=inputs, extra={"router_logits": logits.bfloat16()}), (len(ids), WIDTH))


TURNED = [h % KV for h in range(HEADS)]


def centred(x: Any) -> Any:
    return x - x.mean(-1, keepdim=True)


def other_positions() -> Call:
    table, at = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.arange(3, 23)
    call = Call("positions", "OPTLearnedPositionalEmbedding", {"positions": at}, params={"weight": table})
    return with_output(call, table[at])


PLANTED: dict[str, tuple[Callable[[], Call], str]] = {
    "no epsilon": (lambda: wrong_norm(eps=0.0), "no_epsilon"),
    "other epsilon": (lambda: wrong_norm(eps=1e-6), "other_epsilon"),
    "fitted epsilon": (lambda: wrong_norm(eps=2.3e-4), "other_epsilon"),
    "epsilon behind": (lambda: by_root(lambda x: (x * x).mean(-1, keepdim=True).sqrt() + 1e-5), "epsilon_behind_root"),
    "skipped": (lambda: norm_of(lambda x, w: x * w), "norm_skipped"),
    "sum": (lambda: by_root(lambda x: ((x * x).sum(-1, keepdim=True) + 1e-5).sqrt()), "sum_for_mean"),
    "by parts": (
        lambda: norm_of(lambda x, w: rms(x.unflatten(-1, (4, -1)), torch.ones(()), 1e-5).flatten(-2) * w),
        "norm_by_parts",
    ),
    "one part": (
        lambda: by_root(lambda x: ((x * x)[:, 16:32].mean(-1, keepdim=True) + 1e-5).sqrt()), "mean_of_one_part",
    ),
    "divisor": (lambda: by_root(lambda x: ((x * x).sum(-1, keepdim=True) / 80 + 1e-5).sqrt()), "other_divisor"),
    "no weight": (lambda: wrong_norm(weigh=0.0, one=1.0), "no_weight"),
    "weight and one": (lambda: wrong_norm(one=1.0), "weight_and_one"),
    "weight without one": (lambda: wrong_norm(one=-1.0, cls="GemmaRMSNorm"), "weight_without_one"),
    "centred": (lambda: norm_of(lambda x, w: F.layer_norm(x, (WIDTH,), w, None, 1e-5)), "centred"),
    "no residual": (lambda: wrong_norm(add=0.0), "no_residual"),
    "residual twice": (lambda: wrong_norm(add=2.0), "residual_twice"),
    "not centred": (lambda: wrong_layer(lambda x, w, b: rms(x, w, 1e-5) + b), "not_centred"),
    "sample variance": (
        lambda: wrong_layer(lambda x, w, b: centred(x) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * w + b, rows=96),
        "sample_variance",  # 0.6 %, which a column of 24 rows does not show
    ),
    "no bias": (lambda: wrong_layer(lambda x, w, b: F.layer_norm(x, (WIDTH,), w, None, 1e-5)), "no_bias"),
    "bias twice": (lambda: wrong_layer(lambda x, w, b: F.layer_norm(x, (WIDTH,), w, 2 * b, 1e-5)), "bias_twice"),
    "gelu": (lambda: gate(lambda a, b: F.gelu(a) * b), "other_gate"),
    "erf for tanh": (lambda: gate(lambda a, b: F.gelu(a) * b, "GeluAndMul"), "other_gate"),
    "relu": (lambda: gate(lambda a, b: a.relu() * b), "other_gate"),
    "exchanged": (lambda: gate(lambda a, b: F.silu(b) * a), "halves_exchanged"),
    "interleaved": (
        lambda: gate(lambda a, b: F.silu(torch.cat((a, b), -1)[:, ::2]) * torch.cat((a, b), -1)[:, 1::2]),
        "interleaved",
    ),
    "up alone": (lambda: gate(lambda a, b: b), "up_alone"),
    "gate alone": (lambda: gate(lambda a, b: F.silu(a)), "gate_alone"),
    "both activated": (lambda: gate(lambda a, b: F.silu(a) * F.silu(b)), "both_activated"),
    "argument": (lambda: gate(lambda a, b: F.silu(1.13 * a) * b), "scaled_gate"),
    "slope": (lambda: gate(lambda a, b: a * torch.sigmoid(1.4 * a) * b), "sigmoid_slope"),
    "limit": (lambda: gate(lambda a, b: F.silu(a.clamp(max=3.0)) * b.clamp(-3.0, 3.0)), "clamped"),
    "linear bias": (lambda: product(lambda x, w, b: x @ w.T), "no_bias"),
    "linear bias twice": (lambda: product(lambda x, w, b: x @ w.T + 2 * b), "bias_twice"),
    "part of bias": (lambda: product(lambda x, w, b: x @ w.T + 0.7 * b), "bias_times"),
    "short": (lambda: product(lambda x, w, b: x[:, :-3] @ w[:, :-3].T + b), "short"),
    "no soft cap": (lambda: attention(cap=5.0, spread=2.0, used={"cap": 0.0}), "no_soft_cap"),
    "other soft cap": (lambda: attention(cap=5.0, spread=2.0, used={"cap": 8.0}), "other_soft_cap"),
    "scale of the head": (lambda: attention(used={"scale": HEAD**-0.5}), "other_scale"),
    "fitted scale": (lambda: attention(used={"scale": 0.227}), "other_scale"),
    "fitted scale, cut off": (lambda: attention(used={"scale": 0.227}, rounded=truncated), "other_scale"),
    "one key late": (lambda: attention(read=lambda k, v: (k[:-1], v[:-1], 39)), "own_key_unread"),
    "keys of this step alone": (lambda: attention(read=lambda k, v: (k[40:], v[40:], 0)), "past_unread"),
    "scale of 8-bit keys": (lambda: attention(used={"scale": 0.4}, eight=True), "keys_at_other_scale and other_scale"),
    "no window": (lambda: attention(window=24, used={"window": 0}), "no_window"),
    "window off by one": (lambda: attention(window=24, used={"window": 25}), "other_window"),
    "found window": (lambda: attention(used={"window": 37}), "other_window"),
    "no sinks": (lambda: attention(sinks=True, used={"sinks": None}), "no_sinks"),
    "no slopes": (lambda: attention(slopes=alibi_slopes(HEADS).tolist(), used={"slopes": None}), "no_slopes"),
    "slopes of more heads": (lambda: attention(slopes=alibi_slopes(2 * HEADS)[:HEADS].tolist()), "own_slopes"),
    "learned positions from the first row": (other_positions, "other_offset"),
    "key heads in turn": (lambda: attention(used={"order": TURNED}), "heads_in_turn"),
    "heads shifted": (
        lambda: other_output(attention(), lambda y: y.unflatten(1, (HEADS, HEAD)).roll(1, 1).flatten(1)),
        "heads_shifted",
    ),
    "block of zeros": (lambda: attention(past=zeroed(16, 32)), "positions_not_written"),
    "a zero of each of two": (lambda: attention(past=zeroed(33, 34), other=zeroed(4, 5)), "positions_not_written"),
    "one zero": (lambda: attention(past=zeroed(33, 34)), "positions_not_written"),
    "keys for values": (lambda: attention(past=lambda k, v: (k, k)), "keys_for_values"),
    "base": (lambda: wrong_rotary(base=1e6), "other_base"),
    "fitted base": (lambda: wrong_rotary(base=14000.0), "other_base"),
    "half of the channels": (lambda: wrong_rotary(dim=HEAD // 2), "other_dim"),
    "pairs of neighbours": (lambda: wrong_rotary(neighbours=True), "other_pairs"),
    "one position late": (lambda: wrong_rotary(positions=lambda p: p - 1), "position_off"),
    "positions as one run": (lambda: wrong_rotary(positions=lambda p: torch.arange(len(p)) + p[0]), "one_run"),
    "angles": (lambda: wrong_rotary(positions=lambda p: 1.01 * p), "angles_times"),
    "backwards": (lambda: wrong_rotary(positions=lambda p: -p), "backwards"),
    "end of a table": (lambda: wrong_rotary(positions=lambda p: p.clamp(max=35.0)), "positions_end"),
    "coarse table": (lambda: wrong_rotary(table=four_bits), "coarse_table"),
    "key as it is": (lambda: wrong_rotary(key=lambda p: 0 * p), "not_turned"),
    "key as it is, by place": (lambda: by_place(wrong_rotary(key=lambda p: 0 * p)), "not_turned"),
    "scores of a router": (lambda: other_scores(0), "other_scoring"),
    "scores of a router, some tied": (lambda: other_scores(3), "other_scoring"),
    "experts shifted": (lambda: wrong_experts(ids=lambda i: (i + 2) % 6), "experts_shifted"),
    "experts' gelu": (lambda: wrong_experts(act=F.gelu), "expert_activation"),
    "experts exchanged": (lambda: wrong_experts(exchanged=True), "expert_halves_exchanged"),
    "weights on input": (lambda: wrong_experts(on_input=True), "weights_on_input"),
    "one expert": (lambda: wrong_experts(fewer=1), "fewer_experts"),
    "weights twice": (lambda: wrong_experts(weights=lambda w: w * w), "weights_twice"),
    "no weights": (lambda: wrong_experts(weights=torch.ones_like), "no_weights"),
    "without an expert": (lambda: wrong_experts(missing=4), "expert_missing"),
    "all": (lambda: other_output(linear(), lambda y: 1.05 * y), "all_times"),
    "half": (lambda: other_output(linear(), lambda y: 0.5 * y), "all_times"),
    "nothing": (lambda: other_output(linear(), lambda y: 0.0 * y), "never_written"),
    "plus": (lambda: other_output(linear(), lambda y: y + 0.3), "plus"),
    "a head": (
        lambda: other_output(attention(), lambda y: y * torch.ones(HEADS, HEAD).index_fill(
            0, torch.tensor([3]), 1.2).flatten()), "columns_times",
    ),
    "columns": (
        lambda: other_output(linear(), lambda y: y * torch.ones(48).index_fill(0, torch.arange(8, 16), 1.1)),
        "columns_times",
    ),
    "lost columns": (
        lambda: other_output(linear(), lambda y: y * torch.ones(48).index_fill(0, torch.arange(32, 48), 0.0)),
        "columns_lost",
    ),
    "scales of rows": (neighbours_scales, "scales_of_neighbours"),
    "rows shifted": (lambda: other_output(linear(), lambda y: y.roll(1, 0)), "rows_shifted"),
}  # fmt: skip
"""Name → (a wrong call, the cause's name; two where they are the same edit)."""


TABLES = (PLANTED, planted_addresses.PLANTED, planted_precision.PLANTED)
EACH = {name: row for table in TABLES for name, row in table.items()}
assert len(EACH) == sum(map(len, TABLES)), "two plants of one name"


@pytest.mark.parametrize("name", EACH)
def test_planted_cause_is_said_and_no_other(name: str) -> None:
    make, cause, *parameter = EACH[name]
    found = explained(make())
    assert names(found) == set(cause.split(" and ")), found and found.text
    assert found is not None
    said = [f.guess.value if isinstance(f.guess.value, tuple) else (f.guess.value,) for f in found.found]
    words = [" ".join(map(str, parts)) for parts in said]
    assert all(any(p in w for w in words) for p in parameter), words
    assert found.chance <= 1e-3


@pytest.mark.parametrize(
    "make", [norm, layer_norm, gated, linear, attention, lambda: attention(rounded=truncated),
             *planted_addresses.RIGHT, *planted_precision.RIGHT],
)  # fmt: skip
def test_right_call_has_no_cause(make: Any) -> None:
    call = make()
    call = call if call.outputs else honest(call, *_shapes(call))
    assert explained(call) is None


def _shapes(call: Call) -> list[tuple[int, ...]]:
    rows = len(next(iter(call.inputs.values())))
    if call.cls == "RMSNorm":
        return [(rows, WIDTH), (rows, WIDTH)]
    return [(rows, 48)] if "Linear" in call.cls else [(rows, WIDTH)]



@pytest.mark.parametrize("lost", ["nan", "extra", "attrs", "inputs"])
def test_a_cause_never_costs_the_verdict(lost: str) -> None:
    call = attention(used={"scale": 1.0})
    nan = call.outputs["output.0"].clone()
    nan[3] = float("nan")
    assert explained(replace(call, **({"outputs": {"output.0": nan}} if lost == "nan" else {lost: {}}))) is None


def test_fault_of_some_rows_is_said_of_these() -> None:
    """Rows from the tenth on, of one call, beside a right call."""
    right = honest(linear(), (24, 48))
    wrong = other_output(linear(), lambda y: torch.where(torch.arange(24)[:, None] >= 10, 1.05 * y, y))
    found = explained(wrong, replace(right, name=wrong.name))
    assert names(found) == {"all_times"}
    assert found is not None
    assert found.text.startswith("in the 14 rows of 48 examined that are wrong, mine's output is what this Column")


def test_stale_row_is_said() -> None:
    wrong = other_output(linear(), lambda y: torch.where(torch.arange(24)[:, None] == 7, y.roll(1, 0), y))
    assert names(explained(wrong)) == {"rows_of_others"}


def test_cause_that_holds_in_one_call_alone_is_not_said() -> None:
    first = other_output(linear(), lambda y: 1.05 * y)
    second = other_output(linear(seed=5), lambda y: 1.2 * y)
    assert explained(first, second) is None


def test_too_few_numbers_prove_nothing() -> None:
    wrong = other_output(linear(rows=1), lambda y: y)
    one = wrong.outputs["output.0"].clone()
    one[0, 5] *= 1.5
    assert explained(replace(wrong, outputs={"output.0": one})) is None


def test_chance_counts_fits_and_tries() -> None:
    proof = Proof(moved=20, before=2000.0, after=20.0)
    fixed, fitted = (proof.log_chance(Guess(0.0, fitted=n), 1.0) for n in (0, 2))
    assert fixed < fitted < 0
    assert proof.log_chance(Guess(0.0), 100.0) == pytest.approx(fixed + math.log(100.0))
    assert Proof(moved=1, before=2000.0, after=1.0).log_chance(Guess(0.0), 1.0) == 0.0


def test_golden_value_is_no_fit() -> None:
    call = attention(used={"scale": 0.31})
    found = explained(call, golden={"scale": 0.31})
    assert found is not None
    assert found.found[0].guess.fitted == 0
    assert found.plain()["parameter"] == 0.31


def test_known_cause_is_confirmed_in_the_next_layer() -> None:
    causes = Causes(TABLE, seconds=None)
    first, second = (attention(seed=s, cap=5.0, spread=2.0, used={"cap": 0.0}) for s in (0, 20))
    assert causes.of_calls([captured(first)]) is not None
    found = causes.of_calls([captured(replace(second, name="layers.1.attn"))])
    assert found is not None
    assert found.tried == 1.0
    assert "without its soft cap of 5" in found.text


def test_plain_json_survives_a_replay_file() -> None:
    found = explained(other_output(linear(), lambda y: 1.05 * y))
    assert found is not None
    plain = json.loads(json.dumps(found.plain()))
    assert set(plain) == {"family", "text", "parameter", "residual", "chance"}
    assert plain["family"] == "factor"
    assert 0.0 < plain["residual"] <= 1.0


@pytest.mark.parametrize("whole", [False, True])
def test_what_fails_on_a_few_rows_is_not_examined_on_all(whole: bool) -> None:
    seen: list[int] = []

    @cause(FACTOR, "ColumnParallelLinear", text="doubled", whole=whole)
    def doubled(trial: Trial, _: Any) -> Any:
        seen.append(len(trial.mine()))
        return trial.plain["output.0"].value * 2.0

    wrong = other_output(linear(), lambda y: 1.05 * y)
    assert explained(wrong, causes=marked(doubled)) is None
    assert len(wrong.outputs["output.0"]) == 24
    (rows,) = seen
    assert rows == 24 if whole else rows <= 8  # the worst four and four between, some of which may be the same


@pytest.mark.parametrize("error", [KeyError("router"), ZeroDivisionError("by 0"), StopIteration()])
def test_a_cause_that_raises_is_a_problem(error: Exception) -> None:
    """Its own, and no verdict's: what holds is said."""

    @cause(FACTOR, "*", text="broken", values=lambda trial: [1, 2])
    def broken(trial: Trial, _: Any) -> Any:
        raise error

    @cause(FACTOR, "*", text="declined")
    def declined(trial: Trial, _: Any) -> Any:
        raise Declined("it does not apply")

    half = [c for c in default_causes()[0] if c.name == "all_times"]
    causes = Causes(TABLE, seconds=None, causes=[*marked(broken), *marked(declined), *half])
    found = causes.of_calls([captured(other_output(linear(), lambda y: 0.5 * y))])
    assert names(found) == {"all_times"}
    (said,) = causes.problems()
    assert said.startswith(f"the cause {__name__}.broken failed, at first in layers.0.proj: {type(error).__name__}")
    assert causes.problems(counted=True) == [f"{said} (2 tries)"]


MAKERS: dict[str, Callable[[], Call]] = {
    "norm": lambda: norm(residual=False), "layer norm": layer_norm, "gate": gated, "linear": linear,
    "attention": attention, "views": lambda: planted_addresses.fused_qkv("value"),
}  # fmt: skip


def noise(y: Any, size: float, seed: int = 3) -> Any:
    return drawn(seed, *y.shape, dtype=torch.float64) * size


def bit_flipped(y: Any) -> Any:
    bits = y.bfloat16().view(torch.int16).clone()
    bits[5, 7] ^= 1 << 9
    return bits.view(torch.bfloat16).double()


def half_of_a_row(y: Any) -> Any:
    out = y.clone()
    out[4, ::2] += noise(out, 0.3)[4, ::2]
    return out


def random_columns(y: Any) -> Any:
    return y * (1.0 + 0.2 * noise(y, 1.0)[0])


def mixed(y: Any) -> Any:
    out = y.clone()
    out[::2] *= 1.0 + 0.1 * noise(out, 1.0)[::2, :1]
    return out + 0.02 * noise(y, 1.0, 5).abs()


FAULTS: dict[str, Callable[[Any], Any]] = {
    "noise": lambda y: y * (1.0 + noise(y, 0.05)), "more noise": lambda y: y + noise(y, 0.3) * y.abs().mean(),
    "random columns": random_columns, "mixed": mixed, "bit flipped": bit_flipped, "half of a row": half_of_a_row,
    "sorted": lambda y: y.sort(-1).values, "clipped softly": lambda y: 2.0 * torch.tanh(y / 2.0) + noise(y, 0.03),
    "rows at random": lambda y: y[torch.tensor([(7 * k + 3) % len(y) for k in range(len(y))])],
}  # fmt: skip


def test_a_call_whose_input_was_no_view_is_as_it_is() -> None:
    """The calls of one tap need not all have views."""
    call = norm(residual=False)
    contiguous = replace(call, inputs={"x": next(iter(call.inputs.values()))})
    for strides, offset in ((True, False), (False, True), (True, True)):
        edit: Any = addresses.misread(strides, offset)
        assert edit(SimpleNamespace(call=contiguous), ("x", "[8, 4, 1]", 4)) is contiguous
        with pytest.raises(Declined, match="no such input"):
            edit(SimpleNamespace(call=replace(call, inputs={})), ("x", "[8, 4, 1]", 4))


@pytest.mark.parametrize("operator", MAKERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_no_family_has_no_cause(operator: str, fault: str) -> None:
    call = MAKERS[operator]()
    call = call if call.outputs else with_output(call, torch.zeros(_shapes(call)[0]))
    found = TABLE.evaluate(call)
    assert isinstance(found, dict)
    said = explained(with_output(call, FAULTS[fault](found["output.0"].value)))
    assert said is None, said.text
