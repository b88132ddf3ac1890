"""Planted faults of addresses: something that torch computed rightly is read from, or written to, a wrong place; and of
what only a block, a latent cache, positions of several sections or a sampler have."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from opcheck.cause_calls import (
    HEAD,
    HEADS,
    KV,
    WIDTH,
    attention,
    drawn,
    gated,
    given,
    linear,
    norm,
    product,
    rotary,
    softmax,
    turned,
    with_output,
    wrong_experts,
    wrong_rotary,
)

from vllm_accprobe.align.tokens import SampledRow
from vllm_accprobe.dump.block_code import FORWARD
from vllm_accprobe.dump.schema import Request, RowSpace, SamplingParameters, Segment
from vllm_accprobe.judge import sampling_rules
from vllm_accprobe.opcheck.calls import sampler_calls
from vllm_accprobe.opcheck.calls.neighbours import Past
from vllm_accprobe.opcheck.calls.views import by_place, view_of
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.linear import RowAdapters

EPS = 1e-5


def square() -> Call:
    call = linear()
    return replace(call, params={"weight": drawn(7, WIDTH, WIDTH, scale=0.2), "bias": drawn(8, WIDTH)})


def of_rows(change: Callable[[Any], Any]) -> Call:
    return product(lambda x, w, b: change(x @ w.T + b))


def assigned(y: Any, at: Any, value: Any) -> Any:
    out = y.clone()
    out[at] = value
    return out


def written_into(memory: Any, view: Any, strides: bool = False) -> Call:
    """A product whose output is ``view`` of ``memory``; its kernel writes the rows without gaps, or by the strides."""
    call = product(lambda x, w, b: x @ w.T + b)
    y = call.outputs["output.0"]
    (view if strides else memory.flatten()[view.storage_offset() :][: y.numel()].view(y.shape)).copy_(y)
    return replace(call, outputs={"output.0": view})


def norm_of_a_view(first: int, layout: str = "", epsilon: float = EPS) -> Call:
    """q's or k's norm by heads, whose kernel takes the rows of qkv for rows without gaps. first: the view's head;
    layout: "strides" were captured, or the "memory" is known as well; "offset": that alone is not added."""
    heads, tokens, whole = HEADS if not first else KV, 40, HEADS + 2 * KV
    memory = drawn(3, tokens, whole, HEAD)
    view = memory[:, first : first + heads]
    read = memory.flatten()[first * HEAD :][: view.numel()].reshape(view.shape).double()
    read = memory[:, :heads].double() if layout == "offset" else read
    weight = drawn(4, HEAD) + 2.0
    call = Call("layers.0.self_attn.q_norm", "RMSNorm", {"x": view.contiguous()}, params={"weight": weight},
                attrs={"variance_epsilon": epsilon}, parent={"num_heads": HEADS, "num_kv_heads": KV})  # fmt: skip
    known = memory.flatten() if layout in ("memory", "offset") else None
    found = view_of(view.shape, view.stride(), view.storage_offset(), known)
    if layout and found is not None:
        call = replace(call, views={"inputs.x": found}, parent={})
    return with_output(call, F.rms_norm(read, (HEAD,), weight.double(), epsilon))


def as_contiguous(call: Call, place: str, view: Any, y: Callable[[Any], Any], begin: int | None = None) -> Call:
    """``call``, whose input or argument is ``view``; the kernel ``y`` takes it for contiguous, and to begin at element
    ``begin`` of its storage."""
    size = view.untyped_storage().nbytes() // view.element_size()
    memory = torch.cat((view.as_strided((size,), (1,), 0), drawn(9, view.numel())))  # what lies behind is nobody's
    read = memory[view.storage_offset() if begin is None else begin :][: view.numel()].reshape(view.shape)
    lies = view_of(view.shape, view.stride(), view.storage_offset())
    call = by_place(call, lambda t, at: view.contiguous() if at == place else t)
    return with_output(replace(call, views={} if lies is None else {place: lies}), y(read.double()))


def product_of(view: Any, begin: int | None = None) -> Call:
    call = linear()
    weight, bias = (call.params[n].double() for n in ("weight", "bias"))
    return as_contiguous(call, "inputs.input_", view, lambda x: x @ weight.T + bias, begin)


def gate_of_a_transpose() -> Call:
    view = drawn(1, 2 * WIDTH, 24).t()
    return as_contiguous(gated(), "inputs.x", view, lambda x: F.silu(x[:, :WIDTH]) * x[:, WIDTH:])


def norm_operator() -> Call:
    """torch.ops._C.rms_norm(out, input, weight, epsilon) of half of each row."""
    view, weight = drawn(1, 24, 2, WIDTH)[:, 1], drawn(2, WIDTH) + 2.0
    call = Call("op", "torch.ops._C.rms_norm", args=(torch.zeros(24, WIDTH), view, weight, EPS))
    found = as_contiguous(call, "args.1", view, lambda x: F.rms_norm(x, (WIDTH,), weight.double(), EPS))
    return replace(found, outputs={"inplace.input.0": found.outputs["output.0"]})


def fused_qkv(name: str) -> Call:
    """Attention whose query, key and value are parts of one tensor's rows; the kernel takes one for contiguous."""
    call = of_two(lambda own, other: own)
    memory, first = torch.cat([call.inputs[n] for n in ("query", "key", "value")], 1), 0
    views, read = {}, dict(call.inputs)
    for n, t in call.inputs.items():
        lies = view_of(t.shape, (memory.shape[1], 1), first)
        views |= {} if lies is None else {f"inputs.{n}": lies}
        if n == name:
            read[n] = memory.flatten()[first:][: t.numel()].reshape(t.shape)
        first += t.shape[1]
    q, k, v = (read[n].unflatten(0, (2, 64)) for n in ("query", "key", "value"))
    out = torch.cat([softmax(q[n], k[n], v[n], 0, scale=0.2) for n in range(2)])
    return with_output(replace(call, views=views), out)


