"""One part of ``scripts/card.sh`` inside a process of its own: what needs vLLM imported.

The problem: an engine on an unknown device may hang, run out of memory or take its process with it, and no later
engine of that process can be trusted. The idea: a job is a JSON file, its result another one, written in the end; the
parent (card.py) knows only those, a time limit and a log. An engine is built in this process and driven step by step,
so that all engines see the same batches and each step can be timed.

    python card_engine.py JOB.json

Not here: which jobs there are (card_parts.py), what is made of their results (card_found.py).
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LENGTHS = (1, 3, 40, 12, 2, 25, 8, 4, 17, 6)
"""Tokens of the prompts, which are made up; a new request comes with every second step."""
TOKENS = (14, 12, 10, 16, 9, 8, 12, 6, 4, 7)
FIRST_PLAIN_ID, VOCAB = 8, 512
REQUESTS, PROMPT, STEPS = 8, 16, 100
"""Of the timed engine: one batch, and how many decode steps it takes."""
WINDOW, SETTLING = 10, 2
"""Steps in which the probe is in turn off and on, and how many at the begin of each are not counted."""
PACKAGES = (
    "vllm", "torch", "triton", "accprobe", "numpy", "transformers", "tokenizers", "safetensors", "nvidia", "cuda",
    "flash", "xformers", "cupy", "ascend", "npu", "cann", "mindspore", "intel", "oneccl", "xpu", "kunlun", "xtorch",
    "rocm", "amd", "aiter", "ray", "numba", "xxhash", "orjson", "scipy", "compressed", "msprobe", "mindstudio",
)  # fmt: skip
"""A package whose name has one of these in it matters for what is computed here."""
NEEDED = ("numpy", "safetensors", "h5py", "llvmlite", "numba", "typer", "rich", "xxhash", "orjson")
"""What accprobe needs beside vLLM, as in pyproject.toml."""
SETTINGS = ("VLLM_", "CUDA_", "ASCEND_", "NPU_", "XPU_", "ZE_", "ROCR_", "HIP_", "OMP_", "TORCH", "PYTORCH", "NCCL_",
            "HCCL_", "BKCL_", "TRITON_")  # fmt: skip
SECRET = ("KEY", "TOKEN", "SECRET", "PASS", "CRED", "AUTH")


def timed_steps(kind: str) -> str:
    """The steps that VLLM_ACCPROBE_STEPS names, so that half of the timed steps are captured."""
    begins = range(WINDOW, STEPS, 2 * WINDOW)
    return ",".join(f"{begin}-{begin + WINDOW - 1}" for begin in begins) if kind != "bare" else ""


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = JOBS[job["do"]](job)
    if job.get("result"):
        target = Path(job["result"])
        beside = target.with_suffix(".new")
        beside.write_text(json.dumps(found), encoding="utf-8")
        beside.replace(target)  # so that a result that is there is whole
    # What a server's own shutdown may do on an unknown device is no part of the result.
    sys.stdout.flush()
    return 0


# --- the machine -----------------------------------------------------------------------------------------------------


def machine(job: dict[str, Any]) -> dict[str, Any]:
    """Who this machine is, what its vLLM makes of each way to run, and the models. ``job["ways"]``: arguments, on
    a CPU and on other devices."""
    from tiny_model import make

    found: dict[str, Any] = {
        "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(), "packages": packages(), "settings": settings(job["ours"]), "accprobe": probe_version(),
        "missing": [name for name in NEEDED if find_spec(name) is None],
    }  # fmt: skip
    for name, model in job["models"].items():
        make(model["base"], model["path"], **model["config"])
        found.setdefault("models", []).append(name)
    import torch

    found |= {"torch": torch.__version__, "devices": devices(torch), "managers": managers()}
    import vllm
    from vllm.platforms import current_platform

    found |= {"vllm": vllm.__version__, "platform": type(current_platform).__name__}
    found["device_type"] = str(getattr(current_platform, "device_type", ""))
    kind = "cpu" if found["device_type"] == "cpu" else "device"
    found["ways"] = {name: tried(lambda args=args[kind]: resolved(args)) for name, args in job["ways"].items()}
    return found


def devices(torch: Any) -> list[str]:
    """Names of the accelerators that torch sees, or of the processor."""
    try:
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator().type
            module = torch.get_device_module(kind)
            return [f"{kind}:{i} {module.get_device_name(i)}" for i in range(torch.accelerator.device_count())]
    except Exception as error:
        return [f"not known ({type(error).__name__}: {error})"]
    return [f"cpu, {processor()}, {torch.backends.cpu.get_cpu_capability()}"]


def processor() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware"))]
    return names[0] if names else platform.processor() or platform.machine()


def managers() -> list[str]:
    """What the device's own tool says of it, where there is one: driver, firmware, memory."""
    lines: list[str] = []
    for command in (["nvidia-smi"], ["npu-smi", "info"], ["xpu-smi", "discovery"], ["rocm-smi"], ["xpu_smi"]):
        if shutil.which(command[0]):
            try:
                done = subprocess.run(command, capture_output=True, timeout=20, check=False)
                lines += [" ".join(command) + ":", *done.stdout.decode(errors="replace").splitlines()[:40]]
            except (OSError, subprocess.SubprocessError) as error:
                lines.append(f"{command[0]}: {error}")
    return lines


