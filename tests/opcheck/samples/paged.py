"""Samples of operators over paged caches: attention in every layout, writes, the indexer, sparse attention."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from opcheck.samples.definitions import attend, lower, past, softmax
from opcheck.samples.dtypes import BRAIN, BYTE, E4M3, HALF, SINGLE
from opcheck.samples.sample import Array, Draw, Made, declined, made, sample, wide

from vllm_accprobe.opcheck.reference import Call

BLOCKS, OWN, SCALE = 13, (3, 1, 4), 0.25
"""Blocks of a cache, and the queries of three requests."""


class Batch:
    """Three requests over one paged cache, at sizes that differ from seed to seed."""

    def __init__(self, d: Draw):
        self.kv, self.width, self.size = d.below(2, 4), 16 * d.below(1, 4), 16 * d.below(1, 3)
        self.heads = self.kv * d.below(2, 4)
        self.lengths = [d.below(2 * self.size + 1, 3 * self.size), d.below(17, 30), 4]
        self.table = (1 + d.rng.permutation(9)).reshape(3, 3)
        self.q = d(sum(OWN), self.heads, self.width)
        self.k, self.v = (d(BLOCKS, self.size, self.kv, self.width) for _ in range(2))

    def attended(self, fault: str = "", window: int = 0, causal: bool = True) -> Array:
        out, begin = [], 0
        for n, (own, m) in enumerate(zip(OWN, self.lengths, strict=True)):
            table = self.table[(n + 1) % 3] if fault == "another request's blocks" else self.table[n]
            k, v = (past(wide(t), table, m) for t in (self.k, self.v))
            if fault == "heads interleaved":
                k, v = (x[:, np.arange(self.heads) % self.kv] for x in (k, v))
            hidden = lower(own, m, window=window + (fault == "window off by one") if window else 0) if causal else 0.0
            if fault == "one key too few":
                hidden, k, v = lower(own, m - 1), k[:-1], v[:-1]
                hidden[:, 0] = 0.0  # the first position sees itself
            if fault == "queries at the front":
                hidden = lower(m, m)[:own]
            out.append(attend(wide(self.q[begin : begin + own]), k, v, SCALE, hidden))
            begin += own
        return np.concatenate(out)

    @property
    def numbers(self) -> tuple[torch.Tensor, ...]:
        """Where the requests' queries begin, how long they are, their blocks."""
        return torch.tensor([0, *np.cumsum(OWN)]), torch.tensor(self.lengths), torch.from_numpy(self.table)


