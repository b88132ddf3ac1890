"""A comparison as a large model on many cards gives it, made up: for bench_page.py, pictures of the page and its tests.

The problem: sixty layers on sixty-four cards are not to be had, and what a page weighs depends on what is in it: noise
does not compress, and a fault reaches only what comes after it. The idea: a tap per operator and layer, a pair per tap,
rank and step, noise that piles up with depth, several origins that all
ranks carry on from the next reduction, rows of several requests in
prefill and decode, some skipped pairs; the same every time. Nothing is measured: only the result's values are made.
Not here: drawing and timing (bench_page.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_accprobe.comparison.result import FAIL, PASS, SKIP, Comparison, Pair
from vllm_accprobe.comparison.row_table import RowTable, ValueSample, ValueSpread

LAYER = (
    ("self_attn.qkv_proj", "QKVParallelLinear"),
    ("self_attn.attn", "Attention"),
    ("self_attn.o_proj", "RowParallelLinear"),
    ("mlp.gate_up_proj", "MergedColumnParallelLinear"),
    ("mlp.down_proj", "RowParallelLinear"),
)
ENDS = (("model.embed_tokens", "VocabParallelEmbedding"), ("model.norm", "RMSNorm"), ("lm_head", "ParallelLMHead"))
PROMPTS = (384, 96, 33)
"""Prompts that the first step computes, in tokens; each of them decodes in every later step."""
DECODING = (700, 512, 64)
"""Where three other requests are that decode from the first step on: it is a mixed one."""
LIMIT = 0.016
FLIPPED = "rows after the first flipped token"


@dataclass(frozen=True)
class Made:
    """How large."""

    pairs: int = 20_000
    layers: int = 60
    ranks: int = 64

    @property
    def faults(self) -> tuple[tuple[int, str, float], ...]:
        """What is wrong: (rank, tap, created error); the worst rank is 17, or as far as there are ranks."""
        early, late = self.layers * 23 // 60, self.layers * 41 // 60
        return (
            (17 % self.ranks, f"model.layers.{early}.mlp.down_proj", 0.21),
            (40 % self.ranks, f"model.layers.{late}.self_attn.attn", 0.06),
            (17 % self.ranks, "lm_head", 0.35),
        )


def made(how: Made, seed: int = 0) -> Comparison:
    """A failing comparison of exactly ``how.pairs`` pairs; as many steps as that takes, the first of them prefill."""
    rng = np.random.default_rng(seed)
    taps = _taps(how.layers)
    pairs: list[Pair] = []
    rows: list[tuple[int, np.ndarray, np.ndarray, bool, np.ndarray]] = []
    step = 0
    while len(pairs) < how.pairs:
        for rank in range(how.ranks):
            _rank(how, taps, step, rank, pairs, rows, rng)
        step += 1
    failed = [i for i, p in enumerate(pairs) if p.status == FAIL]
    shown = sorted(failed, key=lambda i: -(pairs[i].worst_row_rel_l2 or 0.0))[:200]
    origins = _origins(how, taps)
    return Comparison(
        golden_path="golden", mine_path="mine", golden_run=_run("cuda", 1), mine_run=_run("npu", how.ranks),
        pairs=pairs,
        coverage={"rows_compared": sum(p.rows or 0 for p in pairs), "rows_only_golden": 0, "rows_only_mine": 0,
                  "taps_only_golden": [], "taps_only_mine": [], "skipped": {FLIPPED: 0}},
        first_divergence=_divergence(origins[0]) if origins else None, origins=origins,
        tokens={"compared": 6 * max(step - 1, 1), "flipped": []},
        verdict=FAIL if failed else PASS, notes=[], plan=[f"ranks: 1 against {how.ranks}"],
        standard={"name": "accprobe", "total": 8.0}, rows=_table(pairs, rows),
        samples=tuple(_sample(i, pairs[i], rng) for i in shown[:64]),
        spreads=tuple(_spread(i, rng) for i in shown),
        created={tap: float(x) for (tap, _), x in zip(taps, rng.lognormal(-2.5, 0.7, len(taps)), strict=True)},
        without_spread={"not among the 200 worst": len(failed) - len(shown)} if len(failed) > len(shown) else {},
    )  # fmt: skip


def _taps(layers: int) -> list[tuple[str, str]]:
    inner = [(f"model.layers.{i}.{t}", c) for i in range(layers) for t, c in LAYER]
    return [ENDS[0], *inner, *ENDS[1:]]


def _rank(how: Made, taps: Any, step: int, rank: int, pairs: list[Pair], rows: list[Any], rng: Any) -> None:
    """One rank's forward: noise that grows with depth, and what a fault adds to it from there on."""
    prompts = (*PROMPTS, 1, 1, 1) if step == 0 else (1,) * (len(PROMPTS) + len(DECODING))
    first = [*((0,) * len(PROMPTS) if step == 0 else (n + step - 1 for n in PROMPTS)), *(n + step for n in DECODING)]
    request = np.repeat(np.arange(len(prompts)), prompts).astype(np.int32)
    position = np.concatenate([f + np.arange(n) for f, n in zip(first, prompts, strict=True)])
    decode = (request >= len(PROMPTS)) | (step > 0)
    carried = np.zeros(len(request))
    for order, (tap, cls) in enumerate(taps):
        if len(pairs) == how.pairs:
            return
        carried = carried + rng.lognormal(-9.5, 0.6, len(request)) / (1 + order / 40)
        error, made_here = carried, 0.0
        for who, place, size in how.faults:
            if place == tap:  # in one request, and from some position on: faults do not fall on every row alike
                added = np.where((request == 0) & (position >= 40), size * rng.uniform(0.6, 1.0, len(request)), 0.0)
                error = error + (added if who == rank else 0.0)
                made_here = size if who == rank else made_here
                carried = carried + added
        limit = LIMIT * (1 + order / 200)
        if tap == "lm_head" and rank % 16 == 5 % how.ranks:
            pairs.append(_pair(tap, cls, step, rank, order, error, request, position, decode, limit, skip=FLIPPED))
            continue
        rows.append((len(pairs), request, position, decode, error.astype(np.float32)))
        pair = _pair(tap, cls, step, rank, order, error, request, position, decode, limit)
        if made_here:  # judged by what was created there, in the row that the origin names
            pair = replace(pair, measure="created", measured=made_here, allowed=LIMIT, limit=LIMIT)
            pair = pair if step else replace(pair, worst_request="chat-0", worst_position=40)
        pairs.append(pair)


