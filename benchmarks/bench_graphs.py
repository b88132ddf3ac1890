"""What taps in a compiled engine cost: compile time and the time of a decode step, against the bare compiled engine.

    python benchmarks/bench_graphs.py [--rounds 8] [--json FILE] [--profile] [--only bare,tensor]

One real vLLM engine per kind, each in a process and with fresh caches of its own, all compiled by inductor as vLLM's
CPU backend does by default, one OMP thread: ``bare`` (VLLM_ACCPROBE unset), ``off`` (VLLM_ACCPROBE_GRAPH_MB=0: no
taps), ``masked`` (taps placed, no step chosen), ``stats`` and ``tensor`` (every step captured). They are built two
at a time, which gives the compile time, and then serve the same requests in turns, round by round.

Measured is CPU time, because wall clock on a shared machine says little: of the engine's own thread, which computes
the model, and of the whole process, whose other threads write the dump. A round's figure is the median of its decode
steps; quoted are medians of the ratios to the bare engine in the same round, and their quartiles. Compile time is the
CPU time of building the engine, children (the C++ compiler) included; vLLM is imported and has looked the model up
before. A kind that fails is told and left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

GOALS = {"off": 1.0, "masked": 1.05, "stats": 1.3, "tensor": 2.0}
KINDS = ("bare", *GOALS)
PROBE = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_GRAPHS": "1", "VLLM_ACCPROBE_PARTS": "input,output"}
SETTINGS: dict[str, dict[str, str]] = {
    "bare": {},
    "off": PROBE | {"VLLM_ACCPROBE_GRAPH_MB": "0", "VLLM_ACCPROBE_STEPS": "999999"},
    "masked": PROBE | {"VLLM_ACCPROBE_STEPS": "999999"},
    "stats": PROBE | {"VLLM_ACCPROBE_TASK": "stats"},
    "tensor": PROBE,
}
REQUESTS, PROMPT, TOKENS, WARM_UP = 16, 16, 14, 3
"""A round: so many requests, tokens of each prompt, generated tokens, and steps at its begin that do not count."""
AT_A_TIME = 2
"""Engines that are being built: one on each of two processors."""
SMALL = {
    "dtype": "bfloat16", "distributed_executor_backend": "uni", "kv_cache_memory_bytes": 128 << 20,
    "max_model_len": 512, "max_num_seqs": REQUESTS, "max_num_batched_tokens": 512, "enable_prefix_caching": False,
    "disable_log_stats": True, "seed": 0,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1536, help="a multiple of 128")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, bare among them")
    parser.add_argument("--profile", action="store_true", help="afterwards: which functions ran most often per step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="where models, caches and dumps go (default: a temporary directory)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(json.loads(options.worker))
        return
    root = Path(tempfile.mkdtemp(prefix="accprobe-graphs-", dir=options.dir))
    try:
        result = measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("\n".join(report(result)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


# --- the parent: one engine per kind, in turns -----------------------------------------------------------------------


class Kind:
    """The process of one kind's engine; it answers each line with a line."""

    def __init__(self, kind: str, root: Path, model: Path):
        self.kind, place = kind, root / kind
        self.log = place / "log"
        place.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | environment(place)
        if kind != "bare":
            env |= SETTINGS[kind] | {"VLLM_ACCPROBE_DIR": str(place / "dump"), "VLLM_ACCPROBE_MAX_GB": "50"}
        job = json.dumps({"kind": kind, "model": str(model)})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker", job],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env,
            )  # fmt: skip

    def ask(self, what: str = "") -> dict[str, Any]:
        """What the engine answers to ``what``; without it, what it says of itself when it is built."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if what:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            raise RuntimeError("\n".join([f"{self.kind}: the engine ended with {self.process.wait()}", *tail]))
        return cast("dict[str, Any]", json.loads(line))

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment(place: Path) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(place / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of processes would hide what compiling costs
    }


def measure(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    from tiny_model import make

    heads = options.hidden // 128
    model = make(
        "qwen2", root / "model", hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4),
    )  # fmt: skip
    engines: dict[str, Kind] = {}
    result: dict[str, Any] = {
        "layers": options.layers, "hidden": options.hidden, "load": [os.getloadavg()[0]], "built": {}, "failed": {},
        "rounds": {}, "profile": {},
    }  # fmt: skip
    try:
        wanted = [kind for kind in KINDS if kind in options.only.split(",")]
        for some in (wanted[i : i + AT_A_TIME] for i in range(0, len(wanted), AT_A_TIME)):
            engines |= {kind: Kind(kind, root, model) for kind in some}
            for kind in some:
                try:
                    result["built"][kind] = engines[kind].ask()
                    print(f"{kind}: built, {result['built'][kind]}", file=sys.stderr)
                except RuntimeError as error:
                    result["failed"][kind] = str(error)
                    engines.pop(kind).end()
        turns = list(engines)
        for number in range(options.rounds + 1):
            for kind in turns[number % len(turns) :] + turns[: number % len(turns)]:
                found = engines[kind].ask(f"round-{number}")
                if number:  # the first round warms up
                    result["rounds"].setdefault(kind, []).append(found)
        if options.profile:
            result["profile"] = {kind: engine.ask("profile") for kind, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.end()
    result["load"].append(os.getloadavg()[0])
    return result


def report(result: dict[str, Any]) -> list[str]:
    """A table in markdown, and what was not measured."""
    rounds, built = result["rounds"], result["built"]
    bare = statistics.median(r["own"] for r in rounds["bare"])
    lines = [
        f"Qwen2, {result['layers']} layers, hidden size {result['hidden']}, bfloat16; inductor, one OMP thread; decode "
        f"steps of {REQUESTS} requests, {bare * 1e3:.1f} ms bare; CPU time; {len(rounds['bare'])} rounds in turns; "
        f"load {result['load'][0]:.1f} to {result['load'][-1]:.1f}", "",
        "| | taps | compile, CPU s | ratio | step, ms | ratio (quartiles) | goal | | µs a tap | process, ratio | "
        "wall, ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for kind, each in ((kind, rounds[kind]) for kind in KINDS if kind in rounds):
        ratios = {
            clock: sorted(a[clock] / b[clock] for a, b in zip(each, rounds["bare"], strict=True))
            for clock in ("own", "process", "wall")
        }
        middle = {clock: statistics.median(values) for clock, values in ratios.items()}
        own, taps = ratios["own"], built[kind]["taps"]
        step = statistics.median(r["own"] for r in each)
        compiled = built[kind]["build_cpu_s"]
        goal = GOALS.get(kind)
        a_tap = f"{(middle['own'] - 1) * bare / taps * 1e6:.1f}" if taps else ""
        lines.append(
            f"| {kind} | {taps} | {compiled:.1f} | {compiled / built['bare']['build_cpu_s']:.2f} | {step * 1e3:.2f} | "
            f"{middle['own']:.3f} ({own[len(own) // 4]:.3f}-{own[-1 - len(own) // 4]:.3f}) | {goal or ''} | "
            f"{'' if goal is None else 'met' if round(middle['own'], 2) <= goal else 'MISSED'} | "
            f"{a_tap} | {middle['process']:.3f} | "
            f"{middle['wall']:.3f} |"
        )
    if "stats" in built and not (built["stats"]["graphs"] or {}).get("statistics"):
        lines += ["", "stats: of what the taps copied, on the host; this version measures nothing in the graph"]
    for kind, why in result["failed"].items():
        lines += ["", f"{kind}: not measured. {why}"]
    for kind, found in result["profile"].items():
        lines += ["", f"{kind}, calls of Python functions in a decode step:", ""]
        lines += [f"    {count:8.1f}  {name}" for name, count in found["calls"][:25]]
    return lines


# --- the child: one engine -------------------------------------------------------------------------------------------


def serve(job: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's prints must not stand between the answers

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    import vllm
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model=job["model"], **SMALL).create_engine_config()  # looks the model's class up in another process
    before, wall = cpu_s(), time.perf_counter()
    llm = vllm.LLM(model=job["model"], **SMALL)
    built = {"build_cpu_s": cpu_s() - before, "build_wall_s": time.perf_counter() - wall}
    answer(built | {"dynamo_s": compile_times()} | graphs_of())
    core = llm.llm_engine
    gc.collect()
    for line in sys.stdin:
        name = line.strip()
        if name == "profile":
            answer({"calls": calls(core)})
        else:
            answer(decode_times(core, name))
    core.engine_core.shutdown()


def compile_times() -> dict[str, float]:
    """Seconds of wall clock that torch says its compiling took, by phase."""
    from torch._dynamo import utils

    return {name: sum(spent) for name, spent in utils.compilation_time_metrics.items() if sum(spent) > 1}


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def graphs_of() -> dict[str, Any]:
    """What the dump says of the taps."""
    path = Path(os.environ.get("VLLM_ACCPROBE_DIR", "."), "run.json")
    graphs = json.loads(path.read_text())["engine"].get("graphs") if path.exists() else None
    return {"taps": (graphs or {}).get("taps", 0), "graphs": graphs}


def begin(core: Any, name: str) -> None:
    """All requests at once; one step, which computes their prompts."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for request in range(REQUESTS):
        ids = [(7 * request + 3 * i + 11) % 500 + 8 for i in range(PROMPT)]
        core.add_request(f"{name}-{request}", {"prompt_token_ids": ids}, sampling)
    core.step()