def packages() -> dict[str, str]:
    """Versions of the installed packages that matter."""
    names = {(d.metadata["Name"] or "").lower(): d.version for d in metadata.distributions()}
    return {name: names[name] for name in sorted(names) if any(part in name for part in PACKAGES)}


def settings(ours: list[str]) -> dict[str, str]:
    """The environment's names that change what is computed, without ``ours`` and what may hold a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(SETTINGS) and name not in ours and not any(part in name for part in SECRET)
    }


def probe_version() -> dict[str, str]:
    """accprobe's version, and a hash of its source, which names a checkout without git."""
    import hashlib

    import vllm_accprobe

    root, whole = Path(vllm_accprobe.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        whole.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return {"version": vllm_accprobe.__version__, "source": whole.hexdigest()[:12]}


def resolved(args: dict[str, Any]) -> dict[str, Any]:
    """What vLLM will make of these arguments, without building the engine."""
    from vllm.engine.arg_utils import EngineArgs

    return how(EngineArgs(**args).create_engine_config())


def how(vllm_config: Any) -> dict[str, Any]:
    config = vllm_config.compilation_config
    mode, graphs = getattr(config, "mode", getattr(config, "level", None)), getattr(config, "cudagraph_mode", None)
    return {
        "mode": str(getattr(mode, "name", mode)), "backend": str(getattr(config, "backend", "") or ""),
        "graphs": str(getattr(graphs, "name", graphs)),
        "sizes": list(getattr(config, "cudagraph_capture_sizes", None) or ()),
    }  # fmt: skip


def tried(what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return what()
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}


# --- engines ---------------------------------------------------------------------------------------------------------


def build(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The engine, and how it was built."""
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(model=job["model"], **job["engine"])
    core = llm.llm_engine
    return llm, {"build_s": time.perf_counter() - begin, "how": how(core.vllm_config)}


def end(llm: Any) -> None:
    """Lets the engine close its dump."""
    shutdown = getattr(llm.llm_engine.engine_core, "shutdown", None)
    if shutdown is not None:
        shutdown()
    del llm
    gc.collect()


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Serves the prompts; tokens and log-probabilities of each answer, the latter as hexadecimal floats: their bits."""
    llm, found = build(job)
    core = llm.llm_engine
    waiting = [(f"card-{i}", prompt(n, i), TOKENS[i]) for i, n in enumerate(LENGTHS)]
    answers: dict[str, Any] = {}
    steps = 0
    while waiting or core.has_unfinished_requests():
        if waiting and steps % 2 == 0:
            add(core, *waiting.pop(0))
        for output in core.step():
            if output.finished:
                one = output.outputs[0]
                answers[output.request_id] = {
                    "tokens": list(one.token_ids), "top": [top(position) for position in one.logprobs or ()]
                }  # fmt: skip
        steps += 1
    end(llm)
    return found | {"answers": answers, "steps": steps}


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(1000 * seed + length)
    return [source.randrange(FIRST_PLAIN_ID, VOCAB) for _ in range(length)]


def add(core: Any, name: str, ids: list[int], tokens: int, logprobs: int | None = 5) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    core.add_request(name, {"prompt_token_ids": ids}, sampling)


def top(position: Any) -> dict[str, str]:
    return {str(token): float(it.logprob).hex() for token, it in position.items()}


def time_steps(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a decode step, by what the probe did in it: wall clock, and CPU time of this thread."""
    llm, found = build(job)
    core = llm.llm_engine
    for request in range(REQUESTS):
        add(core, f"card-{request}", prompt(PROMPT, request), STEPS, None)
    spent: list[tuple[float, float]] = []
    while core.has_unfinished_requests():
        wall, own = time.perf_counter(), time.thread_time()
        core.step()
        spent.append((time.perf_counter() - wall, time.thread_time() - own))
    end(llm)
    kind = job["kind"]
    steps: dict[str, list[tuple[float, float]]] = {}
    for number, one in enumerate(spent):
        if number >= WINDOW and number % WINDOW >= SETTLING:
            on = number // WINDOW % 2 == 1
            steps.setdefault(kind if on or kind == "bare" else "off", []).append(one)
    return found | {
        "steps": {
            name: {"n": len(all_), "wall_s": summary(s[0] for s in all_), "own_s": summary(s[1] for s in all_)}
            for name, all_ in steps.items()
        }
    }


def summary(seconds: Iterable[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(seconds, n=4, method="inclusive")


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"machine": machine, "serve": serve, "time": time_steps}

if __name__ == "__main__":
    sys.exit(main())
