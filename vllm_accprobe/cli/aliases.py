"""Names that are not today's: our own older ones, and other tools', which all go on working and are in no --help.

The problem: scripts type what they typed a year ago, or what msprobe, ait, msit and torch_xray have; "No such option"
helps nobody, and a list of every spelling in --help helps nobody either. The idea: names are data. An older name works
and says in one line on stderr what it is today. `of_today` rewrites a command's options, puts together what other tools
take as several words (``--type layer tensor``, ``-d 0 1``), gives each list once, and says of an option that has no
counterpart what does the same here. Not here: options of other tools that mean something of their own (hidden fields of
the commands' groups; opcheck/compat)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.refusals import CommandError

MOVED: dict[str, tuple[str, str]] = {
    "summary": ("inspect", "inspect DUMP"),
    "show": ("inspect", "inspect DUMP TAP"),
    "formats": ("inspect", "inspect --formats, or inspect FILE"),
    "size": ("inspect", "inspect MODEL_DIR --size"),
    "repair": ("inspect", "inspect DUMP --repair"),
    "labels": ("compare", "compare DUMP"),
    "opdiff": ("compare", "compare GOLDEN.csv MINE.csv"),
    "calibrate": ("compare", "compare GOLDEN MINE --calibrate OUT"),
}
"""Older command → (the command that does it, what to type)."""
_CHECK = "accprobe opcheck, with the same options"
OTHERS: dict[tuple[str, ...], str] = {
    ("acc_check",): _CHECK,
    ("multi_acc_check",): _CHECK,
    ("run_ut",): _CHECK,
    ("multi_run_ut",): _CHECK,
    ("api_precision_compare",): "accprobe compare -npu FILE -gpu FILE",
    ("jprof",): "accprobe gentest DUMP, with the same options",
    ("summary_diff_check",): "accprobe compare GPU.csv XPU.csv RESULT.csv: golden first",
    ("llm", "dump"): "accprobe run --exec COMMAND, with the same options",
    ("llm", "compare"): "accprobe compare --golden-path GOLDEN --my-path MINE",
    ("llm", "opcheck"): "accprobe opcheck -i DIR -c CSV -o OUT",
    ("llm", "errcheck"): "accprobe errcheck --exec COMMAND, with the same options",
    ("debug", "compare"): "accprobe compare --exec COMMAND",
}
"""The first words of another tool's command → what is typed here."""


def check_words(words: Sequence[str]) -> None:
    """A note that names today's command where ``words`` begin with an older one. Raises CommandError where they begin
    with another tool's (msprobe's ``-f pytorch`` before it)."""
    own = tuple(words[2:] if words[:1] in (["-f"], ["--framework"]) else words)
    for names, ours in OTHERS.items():
        if own[: len(names)] == names:
            raise CommandError(f"{' '.join(names)} is here: {ours} (docs/migration.md)")
    if own and own[0] in MOVED:
        note(own[0], MOVED[own[0]][1])


def note(old: str, new: str) -> None:
    """On stderr: what stdout holds may be a program's."""
    print(f"note: `accprobe {old}` is now `accprobe {new}`", file=sys.stderr)


