"""A small transformer in numpy that leaves a dump behind, with the schedules and faults that a test asks for.

Rows are computed one by one, so that batching alone changes no bit; bfloat16 is imitated by rounding every result. The
dump is an object with the reader's face and everything in memory; `write` puts the same through the real writer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from dump.dumps import put_event

from vllm_accprobe.align.derived import round_to_bfloat16
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.schema import (
    DECODE,
    MASKS_KNOWN,
    PREFILL,
    REPLICATED,
    ROOT_TAP,
    Layout,
    Mask,
    Module,
    Payload,
    Record,
    Request,
    RowSpace,
    SamplingParameters,
    Segment,
    Stats,
    Step,
    hash_tokens,
)

HIDDEN, HEADS, KV, HEAD, INNER, VOCAB, LAYERS = 32, 4, 2, 8, 48, 64, 3
CLASSES = {
    "qkv_proj": "QKVParallelLinear", "o_proj": "RowParallelLinear", "attn": "Attention", "self_attn": "TinyAttention",
    "input_layernorm": "RMSNorm", "post_attention_layernorm": "RMSNorm", "norm": "RMSNorm", "mlp": "TinyMLP",
    "gate_up_proj": "MergedColumnParallelLinear", "act_fn": "SiluAndMul", "down_proj": "RowParallelLinear",
    "embed_tokens": "VocabParallelEmbedding", "logits_processor": "LogitsProcessor", "sampler": "Sampler",
    "model": "TinyModel", ROOT_TAP: "TinyForCausalLM",
}  # fmt: skip
Fault = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(values [rows, width], positions [rows], decode [rows]) → values."""
Process = Callable[[np.ndarray, "list[int]", int], np.ndarray]
"""(logits [vocabulary], the tokens before, how many of them are the prompt) → what the processors leave."""


def cls_of(tap: str) -> str:
    leaf = tap.rpartition(".")[2]
    return "TinyLayer" if leaf.isdigit() else CLASSES.get(leaf, CLASSES.get(tap, ""))


@dataclass
class MemoryDump:
    """What `open_dump` gives, from memory."""

    path: Path
    run: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)
    records: list[Record] = field(default_factory=list)
    padding: list[Record] = field(default_factory=list)
    requests: dict[Any, Request] = field(default_factory=dict)
    steps: dict[Any, Step] = field(default_factory=dict)
    rows: dict[Any, RowSpace] = field(default_factory=dict)
    modules: dict[int, list[Module]] = field(default_factory=dict)
    masks: dict[Any, Mask] = field(default_factory=dict)
    skips: list[Any] = field(default_factory=list)
    stops: dict[int, Any] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    data: dict[int, np.ndarray] = field(default_factory=dict)
    reads: int = 0

    def read_rows(self, record: Any, rows: slice, out: Any = None) -> Any:
        return self.read(record)[rows]

    def read(self, record: Record, out: Any = None) -> np.ndarray:
        self.reads += 1
        return self.data[record.payload.off]

    def add(self, rank: int, step: int | None, tap: str, role: str, values: np.ndarray, dtype: str, seq: int,
            rows: str | None, layout: Layout = REPLICATED, row_dim: int = 0, call: int = 0) -> None:  # fmt: skip
        bits = encode(values, dtype)
        off = len(self.data)
        self.data[off] = bits
        wide = widen(bits, dtype, as_float=True).astype(np.float64)
        good = wide[np.isfinite(wide)]
        some = good.size > 0
        stats = Stats(
            wide.size, float(good.min()) if some else None, float(good.max()) if some else None,
            float(good.mean()) if some else None, float(np.sqrt((good**2).sum())) if some else None,
            int(np.isnan(wide).sum()), int(np.isinf(wide).sum()),
        )  # fmt: skip
        digest = xxhash.xxh3_128_hexdigest(bits.tobytes())
        self.records.append(
            Record(rank, step, tap, cls_of(tap), role, call, seq, dtype, bits.shape, rows, row_dim, stats, digest,
                   layout, Payload(0, off, bits.nbytes))
        )  # fmt: skip


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return round_to_bfloat16(np.asarray(values, np.float32))
    return np.ascontiguousarray(values, DTYPES[dtype].storage)


