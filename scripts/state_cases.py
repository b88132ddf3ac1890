"""Wrong states planted in real engines, and clean ones: what the ledger of states says of each (docs/state-checks.md).

The problem: a ledger is worth what it finds and what it does not; both can only be seen in engines that hit prefixes,
preempt, speculate and reload. The idea: lab/state_lab.py builds tiny engines one after another in this
process; each case is one of them with at most one fault of lab/state_faults.py, and is right when the ledger
says that kind of finding about that request, or nothing at all where nothing was planted. A clean case must have been
one: the counter that it names must not be zero.

    python scripts/state_cases.py --out DIR [--only GLOB] [--page FILE]

Exit code 1 where a case is wrong. Not here: the V2 runner's start (--v2 makes this process one of it).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from lab import state_lab as lab  # noqa: E402
from lab.state_lab import Ask, prompt  # noqa: E402


@dataclass(frozen=True)
class Case:
    """One engine. kind: of the finding that must come, "" for none; who: the request that it must name; fault: of
    state_faults.py. metric: which counter must not be 0."""

    name: str
    what: str
    model: str = "qwen2"
    asks: Sequence[Ask] = ()
    kind: str = ""
    who: str = "a"
    fault: str = ""
    metric: str = ""
    mode: str = "sample"
    rounds: int = 1
    between: Callable[[Any], None] | None = None
    args: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


THREE = (Ask("a", prompt(70, 1), 24), Ask("b", prompt(45, 2), 16, 2), Ask("c", prompt(100, 3), 12, 5))
LONG = tuple(Ask(name, prompt(90, i), 60, i) for i, name in enumerate("abcd"))
SAME = (
    Ask("a", prompt(100, 1), 8),
    Ask("b", prompt(100, 1), 8, 12),
    Ask("c", [*prompt(100, 1)[:70], *prompt(40, 9)], 8, 24),
)
TWO = (Ask("a", prompt(40, 1), 24), Ask("b", prompt(50, 2), 24))
REPEATS = tuple(Ask(name, prompt(12, i) * 5, 40, i) for i, name in enumerate("abc"))
HITS: dict[str, Any] = {"enable_prefix_caching": True}
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
GRAPHS: dict[str, Any] = {"enforce_eager": False}
FEW: dict[str, Any] = {"num_gpu_blocks_override": 13, "max_model_len": 256}
NGRAM: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}
ALIGNED: dict[str, Any] = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}


def _reload(llm: Any) -> None:
    llm.collective_rpc("reload_weights")


def _connector(folder: Path) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
    }  # fmt: skip


def cases(root: Path) -> list[Case]:
    """All of them, clean ones first."""
    hybrid = {"block_size": None}
    shared = _connector(root / "transfer")
    again = (Ask("a", prompt(100, 1), 4), Ask("b", prompt(100, 1), 8, 8))
    return [
        Case("hits", "prefix hits, whole and partial", asks=SAME, metric="prefix_hits", args=HITS, rounds=2),
        Case("preemption", "preemption and resume, blocks for half of the requests", asks=LONG, metric="preemptions",
             args=FEW, mode="full"),
        Case("preemption-hits", "the same with prefix caching: resumed on their own blocks", asks=LONG,
             metric="preemptions", args=FEW | HITS),
        Case("chunks", "chunked prefill, 48 tokens a step", asks=THREE, mode="full",
             args={"max_num_batched_tokens": 48}),
        Case("reload", "weights loaded anew between two rounds", asks=THREE, rounds=2, between=_reload, args=HITS),
        Case("ngram", "n-gram speculation", asks=REPEATS, metric="drafted", args=NGRAM, mode="full"),
        Case("sliding", "sliding windows and full attention (Gemma 3)", model="gemma3", asks=LONG,
             args=HITS | {"num_gpu_blocks_override": 60, "max_model_len": 256}, mode="full"),
        Case("mla", "latent attention (DeepSeek-V2)", model="deepseek-v2", asks=THREE, mode="full"),
        Case("mamba2", "recurrent states (Mamba2)", model="mamba2", asks=THREE, args=hybrid, mode="full"),
        Case("falcon-h1", "attention and states in every layer (Falcon-H1), chunked", model="falcon-h1", asks=THREE,
             args=hybrid | {"max_num_batched_tokens": 64}, mode="full"),
        Case("qwen3-next", "gated delta rule and attention (Qwen3-Next)", model="qwen3-next", asks=THREE, args=hybrid,
             mode="full"),
        Case("lfm2", "short convolutions and attention (LFM2)", model="lfm2", asks=THREE, args=hybrid, mode="full"),
        Case("aligned", "states moved on from block to block (align mode)", model="falcon-h1",
             asks=(Ask("a", prompt(90, 1), 120), Ask("b", prompt(70, 2), 90, 3)), mode="full",
             args=ALIGNED | hybrid),
        Case("connector", "blocks brought from a shared storage (ExampleConnector)", asks=again, args=shared,
             mode="full"),
        Case("fp8", "an fp8 cache (e4m3), prefix hits", asks=SAME, metric="prefix_hits", args=HITS | FP8, mode="full"),
        Case("fp8-e5m2", "an fp8 cache (e5m2), chunked prefill", asks=THREE, mode="full",
             args=FP8 | {"kv_cache_dtype": "fp8_e5m2", "max_num_batched_tokens": 48}),
        Case("fp8-dropped-row", "a row that is not written into an fp8 cache", asks=TWO, kind="stale", who="b",
             fault="dropped_row", args=FP8),
        Case("fp8-flipped-bit", "one bit of an fp8 block, in one layer", asks=TWO, kind="changed", fault="flipped_bit",
             mode="full", args=FP8),
        Case("compiled", "a compiled engine: looked at before and after the forward, prefix hits", asks=SAME,
             metric="prefix_hits", args=HITS | GRAPHS, mode="full"),
        Case("compiled-stale-slot", "the slot of the step before, in a compiled engine", asks=TWO, kind="stale",
             fault="stale_slot", args=GRAPHS),
        Case("compiled-flipped-bit", "one bit of a block, in one layer of a compiled engine", asks=TWO, kind="changed",
             fault="flipped_bit", mode="full", args=GRAPHS),
        Case("compiled-freed", "a block freed while it is read, in a compiled engine", kind="freed", fault="freed",
             asks=(THREE[0], Ask("c", prompt(100, 3), 12, 6)), args=GRAPHS),
        Case("freed", "a block freed while it is read", asks=(THREE[0], Ask("c", prompt(100, 3), 12, 6)), kind="freed",
             fault="freed"),
        Case("stale-slot", "the slot of the step before", asks=TWO, kind="stale", fault="stale_slot"),
        Case("dropped-row", "a row that the kernel does not write, metadata right", asks=TWO, kind="stale", who="b",
             fault="dropped_row"),
        Case("other-state", "two requests' state indices exchanged", model="falcon-h1", asks=TWO, kind="other",
             args=hybrid, fault="other_state"),
        Case("no-state", "a new request goes on from what its block holds", model="mamba2", asks=TWO, kind="other",
             args=hybrid, fault="no_state"),
        Case("gdn-other-state", "the same indices in the gated delta rule", model="qwen3-next", asks=TWO, kind="other",
             args=hybrid, fault="other_state"),
        Case("swapped-states", "two requests' states exchanged in the cache", model="mamba2", asks=TWO, kind="other",
             args=hybrid, fault="swapped_states", mode="full"),
        Case("late-state-copy", "a state that is copied behind the forward", model="falcon-h1", kind="late",
             asks=(Ask("a", prompt(90, 1), 120),), args=ALIGNED | hybrid | {"max_model_len": 1000},
             fault="late_state_copy"),
        Case("late-load", "blocks that a connector brings behind the forward", asks=again, kind="late", who="b",
             args=shared, fault="late_load"),
        Case("flipped-bit", "one bit of a block, in one layer", asks=TWO, kind="changed", fault="flipped_bit",
             mode="full"),
        Case("flipped-bit-end", "the same, looked at upon the request's end only", asks=TWO, kind="changed",
             fault="flipped_bit", mode="events"),
        Case("strange-hit", "a prefix hit of other tokens",
             asks=(Ask("a", prompt(100, 1), 30), Ask("b", prompt(100, 5), 8, 6)), kind="strange", who="b", args=HITS,
             fault="strange_hit"),
    ]  # fmt: skip


def run(case: Case, root: Path) -> tuple[bool, str, str]:
    """(whether it is right, what the ledger said, its counters)."""
    import shutil

    from tiny_model import make
    from vllm.v1.worker import mamba_utils

    from lab import eight_bit_cache, state_faults
    from vllm_accprobe.dump.journal import sentence
    from vllm_accprobe.formats import open_dump

    if case.model in lab.HYBRIDS:
        model = lab.hybrid(case.model, root / "models" / case.model)
    else:
        model = make(case.model, root / "models" / case.model)
    shutil.rmtree(root / "transfer", ignore_errors=True)
    if "kv_cache_dtype" in case.args:
        eight_bit_cache.allow()
    plant = getattr(state_faults, case.fault) if case.fault else None
    kept = mamba_utils.do_mamba_copy_block
    args = {k: v for k, v in (lab.ENGINE | case.args).items() if v is not None}
    out = root / case.name
    try:
        if case.args.get("block_size", 0) is None:
            lab.ENGINE.pop("block_size")
        compiled = not args["enforce_eager"]
        if compiled:
            os.environ["VLLM_CPU_CI_ENV"] = "1"  # compiled by dynamo, without inductor's minutes
        ran = lab.run(
            model, out, case.asks, plant, case.mode, case.rounds, case.between,
            {"VLLM_ACCPROBE_GRAPHS": "1"} if compiled else None, **(args if case.args else {}),
        )  # fmt: skip
    finally:
        os.environ.pop("VLLM_CPU_CI_ENV", None)
        lab.ENGINE.setdefault("block_size", 32)
        mamba_utils.do_mamba_copy_block = kept
    dump = open_dump(out)
    totals = dump.state_totals.get(0)
    found = [one for _, one in dump.states]
    counted = "" if totals is None else (
        f"{totals.steps} steps, {totals.hashed:,} hashed, {totals.checked:,} looked at, {totals.held:,} numbers; "
        + ", ".join(f"{n} x {event}" for event, n in sorted(totals.events.items()))
        + ("; not watched: " + ", ".join(f"{n} x {why}" for why, n in totals.skipped.items()) if totals.skipped else "")
    )  # fmt: skip
    watched = totals is not None and totals.checked > 0 and totals.held > 0
    watched = watched and compiled != bool(dump.run["engine"]["eager"])
    was = not case.metric or ran.metrics.get(case.metric, 0) > 0
    if not case.metric:
        what = ""
    else:
        what = f" ({case.metric}: {ran.metrics.get(case.metric, 0):.0f})"
    if case.kind:
        right = any(one.kind == case.kind and one.request.startswith(case.who) for one in found)
        others = sorted({one.kind for one in found} - {case.kind})
        right = right and watched and not (set(others) - set(case.also))
        said = (
            sentence(next(one for one in found if one.kind == case.kind))
            if right
            else "; ".join(map(sentence, found[:3]))
        )
        said += f" (and {', '.join(others)})" if others else ""
        return right, said or "nothing", counted
    said = "; ".join(map(sentence, found[:3])) or "nothing"
    return not found and watched and was, said + what, counted


def page(rows: Sequence[tuple[Case, bool, str, str]]) -> str:
    """The table of docs/state-checks.md."""
    out = ["| case | mode | what the ledger said | right |", "| --- | --- | --- | --- |"]
    for case, right, said, _ in rows:
        out.append(f"| {case.what} | {case.mode} | {said.replace('|', '/')} | {'yes' if right else 'NO'} |")
    return "\n".join(out) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--v2", action="store_true", help="the V2 model runner")
    asked = parser.parse_args()
    lab.prepare()
    if asked.v2:
        os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        sys.path.insert(0, str(ROOT / "tests"))
        from support.engine_ways import prepare_v2_runner

        prepare_v2_runner()
    rows = []
    for case in cases(asked.out):
        if not any(fnmatchcase(case.name, glob) for glob in asked.only.split(",")):
            continue
        begin = time.monotonic()
        try:
            right, said, counted = run(case, asked.out)
        except Exception as error:
            right, said, counted = False, f"the engine failed: {type(error).__name__}: {str(error)[:300]}", ""
        rows.append((case, right, said, counted))
        print(
            f"{'ok ' if right else 'BAD'} {case.name} ({time.monotonic() - begin:.0f} s): {said}\n      {counted}",
            flush=True,
        )
    if asked.page:
        asked.page.write_text(page(rows), encoding="utf-8")
    return 0 if all(right for _, right, _, _ in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
