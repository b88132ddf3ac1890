"""Wrong states, caches and weights planted in real engines, each compared with a whole one: what `compare` says.

The problem: a ledger that finds a wrong cache is of use if the comparison, with its default settings, says "the cache"
and not "the kernel", never says PASS, and stays silent where requests share prefixes rightly. The idea: small engines
one after another in this process, with a capture as a user has it; the golden is the same requests without prefix
caching and without a fault. Each case is right when `accprobe compare` fails and its first origin is of the right kind:
a cache, for a loader's fault the weights, or the runner; a clean one when nothing is said of a cache.

    python scripts/state_pairs.py --out DIR [--only GLOB,...] [--no-replay]

Exit code 1 where a case is wrong. A line of JSON for each case stands in DIR/pairs.jsonl; cases that are there are not
run again. Not here: the ledger's own cases (state_cases.py), the faults (lab/state_faults.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from lab import state_faults as faults, state_lab as lab  # noqa: E402
from lab.state_lab import Ask, prompt  # noqa: E402

CACHE, WEIGHTS, RUNNER, CLEAN = "cache", "weights", "runner", ""


@dataclass(frozen=True)
class Pair:
    """One engine beside its golden. kind: what must be named; golden: asks and arguments of another engine, by name.
    plant, load: of state_faults.py; mode: of the ledger, "" for what a capture has by itself."""

    name: str
    what: str
    kind: str
    asks: Sequence[Ask]
    model: str = "qwen2"
    plant: Callable[[Any], Any] | None = None
    load: Callable[[Any], None] | None = None
    mode: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


HITS: dict[str, Any] = {"enable_prefix_caching": True}
FEW: dict[str, Any] = {"num_gpu_blocks_override": 7, "max_model_len": 192}
TWO = (Ask("a", prompt(40, 1), 10), Ask("b", prompt(50, 2), 10))
AB = (Ask("a", prompt(100, 1), 12), Ask("b", prompt(100, 5), 4, 4))
SAME = (Ask("a", prompt(100, 1), 4), Ask("b", [*prompt(100, 1)[:70], *prompt(30, 9)], 4, 6))
LATER = (Ask("a", prompt(100, 1), 2), Ask("c", prompt(100, 7), 12, 4), Ask("b", prompt(100, 1), 4, 8))
LONG = tuple(Ask(name, prompt(60, i), 30, i) for i, name in enumerate("abc"))
STATES = (Ask("a", prompt(66, 1), 6), Ask("b", prompt(45, 2), 6, 1))


def pairs(root: Path) -> list[Pair]:
    """All of them."""
    one, two = ((i, root / "models" / f"adapter{i}") for i in (1, 2))
    text = prompt(100, 1)

    def adapted(*of: Any, salts: Sequence[str] = ("", "")) -> tuple[Ask, Ask]:
        return Ask("a", text, 4, 0, of[0], salts[0]), Ask("b", [*text[:70], 9, 8, 7], 4, 6, of[1], salts[1])

    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    hit = partial(partial, faults.hit_of)
    given = partial(partial, faults.metadata)
    mamba: dict[str, Any] = {"model": "mamba2", "plain": {"block_size": None}}
    images: dict[str, Any] = {"model": "qwen2.5-vl", "plain": {"limit_mm_per_prompt": {"image": 1, "video": 0}}}

    def seen(*of: int) -> tuple[Ask, Ask]:
        return Ask("a", (), 4, 0, image=of[0]), Ask("b", (), 4, 6, image=of[1])

    chunks = {"max_num_batched_tokens": 64}

    def attention(name: str, what: str, plant: Any, asks: Sequence[Ask] = TWO, **more: Any) -> Pair:
        return Pair(name, what, CACHE, asks, plant=plant, **more)

    return [
        Pair("clean-hits", "prefix hits", CLEAN, SAME, args=HITS),
        Pair("clean-lora", "LoRA, prefix hits of one adapter", CLEAN, adapted(one, one), args=HITS, plain=lora),
        Pair("clean-adapters", "two adapters, no hits", CLEAN, adapted(one, two), args=HITS, plain=lora),
        Pair("clean-salt", "prefix hits under one salt", CLEAN, adapted(None, None, salts=("s", "s")), args=HITS),
        Pair("clean-preemption", "preemption and resume", CLEAN, LONG, args=HITS | FEW),
        Pair("clean-chunks", "Mamba2 in chunks", CLEAN, STATES, args=chunks, **mamba),
        Pair("clean-images", "prefix hits of one image", CLEAN, seen(1, 1), args=HITS, **images),
        attention("image-shared", "two images share a prefix", faults.no_images_in_keys, seen(1, 2), args=HITS,
                  **images),
        attention("hit-other", "a hit on another text's block", hit(columns=[("a", 0)]), AB, args=HITS),
        attention("hit-second", "the second block of a hit is another text's", hit(columns=[("a", 0), ("c", 1)]),
                  (SAME[0], Ask("c", prompt(100, 7), 12), SAME[1]), args=HITS),
        attention("hit-two-owners", "a hit on blocks of two other texts", hit(columns=[("a", 0), ("c", 1)]),
                  (AB[0], Ask("c", prompt(100, 7), 12), AB[1]), args=HITS),
        attention("hit-shifted", "a hit on the right text's next block", hit(columns=[("a", 1)]), SAME, args=HITS),
        attention("hit-unfilled", "a hit on a block whose rows were not computed", hit(columns=[("a", 0), ("a", 3)]),
                  (SAME[0], Ask("b", [*text, *prompt(30, 9)], 4, 1)), args=HITS),
        attention("hit-reused", "a hit on a block that another request has by now", hit(columns=[("a", 0)]), LATER,
                  args=HITS | {"num_gpu_blocks_override": 5, "max_model_len": 128}),
        attention("adapter-shared", "two adapters share a prefix", faults.no_adapter_in_keys, adapted(one, two),
                  args=HITS, plain=lora),
        attention("adapter-of-none", "a request without adapter reads an adapter's prefix", faults.no_adapter_in_keys,
                  adapted(one, None), args=HITS, plain=lora),
        attention("none-of-adapter", "an adapter reads a prefix of no adapter", faults.no_adapter_in_keys,
                  adapted(None, two), args=HITS, plain=lora),
        attention("salt-shared", "two salts share a prefix", faults.no_salt_in_keys,
                  adapted(None, None, salts=("s", "t")), args=HITS),
        attention("salt-of-none", "a salted prefix is read without a salt", faults.no_salt_in_keys,
                  adapted(None, None, salts=("s", "")), args=HITS),
        attention("freed", "a block freed while it is read", partial(faults.freed, at=4),
                  (Ask("a", prompt(70, 1), 12), Ask("c", prompt(100, 3), 4, 6))),
        attention("slot-stale", "the slot of the step before", partial(faults.stale_slot, at=5)),
        attention("slots-moved", "a prompt's rows one slot further on", partial(faults.slots_moved)),
        attention("slots-block", "a step's rows a block further on", partial(faults.slots_moved, by=32, at=4, last=4)),
        attention("table-off", "a block table off by one", given(change=faults.table_off_by_one)),
        attention("tables-exchanged", "two requests' block tables exchanged", given(change=faults.tables_exchanged)),
        attention("table-entry", "one entry of a table is another's", given(change=faults.entry_of_another, last=9)),
        attention("length-short", "a length of the step before", given(change=faults.length_short)),
        attention("length-other", "another request's length", given(change=faults.length_of_another)),
        attention("row-dropped", "a row that the kernel does not write", partial(faults.dropped_row, at=5),
                  mode="sample"),
        attention("bit-flipped", "one bit of a block", partial(faults.flipped_bit, at=5, layer=1), mode="full"),
        attention("state-other", "two requests' states exchanged", partial(faults.other_state, at=4), STATES, **mamba),
        attention("state-none", "a new request has a state", partial(faults.no_state, at=1), STATES, **mamba),
        attention("state-dropped", "a later chunk begins without a state",
                  given(change=faults.prompt_state_dropped, at=2), STATES, args=chunks, **mamba),
        attention("state-elsewhere", "a chunk's state is the next block's",
                  given(change=faults.prompt_state_elsewhere, at=2), STATES, args=chunks, **mamba),
        attention("conv-unwritten", "a chunk's convolution state is not written", partial(faults.kept_state, half=0),
                  STATES, mode="sample", args=chunks, **mamba),
        attention("ssm-unwritten", "a step's recurrent state is not written",
                  partial(faults.kept_state, half=1, at=4), STATES, mode="sample", **mamba),
        attention("states-swapped", "two requests' states exchanged in one layer",
                  partial(faults.swapped_states, at=4), STATES, mode="full", **mamba),
        Pair("load-layers", "two layers' weights exchanged", WEIGHTS, TWO,
             load=faults.loaded_wrong(faults.layers_exchanged)),
        Pair("load-gate-up", "gate and up exchanged", WEIGHTS, TWO,
             load=faults.loaded_wrong(faults.gate_and_up_exchanged)),
        Pair("load-rows", "a weight's rows moved", WEIGHTS, TWO, load=faults.loaded_wrong(faults.rows_moved)),
        Pair("tokens-stale", "a decode row gets the token before", RUNNER, TWO, plant=faults.stale_tokens),
        Pair("tokens-exchanged", "two decode rows' tokens exchanged", RUNNER, TWO, plant=faults.tokens_exchanged),
        Pair("logits-row", "logits of the row before the last", RUNNER, TWO, plant=faults.logits_of_row_before),
        Pair("images-exchanged", "two images' embeddings exchanged", RUNNER,
             (Ask("a", (), 4, 0, image=1), Ask("b", (), 4, 0, image=2)), plant=faults.images_exchanged, **images),
    ]  # fmt: skip


def models(root: Path) -> dict[str, Path]:
    import mode_models
    from tiny_model import MODELS, make

    config = MODELS["qwen2"].config | {"num_hidden_layers": 2}
    for i in (1, 2):
        mode_models.adapter(root / "models" / f"adapter{i}", config, seed=i)
    return {
        "qwen2": make("qwen2", root / "models" / "qwen2", num_hidden_layers=2),
        "qwen2.5-vl": make("qwen2.5-vl", root / "models" / "qwen2.5-vl"),
        "mamba2": mode_models.of_transformers("mamba2", root / "models" / "mamba2"),
    }


def serve(pair: Pair, model: Path, out: Path, *, whole: bool) -> None:
    """One engine, without a fault or with its own."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    args = pair.plain | ({} if whole else pair.args)
    if args.get("block_size", 0) is None:
        lab.ENGINE.pop("block_size", None)
    args = {k: v for k, v in args.items() if v is not None}
    load = DefaultModelLoader.load_weights

    def loaded(self: Any, built: Any, *more: Any, **named: Any) -> Any:
        result = load(self, built, *more, **named)
        if pair.load is not None and not whole:
            pair.load(built)
        return result

    DefaultModelLoader.load_weights = loaded
    undo: list[Callable[[], None]] = []

    def plant(llm: Any) -> Any:
        before = pair.plant(llm) if pair.plant is not None and not whole else None
        undo.append(getattr(llm, "_accprobe_undo", lambda: None))
        return before if callable(before) else None

    try:
        lab.run(model, out, pair.asks, plant, "" if whole else pair.mode, 1, None, {"VLLM_ACCPROBE": "1"}, **args)
    finally:
        DefaultModelLoader.load_weights = load
        lab.ENGINE["block_size"] = 32
        for one in undo:
            one()


