"""Wrong weights planted in real engines, and clean ones: what their life says of each (docs/state-checks.md).

The problem: fingerprints of weights are worth what they find in an engine that packs, reloads, syncs and exchanges
adapters, and that they are silent where nothing is wrong. The idea: tests/support/weight_lab.py builds tiny engines one
after another in this process; each case is one of them, in which vLLM's own function does at most one thing less or
else, and is compared with a clean run of the same events. It is right when all that is found is of the parameter that
was spoilt, as the kind that was planted; a clean case is right when nothing is found.

    python scripts/weight_cases.py --out DIR [--only GLOB,GLOB] [--v2]

Exit code 1 where a case is wrong. Rows of kind "vLLM's own" are told and not judged: they are faults of vLLM 0.32 on a
CPU. Not here: what a load costs (scripts/weight_cost.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / p) for p in ("scripts", "tests", "tests/support", "")]

from support import weight_lab as lab  # noqa: E402
from support.weight_lab import DOWN, WeightEngine  # noqa: E402

QKV, GATE_UP, NORM = "model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "model.norm"
OWN = "vLLM's own"
Plant = Callable[[], contextlib.AbstractContextManager[Any]]
Act = Callable[[WeightEngine, "Models"], None]


@dataclass(frozen=True)
class Models:
    """Checkpoints: two architectures, int8, each after a step of training; one whose step left a norm; two adapters."""

    dense: Path
    dense_moved: Path
    dense_but_norm: Path
    moe: Path
    moe_moved: Path
    int8: Path
    int8_moved: Path
    adapters: tuple[Path, Path]

    @classmethod
    def at(cls, root: Path) -> Models:
        from tiny_model import make

        dense, moe = make("qwen2", root / "dense"), make("qwen2-moe", root / "moe")
        int8 = lab.quantised(dense, root / "int8")
        moved = lab.moved(dense, root / "dense-moved")
        return cls(
            dense, moved, lab.mixed(moved, dense, root / "dense-but-norm", f"{NORM}.weight"), moe,
            lab.moved(moe, root / "moe-moved"), int8, lab.moved(int8, root / "int8-moved"),
            (lab.adapter(dense, root / "adapter-a", 1), lab.adapter(dense, root / "adapter-b", 2)),
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One engine. act: between two requests; plant: while it is loaded; kind: of the finding that must come, "" for
    none, OWN for what is told only; tap, name: of whom; rows: in words; golden: the case it is compared with."""

    name: str
    what: str
    model: str = "dense"
    act: Act | None = None
    plant: Plant = contextlib.nullcontext
    kind: str = ""
    tap: str = ""
    rows: str = ""
    parameter: str = "weight"
    golden: str = ""
    args: dict[str, Any] = field(default_factory=dict)


# --- what is done to vLLM -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def scales_kept() -> Iterator[None]:
    """vLLM 0.32's int8 kernel keeps the address of a scale that its own reload frees; here the scale is kept."""
    from vllm import _custom_ops as ops

    kept: list[Any] = []

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(weight: Any, scales: Any, *args: Any, **kwargs: Any) -> Any:
            kept.append(scales.data)
            return original(weight, scales, *args, **kwargs)

        return made

    with lab.replaced(ops, "create_onednn_scaled_mm", make):
        yield


def without(*names: str) -> Callable[[str], bool]:
    return lambda name: name not in names


def adapters(stale: str = "") -> Act:
    """Two adapters after each other in one slot; stale: the module whose slot is not written for the second."""

    def act(engine: WeightEngine, models: Models) -> None:
        from vllm.lora.request import LoRARequest

        manager = engine.worker.model_runner.lora_manager._adapter_manager
        for number, (name, path) in enumerate(zip("ab", models.adapters, strict=True), 1):
            if stale and number == 2:
                manager.modules[stale].set_lora = lambda *_, **__: None
                manager.modules[stale].reset_lora = lambda *_, **__: None
            engine.ask(lora=LoRARequest(name, number, str(path)))

    return act


LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}
Q, GATE, SCALE = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight", f"{DOWN}.weight_scale"


