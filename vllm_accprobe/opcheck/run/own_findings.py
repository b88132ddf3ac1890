"""What one dump says of its own run without a golden: the runner's inputs, what was built, the weights as loaded.

The problem: a replay shows which operator is wrong for its own inputs, constants and weights; where these are wrong,
all operators are right. The idea: positions and token ids are checked by the row map (comparison/runner_inputs.py), the
modules' constants by config.json (comparison/config_constants.py), and the rows of each loaded weight by the
checkpoint: which of them are not what it has there, and where they stand in it (comparison/weight_places.py). Constants
of config.json replace the module's own before its calls are checked. A form of parameter of which no layer is the
checkpoint's is loaded in a form of its own, and is unchecked. Bounded by bytes and by time; what is left is counted.
Not here: operators (check_calls.py), caches (capture/states/), who shows it (cli/).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.comparison import runner_inputs
from vllm_accprobe.comparison.config_constants import BuiltCheck, check_built_of
from vllm_accprobe.comparison.runner_inputs import NOT_THE_MODEL, RunnerCheck
from vllm_accprobe.comparison.weight_places import (
    ADDRESS,
    ROUNDS,
    UNKNOWN,
    RowsFound,
    by_keys,
    by_values,
    due_rows,
    numbers,
)
from vllm_accprobe.dump.decode import value_at
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import LOAD, NO_LIVES, WeightPrint
from vllm_accprobe.dump.record_table import first_of_each_site, of_sites
from vllm_accprobe.dump.schema import Layout, Module
from vllm_accprobe.dump.weight_sums import row_keys
from vllm_accprobe.judge.weights import (
    NEVER_WRITTEN,
    WeightHistory,
    any_layers,
    faults_within,
    is_computed,
    named,
    side_of,
)
from vllm_accprobe.opcheck.calls.parameters import Checkpoint, Share
from vllm_accprobe.opcheck.run.result_row import CheckResult, of_no_operator

CONFIG, WEIGHTS = "config.json", "weights"
"""Classes of rows of opcheck.csv that are of no operator, in addition to ``cache`` and ``runner``."""
MOST_BYTES, MOST_SECONDS, MOST_FOUND = 8 << 30, 30.0, 50
"""Bytes of a checkpoint that are read, for how long, and findings that are listed."""
MOST_ROWS = 1 << 24
"""Rows of a weight that are put into another order."""
NO_TENSOR = "the checkpoint has no tensor of that name and shape"
OWN_FORM = "loaded in a form of its own: no layer's is the checkpoint's"
TOO_MUCH = "beyond the time or the bytes for reading the checkpoint"
_TURNED = ("Llama4",)
"""Models of which vLLM's loader puts the even rows of each head of q and k before the odd ones: their checkpoints turn
neighbours, its kernel halves [vllm/model_executor/models/llama4.py, permute_qk_weight_for_rotary]."""
NEVER_CALLED = "never called in a captured step"


@dataclass(frozen=True)
class LoadedFault:
    """A weight that is not the checkpoint's. says: the sentence."""

    rank: int
    tap: str
    cls: str
    name: str
    says: str
    found: RowsFound | None = None