def _pair(
    tap: str, cls: str, step: int, rank: int, order: int, error: np.ndarray, request: np.ndarray, position: np.ndarray,
    decode: np.ndarray, limit: float, skip: str = "",
) -> Pair:  # fmt: skip
    at, n = int(error.argmax()), len(error)
    value, failed = float(error[at]), bool(error[at] > limit)
    said = {"step": step, "rank": rank, "dtype_golden": "bfloat16", "dtype_mine": "bfloat16", "shape": (n, 7168),
            "tap": tap, "cls": cls, "role": "output.0", "order": order, "rule": "exact", "rows": n,
            "phase": "decode" if step else "mixed"}  # fmt: skip
    name = f"{tap}/output.0"
    if skip:
        return Pair(name, name, status=SKIP, message=skip, **said)
    whole = float(np.sqrt((error**2).mean()))
    return Pair(
        name, name, cosine=1 - whole**2 / 2, max_abs_err=value * 3, mean_abs_err=whole * 0.2, rmse=whole * 0.4,
        rel_l2=whole, max_rel_err=value * 40, worst_row_rel_l2=value, worst_row_norm_ratio=1 + value / 5, nonfinite=0,
        nonfinite_mismatch=0, status=FAIL if failed else PASS,
        prefill_rel_l2=None if step else float(error[~decode].max()), decode_rel_l2=float(error[decode].max()),
        worst_request=f"chat-{request[at]}", worst_position=int(position[at]),
        max_abs_index=(at, 37), max_abs_golden=1.5, max_abs_mine=1.5 + value * 3, limit=limit, measure="row_rel_l2",
        measured=value, allowed=limit, floor=limit / 8, floor_source="model", x_floor=value / (limit / 8),
        message=f"row relative L2 {value:.3g}, limit {limit:.3g}" if failed else "", **said,
    )  # fmt: skip


def _table(pairs: list[Pair], rows: list[Any]) -> RowTable:
    limits = [pairs[i].limit or np.nan for i, *_ in rows]
    sizes = [len(request) for _, request, *_ in rows]
    error = np.concatenate([e for *_, e in rows])
    labels = tuple(f"chat-{i}" for i in range(len(PROMPTS) + len(DECODING)))
    return RowTable(
        labels, np.repeat([i for i, *_ in rows], sizes).astype(np.int32),
        np.concatenate([r for _, r, *_ in rows]), np.concatenate([p for _, _, p, _, _ in rows]).astype(np.int64),
        np.concatenate([d for _, _, _, d, _ in rows]), error, error / np.repeat(limits, sizes).astype(np.float32),
    )  # fmt: skip


def _origins(how: Made, taps: list[tuple[str, str]]) -> list[dict[str, Any]]:
    places = {tap: (i, cls) for i, (tap, cls) in enumerate(taps)}
    return [
        {"module": tap, "class": places[tap][1], "role": "output.0", "rank": rank, "step": 0,
         "request": "chat-0", "position": 40, "phase": "prefill", "created": size, "propagated": 0.002, "floor": LIMIT,
         "evidence": "jump", "tier": "beyond chance", "times": size / LIMIT, "chance": 1e-9,
         "shape": "columns 400-511 of 7168"}
        for rank, tap, size in sorted(how.faults, key=lambda f: places.get(f[1], (0,))[0]) if tap in places
    ]  # fmt: skip


def _divergence(origin: dict[str, Any]) -> dict[str, Any]:
    return {k: origin[k] for k in ("module", "role", "rank", "step", "request", "position", "phase")} | {
        "metric": "row_rel_l2", "value": origin["created"], "limit": LIMIT,
    }  # fmt: skip


def _sample(index: int, pair: Pair, rng: Any) -> ValueSample:
    golden = rng.standard_normal(96).astype(np.float32)
    mine = (golden * np.float32(1.2)).astype(np.float32)
    return ValueSample(index, golden, mine, 64, pair.worst_request, pair.worst_position)


def _spread(index: int, rng: Any) -> ValueSpread:
    golden = np.append(np.histogram(rng.standard_normal(4096), 40, (-4, 4))[0], (0, 0, 0)).astype(np.int64)
    mine = np.append(np.histogram(1.2 * rng.standard_normal(4096), 40, (-4, 4))[0], (0, 0, 0)).astype(np.int64)
    columns, positions = rng.lognormal(-4, 1, 64), rng.lognormal(-4, 1, 64)
    return ValueSpread(index, -4.0, 4.0, golden, mine, columns, 7168, 0, 383, positions, 744, 744)


def _run(platform: str, tp: int) -> dict[str, Any]:
    return {"vllm": "0.32.0", "platform": platform, "model": "made-60-layers", "dtype": "bfloat16", "tp": tp}
