"""Attention of real engines with a wrong slot, block, window or scale: found at its module and its rows, and told.

With this machine's kernels, and with those for AVX2, whose attention rounds toward zero.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.captures import FIVE, Engines
from support.csv_rows import csv_rows
from support.engine import Ask, Run
from tiny_model import make

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine

WINDOW = 24
LAYERS = {"num_hidden_layers": 4, "sliding_window": WINDOW,
          "layer_types": [*["full_attention"] * 2, *["sliding_attention"] * 2]}  # fmt: skip
"""Of a llama."""
ASKS = [Ask(FIVE[0].ids, 3), Ask(FIVE[2].ids, 3)]
"""Prompts of 40 and 57 tokens: a few calls that fail in each layer, and the causes of each are searched."""
_AT = "model.layers.{}.self_attn.attn"


def checked(dump: Path | None, out: Path) -> tuple[int, list[dict[str, str]]]:
    code = main(["opcheck", str(dump), "-j", "0", "--ops", "Attention", "--out", str(out)])
    return code, csv_rows(out / "opcheck.csv")


@pytest.fixture(scope="module")
def windows(each_engines: Engines) -> Callable[..., Run]:
    """Two layers that see everything and two with a window, prompts in chunks, blocks of 32: clean or with faults."""
    done: dict[str, Run] = {}

    def run(name: str, fault: Any = None) -> Run:
        if name not in done:
            model = make("llama", each_engines.root / "models" / "llama-windows", **LAYERS)
            out = each_engines.root / "dumps" / name
            how = {"max_num_batched_tokens": 48, "block_size": 32}
            done[name] = each_engines.host().capture(model, ASKS, out=out, fault=fault, **how)
        return done[name]

    return run


def test_a_sliding_window_in_chunks_and_decode_passes(windows: Callable[..., Run], tmp_path: Path) -> None:
    run = windows("windowed")
    code, rows = checked(run.dump, tmp_path)
    dump = open_dump(run.dump)
    assert [m.attrs.get("sliding_window") for m in dump.modules[0] if m.cls == "Attention"] == [None, None, 24, 24]
    assert (code, {r["status"] for r in rows}) == (0, {"pass"})
    assert all(r["rows"] == r["checked"] for r in rows)
    assert run.metrics["steps"] > 97 / 48


FAULTS = [
    {"kind": "slot", "module": _AT.format(0), "factor": 1, "rows": "position:21"},
    {"kind": "block", "module": _AT.format(1), "factor": 2},
    {"kind": "setting", "module": _AT.format(2), "factor": 23, "param": "impl.sliding_window"},
    {"kind": "attn", "module": _AT.format(3), "factor": 1.02},
]


def test_a_slot_a_block_a_window_and_a_scale_that_are_wrong_are_found_where_they_are(windows, tmp_path):
    """Each layer has another fault; each is judged by its own inputs, so none hides another."""
    code, rows = checked(windows("wrong-caches", FAULTS).dump, tmp_path)
    assert code == 1
    bad = {layer: [r for r in rows if r["tap"] == _AT.format(layer) and r["status"] == "fail"] for layer in range(4)}
    assert all(bad.values())
    assert all("times rounding alone" in r["message"] for found in bad.values() for r in found)
    # nobody before position 21 looks at its slot, nobody before 23 back over 23 positions
    assert min(int(r["position"]) for r in bad[0] if r["position"]) >= 21
    assert min(int(r["position"]) for r in bad[2] if r["position"]) >= WINDOW - 1
    assert len(bad[3]) > len(rows) // 8  # the scale is wrong in every step, the last rows may not show it
    causes = {layer: {r["cause"] for r in found} for layer, found in bad.items()}
    lost = "mine's output is what this Attention gives if keys and values of position 21 were 0 in the cache"
    assert any(text.startswith(lost) for text in causes[0])
    assert any("if keys and values of positions " in text for text in causes[1])
    assert any(f"sliding window of {WINDOW - 1}" in text for text in causes[2])
    assert any("softmax scale" in text for text in causes[3])
