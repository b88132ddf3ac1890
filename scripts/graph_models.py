"""What taps in compiled graphs do to six models: a table for docs/capture.md, from real engines.

The problem: whether looking changes what is computed, how much of a model is seen, and whether a compiled engine passes
against an eager one depends on the architecture, and an engine that inductor compiles takes a minute. The idea: each
model runs eager and compiled, without taps, with the default set, with some of it chosen, and with the full set; each
run is kept under ``--keep`` and is not made again, so that an interrupted table goes on where it was. Then dumps are
held against each other: bits by the journal's hashes, numbers by ``accprobe compare`` and the root's and logits' rows.
Compiled code is kept under ``--keep`` and nowhere else. ``--quick`` traces with dynamo and compiles
nothing. Exit codes: 0, or 1 where a default tap changes a bit, a clean pair fails, or less than 95 % is seen.
Not here: the models (tiny_model.py), engines (tests/support/engine.py), planted faults (weights.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

import tiny_model  # noqa: E402
from support.captures import FIVE, VISION  # noqa: E402
from support.engine import EngineHost  # noqa: E402

from vllm_accprobe.comparison.engine import compare  # noqa: E402
from vllm_accprobe.dump.dtypes import widen  # noqa: E402
from vllm_accprobe.dump.reader import Dump, open_dump  # noqa: E402
from vllm_accprobe.dump.schema import ROOT_TAP, Record  # noqa: E402

MODELS = ("qwen2", "llama", "gemma3", "qwen2-moe", "deepseek-v2", "qwen2.5-vl")
SEED = 0
"""Of the weights and of the engine; those of the prompts stand in tests/support/captures.py."""
GOAL = 0.95
"""Share of eager's outputs that the full set must have: the issue's."""
LOGITS = "logits_processor"
"""The module's own name: a model with a vision tower has it in its language model."""
_GRAPHS = {"VLLM_ACCPROBE_GRAPHS": "1"}
_SOME = {"VLLM_ACCPROBE_MODULES": "*.1.*o_proj,*.1.*down_proj,logits,<root>", "VLLM_ACCPROBE_STEPS": "1-3"}
EAGER, OFF, DEFAULT, CHOSEN, FULL = "eager", "off", "default", "selected", "full"
WAYS: dict[str, dict[str, str]] = {
    EAGER: {},
    OFF: _GRAPHS | {"VLLM_ACCPROBE_GRAPH_MB": "0"},
    DEFAULT: _GRAPHS,
    CHOSEN: _GRAPHS | _SOME,
    FULL: _GRAPHS | {"VLLM_ACCPROBE_MODULES": "all"},
}


@dataclass(frozen=True)
class Row:
    """One model's line. moved: relative L2 of (the root's output, the logits) over the steps with equal inputs, and how
    many of all steps these are; verdicts: of eager against compiled, by way."""

    model: str
    taps: dict[str, int]
    differs: list[str]
    share: float
    outputs: int
    missing: dict[str, int]
    compiling_moved: tuple[float, float, int, int]
    full_moved: tuple[float, float, int, int]
    verdicts: dict[str, str]
    unjudged: dict[str, int]
    seconds: dict[str, float]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.differs and self.share >= GOAL and set(self.verdicts.values()) == {"pass"}


class Hosts:
    """The processes of all engines: one makes them eager, which it cannot undo, the other one compiles them."""

    def __init__(self, root: Path, quick: bool) -> None:
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        caches = {"VLLM_CACHE_ROOT": str(root / "_cache"), "TORCHINDUCTOR_CACHE_DIR": str(root / "_inductor")}
        how = {"VLLM_CPU_CI_ENV": "1"} if quick else {}
        self._of = {name: EngineHost(root / f"_log-{name}.txt", threads | caches | how) for name in ("eager", "mine")}

    def of(self, way: str) -> EngineHost:
        return self._of["eager" if way == EAGER else "mine"]

    def close(self) -> None:
        for host in self._of.values():
            host.close()