CHUNKS = torch.cat((torch.arange(40, 60), torch.arange(7, 20)))


def of_two(
    read: Callable[[Any, Any], Any], scale: float = 0.2, first: Callable[[Any], Any] = lambda own: own
) -> Call:  # fmt: skip
    """Attention of two requests of 64 positions. read: what the second one's kernel found as keys (or values), of its
    own and the first one's; first: what the first one's found."""
    q, k, v = (drawn(n, 2, 64, h * HEAD) for n, h in enumerate((HEADS, KV, KV)))
    here = RowSpace(0, "tokens", 0, (Segment(0, 0, 64, 0), Segment(1, 0, 64, 0)))
    inputs = {"query": q.flatten(0, 1), "key": k.flatten(0, 1), "value": v.flatten(0, 1)}
    past = Past(("key", "value"))
    past.write(here, {n: inputs[n] for n in ("key", "value")})
    attrs = {"num_heads": HEADS, "num_kv_heads": KV, "head_size": HEAD}
    call = Call("layers.0.attn", "Attention", inputs, attrs=attrs, parent={"scaling": scale},
                extra={"cache": past.view(here)})  # fmt: skip
    out = (
        softmax(q[0], first(k[0]), first(v[0]), 0, scale=scale),
        softmax(q[1], read(k[1], k[0]), read(v[1], v[0]), 0, scale=scale),
    )
    return with_output(call, torch.cat(out))


def gathered(order: list[int]) -> Call:
    """Capped logits over 60 tokens, of ranks whose parts of 64 were put one after the other in ``order``."""
    z = drawn(6, 24, 64, scale=4.0)
    parts = z.chunk(len(order), -1)
    call = Call("logits_processor", "LogitsProcessor", {"hidden_states": drawn(7, 24, WIDTH)},
                attrs={"scale": 0.5, "soft_cap": 5.0}, extra={"lm_head": z})  # fmt: skip
    mine = torch.cat([parts[k] for k in order], -1)[:, :60].double()
    return with_output(call, 0.5 * 5.0 * torch.tanh(mine / 5.0), dtype=torch.float32)


def by_probabilities(change: Callable[[Any, Any], Any]) -> Call:
    """Attention of 64 rows. change: of the probabilities [heads, rows, keys] and the rows' positions."""
    call = of_two(lambda own, other: own)
    out = []
    for one in (slice(0, 64), slice(64, 128)):
        q, k, v = (call.inputs[n][one].double().reshape(64, -1, HEAD) for n in ("query", "key", "value"))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        s = torch.einsum("nhd,mhd->hnm", q, k) * 0.2
        s = s.masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
        out.append(torch.einsum("hnm,mhe->nhe", change(s, torch.arange(64)), v).flatten(1))
    return with_output(call, torch.cat(out))