def _cpu_layout(rows: torch.Tensor, which: str) -> torch.Tensor:
    """[blocks, slots, kv, d] as vLLM's CPU kernels have it, in the shape [blocks, kv, slots, d]."""
    blocks, size, kv, width = rows.shape
    s, c = np.indices((size, width))
    place = {
        "vec key": c * size + s, "vec value": s * width + c,
        "amx key": (s // 16) * 16 * width + (c // 2) * 32 + (s % 16) * 2 + c % 2,
        "amx value": (c // 16) * size * 16 + (s // 2) * 32 + (c % 16) * 2 + s % 2,
    }[which]  # fmt: skip
    out = torch.zeros(blocks, kv, size * width, dtype=rows.dtype)
    out[:, :, torch.from_numpy(place.ravel())] = rows.transpose(1, 2).reshape(blocks, kv, -1)
    return out.reshape(blocks, kv, size, width)


READS = ("another request's blocks", "heads interleaved")


@sample("window off by one", "one key too few", *READS, dtypes=(BRAIN, SINGLE),
        variants=[{"layout": k, "window": w} for k in ("vec", "amx") for w in (0, 9)])  # fmt: skip
def cpu_attention(d: Draw, fault: str, layout: str, window: int) -> Made | None:
    if fault and (window != 9) != (fault == "one key too few"):
        return None
    b = Batch(d)
    starts, lengths, table = b.numbers
    caches = [_cpu_layout(t, f"{layout} {name}") for t, name in ((b.k, "key"), (b.v, "value"))]
    return made("torch.ops._C.cpu_attention_with_kv_cache", b.q, *caches, torch.zeros_like(b.q), starts, lengths, SCALE,
                True, None, window or -1, table, 0.0, torch.zeros(8), None, None,
                outputs={"inplace.input.3": b.attended(fault, window)}, dtype=d.dtype)  # fmt: skip


@sample("window off by one", *READS, dtypes=(HALF,))
def flash_attention_with_a_block_table(d: Draw, fault: str) -> Made:
    b = Batch(d)
    starts, lengths, table = b.numbers
    return made("torch.ops._vllm_fa2_C.varlen_fwd", b.q, b.k, b.v, None, starts, None, lengths, None, table, None, 4,
                max(b.lengths), 0.0, SCALE, False, True, 8, -1, 0.0, outputs={"output.0": b.attended(fault, 9)},
                dtype=HALF)  # fmt: skip


@sample("scales exchanged", seeds=2)
def first_layout_with_8_bit_keys(d: Draw, fault: str) -> Made:
    """[blocks, kv, d / x, slots, x] and [blocks, kv, d, slots] of e4m3 codes with scales."""
    b, scales = Batch(d), (0.5, 0.25)
    codes = [(t.float() / s).to(E4M3) for t, s in zip((b.k, b.v), scales, strict=True)]
    used = scales[::-1] if fault else scales
    sides = [wide(c) * s for c, s in zip(codes, used, strict=True)]
    q, (_, lengths, table) = b.q[:3], b.numbers
    out = np.concatenate([attend(wide(q[n : n + 1]), *(past(x, b.table[n], b.lengths[n]) for x in sides), SCALE)
                          for n in range(3)])  # fmt: skip
    key = codes[0].view(BYTE).reshape(BLOCKS, b.size, b.kv, -1, 16).permute(0, 2, 3, 1, 4).contiguous()
    value = codes[1].view(BYTE).permute(0, 2, 3, 1).contiguous()
    return made("torch.ops._C.paged_attention_v1", torch.zeros_like(q), q, key, value, b.kv, SCALE, table, lengths,
                b.size, max(b.lengths), None, "fp8", *(torch.tensor(s) for s in scales),
                outputs={"inplace.input.0": out})  # fmt: skip


@sample(*READS[:1])
def latent_attention_reads_values_from_its_keys(d: Draw, fault: str) -> Made:
    b, cache = Batch(d), d(BLOCKS, 16, 12)
    q, lengths = d(3, 4, 12), [40, 17, 4]
    out = []
    for n in range(3):
        k = past(wide(cache), b.table[(n + bool(fault)) % 3], lengths[n])[:, None]
        out.append(attend(wide(q[n : n + 1]), k, k[..., :8], 0.3))
    return made("torch.ops._C.mla_decode_kvcache", torch.zeros(3, 4, 8), q, cache, 0.3, b.numbers[2],
                torch.tensor(lengths), outputs={"inplace.input.0": np.concatenate(out)})  # fmt: skip


@sample(
    "queries at the front", *READS, variants=[{"blocks": b, "causal": c} for b in (True, False) for c in (True, False)]
)
def ascend_fused_infer_attention(d: Draw, fault: str, blocks: bool, causal: bool) -> Made | None:
    """With a table of blocks, or keys one request after the other."""
    if fault == "queries at the front" and not causal:
        return None
    b = Batch(d)
    more: dict[str, Any] = {"num_heads": b.heads, "num_key_value_heads": b.kv, "input_layout": "TND", "scale": SCALE,
                            "sparse_mode": 3 if causal else 0,
                            "actual_seq_lengths": np.cumsum(OWN).tolist()}  # fmt: skip
    if blocks:
        more |= {"block_table": b.numbers[2], "actual_seq_lengths_kv": b.lengths}
        sides = [t.flatten(2) for t in (b.k, b.v)]
    else:
        more["actual_seq_lengths_kv"] = np.cumsum(b.lengths).tolist()
        sides = [torch.cat([torch.cat([t[i] for i in b.table[n]])[: b.lengths[n]] for n in range(3)])
                 for t in (b.k, b.v)]  # fmt: skip
    return made("npu.npu_fused_infer_attention_score.default", b.q, *sides, kwargs=more,
                outputs={"output.0": b.attended(fault, causal=causal)})  # fmt: skip


@declined
def ascend_attention_without_a_reference() -> Iterator[tuple[Call, str]]:
    call = ascend_fused_infer_attention(Draw(0), "", True, True).call
    for more in ({"input_layout": "BSH"}, {"sparse_mode": 4}, {"antiquant_scale": SLOTS}, {"actual_seq_lengths": [2]}):
        yield replace(call, kwargs={**call.kwargs, **more}), ""


# --- writes and copies ----------------------------------------------------------------------------------------------

SLOTS = torch.tensor([17, 18, -1, 35, 0])
LAYOUTS = {
    "reshape_and_cache_flash": [lambda t: t] * 2,
    "reshape_and_cache": [lambda t: t.unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4), lambda t: t.permute(0, 2, 3, 1)],
}


def _put(cache: torch.Tensor, new: torch.Tensor, late: bool = False) -> torch.Tensor:
    """``cache`` [blocks, size, ...] with rows in SLOTS; late: one of them in the slot behind its own."""
    out = cache.clone().flatten(0, 1)
    for t, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            out[slot + (late and t == 1)] = new[t]
    return out.reshape(cache.shape)


@sample("a slot late", "the other's scale",
        variants=[{"name": n, "kind": k} for n in LAYOUTS for k in ("auto", "fp8", "fp8_e5m2")])  # fmt: skip
def keys_and_values_written(d: Draw, fault: str, name: str, kind: str) -> Made | None:
    scales = torch.tensor(0.5), torch.tensor(0.125)
    if fault == "the other's scale" and kind == "auto":
        return None
    new, caches, outputs = [d(5, 2, 8) for _ in range(2)], [], {}
    for n, (rows, layout) in enumerate(zip(new, LAYOUTS[name], strict=True)):
        codes, cache = rows, d(4, 16, 2, 8)
        if kind != "auto":
            scale = scales[1 - n if fault == "the other's scale" else n]
            codes = (rows.float() / scale).to(torch.float8_e5m2 if kind == "fp8_e5m2" else E4M3).view(BYTE)
            cache = d.ints(0, 100, 4, 16, 2, 8, dtype=BYTE)
        caches.append(layout(cache))
        outputs[f"inplace.input.{n + 2}"] = layout(_put(cache, codes, fault == "a slot late"))
    return made(f"torch.ops._C_cache_ops.{name}", *new, *caches, SLOTS, kind, *scales, outputs=outputs)


@sample("a slot late", variants=[{"kind": k} for k in ("vec", "amx", "npu", "npu nz")])
def keys_and_values_written_by_others(d: Draw, fault: str, kind: str) -> Made:
    """vLLM's CPU kernels, and Ascend's."""
    new, caches, outputs = [d(5, 2, 16) for _ in range(2)], [], {}
    for n, (rows, name) in enumerate(zip(new, ("key", "value"), strict=True)):
        cache = d(4, 16, 2, 16)
        both = [cache, _put(cache, rows, bool(fault))]
        if kind == "npu nz":
            both = [t.reshape(4, 16, 2, 16).transpose(1, 2).contiguous() for t in both]
        elif kind != "npu":
            both = [_cpu_layout(t, f"{kind} {name}") for t in both]
        caches.append(both[0])
        outputs[f"inplace.input.{n + 2}"] = both[1]
    if kind.startswith("npu"):
        return made("torch.ops.atb._npu_reshape_and_cache", *new, *caches, SLOTS, outputs=outputs)
    return made("torch.ops._C.cpu_attn_reshape_and_cache", *new, *caches, SLOTS, kind, outputs=outputs)


@sample("nothing is copied")
def blocks_of_all_layers_copied(d: Draw, fault: str) -> Made:
    caches = [[d(4, 16, 6) for _ in range(2)] for _ in range(2)]
    outputs = {f"inplace.input.{i}.{n}": t if fault else t[[0, 1, 2, 1]] for i, side in enumerate(caches)
               for n, t in enumerate(side)}  # fmt: skip
    return made("torch.ops._C_cache_ops.copy_blocks", *caches, torch.tensor([[1, 3]]), outputs=outputs)


@sample("nothing is written")
def latent_rows_written(d: Draw, fault: str) -> Made:
    cache, c, pe = d(4, 16, 6), d(5, 4), d(5, 2)
    after = cache if fault else _put(cache, torch.cat((c, pe), 1))
    return made("torch.ops._C_cache_ops.concat_and_cache_mla", c, pe, cache, SLOTS, "auto", torch.tensor(1.0),
                outputs={"inplace.input.2": after})  # fmt: skip


@sample("nothing is copied")
def blocks_copied(d: Draw, fault: str) -> Made:
    cache, to = d(4, 16, 6), d(4, 16, 6)
    moved = to.clone()
    moved[3] = moved[3] if fault else cache[1]
    return made("torch.ops._C_cache_ops.swap_blocks", cache, to, 192, torch.tensor([[1, 3]]),
                outputs={"inplace.input.1": moved})  # fmt: skip


@sample("a row late")
def rows_gathered(d: Draw, fault: str) -> Made:
    cache, table, ends = d(4, 16, 6), torch.tensor([[2, 1], [3, 0]]), torch.tensor([0, 18, 21])
    out = torch.cat([torch.cat([cache[i] for i in table[n]])[:m] for n, m in enumerate((18, 3))])
    return made("torch.ops._C_cache_ops.cp_gather_cache", cache, torch.zeros_like(out), table, ends, 2, None,
                outputs={"inplace.input.1": out.roll(1, 0) if fault else out})  # fmt: skip


# --- the indexer over its own cache ---------------------------------------------------------------------------------


def indexer_cache(d: Draw, blocks: int, size: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys' codes [blocks, size, width], scales [blocks, size], the cache's bytes [blocks, size * (width + 4)])"""
    codes, scales = d(blocks, size, width, dtype=SINGLE).to(E4M3), d.between(0.5, 2, blocks, size)
    return codes, scales, torch.cat([x.view(BYTE).reshape(blocks, -1) for x in (codes, scales)], 1)


class Indexed:
    """Requests with ``many`` queries each over an indexer's cache. lengths: of the last query of each."""

    def __init__(self, d: Draw, many: int = 1):
        requests, heads, width, self.size, pages = (d.below(*at) for at in ((2, 5), (1, 6), (4, 20), (2, 8), (2, 5)))
        self.codes, self.scales, self.cache = indexer_cache(d, requests * pages + 2, self.size, width)
        self.q = d(requests, many, heads, width, dtype=SINGLE).to(E4M3)
        self.w = d(requests * many, heads, dtype=SINGLE)
        self.table = torch.from_numpy(d.rng.permutation(requests * pages + 2)[:-2].reshape(requests, pages)).int()
        self.longest = self.size * pages
        self.lengths = d.ints(many + 1, self.longest + 1, requests)

    def scored(self, fault: str, beyond: int = 0) -> torch.Tensor:
        requests, many, _, _ = self.q.shape
        out = np.full((requests * many, self.longest + beyond), -np.inf)
        for r in range(requests):
            table = self.table[(r + 1) % requests if fault == "blocks of another request" else r]
            scales = np.roll(wide(self.scales), -1, 1) if fault == "scale of the next key" else wide(self.scales)
            keys, by = past(wide(self.codes), table, self.longest), past(scales, table, self.longest)
            for j in range(many):
                stop = int(self.lengths[r]) - (0 if fault == "drafts see each other" else many - j - 1)
                dots = wide(self.q)[r, j] @ keys[:stop].T
                dots = dots if fault == "no relu" else np.maximum(dots, 0)
                out[r * many + j, :stop] = by[:stop] * (wide(self.w)[r * many + j] @ dots)
        return torch.from_numpy(out).float()


SCORES = ("no relu", "scale of the next key", "blocks of another request")


@sample(*SCORES, "drafts see each other", seeds=3)
def scores_over_blocks(d: Draw, fault: str) -> Made:
    x = Indexed(d, many=3)
    return made("torch.ops.vllm.xpu_fp8_paged_mqa_logits", x.q, x.cache.reshape(len(x.cache), x.size, 1, -1), x.w,
                x.lengths, x.table, torch.zeros(1), x.longest, outputs={"output.0": x.scored(fault)})  # fmt: skip


@sample(*SCORES, seeds=3)
def scores_of_single_tokens(d: Draw, fault: str) -> Made:
    """What lies behind a row's keys is nobody's: the kernel does not clean it."""
    x = Indexed(d)
    mine = x.scored(fault)
    behind = torch.isinf(mine).nonzero().tolist()
    mine = torch.where(torch.isinf(mine), 1e-3, mine)
    for place, value in zip(behind, (float("nan"), float("inf"), -float("inf")), strict=False):
        mine[tuple(place)] = value
    return made("torch.ops._C.fp8_paged_mqa_logits_cpu", x.q[:, 0], x.cache, x.w, x.lengths, x.table, x.size, x.longest,
                outputs={"output.0": mine})  # fmt: skip


@sample(
    "one worse", "table of another row", "positions for slots", seeds=3, variants=[{"raw": r} for r in (True, False)]
)
def slots_of_the_best_keys(d: Draw, fault: str, raw: bool) -> Made:
    rows, pages, size, k = d.below(2, 5), d.below(4, 7), d.below(3, 6), d.below(4, 9)
    z, lengths = d(rows, pages * size, dtype=SINGLE), d.ints(k + 1, pages * size + 1, rows)
    lengths[0] = k - 1
    table = 9 + torch.from_numpy(d.rng.permutation(rows * pages).reshape(rows, pages))
    slots, positions = (torch.full((rows, k), -1, dtype=torch.int32) for _ in range(2))
    for r in range(rows):
        best = z[r, : lengths[r]].argsort(descending=True)
        if fault == "one worse" and len(best) > k:
            best[k - 1] = best[k]
        of = table[(r + 1) % rows] if fault == "table of another row" else table[r]
        positions[r, : len(best[:k])] = best[:k].int()
        found = best[:k] if fault == "positions for slots" else of[best[:k] // size] * size + best[:k] % size
        slots[r, : len(best[:k])] = found.int()
    outputs = {"inplace.input.3": slots} | ({"inplace.input.5": positions} if raw else {})
    return made("torch.ops._C.topk_transform_512_cpu", z, lengths, table, torch.zeros_like(slots), size,
                *[torch.zeros_like(positions)] * raw, outputs=outputs)  # fmt: skip


@sample("another slot", "scale of the next", "not rounded up", "codes cut off", seeds=3,
        variants=[{"kind": k} for k in ("ue8m0", "float")])  # fmt: skip
def indexer_keys_written(d: Draw, fault: str, kind: str) -> Made | None:
    if fault == "not rounded up" and kind != "ue8m0":
        return None
    quant, parts, blocks, size, tokens = d.below(4, 9), d.below(1, 4), 5, d.below(3, 7), d.below(3, 7)
    k, cache = d(tokens, quant * parts), d.ints(0, 120, blocks, size, quant * parts + 4 * parts, dtype=BYTE)
    slots = torch.from_numpy(d.rng.permutation(blocks * size)[:tokens])
    slots[1] = -1
    x = wide(k).reshape(tokens, parts, quant)
    by = np.maximum(np.abs(x).max(-1), 1e-4) / 448
    by = np.roll(by, -1, 0) if fault == "scale of the next" else by
    if kind == "ue8m0":
        by = 2.0 ** (np.floor if fault == "not rounded up" else np.ceil)(np.log2(by))
    by = by.astype(np.float32)
    exact = torch.from_numpy((x / by[..., None]).clip(-448, 448)).flatten(1)
    codes = exact.float().to(E4M3)
    bits = codes.view(BYTE)
    if fault == "codes cut off":
        bits = bits - (codes.double().abs() > exact.abs()).byte()
    data, scales = cache.reshape(blocks, -1).clone().split((size * quant * parts, size * 4 * parts), 1)
    for t in range(tokens):
        if slots[t] >= 0:
            block, at = divmod((int(slots[t]) + (fault == "another slot")) % (blocks * size), size)
            data.unflatten(1, (size, -1))[block, at] = bits[t]
            scales.unflatten(1, (size, -1))[block, at] = torch.from_numpy(by[t].view(np.uint8))
    return made("torch.ops._C_cache_ops.indexer_k_quant_and_cache", k, cache, slots, quant, kind,
                outputs={"inplace.input.1": torch.cat((data, scales), 1).reshape(cache.shape)})  # fmt: skip


@sample("blocks of another request", "scale of the next key", seeds=3)
def indexer_keys_gathered(d: Draw, fault: str) -> Made:
    x = Indexed(d)
    scales, keys, by = x.scales.roll(-1, 1) if "scale" in fault else x.scales, [], []
    for r, stop in enumerate(x.lengths.tolist()):
        at = x.table[(r + 1) % len(x.table) if "blocks" in fault else r].long()
        keys.append(x.codes.view(BYTE)[at].flatten(0, 1)[:stop])
        by.append(scales[at].flatten()[:stop])
    mine = {"inplace.input.1": torch.cat(keys).view(E4M3), "inplace.input.2": torch.cat(by).reshape(-1, 1)}
    ends = torch.tensor([0, *np.cumsum(x.lengths.numpy())])
    return made("torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache", x.cache.reshape(len(x.cache), x.size, -1),
                *(torch.zeros_like(y) for y in mine.values()), x.table, ends, outputs=mine)  # fmt: skip


def _pages(d: Draw, blocks: int, size: int, normal: bool) -> tuple[torch.Tensor, Array]:
    """(a cache of keys 512 wide in bytes, the same as numbers [slots, 512]), as DeepSeek-V4 has it. normal: none of its
    codes is subnormal."""
    codes = d(blocks, size, 448, dtype=SINGLE).to(E4M3)
    if normal:
        codes = torch.where(codes.float().abs() < 2.0**-6, 2.0**-6, codes.float()).to(codes.dtype)
    rope, exponents = d(blocks, size, 64, dtype=BRAIN), d.ints(125, 130, blocks, size, 8, dtype=BYTE)
    data = torch.cat([codes.view(BYTE), rope.view(BYTE).reshape(blocks, size, 128)], -1)
    keys = wide(codes) * np.repeat(2.0 ** (wide(exponents)[..., :7] - 127), 64, -1)
    whole = torch.cat([data.reshape(blocks, -1), exponents.reshape(blocks, -1)], 1)
    return whole, np.concatenate([keys, wide(rope)], -1).reshape(blocks * size, 512)


@sample("padding is key 0", "compressed keys left out", "no sink", seeds=3)
def attention_over_pages(d: Draw, fault: str, large: bool = False) -> Made:
    """Of single tokens in a window and of compressed ones. large: sizes of vLLM's own kernel, and its normal codes."""
    heads, size, less = (64, 64, 16) if large else (d.below(1, 4), d.below(2, 5), d.below(2, 4))
    tokens = d.below(2, 5)
    (window, a), (short, b) = _pages(d, 4, size, large), _pages(d, 3, less, large)
    ws, cs = d.ints(0, 4 * size, tokens, 5).long(), d.ints(0, 3 * less, tokens, 4).long()
    ws[0, 3:], cs[-1, 2:] = -1, -1
    q, sinks, out = d(tokens, heads, 512, scale=0.1), d(heads, dtype=SINGLE), np.zeros((tokens, heads, 512))
    for t in range(tokens):
        near = ws[t].clamp(min=0) if fault == "padding is key 0" else ws[t][ws[t] >= 0]
        keys = np.concatenate([a[near], b[cs[t][cs[t] >= 0]] if fault != "compressed keys left out" else a[:0]])
        weights = np.exp(0.2 * wide(q)[t] @ keys.T)
        total = weights.sum(-1) + (0.0 if fault == "no sink" else np.exp(wide(sinks)))
        out[t] = weights @ keys / total[:, None]
    return made("torch.ops._C.flash_mla_with_kvcache_cpu", torch.zeros(out.shape, dtype=BRAIN), q, window, ws, size,
                short, cs, less, sinks, 0.2, outputs={"inplace.input.0": out})  # fmt: skip


# --- sparse latent attention ----------------------------------------------------------------------------------------


class Sparse:
    """Six queries, each of which may see the keys from ``first`` to ``stop``."""

    def __init__(self, d: Draw):
        self.heads, self.keys, self.width = d.below(1, 7), d.below(10, 30), d.below(6, 20)
        self.first = torch.tensor([0, 0, 0, *d.ints(1, 3, 3).tolist()])
        self.stop = torch.tensor([1, *d.ints(4, self.keys, 4).tolist(), self.keys])
        self.q, self.w = d(6, self.heads, self.width, dtype=BRAIN), d(6, self.heads, dtype=SINGLE)
        self.k, self.scale = d(self.keys, self.width, dtype=SINGLE).to(E4M3), d.between(0.5, 2, self.keys)

    def scored(self, fault: str = "") -> torch.Tensor:
        by = np.roll(wide(self.scale), -1) if fault == "scale of the neighbour" else wide(self.scale)
        dots = np.einsum("thd,nd->thn", wide(self.q), wide(self.k)) * by
        out = np.einsum("th,thn->tn", wide(self.w), dots if fault == "no relu" else np.maximum(dots, 0))
        n, last = np.arange(self.keys), self.stop.numpy()[:, None] + (fault == "one key too many")
        return torch.from_numpy(np.where((n >= self.first.numpy()[:, None]) & (n < last), out, -np.inf)).float()

    def made(self, mine: torch.Tensor) -> Made:
        return made("torch.ops.vendor.fp8_mqa_logits", self.q, self.k, self.scale, self.w, self.first, self.stop,
                    outputs={"output.0": mine})  # fmt: skip


@sample("no relu", "scale of the neighbour", "one key too many", seeds=3)
def sparse_scores(d: Draw, fault: str) -> Made:
    x = Sparse(d)
    return x.made(x.scored(fault))


@sample("no relu", "scale of the neighbour", seeds=3)
def sparse_scores_beside_a_large_number(d: Draw, fault: str) -> Made:
    """Query 1 does not see the last key: memory as it was found."""
    x = Sparse(d)
    mine = x.scored(fault)
    mine = torch.where(torch.isinf(mine), 0.0, mine)
    mine[1, -1] = 1e30
    return x.made(mine)


@sample("one worse", "twice the same", "from the first key", seeds=3)
def best_keys_of_each_row(d: Draw, fault: str) -> Made:
    x, top = Sparse(d), d.below(3, 8)
    z, mine = x.scored(), torch.full((6, top), -1, dtype=torch.int32)
    for t in range(6):
        best = z[t].argsort(descending=True)[: int(x.stop[t] - x.first[t])]
        best = (
            torch.cat((best[: top - 1], best[top : top + 1]))
            if fault == "one worse" and len(best) > top
            else best[:top]
        )
        if fault == "twice the same" and len(best) > 1:
            best[-1] = best[0]
        mine[t, : len(best)] = (best.flip(0) - (0 if fault == "from the first key" else x.first[t])).int()
    return made("torch.ops._C.top_k_per_row_prefill", z, x.first, x.stop, torch.zeros_like(mine), 6, x.keys, 1, top,
                outputs={"inplace.input.3": mine})  # fmt: skip


@sample("one worse", "a draft sees all", seeds=2)
def best_keys_of_drafts(d: Draw, fault: str) -> Made:
    """Row j of a request's three sees all but its later rows."""
    z, lengths, mine = d(6, 30, dtype=SINGLE), d.ints(10, 31, 2), torch.full((6, 5), -1, dtype=torch.int32)
    for t in range(6):
        stop = int(lengths[t // 3]) - (0 if fault == "a draft sees all" else 2 - t % 3)
        if fault == "a draft sees all":
            z[t, stop - 1] = 9.0
        best = z[t, :stop].argsort(descending=True)
        mine[t] = best[[0, 1, 2, 3, 5 if fault == "one worse" else 4]].int()
    return made("torch.ops._C.top_k_per_row_decode", z, 3, lengths, torch.zeros_like(mine), 6, 30, 1, 5,
                outputs={"inplace.input.3": mine})  # fmt: skip


@sample("padding is key 0", "last key left out", seeds=3)
def attention_over_the_chosen(d: Draw, fault: str) -> Made:
    x = Sparse(d)
    kv = d(x.keys, 1, x.width)
    indices = torch.tensor([[*d.rng.permutation(x.keys)[:4].tolist(), -1, -1] for _ in range(6)])
    out = np.zeros((6, x.heads, 6))
    for t in range(6):
        at = indices[t].clamp(min=0) if fault == "padding is key 0" else indices[t, : 3 if fault else 4]
        keys = wide(kv)[at, 0]
        out[t] = softmax(0.5 * wide(x.q)[t] @ keys.T) @ keys[:, :6]
    return made("torch.ops._flashmla_C.sparse_prefill_fwd", x.q, kv, indices[:, None], 0.5, 6,
                outputs={"output.0": out})  # fmt: skip


@declined
def an_operator_of_the_cache_without_a_formula() -> Iterator[tuple[Call, str]]:
    x = torch.ones(4, 8)
    yield Call("o", "torch.ops._C_cache_ops.some_new_kernel", args=(x,), outputs={"output.0": x}), "reads the KV cache"