def decode_times(core: Any, name: str) -> dict[str, float]:
    """Seconds of a decode step, medians: CPU time of this thread, of the process, and wall clock. What the writer does
    after a step counts as the process's in the steps after it."""
    begin(core, name)
    spent: list[tuple[float, float, float]] = []
    while core.has_unfinished_requests():
        own, process, wall = time.thread_time(), time.process_time(), time.perf_counter()
        core.step()
        spent.append((time.thread_time() - own, time.process_time() - process, time.perf_counter() - wall))
    spent = spent[WARM_UP:]
    return {clock: statistics.median(s[i] for s in spent) for i, clock in enumerate(("own", "process", "wall"))}


def calls(core: Any) -> list[tuple[str, float]]:
    """How often each Python function was called in a decode step, the most frequent first."""
    begin(core, "profile")
    counts: Counter[Any] = Counter()

    def count(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    steps = 0
    sys.setprofile(count)
    try:
        while core.has_unfinished_requests():
            core.step()
            steps += 1
    finally:
        sys.setprofile(None)
    names = {code: getattr(code, "co_qualname", code.co_name) for code in counts}  # Python 3.10 has no qualified ones
    return [(f"{Path(c.co_filename).name}:{names[c]}", n / steps) for c, n in counts.most_common(40)]


if __name__ == "__main__":
    main()