def cut(s: Any, positions: Any) -> Any:
    whole = (positions + 1) // 16 * 16
    gone = (torch.arange(64)[None] >= whole[:, None]) & (whole > 0)[:, None]
    return torch.softmax(s.masked_fill(gone, -torch.inf), -1)


def ranks(order: list[int]) -> Call:
    """A sum over two ranks, the weights in this order."""
    parts = [replace(linear(seed=10 * n, bias=False, cls="RowParallelLinear"),
                     attrs={"tp_size": 2, "tp_rank": n, "reduce_results": True}) for n in range(2)]  # fmt: skip
    y = sum(parts[n].inputs["input_"].double() @ parts[order[n]].params["weight"].double().T for n in range(2))
    parts = [with_output(p, y) for p in parts]
    return replace(parts[0], extra={"ranks": parts})


def summed(y: Callable[[Any, Any, Any], Any], size: int = 2) -> Call:
    """A sum over ranks with a bias. y: of the ranks' parts [size, rows, 48], their sum with the bias, and the bias."""
    parts = [replace(linear(seed=10 * n, bias=True, cls="RowParallelLinear"),
                     attrs={"tp_size": size, "tp_rank": n, "reduce_results": True}) for n in range(size)]  # fmt: skip
    bias = parts[0].params["bias"].double()
    each = torch.stack([p.inputs["input_"].double() @ p.params["weight"].double().T for p in parts])
    parts = [with_output(p, y(each, each.sum(0) + bias, bias)) for p in parts]
    return replace(parts[-1], extra={"ranks": parts})


def adapted(of_row: Callable[[int], str], scaling: float = 2.0) -> Call:
    """A layer with two adapters; rows 0 to 11 ask for a, the others for b. of_row: what each row got."""
    call = linear(bias=False, cls="ColumnParallelLinearWithLoRA")
    weights = {n: {"": {"lora_a": drawn(20 + k, 4, WIDTH, scale=0.2), "lora_b": drawn(30 + k, 48, 4, scale=0.2),
                        "scaling": 2.0}} for k, n in enumerate("ab")}  # fmt: skip
    x, y = call.inputs["input_"].double(), []
    for row, base in enumerate(x @ call.params["weight"].double().T):
        own = weights[of_row(row)][""] if of_row(row) else None
        y.append(base if own is None else base + scaling * own["lora_b"].double() @ (own["lora_a"].double() @ x[row]))
    asked = RowAdapters(tuple("a" if row < 12 else "b" for row in range(len(x))), weights)
    return with_output(replace(call, extra={"adapters": asked}), torch.stack(y))


def shared(times: float = 1.0) -> Call:
    """A block of routed experts with shared ones, which it adds."""
    routed, own = drawn(1, 24, WIDTH), drawn(2, 24, WIDTH)
    call = Call("layers.0.mlp", "Qwen2MoeSparseMoeBlock", {"hidden_states": drawn(0, 24, WIDTH)}, extra={
        "children": [("experts", "output.0", routed), ("shared_expert", "output.0", own)], "read": lambda r: r})
    return with_output(call, routed.double() + times * own.double())  # fmt: skip


def handed(other: bool) -> Call:
    """A block whose MLP receives the norm's output, or what the block itself received."""
    x, normed, y = (drawn(k, 24, WIDTH) for k in range(3))
    children = [("norm", "output.0", normed), ("attn", "output.0", drawn(4, 24, WIDTH)), ("mlp", "output.0", y)]
    call = Call("layers.0", "OddLayer", {"hidden_states": x}, extra={"children": children, "read": lambda r: r},
                attrs={FORWARD: {"output.0": "mlp[0]", "inside.mlp/x": "norm[0]"}})  # fmt: skip
    return replace(call, outputs={"output.0": y, "inside.mlp/x": x if other else normed})


