"""How large a dump will be, from a model's config.json, before anything runs.

The problem: a capture that fills the disk stops, and one that is too small has to be made again. The idea: what an
eager capture stores for each token is a sum over the tensors of a layer, each stored once (an output that is the next
module's input is one tensor); a tensor is there when one of the modules that have it is chosen. model_tensors.py lists
them; tests/e2e/test_dump_size.py compares the sums with real dumps, byte for byte. A decoder of another type is counted
by what its config.json has in common with those, and that is said.
Not here: vision towers, parameters, what compression of the file system saves; the command (cli/size.py), which modules
a word chooses (capture/taps/selection.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.run.model_tensors import CLASSES, decoder

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Chooses = Callable[[str, str], bool]
"""(path of a module, its class) → whether it is captured."""
MEASURED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""model_type of the architectures that were held against captures of vLLM 0.32 (Mistral is Llama there, and
DeepSeek-V3 is V2)."""


class SizeError(ValueError):
    """The model is not known, or not so; the message is one line."""


def per_token(
    c: Mapping[str, Any], tp: int = 1, size: int = 2, chooses: Chooses | None = None, parts: Sequence[str] = ()
) -> tuple[int, int]:
    """(bytes that all ranks together store for a token, bytes more for a row of logits with what it is made of). size:
    of a number; chooses: None for every module; parts: as ProbeConfig's. Outside the layers lie what the last norm and
    its residual give, the id and the position. Raises KeyError for a config that lacks what a decoder needs."""
    outputs, inputs = (not parts or part in parts for part in ("output", "input"))

    def chosen(*paths: str) -> bool:
        return any(chooses is None or chooses(p, CLASSES.get(p.rpartition(".")[2], "")) for p in paths)

    kept = [t for t in decoder(c, tp) if (outputs and chosen(*t.makers)) or (inputs and chosen(*t.takers))]
    total = sum(t.numbers * (t.width or size) * (1 if t.cut else tp) for t in kept)
    if inputs:
        total += tp * 4 * chosen("<root>", "model", "model.embed_tokens")
        total += tp * 8 * chosen("<root>", "model", "model.layers.0", *_rotary(c))
    return total, size * (
        outputs * c["vocab_size"] * _heads_of_logits(chosen("lm_head"), chosen("logits_processor"), tp)
        + inputs * c["hidden_size"] * tp * chosen("lm_head", "logits_processor")
    )


def _heads_of_logits(head: bool, processor: bool, tp: int) -> int:
    """How often a row of logits is stored: on one rank as one tensor; else the head's pieces once, and what is gathered
    of them on every rank."""
    return int(head or processor) if tp == 1 else head + tp * processor


def _rotary(c: Mapping[str, Any]) -> Iterator[str]:
    for k in range(c["num_hidden_layers"]):
        yield from (f"model.layers.{k}", f"model.layers.{k}.self_attn", f"model.layers.{k}.self_attn.rotary_emb")


def read_config(path: Path) -> tuple[dict[str, Any], int]:
    """(a config.json's text model, bytes of a number). path: the file, or the model's folder. Raises SizeError."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        dtype = next((c[name] for c in (text, config) for name in ("torch_dtype", "dtype") if c.get(name)), "bfloat16")
        return text, BYTES[str(dtype)]
    except OSError as why:
        what = why.strerror or str(why)
    except KeyError as why:
        what = f"its dtype is {why}"
    except (ValueError, AttributeError, TypeError, RecursionError):
        what = "not the JSON object it should be"
    raise SizeError(f"{path}: {what}: the config.json of a model is needed")