OLDER: dict[str, tuple[str, ...]] = {
    "--steps": ("--step",),
    "--ranks": ("--rank",),
    "--requests": ("--request",),
    "--roles": ("--role",),
    "--calls": ("--call",),
    "--positions": ("--position",),
    "--tasks": ("--task",),
    "--metrics": ("--metric",),
    "--filters": ("--filter",),
    "--limit": ("--most",),
    "--tolerance": ("--limit",),
    "--teacher-force": ("--along",),
    "--localize": ("--dig",),
    "--localize-gb": ("--dig-gb",),
}
"""Today's name → older ones, taken by commands that have no option of that name themselves."""
NOTED = ("--along", "--dig", "--dig-gb")
"""Those that say what they are today. The others are today's without the s, and print nothing."""
_AIT_WORDS = {"--operation-name": "--ops", "-opname": "--ops", "--operation-ids": "--ids", "-ids": "--ids"}
_AIT_METRIC = {"--precision-metric": "--metric", "-metric": "--metric"}
SAME: dict[str, dict[str, str]] = {
    "compare": {
        "--output": "--out", "--out_path": "--out", "-mf": "--op-mapping-file", "-gp": "--golden-path",
        "-mp": "--my-path", "--gpu_csv_path": "-gpu", "--npu_csv_path": "-npu",
    },
    "opcheck": {
        "--output": "--out", "--out_path": "--out", "--atb-rerun": "--rerun", "-rerun": "--rerun", "-i": "--input",
        "-c": "--csv-path", "-device": "--device-id", "--api_info_file": "-api_info", "--config_path": "--config",
        "-config": "--config", "--filter_api": "-f", "--num_splits": "--jobs", "-n": "--jobs",
        "--result_csv_path": "-csv_path", "--save_error_data": "-save_error_data",
        **_AIT_WORDS, **_AIT_METRIC,
    },
    "run": {
        "--output": "--dir", "-o": "--dir", "--save-operation-ids": "--atb-ids", "-ids": "--atb-ids",
        "--execute-range": "--atb-range", "-er": "--atb-range", "--operation-name": "--atb-op", "-opname": "--atb-op",
        "--save-time": "--atb-time", "-time": "--atb-time", "--save-tensor-part": "--atb-part", "-stp": "--atb-part",
        "-child": "--save-operation-child", "--save-tiling": "--atb-tiling", "-tiling": "--atb-tiling",
        "--only-save-desc": "--atb-describe", "-sd": "--atb-describe", "--type": "--atb-type",
        "--device-id": "--atb-device", "-device": "--atb-device",
    },
    "errcheck": {"--output": "--dir", "-o": "--dir", "--type": "--kinds"},
}  # fmt: skip
"""command → another tool's name → ours, for an option of the same meaning."""

_LEVELS = (
    "every level is compared at once and compare.csv has a row for each tensor; choose with --taps, "
    "for example --taps '*.layers.*' or --taps 'lm_head,logits_processor'"
)
_DTYPE = "dtypes are read from the files, and the limits follow the coarser one; --standard NAME has other limits"
_SOC = "no chip is named: what rounding alone may differ by is measured, see --floor and --calibrate"
_ALGORITHMS = "no code is run from a file: a standard of your own is a package, see docs/development.md, A standard"
_PARAMETERS = "weights are compared with the rest, by fingerprints where no values were stored"
_STATISTICS = "statistics are compared by themselves where a side has nothing else"
_NO_SEED = "the probe changes no seed; with vLLM set one by --seed of `vllm serve`"
_NO_LINKS = "equal tensors are stored once by our own capture; ATB writes its files itself"
INSTEAD: dict[str, dict[str, str]] = {
    "compare": {
        "--cmp-level": _LEVELS, "-cl": _LEVELS, "--dtype": _DTYPE, "--soc-version": _SOC, "--soc_version": _SOC,
        "--soc": _SOC, "--custom-algorithms": _ALGORITHMS, "-alg": _ALGORITHMS, "--weight": _PARAMETERS,
        "-w": _PARAMETERS, "--stats": _STATISTICS, "-st": _STATISTICS,
    },
    "run": {"-seed": _NO_SEED, "--set-random-seed": _NO_SEED, "--enable-symlink": _NO_LINKS, "-symlink": _NO_LINKS},
}  # fmt: skip
"""command → another tool's option that has no counterpart → what to do instead."""

_ATB_TYPES = frozenset(("model", "layer", "op", "kernel", "tensor", "cpu_profiling", "onnx", "stats"))
SEVERAL: dict[str, dict[str, frozenset[str]]] = {
    "run": {"--type": _ATB_TYPES, "--atb-type": _ATB_TYPES},
    "compare": {"--type": _ATB_TYPES},
    "opcheck": dict.fromkeys(("--metric", "--precision-metric", "-metric"), frozenset(("abs", "cos_sim", "kl"))),
}
"""command → option that takes several words → these words."""
LISTS = ("GLOBS", "RANGES", "IDS", "SIZES", "TYPES", "SETTINGS", "WORDS", "DTYPES", "PARTS", "KINDS", "DEVICES", "HOW")
"""Metavars of lists: with commas, repeated, or both. Paths, commands, NAME=VALUE and shapes may hold commas of their
own, and are repeated only."""
LOG_LEVELS = ("debug", "info", "warning", "warn", "error", "fatal", "critical")
_FORMATS = ("terminal", "lines", "text")
_IDS = ("-ids", "--save-operation-ids", "--atb-ids")
_ID_LIST = re.compile(r"\d+(_\d+)*(,\d+(_\d+)*)*,?")
_DEVICE = re.compile(r"\d{1,4}|(?:cpu|cuda|npu|xpu|mps)(?::\d{1,4})?", re.ASCII)