def latent(used: float, cap: float = 0.0, used_cap: float = 0.0) -> Call:
    """Attention over a latent cache, 24 channels of which are positions' 8; its own scale is 0.25."""
    n, heads, nope, rope, wide = 40, 4, 16, 8, 32
    q, c, pe = drawn(1, n, heads, nope + rope), drawn(2, n, wide), drawn(3, n, 1, rope)
    up_k, up_v = drawn(4, heads, nope, wide, scale=0.2), drawn(5, heads, wide, 16, scale=0.2)
    here, inputs = RowSpace(0, "tokens", 0, (Segment(0, 0, n, 0),)), {"q": q, "kv_c_normed": c, "k_pe": pe}
    past = Past(("kv_c_normed", "k_pe"))
    past.write(here, {m: inputs[m] for m in ("kv_c_normed", "k_pe")})
    call = Call("layers.0.attn", "MLAAttention", inputs, params={"W_UK_T": up_k, "W_UV": up_v},
                attrs={"scale": 0.25, "num_heads": heads} | ({"logits_soft_cap": cap} if cap else {}),
                extra={"cache": past.view(here)})  # fmt: skip
    k = torch.cat((torch.einsum("mc,hnc->mhn", c.double(), up_k.double()), pe.double().expand(-1, heads, -1)), -1)
    s = torch.einsum("nhd,mhd->hnm", q.double(), k) * used
    s = used_cap * torch.tanh(s / used_cap) if used_cap else s
    p = torch.softmax(s.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf), -1)
    return with_output(call, torch.einsum("hnm,mc,hcv->nhv", p, c.double(), up_v.double()).flatten(1))


SECTIONS = [4, 2, 2]


