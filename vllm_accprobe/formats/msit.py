"""Torch dumps of ait and msit: one .pth per input and output of a module, in a directory per token.

The problem: the same dump may be named at any of its levels, tensors may be missing whose statistics are there, and
nothing says in which order the modules ran. The idea: a file's own directories say which module, token and process it
is of, from the file upwards; statistics stand in where a tensor is missing, and tell the order.
Layout: ``torch_tensors/{device}_{pid}/{token}/{root.model.x}/{input_0,output,output_0}.pth``, ``weights/*.pth`` and
``model_tree.json`` next to the tokens, ``statistics.csv`` next to the tensors; ait's older releases call the directory
above ``ait_dump``. A model that returns a dataclass has no output in such a dump, inputs are what they were after the
call, and keyword arguments are missing: the tool does not store them.
Not here: .pth files (torchfile.py), ATB dumps of the same tools (atb.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import ROOT_TAP, Stats
from vllm_accprobe.formats.atb import number_ranks, one_run
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor, torch_dtype
from vllm_accprobe.formats.io import plain_file, torchfile
from vllm_accprobe.formats.io.atb_file import number, stats_of
from vllm_accprobe.formats.io.plain_file import read_json, read_rows

NAME = "msit"
HOW = "a directory torch_tensors/<device>_<pid>/<token>/<module>/ with input_<k>.pth, output.pth (ait, msit)"
ORDER = 40
_FILE = re.compile(r"(input|output)((?:_[A-Za-z0-9]+)*)\.pth")
_MODULE = re.compile(r"root(?:\..+)?")
STATISTICS, TREE, WEIGHTS = "statistics.csv", "model_tree.json", "weights"
_MAX_TREE = 64 << 20


def recognise(path: Path) -> bool:
    return plain_file.probe(path, _is_ours)


def _is_ours(parts: tuple[str, ...]) -> bool:
    if "torch_tensors" in parts:
        return True
    above, own = ("", *parts)[-2:]
    if _MODULE.fullmatch(above):
        return _FILE.fullmatch(own) is not None or own == STATISTICS
    return own == TREE or (above == WEIGHTS and own.startswith("root."))


@dataclass
class _DeviceProcess:
    """What one ``{device}_{pid}`` directory holds. tokens: token → module → its files."""

    tokens: dict[int, dict[str, list[plain_file.FoundFile]]] = field(default_factory=dict)
    weights: list[plain_file.FoundFile] = field(default_factory=list)
    tree: plain_file.FoundFile | None = None


def open(path: Path) -> ForeignDump:
    """Opens such a dump; reads the indices of the .pth files, no payload. Raises DumpError."""
    passed = plain_file.Passed()
    dump = ForeignDump(path, NAME)
    processes: dict[tuple[str, ...], _DeviceProcess] = defaultdict(_DeviceProcess)
    for f in plain_file.files(path, lambda n: n.endswith(".pth") or n in (STATISTICS, TREE), passed):
        _sort(f, processes, dump)
    one_run({p[:-1] for p in processes}, path)
    ranks = number_ranks(list(processes))
    for head in sorted({p[:-1] for p in processes}):
        sibling = path.joinpath(*head).parent / "tensors" if head[-1:] == ("torch_tensors",) else None
        if sibling is not None and path in sibling.parents and sibling.is_dir():
            dump.problem(f"{sibling} holds an ATB dump, not read with the torch dump beside it: name it instead")
    for key, process in processes.items():
        _add_process(dump, process, ranks[key])
    passed.report(dump)
    return dump


def _sort(f: plain_file.FoundFile, processes: dict[tuple[str, ...], _DeviceProcess], dump: ForeignDump) -> None:
    *above, own = f.parts
    if own == TREE:
        processes[tuple(above)].tree = f
    elif above and above[-1] == WEIGHTS:
        processes[tuple(above[:-1])].weights.append(f)
    elif above and _MODULE.fullmatch(above[-1]):
        token = above[-2] if len(above) > 1 and above[-2].isdecimal() else ""
        head = above[:-2] if token else above[:-1]
        modules = processes[tuple(head)].tokens.setdefault(int(token or 0), {})
        modules.setdefault(above[-1], []).append(f)
    else:
        dump.skip(f.name, "file outside of a module's directory")


def tap_of(module: str) -> str:
    """``root.model.norm`` is ``model.norm``; the model itself is ROOT_TAP."""
    return module[5:] if module.startswith("root.") else ROOT_TAP


def role_of(name: str) -> str | None:
    """``output`` and ``output_0`` are both ``output.0``, ``input_0_1`` is ``input.0.1``."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    return match[1] + (match[2].replace("_", ".") or ".0")


