"""Plants faults that settings switch on in a tiny Qwen2, bisects each, and prints what was found in how many runs.

    python scripts/bisect_cases.py --keep DIR                       # what lies there already is not run again
    python scripts/bisect_cases.py --keep DIR --only 'prefix*'
    python scripts/bisect_cases.py --keep DIR --markdown FILE       # the table of docs/gate.md

Every trial is `vllm serve` on the CPU as accprobe starts it; its processes are forked from one that has imported vLLM
(preloaded_vllm.py). Exit codes: 0 when each set is the planted one, 1 when not. Not here: the search (gate/bisect/).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from preloaded_vllm import preloaded  # noqa: E402
from tiny_model import make  # noqa: E402

_DOWN = {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.2}
_COMMON = (
    "--served-model-name=tiny", "--dtype=bfloat16", "--max-model-len=512", "--max-num-seqs=8",
    "--kv-cache-memory-bytes=16M", "--enforce-eager", "--max-num-batched-tokens", "64", "--block-size", "32",
    "--async-scheduling",
)  # fmt: skip
_SWITCHES = """
[[switch]]
name = "fused kernels"
environment = "TINY_FUSED"
plain = "0"

[[switch]]
name = "cascade attention"
words = ["--disable-cascade-attn"]

[[switch]]
name = "plain norms"
environment = "TINY_NORMS"
plain = "1"
"""


@dataclass(frozen=True)
class BisectCase:
    """fault: for ACCPROBE_FAULT. planted: the settings it needs, as bisect names them; of no fault the operator that
    rounds in another way."""

    name: str
    fault: Any
    planted: tuple[str, ...]
    options: tuple[str, ...] = ()
    verdict: str = "found"


CASES = (
    BisectCase("prefix caching", _DOWN | {"rows": "hit"}, ("prefix caching",),
               ("--plain", "block size=64", "--hold", "chunked prefill")),
    BisectCase("chunks and block size", _DOWN | {"rows": "chunk>=2", "when": "chunks&block<=32"},
               ("chunked prefill", "block size"), ("--plain", "block size=128", "--narrow")),
    BisectCase("custom operator",
               {"kind": "act", "module": "model.layers.1.mlp.act_fn", "factor": 1.2, "when": "custom:silu_and_mul"},
               ("custom operators: silu_and_mul",), ("--plain", "block size=64")),
    BisectCase("vendor switch in decode", _DOWN | {"rows": "decode", "when": "env:TINY_FUSED=1"}, ("fused kernels",),
               ("--plain", "block size=64")),
    BisectCase("three together", _DOWN | {"rows": "decode", "when": "env:TINY_FUSED=1&prefix&chunks"},
               ("chunked prefill", "fused kernels", "prefix caching"), ("--plain", "block size=64")),
    BisectCase("nothing is planted", [], ("custom operators: rotary_embedding",), ("--plain", "block size=64")),
)  # fmt: skip


def prompts(path: Path) -> Path:
    """16 prompts of 30 to 250 tokens, four of which begin alike."""
    lines = []
    for i in range(16):
        length = 30 + i * 14
        ids = [20 + (7 * k if i % 4 == 0 else 11 * k + 13 * i) % 480 for k in range(length)]
        lines.append(json.dumps({"id": f"p{i:02}", "token_ids": ids, "max_tokens": 6}) + "\n")
    path.write_text("".join(lines))
    return path


def main() -> int:
    """Bisects what was asked for."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--keep", type=Path, required=True, help="where models and runs lie, and go on from")
    asked.add_argument("--only", default="*", help="glob over cases")
    asked.add_argument("--markdown", type=Path, help="write the table of all that lies there")
    args = asked.parse_args()
    root = args.keep.resolve()
    root.mkdir(parents=True, exist_ok=True)
    model = root / "model" if (root / "model").exists() else make("qwen2", root / "model")
    switches, file = root / "switches.toml", prompts(root / "prompts.jsonl")
    switches.write_text(_SWITCHES)
    environ = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": str(ROOT / "lab" / "planted"), "TINY_FUSED": "1",
        "TINY_NORMS": "0", "VLLM_ACCPROBE": "0",
    }  # fmt: skip
    right = True
    with preloaded(root / "preloaded", environ) as bin_:
        path = f"{bin_}{os.pathsep}{environ.get('PATH', '')}"
        for case in CASES:
            if not fnmatch.fnmatchcase(case.name, args.only):
                continue
            env = environ | {"ACCPROBE_FAULT": json.dumps(case.fault) if case.fault else "", "PATH": path}
            out = root / case.name.replace(" ", "-")
            serve = ["vllm", "serve", str(model), *_COMMON]
            if "chunked prefill" in case.options:  # hits alone: no prompt is cut by the size of a step
                serve[serve.index("64")] = "512"
            words = [sys.executable, "-m", "vllm_accprobe.cli", "bisect", "--out", str(out), "--prompts", str(file),
                     "--switches", str(switches), "--json", *case.options, "--", *serve]  # fmt: skip
            began = time.monotonic()
            done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True)
            if not done.stdout.strip():
                print(f"{case.name}: exit code {done.returncode}", flush=True)
                right = False
                continue
            found = json.loads(done.stdout)
            (root / f"{out.name}.json").write_text(done.stdout)
            said = [s["name"] for cause in found["causes"] for s in cause["settings"]]
            good = sorted(said) == sorted(case.planted) and found["verdict"] == case.verdict
            right &= good
            print(f"{'ok' if good else 'WRONG'} {case.name}: {found['verdict']} {said}, {found['runs']} runs of "
                  f"{found['combinations']}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    if args.markdown:
        args.markdown.write_text(table(root))
    return 0 if right else 1


def table(root: Path) -> str:
    """A row for each case that has a result."""
    rows = ["| fault needs | found | runs | settings | combinations | time |", "| --- | --- | --- | --- | --- | --- |"]
    for case in CASES:
        path = root / f"{case.name.replace(' ', '-')}.json"
        if path.exists():
            found = json.loads(path.read_text())
            said = " + ".join(s["name"] for cause in found["causes"] for s in cause["settings"])
            needs = " + ".join(case.planted) or "nothing is planted"
            rows.append(f"| {needs} | {said or found['verdict']} | {found['runs']} | {len(found['axes'])} | "
                        f"{found['combinations']} | {found['seconds']:.0f} s |")  # fmt: skip
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
