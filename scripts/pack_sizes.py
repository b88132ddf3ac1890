"""Sizes of golden packs by computation, for real models, and against packs that were made.

python scripts/pack_sizes.py                       the table, from the configs below
python scripts/pack_sizes.py --check DUMP ...      packs each dump, and compares the file with what is computed
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from golden_sizes import pack_size

from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import TOKENS
from vllm_accprobe.golden.pack import MB, pack

Config = dict[str, Any]
CONFIGS: dict[str, Config] = {
    "7B dense (Qwen2.5-7B)": {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    },
    "32B dense (Qwen2.5-32B)": {
        "model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064,
    },
    "70B dense (Llama-3.1-70B)": {
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
    },
    "235B MoE (Qwen3-235B-A22B)": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    },
}  # fmt: skip
ROWS, STEPS = 1500, 60
"""Of a golden: a dozen prompts of some hundred tokens, with a few generated ones each."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, nargs="+", default=[], metavar="DUMP")
    parser.add_argument("--max-mb", type=float, metavar="MB", help="with --check: the packs' budget")
    args = parser.parse_args()
    if args.check:
        return max(check(dump, args.max_mb) for dump in args.check)
    print("| model | one row of all | budget | kinds in full | rows in full | rows as sketches | pack | capture |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, config in CONFIGS.items():
        s = pack_size(config, rows=ROWS, steps=STEPS)
        print(f"| {name} | {s.row / MB:.2f} MB | {s.budget / MB:.1f} MB | {s.kinds} of {s.of_kinds} | {s.full} | "
              f"{s.sketched} | {s.bytes / MB:.1f} MB | {s.capture / MB:,.0f} MB |")  # fmt: skip
    return 0


def check(dump: Path, max_mb: float | None) -> int:
    """1 where a pack of the dump is more than 5 % larger or smaller than computed."""
    opened = open_dump(dump)
    config = opened.run["model"]["config"]
    spaces = [s for (rank, _, name), s in opened.rows.items() if (rank, name) == (0, TOKENS)]
    rows, steps = sum(s.n for s in spaces), len(spaces)
    budget = None if max_mb is None else int(max_mb * MB)
    with tempfile.TemporaryDirectory() as out:
        made = pack(dump, Path(out) / "x.golden", max_bytes=budget)
    size = 4 if opened.run["model"]["dtype"] == "float32" else 2
    said = pack_size(config, rows=rows, steps=steps, size=size, budget=budget, full=made.rows_full,
                     sketched=made.rows_sketched)  # fmt: skip
    off = said.bytes / made.bytes - 1
    print(f"{dump.name}: {made.bytes:,} bytes, computed {said.bytes:,} ({off:+.1%}); {made.rows_full} rows in full, "
          f"{made.rows_sketched} as sketches")  # fmt: skip
    return int(abs(off) > 0.05)


if __name__ == "__main__":
    sys.exit(main())
