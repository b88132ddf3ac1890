"""A dump in the folders that ait's and msit's torch hook writes, so that their comparison opens it.

The problem: ``register_hook`` writes our dump, and scripts around ait look for its folders. The idea: each stored
tensor of a module's first call in a step is one .pth under the names that formats/msit.py reads; inputs are numbered in
the order in which they went in. What the layout has no place for is returned to be counted: a module's later calls in a
step, operators, tensors of which only statistics were stored.
Layout: ``torch_tensors/{device}_{pid}/{token}/{root.model.x}/{input_0,output,output_1}.pth``, ``weights/*.pth`` and
``model_tree.json`` beside the tokens; the token is the step.
Not here: the .pth files (torchzip.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.opcalls import is_operator
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ROOT_TAP, Record
from vllm_accprobe.formats.write.torchzip import save_pt

NAME = "ait_dump"
LATER_CALL = "tensors of a module's second or later call in a step"
OPERATOR = "tensors of operators"
NO_VALUES = "tensors of which only statistics were stored"
ODD_NAME = "tensors whose tap makes no folder's name"
OTHER_ROLE = "tensors that are neither input, output nor parameter"
_PLAIN = re.compile(r"[\w.\-]{1,200}", re.ASCII)
_NUMBERED = re.compile(r"\d{1,6}(?:\.\d{1,6})*", re.ASCII)


def write_ait(
    dump: Dump, records: Iterable[Record], root: Path, tick: Callable[[], None] = lambda: None
) -> Counter[str]:
    """Writes ``records`` of all steps and ranks below ``root``, which must not exist. Returns what was left out, by
    reason. Raises OSError, DumpError."""
    skipped: Counter[str] = Counter()
    root.mkdir(parents=True)
    places: dict[int, Path] = {}
    inputs: dict[tuple[int, int | None, str], int] = {}
    for r in sorted(records, key=lambda r: (r.rank, -1 if r.step is None else r.step, r.seq)):
        tick()
        home = places.get(r.rank)
        if home is None:
            home = places[r.rank] = root / "torch_tensors" / _process(dump, r.rank)
            home.mkdir(parents=True)
            (home / "model_tree.json").write_text(json.dumps(_tree(dump, r.rank), indent=1), encoding="utf-8")
        file, why = _file(r, inputs)
        if file is None:
            skipped[why] += 1
            continue
        target = home / file
        target.parent.mkdir(parents=True, exist_ok=True)
        save_pt(target, dump.read(r), r.dtype)
    return skipped


def _process(dump: Dump, rank: int) -> str:
    start = dump.starts.get(rank, {})
    local, pid = start.get("local_rank"), start.get("pid")
    device = local if type(local) is int and 0 <= local < 1 << 20 else rank
    return f"{device}_{pid if type(pid) is int and pid > 0 else 0}"


def _file(r: Record, inputs: dict[tuple[int, int | None, str], int]) -> tuple[Path | None, str]:
    """(where a tensor goes below the process's folder, "") or (None, why it goes nowhere)."""
    kind, _, own = r.role.partition(".")
    if is_operator(r.tap):
        return None, OPERATOR
    if r.payload is None:
        return None, NO_VALUES
    if r.call and r.step is not None:
        return None, LATER_CALL
    module = "root" if r.tap == ROOT_TAP else f"root.{r.tap}"
    if not _PLAIN.fullmatch(module) or ".." in module:
        return None, ODD_NAME
    if kind == "param" and r.step is None:
        weight = f"{module}.{own}"
        return (Path("weights", f"{weight}.pth"), "") if _PLAIN.fullmatch(weight) and not r.call else (None, LATER_CALL)
    if kind == "input":
        number = inputs.setdefault((r.rank, r.step, r.tap), 0)
        inputs[r.rank, r.step, r.tap] = number + 1
        name = f"input_{number}"
    elif kind == "output" and _NUMBERED.fullmatch(own):
        name = f"output_{own.replace('.', '_')}"
    else:
        return None, OTHER_ROLE
    return Path(str(r.step), module, f"{name}.pth"), ""


def _tree(dump: Dump, rank: int) -> dict[str, Any]:
    """``{"name": "root.model", "type": "LlamaModel", "children": [...]}``, from the model itself down."""
    modules = sorted(dump.modules.get(rank, []), key=lambda m: m.index)
    known: dict[str, dict[str, Any]] = {ROOT_TAP: {"name": "root", "type": "", "children": []}}
    for m in modules:
        if m.tap == ROOT_TAP:
            known[ROOT_TAP]["type"] = m.cls
        elif not is_operator(m.tap):
            known[m.tap] = {"name": f"root.{m.tap}", "type": m.cls, "children": []}
    for tap, node in known.items():
        if tap != ROOT_TAP:
            known[_above(tap, known)]["children"].append(node)
    return known[ROOT_TAP]


def _above(tap: str, known: dict[str, Any]) -> str:
    """The nearest module around ``tap``."""
    while "." in tap:
        tap = tap.rpartition(".")[0]
        if tap in known:
            return tap
    return ROOT_TAP
