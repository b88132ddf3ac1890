"""In which dtype golden's own command makes a floor: honest rounding, measured on the machine that is trusted.

The problem: where batching changes nothing, any other kernel differs "beyond batching"; the size of honest rounding is
not known beforehand. The idea: golden's model once more in another dtype rounds at the same places by another amount,
and that gives golden's own rounding. Which dtype: mine's, if it is another than golden's, because then its rounding is
what honest servers differ by; else one that is finer: float16 for bfloat16 (the same memory, eight times as fine),
float32 for float16. For float32 there is none that is finer: bfloat16 gives a limit that is far too wide for float32's
own rounding, and still narrow for most faults; a floor of the user's own is better there.
Not here: what the floor says (measure/floor.py), starting it (sides.py).
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from vllm_accprobe.run.server_command import option_of

DTYPES = ("bfloat16", "float16", "float32")
_SHORT = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def of_command(command: str) -> str | None:
    """The dtype that a command's words or its model's config.json name; None where nobody knows."""
    words = _words(command)
    said = next((word for word in (option_of(words, "--dtype"),) if word and word != "auto"), None)
    if said is None and (model := _model(words)) is not None:
        said = _configured(model)
    said = _SHORT.get(said or "", said)
    return said if said in DTYPES else None


def candidates(golden: str, mine: str | None) -> list[str]:
    """The dtypes to try, the best first; a server may refuse one. mine: its command, None where it is none."""
    ours = of_command(golden) or "bfloat16"
    theirs = None if mine is None else of_command(mine)
    finer = {"bfloat16": ["float16", "float32"], "float16": ["float32", "bfloat16"], "float32": ["bfloat16", "float16"]}
    first = [theirs] if theirs is not None and theirs != ours else []
    return list(dict.fromkeys([*first, *finer[ours]]))


def command(golden: str, dtype: str) -> str:
    """Golden's command with this dtype."""
    words, kept = _words(golden), []
    skip = False
    for word in words:
        if skip or word == "--dtype" or word.startswith("--dtype="):
            skip = word == "--dtype" and not skip
            continue
        kept.append(word)
    return shlex.join([*kept, f"--dtype={dtype}"])


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _model(words: list[str]) -> str | None:
    if "serve" in words[:-1] and not (after := words[words.index("serve") + 1]).startswith("-"):
        return after
    return option_of(words, "--model")


def _configured(model: str) -> str | None:
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
        return str(config.get("dtype") or config.get("torch_dtype") or "") or None
    except (OSError, ValueError, AttributeError):
        return None