def _add_process(dump: ForeignDump, process: _DeviceProcess, rank: int) -> None:
    tree = _read_tree(dump, process.tree) if process.tree else {}
    for f in process.weights:
        _add_weight(dump, f, rank, tree)
    for token in sorted(process.tokens):
        modules = process.tokens[token]
        tables = {m: _read_statistics(dump, fs) for m, fs in modules.items()}
        places = execution_order(list(modules), list(tree), tables)
        for m, fs in modules.items():
            _add_module(dump, m, fs, tables[m], places[m], (rank, token, tree.get(m, "")))


def _add_module(
    dump: ForeignDump, module: str, files: list[plain_file.FoundFile], table: Mapping[str, tuple[Any, ...]],
    place: tuple[int, int], where: tuple[int, int, str],
) -> None:  # fmt: skip
    rank, token, cls = where
    tap = tap_of(module)
    seen = set()
    for f in files:
        role = role_of(f.parts[-1])
        if role is None:
            continue
        seen.add(role)
        order = _order(role, place)
        add_torch_file(dump, f, tap, role, cls=cls, step=token, rank=rank, order=order, row=table.get(role))
    label = files[0].name.rpartition("/")[0]
    for role, row in table.items():
        if role in seen:
            continue
        dtype, shape, stats = row
        dump.add(Tensor(f"{label}/{STATISTICS}:{role}", tap, role, dtype, shape, None, cls, token, rank, 0, stats,
                        order=_order(role, place)))  # fmt: skip


_SLOTS = 64


def _order(role: str, place: tuple[int, int]) -> int:
    """place: of the module's inputs and of its outputs."""
    digits = role.split(".")[1]
    slot = min(int(digits), _SLOTS - 1) if digits.isdecimal() else _SLOTS - 1
    return place[0 if role.startswith("input") else 1] * _SLOTS + slot


def _add_weight(dump: ForeignDump, f: plain_file.FoundFile, rank: int, tree: Mapping[str, str]) -> None:
    module, _, name = f.parts[-1].removesuffix(".pth").rpartition(".")
    add_torch_file(dump, f, tap_of(module), f"param.{name}", cls=tree.get(module, ""), step=None, rank=rank)


def add_torch_file(
    dump: ForeignDump, f: plain_file.FoundFile, tap: str, role: str, *, cls: str = "", step: int | None = 0,
    rank: int = 0, order: int | None = None, row: tuple[Any, ...] | None = None,
) -> None:  # fmt: skip
    """Adds the tensors of a torch file: usually one, under ``role``; of a container each with its key behind that."""
    try:
        found = torchfile.items(f.path)
    except DumpError as e:
        dump.unreadable(e, tap, step, role)
        return
    if not found:
        dump.skip(tap, "file without a tensor", step, role)
    for key, t in found:
        own = f"{role}.{key}" if key else role
        label = f"{f.name}:{key}" if key else f.name
        stats = row[2] if row is not None and len(found) == 1 else None
        dump.add(Tensor(label, tap, own, t.dtype, t.shape, t.read, cls, step, rank, 0, stats, order=order))


def _read_tree(dump: ForeignDump, f: plain_file.FoundFile) -> dict[str, str]:
    """module → class, in the order of declaration."""
    try:
        root = read_json(f.path, _MAX_TREE)
    except DumpError as e:
        dump.problem(f"{e}: classes are not known")
        return {}
    out: dict[str, str] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Mapping) or not isinstance(node.get("name"), str):
            continue
        out[node["name"]] = node["type"] if isinstance(node.get("type"), str) else ""
        children = node.get("children")
        waiting += reversed(children) if isinstance(children, list) else []
    return out


_Row = tuple[str, tuple[int, ...], "Stats | None"]
"""(dtype, shape, statistics)."""


def _read_statistics(dump: ForeignDump, files: list[plain_file.FoundFile]) -> dict[str, _Row]:
    """role → (dtype, shape, statistics) of a module's statistics.csv."""
    f = next((x for x in files if x.parts[-1] == STATISTICS), None)
    if f is None:
        return {}
    out: dict[str, _Row] = {}
    try:
        head, *rows = read_rows(f.path) or [[]]
        for row in (dict(zip(head, cells, strict=False)) for cells in rows):
            role = f"{str(row.get('InputOutput', '')).strip().lower()}.{str(row.get('Index', '')).strip() or 0}"
            shape = tuple(int(d) for d in re.findall(r"\d{1,15}", row.get("Shape") or ""))
            stats = stats_of(shape, *(number(row.get(k)) for k in ("Min", "Max", "Mean", "L2Norm")))
            if role_of(role.replace(".", "_") + ".pth") is not None:
                out[role] = (torch_dtype(row.get("DataType") or ""), shape, stats)
    except DumpError as e:
        dump.problem(str(e))
    return out


