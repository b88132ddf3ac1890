"""The parts of ``scripts/card.sh``: what each runs, and what it needs to have run before.

The problem: which engines are worth building depends on the machine: one that captures nothing need not be asked
twice. The idea: ``ways`` lists every way in which vLLM can run a model; the machine's own vLLM says what it makes of
each; ways that come out the same as an earlier one are told and left out, and the rest makes a flat list of parts.
Not here: running parts (card.py), what happens inside one (card_engine.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAULTY = "model.layers.2.mlp.down_proj"
FACTOR = 1.05
FAULT = {"kind": "scale", "module": FAULTY, "factor": FACTOR}
NAN = {"kind": "nan", "module": FAULTY, "features": [3]}
EAGER = "eager"
WAYS: dict[str, dict[str, Any]] = {
    EAGER: {"enforce_eager": True},
    "compiled": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}},
    "captured": {"enforce_eager": False},
    "piecewise": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
}
"""``captured``: whatever this vLLM does by default. ``full``: captured as a whole, and not compiled."""
MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "base": "qwen2",
        # Heads of 128, which every device's attention has; tiny_model's own 32 are for CPUs.
        "config": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "larger": {
        "base": "bench-h1024",
        "config": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
    },
}
"""``larger``: for step costs."""
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512,
    "enable_prefix_caching": False, "seed": 0,
}  # fmt: skip
ON_A_CPU = {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 64 << 20}
ON_A_DEVICE = {"gpu_memory_utilization": 0.3}
IN_GRAPHS = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_GRAPHS": "1"}
SELECTED = {"VLLM_ACCPROBE_MODULES": "*.1.*_proj,logits,<root>", "VLLM_ACCPROBE_STEPS": "1-6"}
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
"""The environment of every part, where the caller's has nothing else."""
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
"""One of each engine; one of all, since what lies there is named by its content."""
COSTS = ("bare", "stats", "tensor")


@dataclass(frozen=True)
class Part:
    """One process. job: for card_engine.py; command: another one, run with this Python. env: added to the environment.
    needs: parts that must be done. expect: exit codes that are no failure. dump: the dump it leaves, or None.
    doubt: the way whose bits must have changed, or this is not run."""

    name: str
    says: str
    job: Mapping[str, Any] | None = None
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    expect: tuple[int, ...] = (0,)
    dump: Path | None = None
    result: Path | None = None
    doubt: str = ""

    def asked(self) -> str:
        """What the result depends on; a part that was done for other questions is done again."""
        return json.dumps([self.job, self.command, dict(self.env)], sort_keys=True)


@dataclass(frozen=True)
class Asked:
    """What the caller wants. engine: further arguments of vllm.LLM, for all engines."""

    root: Path
    engine: Mapping[str, Any]
    quick: bool = False
    device: str = ""

    def model(self, name: str) -> str:
        return str(self.root / "models" / name)

    def args(self, way: str, device_type: str) -> dict[str, Any]:
        """Arguments of vllm.LLM for ``way``; the caller's compilation_config counts wherever something is compiled."""
        args = ENGINE | (ON_A_CPU if device_type == "cpu" else ON_A_DEVICE) | dict(self.engine)
        own = args.pop("compilation_config", {})
        args |= WAYS[way]
        if own and way != EAGER:
            args["compilation_config"] = own | WAYS[way].get("compilation_config", {})
        return args


def machine(asked: Asked) -> Part:
    """The first part. The process finds out itself whether it is on a CPU."""
    ways = {
        way: {kind: asked.args(way, kind) | {"model": asked.model("small")} for kind in ("cpu", "device")}
        for way in WAYS
    }
    models = {name: model | {"path": asked.model(name)} for name, model in MODELS.items()}
    job = {"do": "machine", "ways": ways, "models": models, "ours": [*QUIET, *CACHES]}
    return Part("machine", "who this machine is, and what its vLLM makes of each way", job)


def chosen_ways(machine: Mapping[str, Any]) -> dict[str, str]:
    """For each way: "" where it is run, else why not."""
    seen: dict[tuple[str, str], str] = {}
    chosen = {}
    for way in WAYS:
        found = machine.get("ways", {}).get(way, {"error": "not asked"})
        if "error" in found:
            chosen[way] = f"this vLLM refuses it: {found['error']}"
            continue
        key = (found["mode"], found["graphs"])
        nothing = ", which captures nothing" if found["graphs"] in ("NONE", "None") and way != "compiled" else ""
        if key in seen:
            chosen[way] = f"the same as {seen[key]} here: mode {found['mode']}, graphs {found['graphs']}{nothing}"
            continue
        seen[key], chosen[way] = way, ""
    return chosen


def parts(asked: Asked, machine: Mapping[str, Any]) -> list[Part]:
    """All others, in the order in which they are run: what says most comes first."""
    ways = [way for way, why in chosen_ways(machine).items() if not why]
    kind = str(machine.get("device_type", ""))
    made: list[Part] = []
    for way in ways:
        made += _served(asked, way, kind)
    for way in ways:
        if not asked.quick:
            made += _timed(asked, way, kind)
    made += _errcheck(asked, kind)
    out = asked.root / "torch"
    options = ("--device", asked.device) if asked.device else ()
    made.append(
        Part("torch", "the taps with torch alone", command=(str(HERE / "card_torch.py"), "--out", str(out), *options),
             expect=(0, 1), result=out / "card.json")
    )  # fmt: skip
    return made