@dataclass
class OwnFindings:
    """built: of the first rank that differs from config.json, else of the first; loaded: weights; held: how many are
    the checkpoint's; unchecked: reason -> weights; notes: sentences."""

    runner: RunnerCheck = field(default_factory=RunnerCheck)
    built: BuiltCheck = field(default_factory=BuiltCheck)
    loaded: list[LoadedFault] = field(default_factory=list)
    held: int = 0
    unchecked: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[CheckResult]:
        """As rows of opcheck.csv that are of no operator."""
        for f in self.runner.faults[:MOST_FOUND]:
            text = f"{NOT_THE_MODEL}: {f.says}"
            yield of_no_operator(f.tap, "runner", f.rank, text, request=f.request, position=f.low)
        for m in self.built.mismatches[:MOST_FOUND]:
            yield of_no_operator(m.taps[0], CONFIG, 0, f"built otherwise than config.json asks: {m.says}")
        for one in self.loaded[:MOST_FOUND]:
            yield of_no_operator(one.tap, WEIGHTS, one.rank, f"the weights, not the kernel: {one.says}")

    def lines(self) -> list[str]:
        """What was checked and what was not, a sentence each."""
        out = []
        checked = ", ".join(f"{n:,} {kind}" for kind, n in self.runner.checked.items())
        left = ", ".join(f"{n:,} {why}" for why, n in self.runner.unchecked.items())
        if checked or left:
            out.append(f"the runner's inputs: {checked or 'none'} checked" + (f"; unchecked: {left}" if left else ""))
        if self.built.checked or self.built.unchecked:
            out.append(self.built.summary())
        if self.held or self.unchecked:
            left = ", ".join(f"{n:,} {why}" for why, n in self.unchecked.most_common())
            out.append(f"weights: {self.held:,} are the checkpoint's" + (f"; unchecked: {left}" if left else ""))
        return [*out, *self.notes]


def own_findings(dump: Any, model: Path | None, *, weights: bool = True) -> OwnFindings:
    """All of it. model: the model's directory or None; weights: whether the checkpoint is read."""
    out = OwnFindings(runner_inputs.check(dump), check_built_of(dump, model))
    lives = getattr(dump, "lives", NO_LIVES)
    if lives.prints:
        side = side_of(lives)
        modules = {(rank, m.tap): m for rank, ms in dump.modules.items() for m in ms}
        if weights and model is not None and model.is_dir():
            _against_checkpoint(dump, side, model, modules, out)
        known = {(f.rank, f.tap, f.name) for f in out.loaded}
        for f in faults_within(side, ""):
            if (f.rank, f.tap, f.name) not in known and (f.what == NEVER_WRITTEN or not weights):
                out.loaded.append(LoadedFault(f.rank, f.tap, _cls(modules, f.rank, f.tap), f.name, f.says))
    out.notes += _never_called(dump)
    return out


def corrected(modules: Mapping[int, dict[str, Module]], built: BuiltCheck) -> list[str]:
    """Puts the constants that config.json requires in place of the modules' own; sentences on it."""
    changes = built.corrections()
    for named_modules in modules.values():
        for tap, values in changes.items():
            if tap in named_modules:
                m = named_modules[tap]
                named_modules[tap] = replace(m, attrs={**m.attrs, **values})
    if not changes:
        return []
    tap, values = next(iter(changes.items()))
    what = ", ".join(f"{n} {v!r}" for n, v in values.items())
    more = f" and {len(changes) - 1} more modules" if changes.keys() - {tap} else ""
    return [f"{tap}{more} {'are' if more else 'is'} checked with what config.json asks for ({what}), not as built"]


def _never_called(dump: Any) -> list[str]:
    """Modules with weights whose forward was not called: what they are for is computed past them, and is not
    checked."""
    modules = {
        (p.rank, p.tap): p.cls
        for p in getattr(dump, "lives", NO_LIVES).prints
        if p.life == 0 and not is_computed(p.name)
    }
    taps = {s.tap: next((c for (_, t), c in modules.items() if t == s.tap), "") for s in getattr(dump, "skips", ())
            if s.reason == NEVER_CALLED and any(t == s.tap for _, t in modules)}  # fmt: skip
    ran = [r for r in first_of_each_site(dump.records) if not r.parameter]
    called = {up for r in ran for up in enclosing(r.tap)}  # by what is inside of them
    taps = {
        t: c for t, c in taps.items() if t.rpartition(".")[2] not in ("embed_tokens", "lm_head") and t not in called
    }
    if not taps:
        return []
    first = next(iter(taps))
    what = f"{len(taps)} modules with weights were" if len(taps) > 1 else "1 module with weights was"
    return [f"{what} never called, so that what is computed with them is not checked: {first} ({taps[first]})"
            + (f" and {len(taps) - 1} more" if len(taps) > 1 else "")]  # fmt: skip


