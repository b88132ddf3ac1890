"""Options of other tools' commands that stand for something else here, or for nothing: one line each.

The problem: a script of ait or msit is typed again with our command's name, and "No such option" helps nobody. The
idea: what we have under another name, or always do, is said where the word is met; several words behind one option,
as argparse takes them (``--type layer tensor``), are put together before the rest is read.
Not here: options that are taken under both names (each command's own).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from vllm_accprobe.cli.spelling.refusal import CommandError

_LEVELS = (
    "every level is compared at once and compare.csv has a row for each tensor; choose with --taps, "
    "for example --taps '*.layers.*' or --taps 'lm_head,logits_processor'"
)
_DTYPE = "dtypes are read from the files, and the limits follow the coarser one; --standard NAME has other limits"
_SOC = "no chip is asked for: what a machine may honestly differ by is measured, see --floor and `accprobe calibrate`"
_ALGORITHMS = "no code is run from a file: a standard of your own is a package, see docs/extending.md, A standard"
TOLD: dict[str, dict[str, str]] = {
    "compare": {
        "--cmp-level": _LEVELS,
        "-cl": _LEVELS,
        "--dtype": _DTYPE,
        "--soc-version": _SOC,
        "--soc_version": _SOC,
        "--soc": _SOC,
        "--custom-algorithms": _ALGORITHMS,
        "-alg": _ALGORITHMS,
        "--weight": "weights are compared with the rest, by fingerprints where no values were stored",
        "-w": "weights are compared with the rest, by fingerprints where no values were stored",
        "--stats": "statistics are compared by themselves where a side has nothing else",
        "-st": "statistics are compared by themselves where a side has nothing else",
    },
    "run": {
        "-seed": "the probe changes no seed; with vLLM set one by --seed of `vllm serve`",
        "--set-random-seed": "the probe changes no seed; with vLLM set one by --seed of `vllm serve`",
        "--enable-symlink": "equal tensors are stored once by our own capture; ATB writes its files itself",
        "-symlink": "equal tensors are stored once by our own capture; ATB writes its files itself",
    },
}
"""command → the other tool's option → what to do instead."""

SEVERAL: dict[str, dict[str, frozenset[str]]] = {
    "run": {
        "--type": frozenset(("model", "layer", "op", "kernel", "tensor", "cpu_profiling", "onnx", "stats")),
        "--atb-type": frozenset(("model", "layer", "op", "kernel", "tensor", "cpu_profiling", "onnx", "stats")),
    },
    "labels": {
        "--type": frozenset(("model", "layer", "op", "kernel", "tensor", "cpu_profiling", "onnx", "stats")),
    },
    "opcheck": dict.fromkeys(("--metric", "--precision-metric", "-metric"), frozenset(("abs", "cos_sim", "kl"))),
}
"""command → option that takes several words → these words."""
_IDS = ("-ids", "--save-operation-ids", "--atb-ids")
_LIST = re.compile(r"\d+(_\d+)*(,\d+(_\d+)*)*,?")
LOG_LEVELS = ("debug", "info", "warning", "warn", "error", "fatal", "critical")


def spelled(command: str, words: Sequence[str], values: Collection[str] = ()) -> list[str]:
    """``words`` as our options have them. values: our options that take one. Raises CommandError where one has no
    counterpart. What another command takes (behind ``--``, or behind the first word of one that is started) stays."""
    told, several = TOLD.get(command, {}), SEVERAL.get(command, {})
    out: list[str] = []
    own = list(words)
    while own:
        word = own.pop(0)
        name, equals, _ = word.partition("=")
        if word == "--" or (command == "run" and not word.startswith("-")):
            return [*out, word, *own]
        if name in told:
            raise CommandError(f"{name}: {told[name]}")
        out.append(word)
        if equals or not own:
            continue
        if name in several:
            listed = []
            while own and own[0] in several[name]:
                listed.append(own.pop(0))
            out += [",".join(listed)] if listed else [own.pop(0)]
        elif command == "run" and word in _IDS:
            listed = [own.pop(0)]
            while own and listed[-1].endswith(",") and _LIST.fullmatch(own[0]):
                listed.append(own.pop(0))
            out.append("".join(listed))
        elif name in values:
            out.append(own.pop(0))
    return out


def quiet(level: str | None) -> bool:
    """Whether a log level leaves out what is only told. Raises CommandError for a level that is none."""
    if level is not None and level.lower() not in LOG_LEVELS:
        raise CommandError(f"--log-level {level}: known are {', '.join(LOG_LEVELS)}")
    return level is not None and LOG_LEVELS.index(level.lower()) > LOG_LEVELS.index("info")
