"""Comparisons made up for the report's tests: a realistic one of any size, and a hostile one."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from vllm_accprobe.comparison.result import Comparison, Pair
from vllm_accprobe.comparison.row_table import RowTable, ValueSample

LAYER_TAPS = [
    ("input_layernorm", "RMSNorm"), ("self_attn.qkv_proj", "QKVParallelLinear"), ("self_attn.q_norm", "RMSNorm"),
    ("self_attn.k_norm", "RMSNorm"), ("self_attn.rotary_emb", "RotaryEmbedding"), ("self_attn.attn", "Attention"),
    ("self_attn.o_proj", "RowParallelLinear"), ("self_attn", "Qwen3Attention"),
    ("post_attention_layernorm", "RMSNorm"), ("mlp.gate_up_proj", "MergedColumnParallelLinear"),
    ("mlp.act_fn", "SiluAndMul"), ("mlp.down_proj", "RowParallelLinear"), ("mlp", "Qwen3MLP"),
    ("", "Qwen3DecoderLayer"),
]  # fmt: skip


def pair(**changes: Any) -> Pair:
    """A passing pair of one [4, 64] bf16 tensor, with ``changes``."""
    tap, role, call = (changes.get(k, d) for k, d in (("tap", "model.norm"), ("role", "output.0"), ("call", 0)))
    name = f"{tap}/{role}" + (f"#{call}" if call else "")
    values: dict[str, Any] = {
        "golden": name, "mine": name, "step": 0, "rank": 0, "dtype_golden": "bfloat16", "dtype_mine": "bfloat16",
        "shape": (4, 64), "cosine": 1.0, "max_abs_err": 0.0, "mean_abs_err": 0.0, "rmse": 0.0, "rel_l2": 0.0,
        "max_rel_err": 0.0, "worst_row_rel_l2": 0.0, "worst_row_norm_ratio": 1.0, "nonfinite": 0,
        "nonfinite_mismatch": 0, "status": "pass", "message": "", "tap": tap, "cls": "RMSNorm", "role": role,
        "call": call, "order": 0, "rule": "exact", "rows": 4, "phase": "prefill", "prefill_rel_l2": None,
        "decode_rel_l2": None, "worst_request": None, "worst_position": None, "max_abs_index": None,
        "max_abs_golden": None, "max_abs_mine": None, "limit": 0.016, "identical": False,
    }  # fmt: skip
    return Pair(**(values | changes))


def comparison(**changes: Any) -> Comparison:
    """A passing comparison of no pairs, with ``changes``."""
    run = {"vllm": "0.32.0", "platform": "cpu", "model": "tiny-qwen3", "dtype": "bfloat16"}
    values: dict[str, Any] = {
        "golden_path": "golden", "mine_path": "mine", "golden_run": run, "mine_run": run, "pairs": [],
        "coverage": {"pairs": len(changes.get("pairs", ())), "rows_compared": 0, "rows_only_golden": 0,
                     "rows_only_mine": 0, "taps_only_golden": [], "taps_only_mine": [], "skipped": {}},
        "first_divergence": None, "origins": [], "tokens": {"compared": 0, "flipped": []}, "verdict": "pass",
        "notes": [], "plan": [], "standard": {"name": "accprobe"},
    }  # fmt: skip
    return Comparison(**(values | changes))


CULPRIT = "model.layers.3.mlp.down_proj"

ORIGIN = {
    "module": CULPRIT, "class": "RowParallelLinear", "role": "output.0", "request": "a", "position": 17,
    "phase": "decode", "created": 0.21, "propagated": 0.0021, "floor": 0.016, "evidence": "jump",
}  # fmt: skip

DIVERGENCE = {
    "module": CULPRIT, "role": "output.0", "rank": 0, "step": 4, "request": "a", "position": 17, "phase": "decode",
    "metric": "worst_row_rel_l2", "value": 0.21, "limit": 0.016,
}  # fmt: skip


@cache
def realistic(layers: int = 8, steps: int = 12, *, fail: bool = True) -> Comparison:
    """``layers`` x 14 taps x (input, output) x ``steps``: a fault in layer 3's down_proj from step 4 (decode) on. One
    for all that ask: nobody changes it."""
    rng = random.Random(0)
    taps = [("model.embed_tokens", "VocabParallelEmbedding")]
    for i in range(layers):
        taps += [(f"model.layers.{i}" + (f".{t}" if t else ""), c) for t, c in LAYER_TAPS]
    taps += [("model.norm", "RMSNorm"), ("logits_processor", "LogitsProcessor")]
    pairs = []
    for step in range(steps):
        phase = "prefill" if step < 2 else "decode"
        rows = 48 if step < 2 else 3
        error, broken = 0.0, False
        for order, (tap, cls) in enumerate(taps):
            for k, role in enumerate(("input.0", "output.0")):
                limit = 0.016 + 0.00004 * order
                if role == "output.0":
                    error = error * rng.uniform(0.97, 1.04) + (3e-5 if order > 4 else 0.0) * rng.random()
                    if fail and tap == CULPRIT and step >= 4:
                        error, broken = 0.21 if step == 4 else rng.uniform(0.05, 0.2), True
                status = "fail" if broken and error > limit else "pass"
                pairs.append(
                    pair(tap=tap, cls=cls, role=role, step=step, order=2 * order + k, shape=(rows, 1024), rows=rows,
                         phase=phase, status=status, limit=limit, identical=error == 0.0, cosine=1 - error * error / 2,
                         rel_l2=error * 0.7, rmse=error * 0.4, max_abs_err=error * 3, mean_abs_err=error * 0.2,
                         max_rel_err=error * 40, worst_row_rel_l2=error, worst_row_norm_ratio=1 + error / 5,
                         prefill_rel_l2=error if phase == "prefill" else None,
                         decode_rel_l2=error if phase == "decode" else None, worst_request="a",
                         worst_position=13 + step, max_abs_index=(rows // 2, 37), max_abs_golden=1.5,
                         max_abs_mine=1.5 + error * 3),
                )  # fmt: skip
    pairs += [
        pair(tap="sampler", cls="Sampler", role="output.token", step=s, order=2 * len(taps), status="skip",
             message="rows after the first flipped token", limit=None, cosine=None, rel_l2=None, worst_row_rel_l2=None)
        for s in range(steps - 3, steps)
    ]  # fmt: skip
    compared = sum(p.rows for p in pairs if p.status != "skip")
    coverage = {
        "pairs": len(pairs), "rows_compared": compared, "rows_only_golden": 16, "rows_only_mine": 0,
        "taps_only_golden": [], "taps_only_mine": ["model.layers.0.mlp.act_fn.extra"],
        "skipped": {"rows after the first flipped token": 9, "tap did not run on this rank": 2},
    }  # fmt: skip
    if not fail:
        return comparison(pairs=pairs, coverage=coverage, tokens={"compared": 36, "flipped": []})
    second = ORIGIN | {"module": "lm_head", "class": "ParallelLMHead", "created": 0.035, "position": 19}
    flipped = [
        {"request": r, "ordinal": 6 + i, "golden": 311, "mine": 42, "golden_margin": 0.41, "mine_margin": 0.07}
        for i, r in enumerate("abc")
    ]
    return comparison(
        pairs=pairs, coverage=coverage, verdict="fail", origins=[ORIGIN, second], first_divergence=DIVERGENCE,
        tokens={"compared": 36, "flipped": flipped},
        notes=["golden is float32 and mine bfloat16: limits are bfloat16's"],
        plan=["names: 114 taps paired exactly", "tokens: 3 requests by id and prompt", "ranks: 1 against 1"],
        mine_run={"vllm": "0.32.0", "platform": "npu", "model": "tiny-qwen3", "dtype": "bfloat16", "tp": 2},
    )  # fmt: skip


def row_table(entries: list[tuple[int, str, int, bool, float, float]]) -> RowTable:
    """From (pair, request, position, decode, error, ratio) per row."""
    labels = sorted({e[1] for e in entries})
    columns = [np.array([e[i] for e in entries]) for i in (0, 2, 3, 4, 5)]
    request = np.array([labels.index(e[1]) for e in entries], np.int32)
    pair_, position, decode, error, ratio = columns
    return RowTable(
        tuple(labels), pair_.astype(np.int32), request, position.astype(np.int64), decode.astype(bool),
        error.astype(np.float32), ratio.astype(np.float32),
    )  # fmt: skip


@cache
def realistic_rows() -> Comparison:
    """``realistic`` by row, see there."""
    return with_rows(realistic())


def with_rows(result: Comparison) -> Comparison:
    """``result`` of ``realistic`` with errors by row: step 0 is 48 rows of a, step 1 of b, then one each of a, b and c;
    a has the pair's error, the others half of it; and with samples of the failed pairs, scaled by 1.25."""
    entries: list[tuple[int, str, int, bool, float, float]] = []
    samples = []
    for i, p in enumerate(result.pairs):
        if not p.role.startswith("output") or p.status == "skip" or p.step is None or p.limit is None:
            continue
        if p.step < 2:
            rows = [("ab"[p.step], k) for k in range(48)]
        else:
            rows = [(r, 46 + p.step) for r in "abc"]
        for r, position in rows:
            error = (p.worst_row_rel_l2 or 0.0) * (1.0 if r == "a" else 0.5)
            entries.append((i, r, position, p.step >= 2, error, error / p.limit))
        if p.status == "fail" and len(samples) < 64:
            golden = np.linspace(-2, 2, 96, dtype=np.float32)
            samples.append(ValueSample(i, golden, golden * np.float32(1.25), 64, "a", 46 + p.step))
    return replace(result, rows=row_table(entries), samples=tuple(samples))