def _cls(modules: Mapping[tuple[int, str], Module], rank: int, tap: str) -> str:
    return modules[rank, tap].cls if (rank, tap) in modules else ""


def _against_checkpoint(
    dump: Any, side: WeightHistory, model: Path, modules: Mapping[tuple[int, str], Module], out: OwnFindings
) -> None:
    try:
        checkpoint = Checkpoint(model)
    except Exception as error:  # safetensors raises errors of its own
        out.notes.append(f"the checkpoint in {model} cannot be read: {error}")
        return
    parameters = of_sites(dump.records, lambda site: site.parameter and site.role.startswith("param."))
    layouts = {(r.rank, r.tap, r.role.removeprefix("param.")): r.layout for r in parameters}
    wrong: dict[str, list[tuple[tuple[int, str, str], WeightPrint, RowsFound, bool]]] = defaultdict(list)
    right: Counter[str] = Counter()
    read, begun = 0, time.monotonic()
    turned = str(value_at(dump.run, "model", "class")).startswith(_TURNED)
    for place, states in side.states.items():
        state = states[0]
        p = state.given
        keys = None if p is None or state.event.kind != LOAD or is_computed(place[2]) else p.sums()
        if p is None or keys is None or not len(keys):
            continue
        size = int(np.prod(p.shape, dtype=np.int64)) * 8
        if read + size > MOST_BYTES or time.monotonic() - begun > MOST_SECONDS:
            out.unchecked[TOO_MUCH] += 1
            continue
        read += size
        module = modules.get((place[0], place[1]))
        piece = _piece(checkpoint, place, p, module)
        if piece is None:
            out.unchecked[NO_TENSOR] += 1
            continue
        due = row_keys(_bits(piece))
        kind = any_layers(*place[1:])
        order = _turned_rows(place[1], module) if turned and place[2] == "weight" else _NO_ORDER
        if order is None:
            out.unchecked[OWN_FORM] += 1
            continue
        if len(order) == len(due):
            piece, due = piece[torch.from_numpy(order)], due[order]
        if len(due) != len(keys):
            out.unchecked[NO_TENSOR] += 1
            continue
        if (due == keys).all():
            right[kind] += 1
            continue
        times = state.written()
        layout = None if len(order) else layouts.get(place)  # no rank's rows stand so in the checkpoint
        found = _explained(checkpoint, place, p, keys, piece, due, layout, dump)
        wrong[kind].append((place, p, found, times is not None and not times.any()))
    out.held = sum(right.values())
    for kind, some in wrong.items():
        # Every layer's, in a way that nothing simple explains: the loader makes another form of it.
        explained = any(f.family == ADDRESS or never for _, _, f, never in some)
        whole = len(some) > 1 or (some[0][2].family == UNKNOWN and some[0][2].rows == some[0][1].count)
        if not right[kind] and not explained and whole:
            out.unchecked[OWN_FORM] += len(some)
            continue
        for place, p, found, never in some:
            rank, tap, name = place
            how = "was never written by loading: as initialised, though the checkpoint has it" if never else (
                f"is not the checkpoint's: {found.text}")  # fmt: skip
            out.loaded.append(LoadedFault(rank, tap, p.cls, name, f"{tap}.{name} {how}", found))
    out.loaded = _once(out.loaded)


_NO_ORDER = np.zeros(0, np.int64)


def _turned_rows(tap: str, module: Module | None) -> np.ndarray | None:
    """int64 [rows]: the rows of the checkpoint's q, k and v in the order of `_TURNED`; empty for a module without
    them, None where its heads were not recorded."""
    if not tap.endswith("qkv_proj") or tap.startswith("vision"):
        return _NO_ORDER
    attrs = module.attrs if module is not None else {}
    head, heads, kv = (attrs.get(n) for n in ("head_size", "num_heads", "num_kv_heads"))
    if not isinstance(head, int) or not isinstance(heads, int) or not isinstance(kv, int) or head < 1 or head % 2:
        return None
    if module is None or (heads + 2 * kv) * head > MOST_ROWS or min(heads, kv) < 0:
        return None
    rows = np.arange((heads + 2 * kv) * head).reshape(-1, head)
    turned = np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1)
    return np.concatenate([turned[: heads + kv].ravel(), rows[heads + kv :].ravel()])