@dataclass
class Sequence:
    ids: list[int]
    prompt_len: int
    request: Request
    computed: int = 0
    kv: list[dict[int, tuple[np.ndarray, np.ndarray]]] = field(default_factory=lambda: [{} for _ in range(LAYERS)])


class Tiny:
    """The model, its scheduler and its probe.

    faults: tap → Fault on the tap's output; ``layers.1:residual`` etc. name the additions between the modules.
    dtype: what results are rounded to and stored in. tp: ranks of the dump. noise: relative size of honest errors
    that another machine would make, added to each result before rounding. mask: position → (what masks the logits
    there, the ids that it forbids); None: a probe that does not write masks down. asks: what all requests ask of the
    sampler; process: what the engine makes of a row's logits before it.
    """

    def __init__(self, *, faults: dict[str, Fault] | None = None, dtype: str = "bfloat16", tp: int = 1,
                 noise: float = 0.0, weights: Callable[[dict[str, np.ndarray]], None] | None = None,
                 sampler: Any = None, rank_fault: str | None = None, params: bool = True,
                 mask: Mapping[int, tuple[Mask, list[int]]] | None = None,
                 asks: SamplingParameters | None = None, process: Process | None = None):  # fmt: skip
        self.mask, self.asks, self.process = mask, asks, process
        self.faults, self.dtype, self.tp, self.noise = faults or {}, dtype, tp, noise
        self.sampler, self.rank_fault = sampler, rank_fault
        self.random = np.random.default_rng(99)
        self.dump = MemoryDump(Path("memory"), {"dtype": dtype}, tuple(range(tp)))
        self.sequences: dict[str, Sequence] = {}
        self.step_number = -1
        self.seq = 0
        rng = np.random.default_rng(5)
        shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
        for i in range(LAYERS):
            p = f"model.layers.{i}."
            shapes |= {
                p + "self_attn.qkv_proj": ((HEADS + 2 * KV) * HEAD, HIDDEN),
                p + "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
                p + "mlp.gate_up_proj": (2 * INNER, HIDDEN),
                p + "mlp.down_proj": (HIDDEN, INNER),
            }
        self.weights = {}
        for name, shape in shapes.items():
            w = rng.standard_normal(shape).astype(np.float32) * (1.0 if "embed" in name else shape[1] ** -0.5)
            self.weights[name] = widen(round_to_bfloat16(w), "bfloat16")
        if weights is not None:
            weights(self.weights)
        head, tail = (ROOT_TAP, "model", "model.embed_tokens"), ("model.norm", "lm_head", "logits_processor")
        taps = (*head, *self._layer_taps(), *tail)
        for rank in range(tp):
            self.dump.modules[rank] = [Module(tap, cls_of(tap), index) for index, tap in enumerate(taps)]
            if mask is not None:
                self.dump.modules[rank].append(Module("sampler", "Sampler", 1 << 20, {MASKS_KNOWN: True}))
        if params:
            for name, w in self.weights.items():
                for rank in range(tp):
                    self._param(rank, name, w)

    @staticmethod
    def _layer_taps() -> list[str]:
        attention = (".input_layernorm", ".self_attn", *(f".self_attn.{x}" for x in ("qkv_proj", "attn", "o_proj")))
        mlp = (".post_attention_layernorm", ".mlp", *(f".mlp.{x}" for x in ("gate_up_proj", "act_fn", "down_proj")))
        leaves = ("", *attention, *mlp)
        return [f"model.layers.{i}{leaf}" for i in range(LAYERS) for leaf in leaves]

    def _param(self, rank: int, name: str, w: np.ndarray) -> None:
        tp, layout = self.tp, REPLICATED
        if tp > 1 and "qkv" in name:
            w, layout = self._blocks(w.T, rank, self._qkv_parts()), self._shard(rank, -2, self._qkv_parts())
            w = w.T
        elif tp > 1 and "gate_up" in name:
            parts = ((INNER // tp, 1), (INNER // tp, 1))
            w, layout = self._blocks(w.T, rank, parts).T, self._shard(rank, -2, parts)
        elif tp > 1 and ("o_proj" in name or "down_proj" in name):
            n = w.shape[1] // tp
            w, layout = w[:, rank * n : (rank + 1) * n], self._shard(rank, -1, ((n, 1),))
        self.dump.add(rank, None, name, "param.weight", w, self.dtype, 0, None, layout)

    # --- scheduling --------------------------------------------------------------------------------------------

    def request(self, name: str, prompt: list[int], ordinal: int = 0) -> None:
        named = (len(self.sequences), name, name + "-x", hash_tokens(prompt), len(prompt), ordinal)
        r = Request(*named, sampling=self.asks)
        self.sequences[name] = Sequence(list(prompt), len(prompt), r)
        for rank in range(self.tp):
            self.dump.requests[(rank, r.req)] = r

    def preempt(self, name: str) -> None:
        s = self.sequences[name]
        s.computed, s.kv = 0, [{} for _ in range(LAYERS)]

    def share(self, name: str, other: str, n: int) -> None:
        """A prefix-cache hit: the first n positions come from another request."""
        s, o = self.sequences[name], self.sequences[other]
        s.computed = n
        for mine, theirs in zip(s.kv, o.kv, strict=True):
            mine.update({p: theirs[p] for p in range(n)})

    def finish(self, chunk: int = 1 << 30, tokens: int = 4, together: bool = True) -> MemoryDump:
        """Runs all requests until each has ``tokens`` generated tokens; returns the dump."""
        names = list(self.sequences)
        for group in [names] if together else [[n] for n in names]:
            while True:
                batch = []
                for name in group:
                    s = self.sequences[name]
                    if len(s.ids) - s.prompt_len < tokens:
                        batch.append((name, min(len(s.ids) - s.computed, chunk), []))
                if not batch:
                    break
                self.step(batch)
        return self.dump

    def step(self, batch: list[tuple[str, int, list[int]]]) -> None:
        """One execute_model: (request, number of known tokens to compute, draft tokens) each."""
        self.step_number += 1
        self.seq = 0
        self.dump.steps |= {(r, self.step_number): Step(self.step_number) for r in range(self.tp)}
        segments, logits, ids, logit_ids, places, row, logit_rows = [], [], [], [], [], 0, []
        for name, n, drafts in batch:
            s = self.sequences[name]
            tokens = (s.ids[s.computed :] + drafts)[: n + len(drafts)]
            for j, t in enumerate(tokens):
                p = s.computed + j
                places.append((s, p, t))
                ids.append(t)
                phase = PREFILL if p < s.prompt_len else DECODE
                segments.append(Segment(s.request.req, p, 1, row, phase))
                if s.computed + n >= len(s.ids) and j >= n - 1:
                    logits.append(Segment(s.request.req, p, 1, len(logits), phase))
                    logit_ids.append(t)
                    logit_rows.append(row)
                row += 1
        for rank in range(self.tp):
            key = (rank, self.step_number)
            self.dump.rows[(*key, "tokens")] = RowSpace(self.step_number, "tokens", row, tuple(segments), tuple(ids))
            if logits:
                space = RowSpace(self.step_number, "logits", len(logits), tuple(logits), tuple(logit_ids))
                self.dump.rows[(*key, "logits")] = space
        self._forward(batch, places, logit_rows)

    # --- the model ---------------------------------------------------------------------------------------------

    def _forward(self, batch: Any, places: list[Any], logit_rows: list[int]) -> None:
        self.positions = np.array([p for _, p, _ in places])
        self.decode = np.array([p >= s.prompt_len for s, p, _ in places])
        tokens = np.array([t for _, _, t in places])
        self._put(ROOT_TAP, "input.input_ids", tokens, dtype="int64")
        self._put(ROOT_TAP, "input.positions", self.positions, dtype="int64")
        self._put("model", "input.input_ids", tokens, dtype="int64")
        self._put("model.embed_tokens", "input.input_", tokens, dtype="int64")
        x = self._out("model.embed_tokens", self.weights["model.embed_tokens"][tokens])
        for i in range(LAYERS):
            x = self._layer(i, x, places)
        h = self._norm("model.norm", x)
        self._put("model", "output.0", h)
        self._put(ROOT_TAP, "output.0", h)
        if logit_rows:
            self._sample(batch, h[logit_rows], logit_rows)
        for name, n, _ in batch:
            s = self.sequences[name]
            s.computed += n

    def _layer(self, i: int, x: np.ndarray, places: list[Any]) -> np.ndarray:
        p = f"model.layers.{i}"
        self._put(p, "input.hidden_states", x)
        h = self._norm(p + ".input_layernorm", x)
        self._put(p + ".self_attn", "input.hidden_states", h)
        qkv = self._linear(p + ".self_attn.qkv_proj", h, out=self._qkv_parts())
        q, k, v = np.split(qkv, [HEADS * HEAD, (HEADS + KV) * HEAD], axis=1)
        for role, value, heads in (("query", q, HEADS), ("key", k, KV), ("value", v, KV)):
            self._put(p + ".self_attn.attn", f"input.{role}", value, parts=self._head_parts(heads))
        for row, (s, at, _) in enumerate(places):
            s.kv[i][at] = (k[row], v[row])
        a = np.stack([self._attend(q[row], s.kv[i], at) for row, (s, at, _) in enumerate(places)])
        a = self._out(p + ".self_attn.attn", a, parts=self._head_parts(HEADS))
        a = self._linear(p + ".self_attn.o_proj", a, into=self._head_parts(HEADS))
        self._put(p + ".self_attn", "output.0", a)
        x = self._glue(f"layers.{i}:residual", x + a)
        h = self._norm(p + ".post_attention_layernorm", x)
        self._put(p + ".mlp", "input.x", h)
        half = ((INNER // self.tp, 1),)
        gu = self._linear(p + ".mlp.gate_up_proj", h, out=half * 2)
        self._put(p + ".mlp.act_fn", "input.x", gu, parts=half * 2)
        g, u = np.split(gu, 2, axis=1)
        m = self._out(p + ".mlp.act_fn", g / (1 + np.exp(-g)) * u, parts=half)
        m = self._linear(p + ".mlp.down_proj", m, into=half)
        self._put(p + ".mlp", "output.0", m)
        x = self._glue(f"layers.{i}:output", x + m)
        self._put(p, "output.0", x)
        return x

    @staticmethod
    def _attend(q: np.ndarray, cache: dict[int, Any], at: int) -> np.ndarray:
        k = np.stack([cache[p][0] for p in range(at + 1)]).reshape(-1, KV, HEAD)
        v = np.stack([cache[p][1] for p in range(at + 1)]).reshape(-1, KV, HEAD)
        out = []
        for head in range(HEADS):
            scores = k[:, head * KV // HEADS] @ q[head * HEAD : (head + 1) * HEAD] / HEAD**0.5
            w = np.exp(scores - scores.max())
            out.append((w / w.sum()) @ v[:, head * KV // HEADS])
        return np.concatenate(out)

    def _sample(self, batch: Any, h: np.ndarray, logit_rows: list[int]) -> None:
        self._put("logits_processor", "input.hidden_states", h, rows="logits")
        logits = self._out("logits_processor", self._product(h, self.weights["lm_head"]), rows="logits", at=logit_rows)
        logits = self._faulty("compute_logits", logits, logit_rows)  # the model's own code behind its head
        order = np.argsort(-logits, axis=1, kind="stable")[:, :5]
        self._put("sampler", "output.top_logits", np.take_along_axis(logits, order, 1), dtype="float32", rows="logits")
        self._put("sampler", "output.top_ids", order, dtype="int32", rows="logits")
        if self.mask is not None and any(p in self.mask for p in self.positions[logit_rows]):
            order = self._masked(batch, logits, self.positions[logit_rows])
        if self.process is not None:
            names = [n for n, m, _ in batch if self.sequences[n].computed + m >= len(self.sequences[n].ids)]
            pasts = [(self.sequences[n].ids, self.sequences[n].prompt_len) for n in names]
            order = self._left(np.stack([self.process(row, *past) for row, past in zip(logits, pasts, strict=True)]))
        best = order[:, 0].copy()
        if self.sampler is not None:
            best = self.sampler(best, self.positions[logit_rows])
        tokens, row = np.full(len(best), -1), 0
        for name, n, drafts in batch:
            s = self.sequences[name]
            if s.computed + n < len(s.ids):
                continue
            new = []
            for j in range(len(drafts) + 1):
                tokens[row + j] = best[row + j]
                new.append(int(best[row + j]))
                if j < len(drafts) and drafts[j] != best[row + j]:
                    break
            row += len(drafts) + 1
            s.computed += len(new) - 1  # the accepted drafts; the caller adds n
            s.ids += new
        self._put("sampler", "output.token", tokens, dtype="int64", rows="logits")

    def _masked(self, batch: Any, logits: np.ndarray, at: np.ndarray) -> np.ndarray:
        """The best ids after masks, which are noted."""
        left = logits.copy()
        names = [n for n, m, _ in batch if self.sequences[n].computed + m >= len(self.sequences[n].ids)]
        for row, (name, p) in enumerate(zip(names, at.tolist(), strict=True)):
            if p in (self.mask or {}):
                mask, forbidden = self.mask[p]
                left[row, forbidden] = -np.inf
                req = self.sequences[name].request.req
                self.dump.masks |= {(rank, self.step_number, req): mask for rank in range(self.tp)}
        return self._left(left)

    def _left(self, left: np.ndarray) -> np.ndarray:
        """The best ids of what processors left."""
        order = np.argsort(-left, axis=1, kind="stable")[:, :5]
        best = np.take_along_axis(left, order, 1)
        self._put("sampler", "output.masked_logits", best, dtype="float32", rows="logits")
        self._put("sampler", "output.masked_ids", order, dtype="int32", rows="logits")
        return order

    # --- one tap -----------------------------------------------------------------------------------------------

    def _norm(self, tap: str, x: np.ndarray) -> np.ndarray:
        self._put(tap, "input.x", x)
        return self._out(tap, x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6))

    def _linear(self, tap: str, x: np.ndarray, out: Any = None, into: Any = None) -> np.ndarray:
        self._put(tap, "input.input_", x, parts=into)
        return self._out(tap, self._product(x, self.weights[tap]), parts=out)

    @staticmethod
    def _product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return np.stack([w.astype(np.float64) @ row for row in x.astype(np.float64)]).astype(np.float32)

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        if self.noise:
            values = values * (1 + self.noise * self.random.standard_normal(values.shape))
        values = np.asarray(values, np.float32)
        return widen(round_to_bfloat16(values), "bfloat16") if self.dtype == "bfloat16" else values

    def _faulty(self, name: str, values: np.ndarray, at: Any = None) -> np.ndarray:
        fault = self.faults.get(name)
        if fault is None:
            return values
        at = slice(None) if at is None else at
        return fault(values.copy(), self.positions[at], self.decode[at])

    def _glue(self, name: str, values: np.ndarray) -> np.ndarray:
        return self._rounded(self._faulty(name, values))

    def _out(self, tap: str, values: np.ndarray, *, parts: Any = None, rows: str = "tokens",
             at: Any = None) -> np.ndarray:  # fmt: skip
        values = self._rounded(self._faulty(tap, values, at))
        self._put(tap, "output.0", values, parts=parts, rows=rows)
        return values

    def _put(self, tap: str, role: str, values: np.ndarray, *, dtype: str | None = None, parts: Any = None,
             rows: str = "tokens") -> None:  # fmt: skip
        self.seq += 1
        for rank in range(self.tp):
            piece, layout = values, REPLICATED
            if self.tp > 1:
                layout = Layout("replicated", "tp", rank, self.tp)
            if self.tp > 1 and parts is not None:
                piece, layout = self._blocks(values, rank, parts), self._shard(rank, -1, parts)
            if rank and self.rank_fault == f"{tap}/{role}":
                piece = piece * 1.25
            self.dump.add(rank, self.step_number, tap, role, piece, dtype or self.dtype, self.seq, rows, layout)

    # --- tensor parallel ---------------------------------------------------------------------------------------

    def _qkv_parts(self) -> tuple[tuple[int, int], ...]:
        return self._head_parts(HEADS) + self._head_parts(KV) * 2

    def _head_parts(self, heads: int) -> tuple[tuple[int, int], ...]:
        return ((max(heads // self.tp, 1) * HEAD, max(self.tp // heads, 1)),)

    def _shard(self, rank: int, dim: int, parts: Any) -> Layout:
        return Layout("shard", "tp", rank, self.tp, dim, tuple(parts))

    def _blocks(self, values: np.ndarray, rank: int, parts: Any) -> np.ndarray:
        out, start = [], 0
        for local, replicas in parts:
            k = rank // replicas
            out.append(values[:, start + k * local : start + (k + 1) * local])
            start += local * (self.tp // replicas)
        return np.concatenate(out, axis=1)


def scaled(factor: float, where: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None) -> Fault:
    """A fault that multiplies the rows that ``where(positions, decode)`` selects, or all of them."""

    def fault(values: np.ndarray, positions: np.ndarray, decode: np.ndarray) -> np.ndarray:
        rows = slice(None) if where is None else where(positions, decode)
        values[rows] = values[rows] * factor
        return values

    return fault


PROMPTS = {
    "a": [3, 14, 15, 9, 26, 5, 35, 8, 9, 7],
    "b": [2, 7, 18, 28, 18, 28],
    "c": [1, 61, 8, 3, 39, 8, 8, 7],
}


def capture(
    *, chunk: int = 1 << 30, together: bool = True, tokens: int = 4, prompts: Any = None, **how: Any
) -> MemoryDump:
    tiny = Tiny(**how)
    for name, prompt in (prompts or PROMPTS).items():
        tiny.request(name, prompt)
    return tiny.finish(chunk, tokens, together)


def write(dump: MemoryDump, root: Path, *, payloads: bool = True) -> Path:
    """The same dump on disk, through the real writer. payloads: False leaves statistics and hashes only."""
    from dataclasses import asdict

    from vllm_accprobe.dump.writer import RankWriter, write_run_json

    write_run_json(root, dump.run)
    for rank in dump.ranks:
        writer = RankWriter(root, rank, {}, budget_bytes=1 << 30, block_bytes=1 << 16)
        for m in dump.modules.get(rank, []):
            writer.line({"event": "module", "tap": m.tap, "class": m.cls, "index": m.index, "attrs": {}})
        for (r, _), request in dump.requests.items():
            if r == rank:
                writer.line({"event": "request"} | asdict(request))
        for (r, step), _ in dump.steps.items():
            if r == rank:
                writer.line({"event": "step", "step": step, "batch": {}})
        for (r, _, _), space in dump.rows.items():
            if r == rank:
                writer.line({"event": "rows"} | asdict(space))
        for record in dump.records:
            if record.rank != rank:
                continue
            event = {
                "event": "param" if record.step is None else "tensor", "tap": record.tap, "class": record.cls,
                "role": record.role, "call": record.call, "seq": record.seq, "dtype": record.dtype,
                "shape": list(record.shape), "row_dim": record.row_dim, "layout": record.layout.to_event(),
            }  # fmt: skip
            if record.step is not None:
                event["step"] = record.step
            if record.rows is not None:
                event["rows"] = record.rows
            bits = dump.data[record.payload.off]
            if payloads:
                put_event(writer, bits, event)
            else:
                writer.line(event | {"stats": asdict(record.stats), "hash": record.hash})
        writer.close("done", {"steps": 0, "tensors": 0})
    return root