def _served(asked: Asked, way: str, kind: str) -> list[Part]:
    graphs = {"VLLM_ACCPROBE": "1"} if way == EAGER else IN_GRAPHS
    variants: dict[str, dict[str, str]] = {"bare": {}, "on": graphs}
    if not asked.quick:
        variants["selected"] = graphs | SELECTED
        if way != EAGER:
            variants["off"] = graphs | {"VLLM_ACCPROBE_GRAPH_MB": "0"}
    variants["fault"] = graphs | {"ACCPROBE_FAULT": json.dumps(FAULT)}
    says = {
        "bare": "no probe", "on": "taps on", "selected": "some taps, some steps", "off": "the probe without taps",
        "fault": "with a planted fault",
    }  # fmt: skip
    made = []
    for variant, env in variants.items():
        dump = asked.root / "dumps" / f"{way}-{variant}" if env else None
        job = {"do": "serve", "model": asked.model("small"), "engine": asked.args(way, kind)}
        more = {"VLLM_ACCPROBE_DIR": str(dump)} if dump else {}
        made.append(Part(f"{way}-{variant}", f"{way}, {says[variant]}", job, env=env | more, dump=dump))
    # Where looking changed bits: does this machine give the same bits twice?
    again = {"do": "serve", "model": asked.model("small"), "engine": asked.args(way, kind), "time": "second"}
    made.append(Part(f"{way}-again", f"{way}, no probe, once more", again, doubt=way))
    for variant in ("on", "fault"):
        if (way, variant) != (EAGER, "on"):
            made.append(_compared(asked, way, variant))
    return made


def _compared(asked: Asked, way: str, variant: str) -> Part:
    golden, mine = f"{EAGER}-on", f"{way}-{variant}"
    out = asked.root / "compared" / mine
    dumps = asked.root / "dumps"
    command = ("-m", "vllm_accprobe.cli", "compare", str(dumps / golden), str(dumps / mine), "--out", str(out))
    says = f"{way}{' with the fault' if variant == 'fault' else ''} against eager"
    return Part(
        f"compare-{mine}", says, command=command, needs=(golden, mine), expect=(0, 1), result=out / "compare.json"
    )


def _timed(asked: Asked, way: str, kind: str) -> list[Part]:
    from card_engine import timed_steps

    made = []
    for cost in COSTS:
        env = {}
        dump = asked.root / "dumps" / f"{way}-cost-{cost}" if cost != "bare" else None
        if dump:
            env = {"VLLM_ACCPROBE": "1"} if way == EAGER else dict(IN_GRAPHS)
            env |= {
                "VLLM_ACCPROBE_TASK": cost, "VLLM_ACCPROBE_STEPS": timed_steps(cost), "VLLM_ACCPROBE_DIR": str(dump),
                "VLLM_ACCPROBE_PARTS": "input,output",
            }  # fmt: skip
        job = {"do": "time", "kind": cost, "model": asked.model("larger"), "engine": asked.args(way, kind)}
        made.append(Part(f"{way}-cost-{cost}", f"{way}, step time, {cost}", job, env=env, dump=dump))
    return made


def _errcheck(asked: Asked, kind: str) -> list[Part]:
    """``accprobe errcheck`` around an engine that makes a NaN, and around one that does not."""
    made = []
    job = {"do": "serve", "model": asked.model("small"), "engine": asked.args(EAGER, kind)}
    for name, env in (("nan", {"ACCPROBE_FAULT": json.dumps(NAN)}), ("clean", {})):
        if name == "clean" and asked.quick:
            continue
        file = asked.root / "jobs" / f"errcheck-{name}.inner.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(job), encoding="utf-8")
        out = asked.root / "errcheck" / name
        command = ("-m", "vllm_accprobe.cli", "errcheck", "--dir", str(out), "--")
        command = (*command, sys.executable, str(HERE / "card_engine.py"), str(file))
        made.append(Part(f"errcheck-{name}", f"errcheck, {name}", command=command, env=env, expect=(0, 1, 3), dump=out))
    return made


def environment(asked: Asked, part: Part) -> dict[str, str]:
    """Of the part's process. Each engine has compile caches of its own where vLLM names them: a fault is in no key."""
    old = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_ACCPROBE")}
    old.pop("ACCPROBE_FAULT", None)
    paths = [str(HERE.parent), str(HERE), str(HERE.parent / "lab" / "planted"), str(asked.root / "plugin")]
    if "VLLM_PLUGINS" in old:  # a list of those that vLLM may load
        old["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*old["VLLM_PLUGINS"].split(","), "accprobe", "accprobe_faults"]))
    caches = dict(zip(CACHES, (str(asked.root / "caches" / name) for name in (part.name, "inductor")), strict=True))
    pythonpath = os.pathsep.join([*paths, *filter(None, [old.get("PYTHONPATH")])])
    return {**QUIET, **old, **caches, **part.env, "PYTHONPATH": pythonpath}
