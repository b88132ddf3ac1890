"""The demo: one tiny model, two runs of `vllm serve`, one planted fault, and the comparison that names it.

The problem: a claim that a tool finds the broken operator is worth what can be watched. The idea: everything is real
(HTTP server, concurrent clients, chunked prefill, vLLM's own scheduler); only the weights are random and the fault is
planted, by a vLLM plugin that the probe knows nothing of (lab/planted). Started by demo.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from tiny_model import make  # noqa: E402
from vllm_server import Server  # noqa: E402

from vllm_accprobe.gate.sending.client import NotServed  # noqa: E402

FAULT = {"kind": "scale", "module": "model.layers.2.self_attn.o_proj", "factor": 1.05, "rows": "position>=40"}
WHAT = "output of model.layers.2.self_attn.o_proj 5 % too large from position 40 on"
CHUNK = 24

LONG = "Please read this text twice, compare the numbers on one machine with the numbers on another, and say which " * 2
REQUESTS = [
    ("/v1/chat/completions", "chat-short", "Which operator parted first?"),
    ("/v1/chat/completions", "chat-long", LONG),
    ("/v1/completions", "text-short", "The quick brown fox jumps over"),
    ("/v1/completions", "text-long", LONG[::-1]),
    ("/v1/chat/completions", "chat-medium", "Attention, rotation, projection: each takes a tensor and gives a tensor."),
    ("/v1/completions", "text-medium", "A number on one machine should be the number on another machine; where it"),
]


def ask(url: str, path: str, name: str, text: str) -> int:
    """Send one request and return how many tokens came back."""
    body: dict[str, object] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return int(json.load(response)["usage"]["completion_tokens"])


def serve(title: str, model: Path, dump: Path, fault: dict[str, object] | None) -> None:
    faults = os.pathsep.join([str(ROOT / "lab" / "planted"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(dump), "PYTHONPATH": faults}
    if fault:
        env["ACCPROBE_FAULT"] = json.dumps(fault)
    print(f"\n{title}: VLLM_ACCPROBE=1 vllm serve ...", flush=True)
    with Server(model, log=dump.with_suffix(".log"), env=env, args=[f"--max-num-batched-tokens={CHUNK}"]) as server:
        print(f"  ready after {server.ready_s:.0f} s", flush=True)
        begin = time.monotonic()
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            counts = list(pool.map(lambda r: ask(server.url, *r), REQUESTS))
        print(
            f"  {len(counts)} concurrent requests, prompts in chunks of {CHUNK}, {sum(counts)} tokens generated: "
            f"{time.monotonic() - begin:.1f} s",
            flush=True,
        )
    print(f"  stopped after {server.stop_s:.0f} s; dump: {dump}", flush=True)
    if not (dump / "run.json").exists():
        raise NotServed(f"the server ran, and no dump was written to {dump}; read {server.log}")


def run(out: Path) -> int:
    begin = time.monotonic()
    for old in (out / "golden", out / "mine", out / "report"):
        shutil.rmtree(old, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    model = make("qwen2", out / "model")
    print(f"model: {model} (4 layers, random weights, bfloat16)")
    serve("1. golden, clean", model, out / "golden", None)
    serve(f"2. mine, with a fault ({WHAT})", model, out / "mine", FAULT)

    print("\n3. accprobe compare golden mine", flush=True)
    command = [str(Path(sys.executable).parent / "accprobe"), "compare", "golden", "mine", "--out", "report"]
    code = subprocess.run(command, cwd=out, check=False).returncode
    if code not in (0, 1):
        print(f"demo: accprobe compare ended with {code}", file=sys.stderr)
        return 1
    result = json.loads((out / "report" / "compare.json").read_text())
    named = result["origins"][0] if result["origins"] else None
    print(f"\ncsv   {out / 'report' / 'compare.csv'}")
    print(f"json  {out / 'report' / 'compare.json'}")
    print(f"html  {out / 'report' / 'compare.html'}")
    if result["verdict"] != "fail" or named is None or named["module"] != FAULT["module"]:
        what = f"named {named['module']}" if named else "named nothing"
        print(f"demo: accprobe said {result['verdict']} and {what}; planted was {FAULT['module']}", file=sys.stderr)
        return 1
    where = f"{named['phase']}, position {named['position']} of request {named['request']}"
    print(f"\nplanted {FAULT['module']} — named {named['module']} ({where}); {time.monotonic() - begin:.0f} s in all")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="directory for model, dumps, logs and report")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with Server` ends its server
    try:
        return run(parser.parse_args().out.resolve())
    except (NotServed, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
