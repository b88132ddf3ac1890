"""Digs for each fault of the gate's laboratory that the gate finds, and prints whether the planted module is named.

    python scripts/gate_dig_cases.py --keep DIR    # the folder of gate_cases.py; what lies there is not run again
    python scripts/gate_dig_cases.py --keep DIR --only 'batch*'

The gate's verdict and its worst tokens are those of the laboratory's folders (gate_lab.py); both captures are of real
`vllm serve` commands, forked from one process that has imported vLLM (preloaded_vllm.py), as `accprobe gate --dig`
starts them. Exit codes: 0 where every planted module is named, 1 where not. Not here: the cases (gate_pairs.py).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (".", "tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from preloaded_vllm import preloaded  # noqa: E402
from support.engine_worker import DEFAULTS  # noqa: E402

from lab.gate_lab import GateBench  # noqa: E402
from lab.gate_pairs import BASE, FAULTS, WAYS, GateCase  # noqa: E402
from vllm_accprobe.cli import gate_run  # noqa: E402
from vllm_accprobe.gate.sending import replies  # noqa: E402
from vllm_accprobe.gate.sides import COMMAND, SendSettings, ServerSide  # noqa: E402
from vllm_accprobe.refusals import CommandError, NothingThere  # noqa: E402

GIGABYTES = 4.0
_NO_WORDS = {"disable_log_stats", "distributed_executor_backend"}


def main() -> int:
    """Digs for what was asked for."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--keep", type=Path, required=True, help="where the laboratory's folders lie")
    asked.add_argument("--only", default="*", help="glob over titles")
    args = asked.parse_args()
    root = args.keep.resolve()
    for name in [n for n in os.environ if n.startswith("VLLM_ACCPROBE")]:
        del os.environ[name]
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT / "lab" / "planted"),
    }  # fmt: skip
    bench, right, dug = GateBench(root), 0, 0
    print("|  | case | planted | dig named | where | evidence | s |\n| --- | --- | --- | --- | --- | --- | --- |")
    with preloaded(root / "preloaded", os.environ) as bin_:
        os.environ["PATH"] = f"{bin_}{os.pathsep}{os.environ['PATH']}"
        for case in FAULTS:
            if not fnmatch.fnmatch(case.title, args.only):
                continue
            assert case.fault is not None
            began, planted = time.monotonic(), str(case.fault["module"])
            try:
                found, where, evidence = _dig(bench, case, root)
            except (CommandError, NothingThere) as e:
                found, where, evidence = f"error: {e}"[:120], "", ""
            good = found == planted
            dug, right = dug + 1, right + good
            cells = ("ok" if good else "**no**", case.title, planted, found, where, evidence,
                     f"{time.monotonic() - began:.0f}")  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    bench.close()
    print(f"named: {right} of {dug}")
    return 0 if right == dug else 1


def _dig(bench: GateBench, case: GateCase, root: Path) -> tuple[str, str, str]:
    """(module, token, evidence) of what is named first."""
    gate = bench.judged(case).gate
    if gate.verdict != "fail":
        return f"(the gate says {gate.verdict})", "", ""
    golden = bench.folder(case.model, case.golden, None, None, None, case.prompts)
    mine = bench.folder(case.model, case.mine, None, case.fault, golden, case.prompts)
    model = root / f"model-{case.model}"
    ours = ServerSide(COMMAND, _command(model, case.golden, None))
    theirs = ServerSide(COMMAND, _command(model, case.mine, case.fault))
    failed = gate_run.FailedGate(replies.read(golden), replies.read(mine), gate.worst, (ours, theirs))
    out = root / "dug" / case.title.replace(" ", "-").replace(",", "")
    out.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    dug = gate_run.localize(failed, out, SendSettings(), GIGABYTES, said.append)
    (out / "said.txt").write_text("\n".join(said) + "\n")
    if dug is None or dug.origin is None or dug.token is None:
        return "(nothing)", "", ""
    name, position, ordinal = dug.token[0], dug.token[1], dug.token[2]
    return str(dug.origin["module"]), f"{name}, {position}, {ordinal}", str(dug.origin.get("evidence"))


def _command(model: Path, way: str, fault: Mapping[str, Any] | None) -> str:
    """The engine of the laboratory as a command."""
    engine = DEFAULTS | {"max_logprobs": 20} | BASE | dict(WAYS[way].engine)
    words = ["vllm", "serve", str(model)]
    for name, value in engine.items():
        option = name.replace("_", "-")
        if name in _NO_WORDS:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    settings = [f"ACCPROBE_FAULT={shlex.quote(json.dumps(fault))}"] if fault else []
    return " ".join([*settings, shlex.join(words)])


if __name__ == "__main__":
    sys.exit(main())
