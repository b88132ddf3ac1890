"""The ways in which the laboratory serves its requests, and the requests.

The problem: a fault is easy to see against a golden that did everything in the same order, and a tool that needs that
is of no use. The idea: a *way* is how an engine is built and how requests reach it; golden and mine are each a model
served in some way, so any two of them make a pair. Runs are shared: a golden serves all the cases that name it.
Not here: what is planted (cases.py), how runs are made and compared (judging.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.captures import VISION
from support.engine import Ask
from support.prompts import prompt, prompts, repetitive
from train_tiny import CONFIGS as TRAINED, library_prompt

TEXT = [Ask(ids, 8) for ids in prompts(40, 23, 57, 31, 70, 260)]
"""481 prompt tokens; the long one is chunked wherever 96 tokens are a step's limit, and decodes alone in the end."""
LIBRARY = [Ask(library_prompt(len(ask.ids), i), ask.max_tokens) for i, ask in enumerate(TEXT)]
"""For trained models: what they have learnt to go on with, as long as `TEXT`."""
TRANSFORMERS = "transformers"
"""A way that needs no engine: the model run by the transformers library, see bench.py."""


@dataclass(frozen=True)
class Way:
    """host: v1, v2, tp2 (see support/captures.py) or transformers. asks: text, picture models take VISION.
    env: VLLM_ACCPROBE_* of the run."""

    host: str = "v1"
    how: str = "together"
    asks: Sequence[Ask] = field(default_factory=lambda: TEXT)
    engine: Mapping[str, Any] = field(default_factory=dict)

    def engine_of(self, model: str) -> Mapping[str, Any]:
        """``engine``, with another MLA backend for float32: the one that vLLM takes with AMX has bfloat16 only."""
        if model.endswith("deepseek-v2") and self.engine.get("dtype") == "float32":
            return {**self.engine, "attention_backend": "CPU_MLA"}
        return self.engine

    def requests(self, model: str) -> Sequence[Ask]:
        if self.asks is not TEXT:
            return self.asks
        return VISION if model == "qwen2.5-vl" else LIBRARY if model in TRAINED else TEXT


_TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_LONG = [replace(a, max_tokens=40) for a in TEXT[:5]]
_GUESSABLE = [Ask(repetitive(60, 9, i), 24) for i in range(3)]
_SHARED = [Ask([*prompt(64, 9), *prompt(10, i)], 8) for i in range(3)]
_SWAPPED = [VISION[2], VISION[0], VISION[1]]

WAYS: dict[str, Way] = {
    "serial": Way(how="serial"), "serial-again": Way(how="serial"), "mixed": Way(engine={"max_num_batched_tokens": 96}),
    "mixed-again": Way(engine={"max_num_batched_tokens": 96}), "chunk32": Way(engine={"max_num_batched_tokens": 32}),
    "staggered": Way(how="staggered", engine={"max_num_batched_tokens": 64}),
    "float32": Way(how="serial", engine={"dtype": "float32"}), "tp2": Way("tp2", engine=_TP2),
    "tp2-mixed": Way("tp2", engine=_TP2 | {"max_num_batched_tokens": 96}), "v2": Way("v2"),
    "block64": Way(engine={"block_size": 64}), "alone-shared": Way(how="serial", asks=_SHARED),
    "prefix": Way(how="serial", asks=_SHARED, engine={"enable_prefix_caching": True, "block_size": 32}),
    "alone-guessable": Way(how="serial", asks=_GUESSABLE),
    "ngram": Way(asks=_GUESSABLE, engine={"speculative_config": _NGRAM}), "alone-long": Way(how="serial", asks=_LONG),
    "preempted": Way(asks=_LONG, engine={"num_gpu_blocks_override": 9, "block_size": 32, "max_model_len": 256}),
    "pictures-swapped": Way(asks=_SWAPPED), TRANSFORMERS: Way(TRANSFORMERS, how="serial"),
}  # fmt: skip
EASY = ("serial", "mixed")
"""Goldens against which everything upstream of a fault is bit-identical where, as in vLLM's CPU build with one thread,
a row's numbers do not depend on its batch. They do on most other machines."""


def _pairs(model: str, ways: str) -> list[tuple[str, str, str]]:
    """ways: ``golden>mine``, blanks between."""
    return [(model, *way.split(">")) for way in ways.split()]  # type: ignore[misc]


CLEAN = [
    *_pairs("qwen2", "serial>mixed serial>chunk32 serial>staggered serial>serial-again mixed>mixed-again "
            "serial>block64 serial>tp2 tp2>mixed float32>mixed float32>tp2-mixed serial>v2 alone-shared>prefix "
            "alone-guessable>ngram alone-long>preempted transformers>mixed"),
    *_pairs("llama", "float32>mixed transformers>mixed tp2>mixed"),
    *_pairs("qwen2-moe", "serial>mixed float32>mixed tp2>mixed transformers>mixed"),
    *_pairs("mixtral", "serial>mixed float32>mixed tp2>mixed transformers>mixed"),
    *_pairs("deepseek-v2", "serial>mixed float32>mixed tp2>mixed tp2>tp2-mixed"),
    *_pairs("qwen2.5-vl", "serial>mixed float32>mixed tp2>mixed serial>pictures-swapped"),
]  # fmt: skip
"""(model, golden, mine) that differ by their ways alone. All of these were tuned on."""

_DENSE = ("trained-qwen2", "trained-llama", "trained-gemma3")
MORE_CLEAN = [
    *_pairs("qwen2", "v2>mixed tp2>v2 float32>v2 float32>chunk32"),
    *_pairs("llama", "serial>mixed serial>v2 v2>mixed"),
    *(pair for model in TRAINED for pair in _pairs(
        model, "serial>mixed float32>mixed tp2>mixed serial>tp2 float32>tp2 serial>chunk32")),
    *(pair for model in _DENSE for pair in _pairs(model, "v2>serial serial>v2")),
    *(pair for model in ("trained-qwen2", "trained-llama") for pair in _pairs(model, "transformers>mixed")),
]  # fmt: skip
ACROSS: list[tuple[str, str, str]] = [
    (model, golden, "mixed")
    for model in ("qwen2", "llama", "qwen2-moe", "mixtral", "deepseek-v2", "qwen2.5-vl", *TRAINED)
    for golden in ("serial", "float32")
]
"""Pairs whose runs were made by two kernels, as on two machines: (model, golden of the one, mine of the other)."""