def _once(faults: Iterable[LoadedFault]) -> list[LoadedFault]:
    """One of those that all ranks have."""
    seen: dict[str, LoadedFault] = {}
    for f in faults:
        seen.setdefault(f.says, f)
    return list(seen.values())


def _piece(checkpoint: Checkpoint, place: tuple[int, str, str], p: WeightPrint, module: Module | None) -> Any | None:
    """The rank's piece of the checkpoint's tensor in the dtype of the weight, torch, or None."""
    size, rank = (int(module.attrs.get(n, d)) if module else d for n, d in (("tp_size", 1), ("tp_rank", 0)))
    dtype = getattr(torch, p.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return None
    try:
        value = checkpoint.get(place[1], place[2], Share(p.shape, rank, size))
    except Exception:  # a file of a stranger's
        return None
    if value is None or tuple(value.shape) != p.shape:
        return None
    if value.dtype != dtype and not (value.is_floating_point() and dtype.is_floating_point):
        return None
    return value.to(dtype)


def _bits(value: Any) -> np.ndarray:
    """Rows as fingerprints have them, signed integers [rows, width]."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    bits = value.contiguous().view(ints)
    return bits.reshape(-1, bits.shape[-1] if bits.ndim > 1 else 1).numpy()


def _explained(
    checkpoint: Checkpoint, place: tuple[int, str, str], p: WeightPrint, keys: np.ndarray, piece: Any, due: np.ndarray,
    layout: Layout | None, dump: Any,
) -> RowsFound:  # fmt: skip
    """Where the rows stand in the checkpoint's whole tensor; else what their values are, where the dump has them."""

    def names(rows: np.ndarray) -> str:
        of_ranks = layout is not None and layout.size > 1
        if len(rows) == p.count:
            return f"all rows of rank {place[0]}" if of_ranks else "all rows"
        what = named(p, rows)
        what = what if what and not what.startswith(("row", "element")) else f"rows {numbers(rows)}"
        return f"rank {place[0]}'s {what}" if of_ranks else what

    found = None
    at = due_rows(layout, p.shape) if layout is not None else None
    whole = None
    if layout is not None and layout.size > 1 and at is not None and layout.kind == "shard":
        try:
            whole = checkpoint.get(place[1], place[2])
        except Exception:
            whole = None
    if whole is not None and at is not None:
        rows = row_keys(_bits(whole.to(piece.dtype)))
        if len(rows) >= at[1] and at[0].max(initial=-1) < len(rows):
            found = by_keys(rows, keys, at[0], names, "the checkpoint")
    found = found or by_keys(due, keys, np.arange(len(keys)), names, "the checkpoint")
    assert found is not None
    if found.family == ADDRESS:
        return found
    sites = of_sites(dump.records, lambda site: site.parameter and site.tap == place[1])
    record = next((r for r in sites if (r.rank, r.role) == (place[0], f"param.{place[2]}")), None)
    if record is not None and record.payload is not None and record.shape == p.shape and piece.is_floating_point():
        mine = _values(dump, record)
        if mine is not None:
            width = p.shape[-1] if len(p.shape) > 1 else 1
            theirs = piece.double().reshape(-1, width).numpy()
            return by_values(theirs, mine.reshape(-1, width), names, ROUNDS, "the checkpoint") or found
    return found


def _values(dump: Any, record: Any) -> np.ndarray | None:
    try:
        with np.errstate(invalid="ignore"):  # memory that was never written holds any bits
            return np.asarray(widen(dump.read(record), record.dtype, as_float=True)).astype(np.float64)
    except (DumpError, OSError):
        return None