class Runs:
    """Makes the runs of one model under ``root`` and remembers them on the disk."""

    def __init__(self, root: Path, model: str, hosts: Hosts) -> None:
        self.root, self.model, self.hosts = root, model, hosts

    def make(self, way: str) -> None:
        out, done = self.path(way), self.marker(way)
        if done.exists():
            return
        shutil.rmtree(out, ignore_errors=True)
        weights = tiny_model.make(self.model, self.root / "_models" / self.model, seed=SEED)
        asks = VISION if self.model == "qwen2.5-vl" else FIVE
        eager = way == EAGER
        run = self.hosts.of(way).capture(weights, asks, out=out, env=WAYS[way], enforce_eager=eager, seed=SEED)
        done.write_text(json.dumps({"tokens": run.tokens, "seconds": run.metrics["build_s"]}))

    def path(self, way: str) -> Path:
        return self.root / "_runs" / f"{self.model}_{way}"

    def said(self, way: str) -> dict[str, Any]:
        return json.loads(self.marker(way).read_text())

    def marker(self, way: str) -> Path:
        """Says that the run is made. Not by ``with_suffix``, which cuts "qwen2.5-vl_off" at its dot."""
        return self.root / "_runs" / f"{self.model}_{way}.json"


def row(runs: Runs) -> Row:
    """The line of a model whose runs are all there."""
    dumps = {way: open_dump(runs.path(way)) for way in WAYS}
    outputs, missing = seen(dumps[EAGER], dumps[FULL])
    compared = {way: compare(runs.path(EAGER), runs.path(way)) for way in (OFF, DEFAULT, FULL)}
    run = dumps[OFF].run
    return Row(
        model=runs.model,
        taps={way: dumps[way].run["engine"]["graphs"]["taps"] for way in (DEFAULT, FULL)},
        differs=[f"{way}: {what}" for way in (DEFAULT, CHOSEN) for what in differing(runs, dumps, way)],
        share=1 - sum(missing.values()) / outputs,
        outputs=outputs,
        missing=dict(missing),
        compiling_moved=moved(dumps[EAGER], dumps[OFF]),
        full_moved=moved(dumps[OFF], dumps[FULL]),
        verdicts={way: result.verdict for way, result in compared.items()},
        unjudged={way: _near_ties(result.coverage["skipped"]) for way, result in compared.items()},
        seconds={way: runs.said(way)["seconds"] for way in WAYS},
        versions={name: str(run.get("versions", {}).get(name, "")) for name in ("vllm", "torch", "transformers")},
    )


def _near_ties(skipped: Mapping[str, int]) -> int:
    return sum(n for why, n in skipped.items() if "near tie" in why and why.startswith("rows"))


def differing(runs: Runs, dumps: Mapping[str, Dump], way: str) -> list[str]:
    """What is not, to the bit, as without taps: tokens, and tensors that both dumps have (root, logits, top logits)."""
    said = [] if runs.said(OFF)["tokens"] == runs.said(way)["tokens"] else ["tokens"]
    without, here = hashes(dumps[OFF]), hashes(dumps[way])
    both = without.keys() & here.keys()
    if way == DEFAULT:
        both = without.keys()
    wrong = {f"{key[1]} {key[2]}" for key in both if here.get(key) != without[key]}
    return [*said, *sorted(wrong), *([] if both else ["nothing in common"])]


def hashes(dump: Dump) -> dict[tuple[int, str, str, int], str]:
    return {(r.step, r.tap, r.role, r.call): r.hash for r in dump.records if r.step is not None}


def seen(eager: Dump, full: Dump) -> tuple[int, Counter[str]]:
    """How many module outputs eager has in its steps, and why those are missing that the full set has not."""
    wanted = {(r.tap, r.role) for r in eager.records if r.step is not None and r.role.startswith("output.")}
    have = {(r.tap, r.role) for r in full.records if r.step is not None}
    why = {skip.tap: skip.reason for skip in full.skips}
    return len(wanted), Counter(why.get(tap, "NO REASON GIVEN") for tap, role in sorted(wanted - have))