def cases() -> list[Case]:
    """Clean ones first: others are compared with them."""
    return [
        Case("load", "loaded and packed"),
        Case("load-experts", "loaded and packed, experts", "moe"),
        Case("reload-same", "reloaded from the same files", act=lambda e, m: e.reload()),
        Case("reload-new", "reloaded after a step of training", act=lambda e, m: e.reload(m.dense_moved)),
        Case("sync", "a trainer's tensors, all of them", act=lambda e, m: e.sync(m.dense_moved)),
        Case("sync-int8", "the same, int8 with scales", "int8", lambda e, m: e.sync(m.int8_moved), scales_kept),
        Case("adapters", "two adapters after each other in one slot", act=adapters(), args=LORA),
        Case("scale", "a sync leaves one scale behind", "int8", lambda e, m: e.sync(m.int8_moved, without(SCALE)),
             scales_kept, "not written", DOWN, parameter="weight_scale", golden="sync-int8"),
        Case("shard-q", "a reload skips q", act=lambda e, m: e.sync(m.dense_moved, without(Q)), kind="not written",
             tap=QKV, rows="q", golden="sync"),
        Case("shard-gate", "a reload skips gate", act=lambda e, m: e.sync(m.dense_moved, without(GATE)),
             kind="not written", tap=GATE_UP, rows="gate", golden="sync"),
        Case("parameter", "a reload leaves a whole parameter out",
             act=lambda e, m: e.sync(m.dense_moved, without(f"{NORM}.weight")), kind="not written", tap=NORM,
             golden="sync"),
        Case("as-before", "a parameter is written, with its old values", act=lambda e, m: e.reload(m.dense_but_norm),
             kind="differs", tap=NORM, golden="reload-new"),
        Case("adapter", "a module's slot keeps the adapter before", act=adapters(DOWN), kind="old adapter", tap=DOWN,
             parameter="lora_", golden="adapters", args=LORA),
        Case("own-experts", "vLLM reloads experts and does not pack them", "moe", lambda e, m: e.reload(m.moe_moved),
             kind=OWN),
        Case("own-int8", "vLLM reloads int8: scales at a freed address", "int8", lambda e, m: e.reload(m.int8_moved),
             kind=OWN),
    ]  # fmt: skip


# --- running them -------------------------------------------------------------------------------------------------


def run(case: Case, models: Models, out: Path) -> None:
    """One engine: a request, the case's act, a request."""
    shutil.rmtree(out, ignore_errors=True)
    with case.plant():
        engine = WeightEngine(getattr(models, case.model), out, **case.args)
        try:
            engine.ask()
            if case.act is not None:
                case.act(engine, models)
                engine.ask()
        finally:
            engine.close()


def told(case: Case, root: Path) -> list[dict[str, Any]]:
    """The findings of the case's dump, against its golden or alone; as in compare.json."""
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.judge.weights import faults_within, side_of, weights_between

    mine = open_dump(root / case.name).lives
    if not mine.prints:
        raise SystemExit(f"{case.name}: the dump tells nothing of its weights")
    if case.golden:
        found: list[dict[str, Any]] = weights_between(open_dump(root / case.golden).lives, mine)["findings"]
        return found
    return [f.to_dict() for f in faults_within(side_of(mine), "mine")]


def right(case: Case, found: list[dict[str, Any]]) -> bool:
    if case.kind in ("", OWN):
        return not found or case.kind == OWN
    return bool(found) and all(
        f["what"] == case.kind
        and f["module"] == case.tap
        and f["parameter"].startswith(case.parameter)
        and (not case.rows or f["rows"] == case.rows)
        for f in found
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*", help="globs, with commas between")
    parser.add_argument("--v2", action="store_true", help="the V2 model runner")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if args.v2:
        os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        from support.engine_ways import prepare_v2_runner

        prepare_v2_runner()
    globs = args.only.split(",")
    known = cases()
    chosen = [c for c in known if any(fnmatchcase(c.name, g) for g in globs)]
    goldens = {c.golden for c in chosen}
    chosen = [c for c in known if c in chosen or c.name in goldens]
    models = Models.at(args.out / "models")
    wrong = []
    for case in chosen:
        begin = time.monotonic()
        run(case, models, args.out / case.name)
        found = told(case, args.out)
        good = right(case, found)
        if not good:
            wrong.append(case.name)
        verdict = OWN if case.kind == OWN else "right" if good else "WRONG"
        says = found[0]["says"] if found else "nothing"
        says += f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        print(f"{case.name:14} {verdict:10} {time.monotonic() - begin:5.1f} s  {case.what}: {says}", flush=True)
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} right" + (f"; wrong: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
