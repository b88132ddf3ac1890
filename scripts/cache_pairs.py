"""Golden with a cache of 16 bits, mine with one of 8, right and wrong: what is reported (docs/state-checks.md).

The problem: an fp8 cache moves the output of attention by percents, and so does a wrong block; a comparison must say
how much of a difference is the format, and still find the block. The idea: one golden engine, then engines with fp8
caches, of which some have a fault of lab/state_faults.py; none of mine keeps a ledger, so that the tensors
alone must tell. Each is compared with golden, replay included, and is right when nothing is blamed, or attention is.

    python scripts/cache_pairs.py --out DIR [--only GLOB,GLOB]

Exit code 1 where one is wrong. Where vLLM's build for this CPU has no kernels for fp8 caches, torch stands in for them
(lab/eight_bit_cache.py), and it is said. Not here: what a ledger finds in such caches (state_cases.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from lab import state_lab as lab  # noqa: E402
from lab.state_lab import Ask, prompt  # noqa: E402

CASES = (
    ("right-e4m3", "fp8_e4m3", "", ""),
    ("right-e5m2", "fp8_e5m2", "", ""),
    ("stale-slot", "fp8_e4m3", "stale_slot", "model.layers.0.self_attn.attn"),
    ("dropped-row", "fp8_e4m3", "dropped_row", "model.layers.1.self_attn.attn"),
)
"""(name, format, fault, the module to be blamed)."""
ASKS = (Ask("a", prompt(40, 1), 12), Ask("b", prompt(50, 2), 12))


def told(golden: Path, mine: Path) -> dict[str, object]:
    """compare.json of the two."""
    out = mine.with_name(f"{mine.name}-compared")
    command = [sys.executable, "-m", "vllm_accprobe.cli", "compare", str(golden), str(mine), "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ran.returncode not in (0, 1):
        raise SystemExit(ran.stdout + ran.stderr)
    found: dict[str, object] = json.loads((out / "compare.json").read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*", help="globs, with commas between")
    asked = parser.parse_args()
    lab.prepare()
    from tiny_model import make

    from lab import eight_bit_cache, state_faults

    own = eight_bit_cache.allow()
    kernels = "vLLM's own kernels" if own else "torch, in the place of kernels that vLLM's build has not here"
    print(f"fp8 caches: {kernels}")
    model = make("qwen2", asked.out / "models" / "qwen2")
    golden = asked.out / "golden"

    def serve(out: Path, **args: str) -> None:
        plant = getattr(state_faults, args.pop("fault", "") or "-", None)
        lab.run(model, out, ASKS, plant, "", env={"VLLM_ACCPROBE": "1"}, **args)

    serve(golden)
    wrong = []
    for name, kind, fault, blamed in CASES:
        if not any(fnmatchcase(name, glob) for glob in asked.only.split(",")):
            continue
        begin = time.monotonic()
        serve(asked.out / name, kv_cache_dtype=kind, fault=fault)
        found = told(golden, asked.out / name)
        origins = [one["module"] for one in found["origins"]]  # type: ignore[attr-defined]
        notes = [n for n in found["notes"] if "that rounding alone" in n]  # type: ignore[attr-defined]
        said = notes[0] if notes else "nothing of the cache"
        right = (blamed in origins if blamed else not origins) and "that rounding alone" in said
        wrong += [] if right else [name]
        took = f"{'right' if right else 'WRONG'} {time.monotonic() - begin:5.1f} s"
        print(f"{name:12} {took}  {found['verdict']}, blamed: {', '.join(origins[:2]) or 'nobody'}; {said}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
