"""The case study of docs/laboratory.md, run again: a model whose answers depend on who else is in the batch.

A tiny DeepSeek-V2 with plain rotary embeddings runs on vLLM's CPU engine, once each request alone and once together;
`accprobe compare` names the operator; then the operator is called directly, without a model, to see that it is so and
why. Needs vLLM for CPU. Takes about a minute. Ends 0 when the finding is there, 3 when this vLLM no longer has it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

HEADS, ROPE, HEAD, LATENT = 4, 64, 96, 512
"""Of the tiny model: query heads, rotated part of a head, the whole head, and what stands before the key's own part."""


def capture(out: Path) -> None:
    """Leaves out/alone and out/together: the same three requests, one after the other and in one batch."""
    from support.engine import Ask, EngineHost
    from support.prompts import prompts
    from tiny_model import make

    model = make("deepseek-v2", out / "model", rope_scaling=None)
    asks = [Ask(ids, 6) for ids in prompts(24, 37, 11)]
    host = EngineHost(out / "engine.log")
    try:
        for name, how in (("alone", "serial"), ("together", "together")):
            shutil.rmtree(out / name, ignore_errors=True)
            run = host.capture(model, asks, out=out / name, how=how)
            print(f"{name}: {run.tokens}", flush=True)
    finally:
        host.close()


def compare(out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "vllm_accprobe.cli", "compare", "alone", "together", "--out", "report"]
    code = subprocess.run(command, cwd=out, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(f"case study: accprobe compare ended with {code}")
    result: dict[str, Any] = json.loads((out / "report" / "compare.json").read_text(encoding="utf-8"))
    return result


def angles(n: int) -> Any:
    """cos and sin of positions 0 .. n-1 for 64 dimensions, float32 [n, 64]: what vLLM calls cos_sin_cache."""
    import torch

    turn = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, ROPE, 2) / ROPE)
    return torch.cat([turn.cos(), turn.sin()], -1)


def rotate(x: Any, cache: Any, position: int) -> Any:
    """Pairs of neighbours (2i, 2i+1) of ``x`` [..., 64], turned by the angles of ``position``."""
    import torch

    cos, sin = cache[position].chunk(2)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def call(x: Any, cache: Any) -> Any:
    """The operator as vLLM's RotaryEmbedding.forward_cpu calls it, on ``x`` alone, which it changes in place."""
    import torch
    from vllm import _custom_ops as ops

    ops.rotary_embedding(torch.arange(len(x)), x, None, ROPE, cache, False)
    return x


def confirm(n: int = 24) -> bool:
    """Calls the operator on equal values in different memory, and on a model of what it does wrong."""
    import torch

    torch.manual_seed(0)
    cache = angles(n)
    q = torch.randn(n, HEADS, ROPE)
    right = torch.stack([rotate(q[t], cache, t) for t in range(n)])

    def error(got: Any, want: Any, rows: slice = slice(None)) -> float:
        return float((got - want)[rows].norm() / want[rows].norm())

    flat = call(q.reshape(n, -1).clone(), cache).reshape(q.shape)
    whole = call(q.clone(), cache)
    view = torch.zeros(n, HEADS, HEAD)[..., HEAD - ROPE :].copy_(q)
    sliced = call(view, cache)
    print(f"query [n, heads * size]:               error {error(flat, right):.1e}")
    print(f"query [n, heads, size]:                error {error(whole, right):.2f}")
    print(f"query [n, heads, size], a view:        error {error(sliced, right):.2f}")
    print(f"  position 0, whose angle is 0:        error {error(whole, right, slice(0, 1)):.2f}")
    for m in (1, 2, n):
        some = call(q[:m].clone(), cache)
        print(f"  position 0 with {m:2d} rows in the batch: error {error(some, right[:m], slice(0, 1)):.2f}")

    # What it does, if the last dimension is all heads together and stride(-2) the distance between tokens: right for
    # [n, heads * size]; of [n, heads, size] it turns the first n heads of the memory, the r-th by position r.
    guess = q.clone().reshape(-1, ROPE)
    for r in range(n):
        guess[r] = rotate(guess[r], cache, r)
    said = error(whole, guess.reshape(q.shape))
    print(f"the operator against 'head r of the memory is token r': error {said:.1e}")

    memory = torch.randn(n, LATENT + ROPE)
    before = memory.clone()
    key = memory[:, LATENT:].unsqueeze(1)
    want = torch.stack([rotate(key[t].clone(), cache, t) for t in range(n)])
    print(f"key [n, 1, size], a view of [n, {LATENT + ROPE}]: stride(-2) is {key.stride(-2)}")
    call(key, cache)
    spilt = int((memory[:, :LATENT] != before[:, :LATENT]).sum())
    print(f"  error {error(key, want):.2f}; {spilt} numbers beside the key were overwritten")
    return error(flat, right) < 1e-5 and error(whole, right) > 0.1 and said < 1e-5 and spilt > 0


def picture(out: Path, target: Path, chromium: str) -> None:
    """A picture of the report's first screen, with playwright and a Chromium that is there."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto((out / "report" / "compare.html").resolve().as_uri())
        page.wait_for_selector("body[data-ready]", state="attached")
        page.screenshot(path=target)
        browser.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="directory for model, dumps and report")
    parser.add_argument("--confirm", action="store_true", help="only call the operator directly")
    parser.add_argument("--picture", type=Path, help="also write a picture of the report here (PNG)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    out = options.out.resolve()
    culprits = []
    if not options.confirm:
        out.mkdir(parents=True, exist_ok=True)
        capture(out)
        culprits = [o["module"] for o in compare(out)["origins"]]
        if options.picture:
            picture(out, options.picture, shutil.which("chromium") or "chromium")
    there = confirm()
    if not options.confirm:
        there = there and bool(culprits) and culprits[0].endswith("rotary_emb")
    print("the finding is there" if there else "this vLLM does not have the finding")
    return 0 if there else 3


if __name__ == "__main__":
    sys.exit(main())