EVIL = "</script><img src=x onerror=window.pwned=1><b>\x1b[31m\u202e&amp;{{data}}"


def hostile() -> Comparison:
    """Every string that a dump can choose tries to break out."""
    bad = [
        pair(tap=EVIL + str(i), cls=EVIL, role="output." + EVIL, rule=EVIL, message=EVIL, status="fail",
             worst_request=EVIL, worst_position=EVIL, worst_row_rel_l2=0.5, prefill_rel_l2=0.5, dtype_mine=EVIL,
             order=i)
        for i in range(3)
    ]  # fmt: skip
    rows = [(i, EVIL, k, False, 0.5, 30.0) for i in range(3) for k in range(4)]
    values = np.ones(8, np.float32)
    origin = {"module": EVIL + "0", "class": EVIL, "role": EVIL, "request": EVIL, "phase": EVIL, "shape": EVIL}
    return comparison(
        rows=row_table(rows), samples=tuple(ValueSample(i, values, values * 2, 4, EVIL, 1) for i in range(3)),
        pairs=bad, verdict="fail", golden_path=EVIL, golden_run={EVIL: EVIL, "nested": {EVIL: [EVIL]}},
        origins=[ORIGIN | origin], first_divergence=DIVERGENCE | {"module": EVIL, "metric": EVIL},
        tokens={"compared": 1, "flipped": [{"request": EVIL, "ordinal": EVIL, "golden": 1, "mine": EVIL}]},
        notes=[EVIL], plan=[EVIL], standard={"name": EVIL, EVIL: EVIL},
        coverage={"pairs": 3, "rows_compared": 3, "taps_only_golden": [EVIL], "skipped": {EVIL: 1}},
    )  # fmt: skip