def moved(golden: Dump, mine: Dump) -> tuple[float, float, int, int]:
    """(relative L2 of the root's output, of the logits, steps with equal inputs of the root, all steps)."""
    found = [{(r.step, r.tap, r.role): r for r in d.records if r.step is not None} for d in (golden, mine)]
    steps = sorted({step for step, tap, _ in found[0] if tap == ROOT_TAP})
    ins = [{k: r.hash for k, r in side.items() if k[1] == ROOT_TAP and k[2].startswith("input.")} for side in found]
    same = [s for s in steps if _of(ins[0], s) == _of(ins[1], s)]
    sums = {name: np.zeros(2) for name in (ROOT_TAP, LOGITS)}
    for step, tap, role in sorted(found[0].keys() & found[1].keys()):
        name = tap.rpartition(".")[2]
        if step in same and name in sums and role == "output.0":
            g, m = (_values(d, side[step, tap, role]) for d, side in zip((golden, mine), found, strict=True))
            if g.shape == m.shape:
                sums[name] += ((g - m) ** 2).sum(), (g**2).sum()
    root, logits = (float(np.sqrt(d / g)) if g else float("nan") for d, g in sums.values())
    return root, logits, len(same), len(steps)


def _values(dump: Dump, record: Record) -> np.ndarray:
    return widen(dump.read(record), record.dtype).astype(np.float64)


def _of(inputs: Mapping[tuple[Any, ...], str], step: int) -> dict[str, str]:
    return {role: hash for (at, _, role), hash in inputs.items() if at == step}


def page(rows: Sequence[Row], quick: bool) -> str:
    """The table in markdown."""
    how = "dynamo, torch's eager backend" if quick else "inductor"
    versions = ", ".join(f"{name} {version}" for name, version in rows[0].versions.items() if version)
    lines = [
        f"`scripts/graph_models.py`: {how}; {versions}; seed {SEED}; one thread.",
        "",
        "| model | taps: default, full | default and selected against none | outputs seen, full set | eager → compiled "
        "moves root, logits | full set moves root, logits | eager against compiled: none, default, full |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        bits = "every bit the same" if not r.differs else "; ".join(r.differs)
        verdicts = ", ".join(_verdict(r, way) for way in (OFF, DEFAULT, FULL))
        known = f"{r.share:.1%} of {r.outputs}"
        moves = " | ".join(f"{m[0]:.1e}, {m[1]:.1e}" for m in (r.compiling_moved, r.full_moved))
        lines.append(f"| {r.model} | {r.taps[DEFAULT]}, {r.taps[FULL]} | {bits} | {known} | {moves} | {verdicts} |")
    lines += ["", "What the full set does not see of eager's outputs:", ""]
    for r in rows:
        lines += [f"- {r.model}: {n} × {why}" for why, n in sorted(r.missing.items(), key=lambda x: -x[1])]
    return "\n".join(lines) + "\n"


def _verdict(r: Row, way: str) -> str:
    return r.verdicts[way] + (f" ({r.unjudged[way]} rows not judged)" if r.unjudged[way] else "")


def make(root: Path, models: Iterable[str], quick: bool) -> list[Row]:
    rows = []
    hosts = Hosts(root, quick)
    try:
        for model in models:
            runs = Runs(root, model, hosts)
            for way in WAYS:
                runs.make(way)
                print(f"{model} {way}: {runs.said(way)['seconds']:.0f} s to build", flush=True)
            rows.append(row(runs))
            (root / f"{model}.json").write_text(json.dumps(asdict(rows[-1]), indent=1))
            print(page(rows[-1:], quick), flush=True)
    finally:
        hosts.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="What taps in compiled graphs do to six models.")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep all runs there; those found there are not redone"
    )
    parser.add_argument("--quick", action="store_true", help="trace with dynamo, compile nothing")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    root = Path(args.keep or tempfile.mkdtemp(prefix="graph-models-"))
    (root / "_runs").mkdir(parents=True, exist_ok=True)
    try:
        rows = make(root, args.only, args.quick)
    finally:
        if args.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    text = page(rows, args.quick)
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    return 0 if all(r.good for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