def judge(pair: Pair, golden: Path, mine: Path, *more: str) -> dict[str, Any]:
    """What compare says: {"exit", "verdict", "named", "right", "said"}."""
    out = mine.parent / f"{mine.name}-compared{'-plain' if more else ''}"
    words = [sys.executable, "-m", "vllm_accprobe", "compare", str(golden), str(mine), "--out", str(out), *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = json.loads((out / "compare.json").read_text()) if (out / "compare.json").exists() else {}
    origins = found.get("origins") or []
    first = origins[0] if origins else {}
    named = "cache" if first.get("role") == "cache" else f"{first.get('module', '')}/{first.get('role', '')}"
    head = next((line for line in done.stdout.splitlines() if line.startswith(("FAIL", "PASS"))), "")
    weights = "weights, not the kernel" in head or str(first.get("role", "")).startswith("param.")
    cache = bool((found.get("states") or {}).get("mine", {}).get("findings"))
    right = {
        CACHE: done.returncode == 1 and named == "cache",
        WEIGHTS: done.returncode == 1 and weights and not cache,
        RUNNER: done.returncode == 1 and first.get("class") == "runner",
        CLEAN: not cache and done.returncode == 0,
    }[pair.kind]
    error = done.stderr[-300:] if done.returncode > 1 else ""
    result = {"exit": done.returncode, "verdict": found.get("verdict"), "named": named, "right": right}
    return result | {"said": head[:400], "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*")
    parser.add_argument("--no-replay", action="store_true", help="compare without a replay as well")
    asked = parser.parse_args()
    lab.prepare()
    asked.out.mkdir(parents=True, exist_ok=True)
    record = asked.out / "pairs.jsonl"
    known = {json.loads(line)["name"] for line in record.read_text().splitlines()} if record.exists() else set()
    made = models(asked.out)
    wrong = 0
    for pair in pairs(asked.out):
        if pair.name in known or not any(fnmatchcase(pair.name, glob) for glob in asked.only.split(",")):
            continue
        begin = time.monotonic()
        line: dict[str, Any] = {"name": pair.name, "what": pair.what, "kind": pair.kind, "right": False}
        try:
            key = f"golden-{pair.model}-{abs(hash_of(pair)):x}"
            golden, mine = asked.out / key, asked.out / pair.name
            if not (golden / "done").exists():
                serve(pair, made[pair.model], golden, whole=True)
                (golden / "done").touch()
            serve(pair, made[pair.model], mine, whole=False)
            line |= judge(pair, golden, mine)
            if asked.no_replay:
                line["plain"] = judge(pair, golden, mine, "--no-replay")
            shutil.rmtree(mine)
        except Exception as error:
            line |= {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        wrong += not line["right"]
        line["seconds"] = round(time.monotonic() - begin)
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        said = line.get("said") or line
        print(f"{'ok ' if line['right'] else 'BAD'} {pair.name} ({line['seconds']} s): {said}", flush=True)
    return 1 if wrong else 0


def hash_of(pair: Pair) -> int:
    """The same for engines whose golden is the same."""
    import zlib

    asks = [(a.name, list(a.ids), a.max_tokens, a.after, a.lora and a.lora[0], a.salt, a.image) for a in pair.asks]
    return zlib.crc32(json.dumps([asks, sorted(pair.plain)], default=str).encode())


if __name__ == "__main__":
    raise SystemExit(main())
