"""``scripts/card.sh --torch``: the taps of capture/graphs on this machine's device, without a server.

The problem: code for devices cannot be run where there is none. The idea: a tiny transformer, whose projections have
the names of vLLM's classes, runs eager, compiled and captured in a CUDA graph; each clean, with taps absent, off and
on, and with one planted fault. The page says whether looking changed a bit, where the first difference was seen, and
what a tap costs. All ways compute more rows than are wanted, as a captured graph does: those behind them are padding.
Not here: vLLM.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.graphs.graph_ops import choose
from vllm_accprobe.capture.graphs.placement import Placed, plan, watching

HIDDEN, HEADS, LAYERS, ROWS, MOST = 256, 4, 4, 13, 16
FAULTY = "layers.2.down_proj"
FACTOR = 1.05
LIMIT = 0.03
"""Relative L2 beyond which a tap differs: ten times what bfloat16 rounding moves this model."""
ROWED = range(ROWS)
TIMES = 100
"""Forwards of which the fastest is taken."""
Forward = Callable[[torch.Tensor], torch.Tensor]


class QKVParallelLinear(torch.nn.Linear):
    pass


class MergedColumnParallelLinear(torch.nn.Linear):
    pass


class RowParallelLinear(torch.nn.Linear):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if self.factor == 1.0 else out * self.factor


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(HIDDEN), torch.nn.LayerNorm(HIDDEN)
        self.qkv_proj = QKVParallelLinear(HIDDEN, 3 * HIDDEN)
        self.o_proj = RowParallelLinear(HIDDEN, HIDDEN)
        self.gate_up_proj = MergedColumnParallelLinear(HIDDEN, 8 * HIDDEN)
        self.down_proj = RowParallelLinear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(self.norm1(x)).view(-1, 3, HEADS, HIDDEN // HEADS).unbind(1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        x = x + self.o_proj(mixed.transpose(0, 1).reshape(-1, HIDDEN))
        gate, up = self.gate_up_proj(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down_proj(torch.nn.functional.silu(gate) * up)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model(device: torch.device, fault: bool) -> Model:
    torch.manual_seed(0)
    made = Model().to(device, torch.bfloat16).eval()
    if fault:
        made.get_submodule(FAULTY).factor = FACTOR  # type: ignore[assignment]
    return made


def eager(made: Model, x: torch.Tensor) -> Forward:
    return made


def compiled(made: Model, x: torch.Tensor) -> Forward:
    torch._dynamo.reset()
    forward = torch.compile(made, fullgraph=True)
    forward(x)
    return forward


def captured(made: Model, x: torch.Tensor) -> Forward:
    """``compiled``, replayed: the input is copied to where the graph reads it."""
    forward, held = compiled(made, x), x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(held)

    def replay(x: torch.Tensor) -> torch.Tensor:
        held.copy_(x)
        graph.replay()
        return out

    return replay


WAYS = {"eager": eager, "compiled": compiled, "captured": captured}


class Tapped:
    """One model with taps, made ready one way. ``taps``: by name, what a forward with taps on left in the buffers."""

    def __init__(self, device: torch.device, way: str, x: torch.Tensor, fault: bool) -> None:
        made = model(device, fault)
        with watching(made, [""]) as seen:
            made(x)
        self.placed = Placed(plan(seen, lambda path, cls: False, MOST, 10**8), lambda path, cls: True, device)
        self.forward, self.ready_s = timed_once(lambda: WAYS[way](made, x))
        self.off = self.forward(x).clone()
        choose(self.placed.select, ROWED)
        self.on = self.forward(x).clone()
        self.taps = {one.path: buffer[:ROWS].clone() for one, buffer in self.placed.chosen}


def run(way: str, device: torch.device, golden: dict[str, torch.Tensor]) -> tuple[dict[str, Any], Any]:
    """What one way shows, and its clean taps, which are the golden ones of the ways after it."""
    x = torch.randn(MOST, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    plain = model(device, False)
    bare, bare_s = timed_once(lambda: WAYS[way](plain, x))
    without = bare(x).clone()
    clean, faulty = Tapped(device, way, x, False), Tapped(device, way, x, True)
    golden = golden or clean.taps
    beyond = [path for path, taps in faulty.taps.items() if distance(golden[path], taps) > LIMIT]
    found: dict[str, Any] = {
        "taps": len(clean.taps),
        "off_changes_no_bit": torch.equal(without, clean.off),
        "on_changes_no_bit": torch.equal(without, clean.on),
        "clean_largest": max(distance(golden[path], taps) for path, taps in clean.taps.items()),
        "fault_first": beyond[0] if beyond else None,
        "ready_s": {"without": bare_s, "with": clean.ready_s},
    }
    found["step_us"] = costs = step_costs(bare, clean, x, device)
    found["tap_us"] = {name: (costs[name] - costs["without"]) / len(clean.taps) for name in ("off", "on")}
    found["passed"] = bool(
        found["off_changes_no_bit"] and found["on_changes_no_bit"] and found["clean_largest"] <= LIMIT
        and found["fault_first"] == FAULTY
    )  # fmt: skip
    return found, clean.taps


def distance(golden: torch.Tensor, mine: torch.Tensor) -> float:
    """Relative L2 in float64."""
    a, b = golden.double(), mine.double()
    return float((a - b).norm() / a.norm())


def timed_once(what: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    return what(), time.perf_counter() - begin


def step_costs(bare: Forward, tapped: Tapped, x: torch.Tensor, device: torch.device) -> dict[str, float]:
    """The fastest of many forwards without taps, with taps off and on, in µs; in turns, since a machine has others."""
    best: dict[str, float] = {}
    for _ in range(TIMES):
        for name, forward, rows in (("without", bare, ()), ("off", tapped.forward, ()), ("on", tapped.forward, ROWED)):
            choose(tapped.placed.select, rows)
            forward(x)
            wait(device)
            begin = time.perf_counter()
            forward(x)
            wait(device)
            best[name] = min(best.get(name, math.inf), (time.perf_counter() - begin) * 1e6)
    return best


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def page(device: torch.device, found: dict[str, Any]) -> str:
    """The page of what was found, by way; a way that was not run has a text instead."""
    lines = [
        "# Taps on this card", "",
        f"`scripts/card.sh --torch`: {LAYERS} layers, bfloat16, {ROWS} rows of {MOST}; the fault is "
        f"{FAULTY} × {FACTOR}. Distances are relative L2 against eager.", "",
        f"- device: {name_of(device)}", f"- torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}", "",
        "| | taps | off changes no bit | on changes no bit | largest distance, clean | fault seen first at | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for way, one in found.items():
        if isinstance(one, str):
            lines.append(f"| {way} | {one} | | | | | not run |")
            continue
        lines.append(
            f"| {way} | {one['taps']} | {yes(one['off_changes_no_bit'])} | {yes(one['on_changes_no_bit'])} | "
            f"{one['clean_largest']:.2e} | {one['fault_first'] or 'nowhere'} | "
            f"{'passed' if one['passed'] else 'FAILED'} |"
        )
    lines += [
        "", "| | made ready, s, without taps | with | fastest step, µs, without taps | off | on | µs a tap, off | on |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for way, one in found.items():
        if not isinstance(one, str):
            ready, step, tap = one["ready_s"], one["step_us"], one["tap_us"]
            lines.append(
                f"| {way} | {ready['without']:.1f} | {ready['with']:.1f} | {step['without']:.0f} | {step['off']:.0f} | "
                f"{step['on']:.0f} | {tap['off']:.1f} | {tap['on']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def yes(value: bool) -> str:
    return "yes" if value else "NO"


def name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type}, {torch.get_device_module(device).get_device_name()}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="card.sh --torch", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("accprobe-card"), help="folder of the page and the archive")
    parser.add_argument("--device", help="cpu, cuda, npu, ...; by default the accelerator, else cpu")
    args = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(args.device) if args.device else accelerator or torch.device("cpu")
    found: dict[str, Any] = {}
    golden: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for way in WAYS:
            if way == "captured" and device.type != "cuda":
                found[way] = f"needs CUDA graphs; this is {device.type}"
                continue
            try:
                found[way], taps = run(way, device, golden)
                golden = golden or taps
            except Exception as error:
                found[way] = f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")
            print(f"{way}: {found[way]}", file=sys.stderr)
    args.out.mkdir(parents=True, exist_ok=True)
    text = page(device, found)
    (args.out / "card.md").write_text(text, encoding="utf-8")
    facts = {"device": name_of(device), "torch": torch.__version__, "python": platform.python_version(), "ways": found}
    (args.out / "card.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (args.out / "torch.txt").write_text(torch.__config__.show(), encoding="utf-8")
    archive = args.out / "accprobe-card.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for name in ("card.md", "card.json", "torch.txt"):
            file.add(args.out / name, name)
    print(text)
    print(f"the page: {args.out / 'card.md'}; to send: {archive}")
    failed = [way for way, one in found.items() if not isinstance(one, str) and not one["passed"]]
    broken = [way for way, one in found.items() if isinstance(one, str) and "needs CUDA" not in one]
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
