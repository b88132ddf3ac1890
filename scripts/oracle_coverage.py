#!/usr/bin/env python3
"""What share of operators that are not PyTorch's own `opcheck` judges, of real engines: a table of docs/operators.md.

    python scripts/oracle_coverage.py --work DIR [--models qwen2,lfm2] [--kernels avx2]

Each tiny model is served by vLLM's CPU engine with every operator captured (five staggered requests, 16 tokens each at
most), and each captured call is held against its reference. A call is judged where an output of it passed or failed; of
the others the reason is counted. Models and dumps are kept in DIR and used again. Exit code 1 where an output fails
that is not among KNOWN."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import mode_models
import tiny_model
from support.engine import EngineHost
from support.prompts import prompts

from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap

LENGTHS = (37, 21, 64, 9, 90)
MODELS = ("qwen2", "qwen2-moe", "deepseek-v2", "w8a8", "mamba2", "falcon-h1", "qwen3-next", "lfm2")
KNOWN = {
    "_C.onednn_scaled_mm": "oneDNN without VNNI adds pairs of products in 16 bits, and what is more is cut off",
    "_C.rotary_embedding": "vLLM's CPU kernel turns 3-D tensors wrongly, in LFM2 and in a DeepSeek-V2 without YaRN",
}


def model(name: str, work: Path) -> Path:
    path = work / "models" / name
    if name == "w8a8":
        return mode_models.w8a8(path)
    if name in mode_models.ARCHITECTURES:
        return mode_models.of_transformers(name, path)
    return tiny_model.make(name, path)


def captured(name: str, work: Path, forced: str, host: EngineHost) -> Path:
    dump = work / "dumps" / f"{name}-{forced}"
    if not (dump / "run.json").exists():
        asks = prompts(*LENGTHS)
        host.capture(model(name, work), asks, out=dump, how="staggered", env={"VLLM_ACCPROBE_OPS": "1"},
                     max_model_len=512)  # fmt: skip
    return dump


def judged(dump: Path, weights: Path) -> dict[str, Any]:
    """By operator: calls, judged, failed, and of the others how many for which reason."""
    calls, references = Calls(open_dump(dump), weights), default_references()
    found: dict[str, Any] = {}
    for rank, tap, op in calls.taps():
        if "::" not in tap or op.startswith("aten."):
            continue
        rows = list(check_tap(calls, rank, tap, lambda c: references.evaluate(c.what), Options(habits=True)))
        entry = found.setdefault(op.removesuffix(".default"), {"calls": 0, "judged": 0, "failed": 0, "why": Counter()})
        by_call: dict[Any, list[Any]] = {}
        for row in rows:
            if row.step is not None or row.call is not None:
                by_call.setdefault((row.step, row.call), []).append(row)
        entry["calls"] += len(calls.ops[rank, tap])
        for of_call in by_call.values():
            states = {r.status for r in of_call}
            if states & {"pass", "fail", "warning"}:
                entry["judged"] += 1
                entry["failed"] += "fail" in states
            else:
                entry["why"][next((r.message for r in of_call if r.message), "?")] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--kernels", default="native")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    lines, wrong = [], []
    for name in options.models.split(","):
        with_env = EngineHost(options.work / f"{name}.log", forced=options.kernels)
        try:
            dump = captured(name, options.work, options.kernels, with_env)
        finally:
            with_env.close()
        found = judged(dump, model(name, options.work))
        (options.work / f"{name}-{options.kernels}.json").write_text(json.dumps(found, indent=1))
        total = sum(e["calls"] for e in found.values())
        done = sum(e["judged"] for e in found.values())
        reasons: Counter[str] = sum((Counter(e["why"]) for e in found.values()), Counter())
        why = "; ".join(f"{n} {text}" for text, n in reasons.most_common())
        lines.append(f"| {name} | {total} | {done} ({100 * done / max(total, 1):.0f} %) | {why} |")
        print(lines[-1], flush=True)
        for op, e in sorted(found.items()):
            print(f"    {op}: {e['calls']} calls, {e['judged']} judged, {e['failed']} failed", flush=True)
            if e["failed"] and op not in KNOWN:
                wrong.append(f"{name}: {e['failed']} calls of {op} fail")
    print("\n| model | calls | judged | not judged |\n| --- | --- | --- | --- |")
    print("\n".join(lines))
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
