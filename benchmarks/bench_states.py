"""What the ledger of states costs: CPU time per engine step with it on against the bare engine, in one run.

    python benchmarks/bench_states.py [--rounds 10] [--tiny] [--json FILE]

One real vLLM engine (engine_rounds.py) serves the same eight requests again and again; in turn nothing is attached, or
a ledger in one of its modes. Quoted are medians of ratios within a round and their quartiles. ``--tiny``: a model of 4
layers of hidden size 128 and prompts of 400 tokens in blocks of 32, where a step is hardly anything but Python: the
most that a ledger can cost. The aim is a decode step of at most 1.3 of the bare one's time in mode `sample`.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from engine_rounds import BARE, STEPS, Engine, Options, build, compared, in_turn, observed, run  # noqa: E402

KINDS = (BARE, "events", "sample", "full")


def tiny(root: Path) -> Engine:
    """See ``--tiny``."""
    sys.path.insert(0, str(HERE.parent))
    from lab import state_lab

    state_lab.prepare()
    from tiny_model import make
    from vllm import LLM

    more = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 4096, "disable_log_stats": True}
    return Engine(LLM(model=str(make("qwen2", root / "model")), **(state_lab.ENGINE | more)), prefill=8 * 400)


def measure(root: Path, options: Options) -> dict[str, Any]:
    from vllm_accprobe.capture.states.observer import StatesObserver
    from vllm_accprobe.config import ProbeConfig

    engine = tiny(root) if options.tiny else build(root)
    looked: dict[str, list[int]] = {}

    def attach(kind: str, place: Path) -> Any:
        config = ProbeConfig.from_kwargs(enabled=False, dir=str(place), states=kind)
        ledger = observed(engine, StatesObserver, config)
        ledger.loaded()
        return ledger

    def detach(kind: str, ledger: Any, number: int) -> None:
        assert ledger.dead is None, ledger.dead
        assert ledger.ledger.steps > 0
        assert ledger._findings.count == 0
        looked[kind] = [ledger.ledger.bytes.hashed, ledger.ledger.bytes.checked, ledger.ledger.held]
        ledger.close("benchmark")
        engine.bare_again()

    return {"times_s": in_turn(engine, KINDS, options.rounds, root, attach, detach), "looked": looked}


def report(result: dict[str, Any]) -> list[str]:
    times = result["times_s"]
    lines = [f"{'step':<10}{'mode':<10}{'ms':>8}{'/bare':>8}{'quartiles':>14}   (CPU)"]
    for step in STEPS:
        lines.append(f"{step:<10}{BARE:<10}{statistics.median(times[BARE][step]) * 1e3:>8.2f}")
        for kind in KINDS[1:]:
            ms, ratio, spread = compared(times, step, kind)
            lines.append(f"{step:<10}{kind:<10}{ms:>8.2f}{ratio:>8.3f}{spread:>14}")
    for kind, (hashed, checked, held) in result["looked"].items():
        lines.append(f"{kind}: {hashed:,} blocks hashed, {checked:,} looked at, {held:,} numbers held, per round")
    return lines


if __name__ == "__main__":
    run(__doc__ or "", measure, report, rounds=10, more=lambda p: p.add_argument("--tiny", action="store_true"))