# --- in which order the modules ran, where it was not recorded ---


def execution_order(
    modules: list[str], declared: list[str], tables: Mapping[str, Mapping[str, tuple[Any, ...]]]
) -> dict[str, tuple[int, int]]:
    """module → (place of its inputs, place of its outputs): what a module encloses runs between the two.

    tables: role → (dtype, shape, statistics) of each module. Siblings run in the order in which they hand tensors on;
    one that was waiting for another runs right behind it, and where nothing is handed on the declaration decides."""
    known = set(modules)
    index = {m: i for i, m in enumerate([*declared, *sorted(known - set(declared), key=plain_file.natural)])}
    children: dict[str, list[str]] = defaultdict(list)
    members = known | {up for m in known for up in _above(m)}
    for m in sorted(members, key=lambda m: index.get(m, len(index))):
        children[m.rpartition(".")[0]].append(m)
    children = {up: _usual(below) for up, below in children.items()}
    gives: dict[str, set[Any]] = defaultdict(set)
    takes: dict[str, set[Any]] = defaultdict(set)
    for m, table in tables.items():
        for role, row in table.items():
            if row[2] is not None:
                side = takes if role.startswith("input") else gives
                for up in (m, *_above(m)):
                    side[up].add((row[0], row[2]))
    places: dict[str, tuple[int, int]] = {}
    clock = 0
    waiting: list[tuple[str, bool]] = [(m, False) for m in reversed(_sorted(children.get("", []), gives, takes))]
    start: dict[str, int] = {}
    while waiting:
        m, done = waiting.pop()
        clock += 1
        if done:
            places[m] = (start[m], clock)
            continue
        start[m] = clock
        waiting.append((m, True))
        waiting += [(c, False) for c in reversed(_sorted(children.get(m, []), gives, takes))]
    return places


_USUAL = tuple(
    re.compile(p, re.I)
    for p in (
        r"embed_tokens|wte|word_embeddings?|embed_in|tok_embeddings|embedding",
        r"rotary\w*",
        r"input_layernorm|ln_?1|norm_?1|attention_norm",
        r"(self_)?att(entio)?n",
        r"post_attention_layernorm|ln_?2|norm_?2|ffn_norm",
        r"mlp|ffn|feed_forward|block_sparse_moe|moe",
        r"q_proj|qkv_proj|query_key_value|wq",
        r"k_proj|wk",
        r"v_proj|wv",
        r"q_norm",
        r"k_norm",
        r"o_proj|wo|out_proj",
        r"gate_proj|gate_up_proj|w1|c_fc|fc1",
        r"up_proj|w3",
        r"act(_fn|ivation)?",
        r"down_proj|w2|fc2",
        r"layers|h|blocks",
        r"norm|ln_f|final_layernorm",
        r"model|transformer|backbone",
        r"lm_head|output_layer|embed_out",
    )
)  # fmt: skip


def _usual(siblings: list[str]) -> list[str]:
    """Siblings whose names are known in the order in which such modules run; the others stay where they are."""
    known = {}
    for s in siblings:
        own = s.rpartition(".")[2]
        place = next((i for i, p in enumerate(_USUAL) if p.fullmatch(own)), None)
        if place is not None:
            known[s] = place
    ordered = iter(sorted(known, key=lambda s: known[s]))
    return [next(ordered) if s in known else s for s in siblings]


def _above(module: str) -> list[str]:
    out = []
    while "." in module:
        module = module.rpartition(".")[0]
        out.append(module)
    return out


def _sorted(siblings: list[str], gives: Mapping[str, set[Any]], takes: Mapping[str, set[Any]]) -> list[str]:
    """Siblings in the order of execution as far as it is known; passed in the order of declaration."""
    makers: dict[Any, list[str]] = defaultdict(list)
    for s in siblings:
        for value in gives.get(s, ()):
            makers[value].append(s)
    before: dict[str, set[str]] = {}
    for s in siblings:
        own = takes.get(s, set())
        before[s] = {m for value in own for m in makers.get(value, ()) if m != s}
    left = list(siblings)
    out: list[str] = []
    ready: list[str] = []
    while left:
        free = [s for s in left if not before[s] - set(out)]
        chosen = next((s for s in reversed(ready) if s in free), None)
        if chosen is None:  # a circle of equal values says nothing
            chosen = free[0] if free else left[0]
        left.remove(chosen)
        out.append(chosen)
        ready += [s for s in reversed(left) if chosen in before[s] and not before[s] - set(out)]
    return out
