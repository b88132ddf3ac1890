"""Plants a fault, sees the gate fail, heals the module, and sees it pass: one line for each of 12 operators.

    python scripts/heal_cases.py --keep DIR            # what lies there already is not run again
    python scripts/heal_cases.py --keep DIR --only '*attention*'

Exit code 0 where each gate fails with its fault and passes with the module healed. Two faults in one server, of which
the second is named when the first is healed: tests/e2e/test_heal_engine.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (".", "tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from lab.gate_lab import EngineError, GateBench  # noqa: E402
from lab.gate_pairs import GateCase, prompts  # noqa: E402

_L = "model.layers"
_EXPERTS = f"{_L}.1.mlp.experts"


def _case(name: str, kind: str, module: str, factor: float, model: str = "qwen2", **more: Any) -> GateCase:
    return GateCase(model, "base", "base", {"kind": kind, "module": module, "factor": factor, **more}, name=name)


HEALED: tuple[tuple[GateCase, str], ...] = (
    (_case("linear", "scale", f"{_L}.1.mlp.down_proj", 1.08), "layers.1.mlp.down_proj"),
    (_case("linear, a row of its weight", "product", f"{_L}.1.self_attn.qkv_proj", 2.0, features=[40, 41]),
     "layers.*.qkv_proj"),
    (_case("linear, decode alone", "scale", f"{_L}.2.self_attn.o_proj", 1.08, rows="decode"), "*.o_proj"),
    (_case("linear, five bits", "coarse", f"{_L}.1.mlp.gate_up_proj", 5.0, "llama"), "*.gate_up_proj"),
    (_case("norm, its epsilon", "eps", f"{_L}.1.input_layernorm", 0.5), "*.input_layernorm"),
    (_case("rotary embedding", "angle", f"{_L}.0.self_attn.rotary_emb", 1.05), "layers.*.rotary_emb"),
    (_case("activation", "act", f"{_L}.1.mlp.act_fn", 1.3, "llama"), "layers.*.mlp.act_fn"),
    (_case("attention, its scale", "kernel_scale", f"{_L}.2.self_attn.attn", 1.2), "layers.*.self_attn.attn"),
    (_case("attention, its cache", "cache", f"{_L}.1.self_attn.attn", 0.5, rows="position>=9"),
     "layers.*.self_attn.attn"),
    (_case("lm_head", "logits", "lm_head", 1.1, features=list(range(100, 300))), "lm_head"),
    (_case("one expert", "expert", f"{_EXPERTS}.routed_experts.quant_method", 1.5, "qwen2-moe", expert=3), _EXPERTS),
    (_case("a router", "route", _EXPERTS, 1.0, "qwen2-moe", rows="position>=8"), _EXPERTS),
)  # fmt: skip
"""A fault, and the globs that heal it."""


def short_prompts(seed: int) -> list[dict[str, Any]]:
    """24 prompts of at most 54 tokens, and four more each: healing is slow."""
    lines = prompts(seed)
    return [{**line, "token_ids": line["token_ids"][: 8 + 2 * i], "max_tokens": 4} for i, line in enumerate(lines)]


def main() -> int:
    """Runs and judges what was chosen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, help="where the folders lie, and go on from")
    parser.add_argument("--only", default="*", help="glob over names")
    args = parser.parse_args()
    bench, good, chosen = GateBench(args.keep or Path(tempfile.mkdtemp(prefix="heal-")), short_prompts), 0, 0
    print("| fault | planted | x floor | healed | x floor |", "| --- | --- | --- | --- | --- |", sep="\n", flush=True)
    try:
        for case, globs in HEALED:
            if not fnmatch.fnmatch(case.title, args.only):
                continue
            chosen += 1
            try:
                gates = [bench.judged(case, heal=heal).gate for heal in ("", globs)]
            except EngineError as error:
                print(f"| {case.title} | error: {error} | | | |", flush=True)
                continue
            good += gates[0].verdict == "fail" and gates[1].verdict == "pass"
            cells = [cell for gate in gates for cell in (str(gate.verdict), f"{gate.times or 0:.3g}")]
            print("| " + " | ".join((case.title, *cells)) + " |", flush=True)
    finally:
        bench.close()
    print(f"{good} of {chosen} fail with their fault, and pass when it is healed")
    return 0 if chosen and good == chosen else 1


if __name__ == "__main__":
    sys.exit(main())