def sections(used: list[int], positions: Callable[[Any], Any] = lambda p: p) -> Call:
    """Rotary embeddings of an image's rows: time, row and column."""
    at = torch.stack((torch.full((30,), 9), 9 + torch.arange(30) // 6, 9 + torch.arange(30) % 6))
    call = rotary(at=torch.arange(30))
    kind = torch.repeat_interleave(torch.arange(3), torch.tensor(used))
    angle = positions(at).double()[kind].T * 10000.0 ** -(torch.arange(0, HEAD, 2).double() / HEAD)
    call = replace(call, cls="MRotaryEmbedding", inputs={**call.inputs, "positions": at},
                   attrs={**call.attrs, "mrope_section": SECTIONS})  # fmt: skip
    return given(call, lambda q, k: (turned(q, angle), turned(k, angle)), "query", "key")


def sampled(seed: Callable[[int], int] = lambda k: k, top_p: float | None = None) -> Call:
    """A sampler's call of 40 rows with seeds and filters of their own. seed: which row's is taken; top_p: of the draw,
    None for each row's own."""
    n, wide = 40, 64
    z = drawn(1, n, wide, dtype=torch.float64)
    asks = [SamplingParameters(temperature=0.7 + 0.01 * k, top_p=0.6 + 0.005 * k, seed=100 + k) for k in range(n)]
    draw = sampling_rules.by_gumbel
    rows = [sampling_rules.LogitsRow(a, z[k].numpy(), None, None, None, None, k, draw=draw) for k, a in enumerate(asks)]
    took = [replace(a, seed=asks[seed(k)].seed, top_p=top_p or a.top_p) for k, a in enumerate(asks)]
    tokens = [sampling_rules.drawn(z[k].numpy(), took[k], r) for k, r in enumerate(rows)]
    rows = [replace(r, token=0 if t is None else t) for r, t in zip(rows, tokens, strict=True)]
    history = [SampledRow(Request(k, str(k), "", "", 4, sampling=a), 4, k, None, None, False)
               for k, a in enumerate(asks)]  # fmt: skip
    call = Call("sampler", "Sampler", outputs={"output.token": torch.tensor([r.token for r in rows])})
    facts = sampler_calls._judged(call, history, rows) | {"settings": {}, "by_row": rows}
    return replace(call, extra={"sampled": {**facts, "again": lambda r: sampler_calls._judged(call, history, r)}})


def penalised() -> Call:
    """An operator that takes the repetition penalties of the row before."""
    z, tokens = drawn(1, 24, 48, dtype=torch.float32), torch.randint(0, 48, (24, 12), generator=torch.Generator())
    numbers = [torch.linspace(low, high, 24) for low, high in ((0.1, 0.9), (0.2, 0.7), (1.1, 2.0))]
    counts = torch.zeros(24, 48, dtype=torch.float64).scatter_add_(1, tokens, torch.ones(24, 12, dtype=torch.float64))
    presence, frequency, repetition = (t.double()[:, None] for t in numbers)
    repetition = repetition.roll(1, 0)
    y = torch.where(counts > 0, torch.where(z > 0, z / repetition, z * repetition), z.double())
    call = Call("op", "torch.ops._C.apply_penalties", args=(z, tokens[:, :0], tokens, *numbers))
    return with_output(call, y - frequency * counts - presence * (counts > 0), dtype=torch.float32)


PLANTED: dict[str, tuple[Callable[[], Call], str]] = {
    "another part's input": (lambda: handed(True), "other_part_handed"),
    "no shared experts": (lambda: shared(0.0), "shared_skipped"),
    "shared experts scaled": (lambda: shared(1.7), "shared_times"),
    "latent scale": (lambda: latent(24**-0.5), "other_scale"),
    "latent scale fitted": (lambda: latent(0.3), "other_scale"),
    "latent cap lost": (lambda: latent(0.25, 2.0), "no_soft_cap"),
    "latent cap": (lambda: latent(0.25, 2.0, 3.0), "other_soft_cap"),
    "text's sections": (lambda: sections([8, 0, 0]), "one_section"),
    "sections turned": (lambda: sections([2, 2, 4]), "other_sections"),
    "rows' positions in all": (lambda: sections(SECTIONS, lambda p: p[1].expand_as(p)), "one_section"),
    "seed of the next row": (lambda: sampled(lambda k: (k + 1) % 40), "parameter_of_another_row"),
    "penalties of the row before": (penalised, "argument_of_another_row"),
    "no top-p": (lambda: sampled(top_p=1.0), "parameter_left_out"),
    "row of another": (lambda: of_rows(lambda y: assigned(y, 5, y[11])), "rows_of_others"),
    "two rows": (lambda: of_rows(lambda y: assigned(y, [3, 9], y[[15, 2]])), "rows_of_others"),
    "reversed": (lambda: of_rows(lambda y: y.flip(0)), "rows_reversed"),
    "rows of neighbours": (lambda: of_rows(lambda y: y[[k ^ 1 for k in range(len(y))]]), "rows_exchanged"),
    "row before": (lambda: of_rows(lambda y: assigned(y, slice(4, 12), y[3:11])), "rows_shifted"),
    "q read without gaps": (lambda: norm_of_a_view(0), "view_read_as_contiguous"),
    "k read without gaps": (lambda: norm_of_a_view(HEADS), "view_read_as_contiguous"),
    "k by its strides": (lambda: norm_of_a_view(HEADS, "strides"), "strides_ignored"),
    "k, of any scale": (lambda: norm_of_a_view(HEADS, "strides", 0.0), "strides_ignored"),
    "k in known memory": (lambda: norm_of_a_view(HEADS, "memory"), "strides_ignored"),
    "k without its offset": (lambda: norm_of_a_view(HEADS, "offset"), "offset_ignored"),
    "half of each row": (lambda: product_of(drawn(1, 24, 2, WIDTH)[:, 0]), "strides_ignored"),
    "every second row": (lambda: product_of(drawn(1, 48, WIDTH)[1::2]), "strides_ignored"),
    "every second row, from the first on": (lambda: product_of(drawn(1, 48, WIDTH)[1::2], 0), "view_ignored"),
    "output in wider rows": (lambda: written_into(m := drawn(9, 24, 96), m[:, 48:]), "written_as_contiguous"),
    "output a transpose": (lambda: written_into(m := drawn(9, 48, 24), m.T), "written_as_contiguous"),
    "input a transpose": (gate_of_a_transpose, "strides_ignored"),
    "operator's argument": (norm_operator, "strides_ignored"),
    "query in qkv": (lambda: fused_qkv("query"), "strides_ignored"),
    "value in qkv": (lambda: fused_qkv("value"), "strides_ignored"),
    "transposed": (lambda: product(lambda x, w, b: x @ w + b, square()), "weight_transposed"),
    "read transposed": (
        lambda: product(lambda x, w, b: x @ w.reshape(WIDTH, 48) + b), "weight_read_transposed",
    ),
    "halves": (lambda: of_rows(lambda y: torch.cat((y[:, 24:], y[:, :24]), 1)), "columns_exchanged"),
    "k and v": (
        lambda: replace(of_rows(lambda y: torch.cat((y[:, :32], y[:, 40:], y[:, 32:40]), 1)),
                        parent={"q_size": 32, "kv_size": 8}), "columns_exchanged",
    ),
    "k and v, by its own sizes": (
        lambda: replace(c := of_rows(lambda y: torch.cat((y[:, :32], y[:, 40:], y[:, 32:40]), 1)),
                        attrs={**c.attrs, "num_heads": 4, "num_kv_heads": 1, "head_size": 8}), "columns_exchanged",
    ),
    "vocabulary's halves": (lambda: gathered([1, 0]), "ranks_in_another_order"),
    "vocabulary of four": (lambda: gathered([0, 3, 1, 2]), "ranks_in_another_order"),
    "slot overwritten": (lambda: of_two(lambda own, other: assigned(own, 9, other[63])), "slot_overwritten"),
    "inputs' halves": (
        lambda: product(lambda x, w, b: torch.cat((x[:, 32:], x[:, :32]), 1) @ w.T + b), "input_columns_shifted",
    ),
    "stale tile": (
        lambda: of_rows(lambda y: assigned(y, (slice(None), slice(32, 48)), y.roll(1, 0)[:, 32:])), "columns_stale",
    ),
    "tail of squares": (
        lambda: with_output(
            c := norm(residual=False, size=1.0), c.inputs["x"].double() / (
                (c.inputs["x"].double()[:, :-4] ** 2).sum(1, keepdim=True) / WIDTH + EPS).sqrt()
            * c.params["weight"].double()), "norm_tail",
    ),
    "ranks": (lambda: ranks([1, 0]), "ranks_exchanged"),
    "ranks' bias": (lambda: summed(lambda each, y, bias: y + bias), "bias_of_each_rank"),
    "ranks' bias, of three": (lambda: summed(lambda each, y, bias: y + 2 * bias, 3), "bias_of_each_rank"),
    "another adapter": (lambda: adapted(lambda row: "a"), "another_adapter"),
    "no adapter": (lambda: adapted(lambda row: ""), "another_adapter"),
    "adapter scaled twice": (lambda: adapted(lambda row: "ab"[row > 11], 4.0), "adapter_scaling"),
    "rank missing": (lambda: summed(lambda each, y, bias: y - each[1]), "rank_missing"),
    "rank alone": (lambda: summed(lambda each, y, bias: each[2], 3), "not_reduced"),
    "key's position": (lambda: wrong_rotary(CHUNKS, key=lambda p: p - 1), "positions_shifted"),
    "from zero": (
        lambda: wrong_rotary(CHUNKS, positions=lambda p: torch.cat((torch.arange(20), torch.arange(13)))),
        "positions_from_zero",
    ),
    "row for position": (
        lambda: wrong_rotary(CHUNKS, positions=lambda p: torch.arange(33)), "positions_of_the_batch",
    ),
    "cache times": (lambda: attention(past=lambda k, v: (k * 1.1, v * 1.1)), "past_times"),
    "k for v for k": (lambda: attention(past=lambda k, v: (v, k)), "keys_and_values_exchanged"),
    "key head": (
        lambda: attention(past=lambda k, v: tuple(t.unflatten(1, (KV, HEAD)).roll(-1, 1).flatten(1) for t in (k, v))),
        "key_heads_shifted",
    ),
    "block of another": (
        lambda: of_two(lambda own, other: torch.cat((own[:16], other[16:32], own[32:]))), "block_of_another",
    ),
    "position of all": (
        lambda: of_two(lambda own, other: assigned(own, 5, 0.0), first=lambda own: assigned(own, 5, 0.0)),
        "positions_not_written",
    ),
    "tail of keys": (lambda: by_probabilities(cut), "tail_of_keys"),
    "routing weights": (lambda: wrong_experts(weights=lambda w: w.flip(-1)), "weights_reversed"),
    "call before": (
        lambda: replace(
            with_output(linear(), drawn(5, 24, 48, dtype=torch.float64)),
            extra={"before": {"output.0": drawn(5, 24, 48)}},
        ), "one_call_before",
    ),
}  # fmt: skip
"""Name → (a wrong call, the cause's name)."""

RIGHT: tuple[Callable[[], Call], ...] = (
    wrong_rotary, lambda: ranks([0, 1]), wrong_experts,
    lambda: summed(lambda each, y, bias: y, 3), lambda: adapted(lambda row: "ab"[row > 11]),
    lambda: of_two(lambda own, other: own), sampled, shared, lambda: latent(0.25), lambda: sections(SECTIONS),
    lambda: handed(False), lambda: written_into(m := drawn(9, 24, 96), m[:, 48:], strides=True),
)  # fmt: skip
"""Calls that are right, each of another maker."""