def of_today(command: str, words: Sequence[str], params: Iterable[Any], interspersed: bool = True) -> list[str]:
    """``words`` behind ``command`` as it has its options. params: the command's, as click has them; interspersed: False
    where the first word that is no option, and all behind it, belongs to another command. What is behind ``--`` stays.
    Raises CommandError."""
    command = MOVED.get(command, (command,))[0]
    options = {name: p for p in params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    older = {old: new for new, all_old in OLDER.items() if new in options for old in all_old if old not in options}
    names = {old: new for old, new in SAME.get(command, {}).items() if new in options and old not in options} | older
    instead, several = INSTEAD.get(command, {}), SEVERAL.get(command, {})
    out: list[str] = []
    lists: dict[str, int] = {}
    own = list(words)
    while own:
        word = own.pop(0)
        if word == "--" or (not interspersed and not word.startswith("-")):
            return [*out, word, *own]
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name in instead:
            raise CommandError(f"{name}: {instead[name]}")
        if command == "opcheck" and name == "-j" and not (own and own[0].isdecimal()):
            name = "--jit_compile"
        if name == "--format" and name not in options and "--json" in options:
            kind = value if equals else (own.pop(0) if own else "")
            if kind not in ("json", *_FORMATS):
                raise CommandError(f"--format {kind}: lines for people, or json, which --json says, too")
            out += ["--json"] if kind == "json" else []
            continue
        if name in older and name in NOTED:
            print(f"note: {name} is now {older[name]}", file=sys.stderr)
        theirs, name = name, names.get(name, name)
        option = options.get(name)
        if option is None or option.is_flag or not (equals or own):
            out.append(name + equals + value)
            continue
        value = value if equals else _value(theirs, own, several.get(theirs), command)
        if option.metavar not in LISTS:
            out += [f"{name}={value}"] if equals else [name, value]
        elif option.multiple:
            for item in [item for part in value.split(",") if (item := part.strip())] or [value]:
                out += [name, item]
        elif (at := lists.get(option.name)) is not None:
            out[at] = f"{out[at]},{value}".strip(",")
        else:
            out += [name, value]
            lists[option.name] = len(out) - 1
    return out


def _value(name: str, own: list[str], listed: frozenset[str] | None, command: str) -> str:
    """Takes the value of option ``name`` from ``own``: one word, or as many as other tools put there."""
    taken = [own.pop(0)]
    if listed is not None:
        while taken[0] in listed and own and own[0] in listed:
            taken.append(own.pop(0))
        return ",".join(taken)
    if command == "opcheck" and name in ("-d", "--device"):
        while own and _DEVICE.fullmatch(taken[-1]) and _is_device(own[0]):
            taken.append(own.pop(0))
        return ",".join(taken)
    while command == "run" and name in _IDS and own and taken[-1].endswith(",") and _ID_LIST.fullmatch(own[0]):
        taken.append(own.pop(0))
    return "".join(taken)


def _is_device(word: str) -> bool:
    """``0``, or ``npu:0`` where no file is called so."""
    return bool(_DEVICE.fullmatch(word)) and (word.isdecimal() or not Path(word).exists())


def is_quiet(level: str | None) -> bool:
    """Whether a log level leaves out what only informs. Raises CommandError for a level that is none."""
    if level is not None and level.lower() not in LOG_LEVELS:
        raise CommandError(f"--log-level {level}: known are {', '.join(LOG_LEVELS)}")
    return level is not None and LOG_LEVELS.index(level.lower()) > LOG_LEVELS.index("info")
