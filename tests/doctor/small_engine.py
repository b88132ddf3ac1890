"""What stands in for an engine: reads the probe's settings as an engine would, and writes the dump that one would.

Six taps in two layers, two requests one after the other, each a prompt and three tokens. What it computes may depend on
which taps are placed, as compiled code does: ``CHANGES`` names modules whose tap moves everything behind it. Run as a
program, or called in a test's process. The dump is written by the real writer.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from dump.dumps import put_event

from vllm_accprobe.config import ProbeConfig, in_ranges, matches
from vllm_accprobe.dump.writer import RankWriter, write_run_json

TAPS = [f"model.layers.{i}.{name}" for i in range(2) for name in ("qkv_proj", "o_proj", "down_proj")]
MORE = ["model.norm"]
"""Of the full set only."""
CHANGES, UNSTEADY, EAGER, FLIPS = "SMALL_CHANGES", "SMALL_UNSTEADY", "SMALL_EAGER", "SMALL_FLIPS"
PROMPTS = (4, 6)


def main(environ: Mapping[str, str] = os.environ) -> None:
    config = ProbeConfig.from_env(environ)
    everything = "all" in config.modules or bool(config.graph_taps)
    names = [*TAPS, *(MORE if everything else [])]
    taps = [tap for tap in names if matches(config.graph_taps, (tap,))] if config.graph_mb else []
    engine: dict[str, object] = {"eager": EAGER in environ}
    if taps and not engine["eager"]:
        chosen = [tap for tap in taps if _chosen(config, tap)]
        key = hashlib.sha256(repr(taps).encode()).hexdigest()
        engine["graphs"] = {
            "set": "full" if everything else "default", "taps": len(taps), "chosen": len(chosen), "key": key,
            "pieces": [taps], "between": [],
        }  # fmt: skip
    root = Path(config.dir)
    write_run_json(root, {"engine": engine})
    wrong = [TAPS.index(tap) if tap in TAPS else len(TAPS) for tap in taps if tap in environ.get(CHANGES, "").split()]
    start = min(wrong, default=99)
    _write(
        root, config, taps, start, flips=FLIPS in environ, noise=len(os.listdir(root.parent)) * (UNSTEADY in environ)
    )


def _chosen(config: ProbeConfig, tap: str) -> bool:
    globs = tuple("*" if glob == "all" else glob for glob in config.modules)
    return matches(globs, (tap,))


def _write(root: Path, config: ProbeConfig, taps: list[str], start: int, *, flips: bool, noise: int) -> None:
    w = RankWriter(root, 0, {}, budget_bytes=1 << 30, block_bytes=1 << 16)
    step = 0

    def put(array: np.ndarray, dtype: str, **event: object) -> None:
        line = {"event": "tensor", "step": step, "call": 0, "dtype": dtype, "shape": list(array.shape), "row_dim": 0}
        put_event(w, np.ascontiguousarray(array), line | event)

    for req, length in enumerate(PROMPTS):
        w.line({"event": "request", "req": req, "id": str(req), "prompt": f"{req}b" * 16, "prompt_len": length})
        position = 0
        for n in (length, 1, 1, 1):
            if in_ranges(config.steps, step):
                w.line({"event": "step", "step": step, "batch": {"requests": 1, "tokens": n}})
                moved = start < 99
                ids = [
                    (7 * p + req + (moved and flips and p >= length + 1)) % 50 for p in range(position, position + n)
                ]
                for space, first in (("tokens", position), ("logits", position + n - 1)):
                    rows = position + n - first
                    segment = {"req": req, "pos": first, "n": rows, "row": n - rows, "phase": "prefill"}
                    line = {"event": "rows", "step": step, "space": space, "src_rows": n, "segments": [segment]}
                    w.line({**line, "ids": ids[-rows:]})
                base = np.asarray(ids, "<f4")[:, None] + np.arange(8, dtype="<f4")
                for seq, tap in enumerate(taps):
                    if _chosen(config, tap):
                        at = TAPS.index(tap) if tap in TAPS else len(TAPS)
                        value = base * (at + 1) + (0.5 if at >= start else 0)
                        put(value, "float32", tap=tap, role="output.0", seq=seq, rows="tokens", **{"class": "L"})
                out = base + (0.5 if moved else 0) + noise
                put(out, "float32", tap="<root>", role="output.0", seq=50, rows="tokens", **{"class": "M"})
                last = out[-1:] * 2
                after = position + n
                token = (7 * after + req + (moved and flips and after > length)) % 50
                put(last, "float32", tap="logits_processor", role="output.0", seq=51, rows="logits", **{"class": "P"})
                for role, array, dtype in (
                    ("output.top_logits", last[:, :5], "float32"),
                    ("output.top_ids", np.arange(5, dtype="<i4")[None], "int32"),
                    ("output.token", np.asarray([token], "<i8"), "int64"),
                ):
                    put(array, dtype, tap="sampler", role=role, seq=52, rows="logits", **{"class": "S"})
            step += 1
            position += n
    w.close("done", {})


if __name__ == "__main__":
    main()
    print(json.dumps({"done": True}))
