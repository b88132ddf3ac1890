"""What tensors and files are called in an export, as it is written and as it is read again.

The problem: a container has one text for a tensor, ours have six parts; who writes that text and who takes it apart
must agree. The idea: for each container the two stand side by side: torch_xray's ``path.Class.n.forward_output.i`` in
HDF5, ``step/tap/role#call`` in npz and safetensors, ``globalrank-<r>_localrank-<l>`` for one rank's file.
Not here: what the names cannot say (notes.py), the containers (containers.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ROOT_TAP, Record

RANK_FILE = re.compile(r"globalrank-(\d{1,9})_localrank-\d{1,9}", re.ASCII)
H5_FILE = re.compile(r"globalrank-(\d{1,9})(?:_localrank-\d+)?.*\.(?:h5|hdf5)", re.ASCII)
"""A rank's file of torch_xray, in any of its releases."""
_KEY = re.compile(
    r"(?:rank(\d{1,9})/)?(\d{1,9}|param)/([^/]+)/((?:input|output|inplace|param|grad|value)(?:\.[^/#]+)?)(?:#(\d{1,9}))?(?:~\d+)?",
    re.ASCII,
)
_NUMBERED = re.compile(r"\d{1,6}(?:\.\d{1,6})*", re.ASCII)
_PART = re.compile(r"(?:^|\.)(forward|backward)_(input|output|params?|inplace|grad(?:_(?:in|out)put)?|value)s?\.(.+)$")
_CALL = re.compile(r"(.*)\.call(\d{1,9})$", re.ASCII)


def rank_file(rank: int, local: int, ending: str) -> str:
    """One rank's file, where there are several."""
    return f"globalrank-{rank}_localrank-{local}.{ending}"


def unused(name: str, taken: set[str]) -> str:
    """``name``, or with ``~2``, ``~3`` behind it where that is among ``taken``, which it then is."""
    unique, n = name, 2
    while unique in taken:
        unique, n = f"{name}~{n}", n + 1
    taken.add(unique)
    return unique


def _plain(name: str) -> str:
    """A slash would make a group, a NUL ends a name."""
    return name.replace("/", "_").replace("\0", "_")


# --- npz and safetensors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyPlace:
    """Where a key says that a tensor belongs. rank: None where it does not say."""

    rank: int | None
    step: int | None
    tap: str
    role: str
    call: int


def keys(records: Sequence[Record]) -> list[str]:
    """A key for each record, no two alike."""
    several = len({r.rank for r in records}) > 1
    taken: set[str] = set()
    found = []
    for r in records:
        step = "param" if r.step is None else str(r.step)
        parts = [*([f"rank{r.rank}"] if several else []), step, _plain(r.tap), _plain(r.role)]
        name = "/".join(part.replace("..", "__") for part in parts) + (f"#{r.call}" if r.call else "")
        found.append(unused(name, taken))
    return found


def key_place(key: str) -> KeyPlace | None:
    """None for a key that is none of ours."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    rank, step, tap, role, call = match.groups()
    return KeyPlace(int(rank) if rank else None, None if step == "param" else int(step), tap, role, int(call or 0))


# --- HDF5 as torch_xray lays it out ----------------------------------------------------------------------------------


def datasets(dump: Dump, records: Sequence[Record]) -> list[tuple[str, str]]:
    """(group, dataset) of each record of one rank; these are in the order of execution.

    n numbers the modules of one class under one parent. A tap's later calls in a step have ``.call<c>`` after n."""
    first = min((r.step for r in records if r.step is not None), default=0)
    ordinals = _class_ordinals(dump, records)
    numbers: dict[tuple[int, str, int, str], int] = defaultdict(int)
    for r in records:  # what has a name of its own gets the numbers behind those that are taken
        kind, _, rest = r.role.partition(".")
        if r.step is not None and _NUMBERED.fullmatch(rest):
            key = (r.step, r.tap, r.call, kind)
            numbers[key] = max(numbers[key], int(rest.partition(".")[0]) + 1)
    taken: dict[str, set[str]] = defaultdict(set)
    result = []
    for r in records:
        kind, _, rest = r.role.partition(".")
        module = f"{'' if r.tap == ROOT_TAP else _plain(r.tap) + '.'}{_plain(r.cls) or 'Module'}.{ordinals[r.tap]}"
        if r.call:
            module += f".call{r.call}"
        if r.step is None:
            leaf = f"forward_params.{_plain(rest)}"
        else:
            key = (r.step, r.tap, r.call, kind)
            if not _NUMBERED.fullmatch(rest):
                rest, numbers[key] = str(numbers[key]), numbers[key] + 1
            leaf = f"forward_{_plain(kind)}.{rest}"
        group = str(first if r.step is None else r.step)
        result.append((group, unused(f"{module}.{leaf}", taken[group])))
    return result


def _class_ordinals(dump: Dump, records: Sequence[Record]) -> dict[str, int]:
    """tap → its number among the taps of the same class and parent, in the order of the module tree."""
    order = [(m.tap, m.cls) for rank in dump.ranks for m in dump.modules.get(rank, ())]
    order += [(r.tap, r.cls) for r in records]
    result: dict[str, int] = {}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for tap, cls in order:
        if tap not in result:
            key = (tap.rpartition(".")[0], cls)
            result[tap] = seen[key]
            seen[key] += 1
    return result


def dataset_place(name: str) -> tuple[str, str, str, int | None]:
    """(tap, class, role, call) of a dataset's name. A name of another kind is its own tap, with one output."""
    match = _PART.search(name)
    if match is None:
        return name, "", "output.0", None
    module, kind = name[: match.start()], match[2]
    role = {"params": "param", "param": "param", "grad_input": "input", "grad_output": "output"}.get(kind, kind)
    call: int | None = None
    if called := _CALL.fullmatch(module):
        module, call = called[1], int(called[2])
    parts = module.split(".") if module else []
    cls = ""
    if len(parts) > 1 and parts[-1].isdecimal() and not parts[-2].isdecimal() and _is_class(parts[-2], len(parts)):
        cls, parts = parts[-2], parts[:-2]
    elif parts and _is_class(parts[-1], 0):
        cls, parts = parts[-1], parts[:-1]
    tap = ".".join(parts) or ROOT_TAP
    if match[1] == "backward":
        tap = f"backward.{tap}"
    return tap, cls, role if role == "value" else f"{role}.{match[3]}", call


def _is_class(word: str, parts: int) -> bool:
    """A class has a capital letter at its beginning; a module path hardly ever has."""
    return word.lstrip("_")[:1].isupper()
