"""The same inputs N times: an operator that races, or returns memory that was never written, gives other numbers.

The problem: on an idle machine the allocator gives an operator the same clean memory and its threads run one after
another, so that a replay that runs it once sees nothing. The idea: before each run memory is filled with a byte that
changes from run to run (`PATTERNS`), and every other run has threads that take its cores, and on CUDA a busy stream. An
element whose bytes are that byte in every run was never written; an output that is always the same for one byte and
another for another one was computed from memory that was never written. What differs otherwise is a matter of timing:
different within the operator's own floor is how sums of atomics come out, and a remark; beyond it, wrong. What differs
is run again under torch's switch for deterministic algorithms. Where filling does not reach (another C library, a
kernel's own workspace), nothing is found.
Elsewhere: batches (by_rows.py), kernels of this machine (machine_kernels.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.judge.statistic import CHANCE
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.repeat.machine_kernels import MachineKernels
from vllm_accprobe.opcheck.run.judged_row import without_verdict
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, PASS, SKIP, WARNING, CheckResult

PATTERNS = (0xFF, 0x7B, 0xBE)
"""Chosen: bytes that memory is filled with in turn. 0xFF is NaN in every float format of 8 to 64 bits but e5m2's
and -1 in integers; 0x7B a number far above activations (1.3e36 in bfloat16); 0xBE a small negative one (-0.37), which
no check for large numbers would see."""
_PERTURB = -6
_MOST_FILLED = 1 << 30
"""Bytes, chosen: what is filled in advance for one run at most."""
_COPIES = 4
"""Chosen: pieces of each size, and of twice it, since the first ones go to what the operator allocates besides."""
_SWITCH = 1e-5
"""Seconds, chosen: how soon the interpreter hands itself to another thread in a busy run; 0.005 otherwise."""


def pattern(run: int) -> int:
    """The byte of the ``run``-th run, from 0."""
    return PATTERNS[run % len(PATTERNS)]


def busy(run: int) -> bool:
    """Whether that run has company. Each pattern comes with and without it."""
    return run // len(PATTERNS) % 2 == 1


@contextlib.contextmanager
def memory(byte: int, sizes: Iterable[int], device: Any) -> Iterator[None]:
    """Within it, what is allocated holds ``byte`` as far as that can be had. sizes: bytes of the outputs that are
    expected; device: torch's."""
    libc = _glibc() if device.type == "cpu" else None
    if libc is not None:
        libc.mallopt(_PERTURB, byte ^ 0xFF or 0x100)  # the low byte inverted is what is written; 0 would switch it off
    try:
        _fill(byte, sizes, device)
        yield
    finally:
        if libc is not None:
            libc.mallopt(_PERTURB, 0)


def _fill(byte: int, sizes: Iterable[int], device: Any) -> None:
    left, filled_now = _MOST_FILLED, []
    for size in sizes:
        for n in (size, 2 * size):
            for _ in range(_COPIES):
                if 0 < n <= left:
                    filled_now.append(torch.empty(n, dtype=torch.uint8, device=device).fill_(byte))
                    left -= n
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del filled_now


def _glibc() -> Any | None:
    try:
        if not os.confstr("CS_GNU_LIBC_VERSION"):
            return None
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "mallopt") else None
    except (ValueError, OSError, AttributeError):
        return None


@contextlib.contextmanager
def company(device: Any) -> Iterator[None]:
    """Within it, other threads take this machine's cores, the interpreter changes threads often, and on CUDA the work
    is put on a stream of its own and another one is busy."""
    stop, before = threading.Event(), sys.getswitchinterval()
    block = bytes(1 << 18)

    def burn() -> None:
        while not stop.is_set():
            hashlib.sha256(block)  # gives the interpreter's lock back while it computes

    threads = [threading.Thread(target=burn, daemon=True) for _ in range(max(1, os.cpu_count() or 1))]
    sys.setswitchinterval(_SWITCH)
    for t in threads:
        t.start()
    try:
        with _stream(device):
            yield
    finally:
        stop.set()
        sys.setswitchinterval(before)
        for t in threads:
            t.join()


@contextlib.contextmanager
def _stream(device: Any) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    noise, mine = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(noise):
        a = torch.ones(1024, 1024, device=device)
        for _ in range(32):
            a = a @ a * 1e-3
    mine.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(mine):
        yield
    torch.cuda.synchronize(device)


UNWRITTEN, MEMORY, TIMING, EQUAL = "not written", "memory", "timing", "equal"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMED = 6


def bits(tensor: Any) -> Any:
    """The bits of a tensor as integers of its elements' size, [elements] flattened; complex ones as pairs."""
    t = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return t.contiguous().view(_INTEGERS[t.element_size()]).reshape(-1)


def changed(a: Any, b: Any) -> Any:
    """Which elements, bool [elements] (pairs of complex ones), are not the same to the bit; NaN is NaN whatever its
    sign and payload, which kernels for vectors and for single numbers make differently."""
    found = bits(a) != bits(b)
    if a.is_floating_point() or a.is_complex():
        x, y = ((torch.view_as_real(t) if t.is_complex() else t).reshape(-1).float() for t in (a, b))
        found &= ~(torch.isnan(x) & torch.isnan(y))
    return found


def filled(tensor: Any, byte: int) -> Any:
    """Which elements, bool [elements], are computed from nothing but this byte."""
    found = bits(tensor)
    size = found.element_size()
    whole = int.from_bytes(bytes([byte]) * size, "little", signed=size > 1)
    return found == whole


@dataclass
class RunDifferences:
    """Filled by `add`, run by run. runs: how many; differing: runs that are not the first to the bit; first, furthest:
    outputs; at: bool [elements], where any run differs from the first."""

    runs: int = 0
    differing: int = 0
    first: Any = None
    furthest: Any = None
    furthest_run: int = 0
    at: Any = None
    gap: float = 0.0
    _by_byte: dict[int, Any] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _within: Any = None
    _unwritten: Any = None

    def add(self, output: Any, byte: int) -> None:
        """One more run. output: a tensor on the CPU; byte: what memory contained before. Raises ValueError where shape
        or dtype are other ones than in the runs before."""
        run, self.runs = self.runs, self.runs + 1
        filled_now = filled(output, byte)
        if self.first is None:
            self.first, self._unwritten = output.clone(), filled_now
            self.at, self._within = torch.zeros_like(filled_now), torch.zeros_like(filled_now)
        else:
            if output.shape != self.first.shape or output.dtype != self.first.dtype:
                raise ValueError(f"run {run} gives {output.dtype} {list(output.shape)}, the first one "
                                 f"{self.first.dtype} {list(self.first.shape)}")  # fmt: skip
            self._unwritten &= filled_now
            other = changed(output, self.first)
            if bool(other.any()):
                self.differing += 1
                self.at |= other
                gap = largest_gap(output, self.first)
                if self.furthest is None or gap > self.gap:
                    self.furthest, self.furthest_run, self.gap = output.clone(), run, gap
        self._counts[byte] = self._counts.get(byte, 0) + 1
        if byte in self._by_byte:
            self._within |= changed(output, self._by_byte[byte])
        else:
            self._by_byte[byte] = output.clone()

    @property
    def unwritten(self) -> Any:
        """bool [elements]: what was never written. None of them where memory contained one byte only."""
        return self._unwritten if len(self._by_byte) > 1 else torch.zeros_like(self._unwritten)

    @property
    def kind(self) -> str:
        if bool(self.unwritten.any()):
            return UNWRITTEN
        if not self.differing:
            return EQUAL
        seen_twice = sum(n > 1 for n in self._counts.values()) > 1
        return MEMORY if seen_twice and not bool(self._within.any()) else TIMING


def largest_gap(a: Any, b: Any) -> float:
    """How far two outputs of one shape are apart: the largest difference, inf where one side alone is not finite or
    both are infinite in opposite directions. Equal infinities, and two NaN, are no difference: x - x of them is NaN."""
    x, y = ((torch.view_as_real(t) if t.is_complex() else t).double() for t in (a, b))
    same = (x == y) | (torch.isnan(x) & torch.isnan(y))
    apart = torch.where(same, torch.zeros_like(x), (x - y).abs())
    return float(torch.nan_to_num(apart, nan=float("inf"), posinf=float("inf")).max()) if apart.numel() else 0.0


def gap_words(gap: float) -> str:
    """``largest difference 0.0312``, or what stands for it where that is no number."""
    return f"largest difference {gap:.3g}" if gap != float("inf") else "NaN or infinity on one side alone"


def where(mask: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Of a mask [elements] of a tensor of ``shape``: how many, in which rows (of dimension 0) and columns (of all
    others), the first of them named."""
    rows = shape[0] if shape else 1
    width = max(mask.numel() // max(rows, 1), 1)
    grid = mask.reshape(rows, -1) if mask.numel() % max(rows, 1) == 0 and rows else mask.reshape(1, -1)
    at_rows, at_columns = grid.any(1).nonzero().flatten(), grid.any(0).nonzero().flatten()
    return {
        "elements": int(mask.sum()), "of": int(mask.numel()), "rows": len(at_rows), "of_rows": rows,
        "first_rows": at_rows[:_NAMED].tolist(), "columns": len(at_columns), "of_columns": width,
        "first_column": int(at_columns[0]) if len(at_columns) else -1,
        "last_column": int(at_columns[-1]) if len(at_columns) else -1,
    }  # fmt: skip


def place(found: dict[str, Any]) -> str:
    """``12 of 448 elements, rows 0, 3, 5, columns 0 to 63``."""
    rows = ", ".join(map(str, found["first_rows"]))
    more = " ..." if found["rows"] > len(found["first_rows"]) else ""
    first, last = found["first_column"], found["last_column"]
    columns = f"column {first}" if first == last else f"columns {first} to {last}"
    word = "row" if found["rows"] == 1 else "rows"
    return f"{found['elements']:,} of {found['of']:,} elements, {word} {rows}{more}, {columns}"


@dataclass(frozen=True)
class CallFloors:
    """Of one call. base: outputs at hand by role; expected: the reference's, where there is one; why: why not."""

    base: Mapping[str, Any]
    expected: Mapping[str, Expected]
    why: str
    chance: float
    word: str

    @classmethod
    def of(
        cls, references: References, call: Call, base: Mapping[str, Any], chance: float, word: str
    ) -> CallFloors:  # fmt: skip
        """call: on the CPU, with all that it needs in itself; word: what the outputs at hand are, "the first run"."""
        found = references.evaluate(replace(call, outputs=dict(base)))
        if isinstance(found, Declined):
            return cls(base, {}, found.reason, chance, word)
        return cls(base, found, "", chance, word)

    def judge(self, role: str, other: Any) -> tuple[Verdict, str]:
        """(verdict on ``other`` in the place of base[role], what it was compared with)."""
        known, base = self.expected.get(role), self.base[role]
        if known is not None and tuple(known.value.shape) == tuple(base.shape):
            known = replace(known, rows=None) if known.rows is None or bool(known.rows.all()) else known
            if self._against(known, base).passed:
                return self._against(known, other), "its reference"
        wide = base.double() if base.is_floating_point() else base
        noise = None
        if base.is_floating_point():
            noise = unit(_name(base)) * _scale(wide)
            if known is not None and known.noise is not None and tuple(known.value.shape) == tuple(base.shape):
                noise = (noise.square() + 2 * known.noise.expand_as(wide).square()).sqrt()
        return self._against(Expected(wide, noise), other), self.word

    def _against(self, expected: Expected, other: Any) -> Verdict:
        return OutputRows.of(expected, other, 0).judge(_name(other), chance=self.chance)


def _scale(wide: Any) -> Any:
    """What a rounding inside is relative to: an element's own size, or its row's root mean square if that is more."""
    size = torch.nan_to_num(wide.abs(), nan=0.0, posinf=0.0)
    if not size.dim() or not size.numel():
        return size
    return torch.maximum(size, size.square().mean(-1, keepdim=True).sqrt())


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


REPEAT = "repeat"
"""The measure of these rows."""
_SWITCHED = 3


@dataclass(frozen=True)
class RepeatOptions:
    """runs: how often each call is run, 2 at least; strict: any difference fails; chance: of a floor."""

    runs: int
    strict: bool = False
    chance: float = CHANCE


def repeat(captured: Captured, kernels: MachineKernels, options: RepeatOptions) -> Iterator[CheckResult]:
    """A row for each output of a call, or one that says why there is none."""
    found = _runs(captured, kernels, options.runs)
    if isinstance(found, Declined):
        yield without_verdict(captured, "", None, ERROR if found.failed else SKIP, found.reason)
        return
    bad = {role for role, d in found.items() if d.kind != EQUAL}
    floors = None
    if bad:
        call, base = kernels.here(captured.what), {role: d.first for role, d in found.items()}
        floors = CallFloors.of(kernels.references, call, base, options.chance, "the first run")
    note = _switched(captured, kernels, found) if bad else ""
    for role, d in found.items():
        yield _row(captured, role, d, floors, note, options)


def _runs(captured: Captured, kernels: MachineKernels, runs: int) -> Mapping[str, RunDifferences] | Declined:
    """Each output over all runs."""
    try:
        call = kernels.ready(captured.what)
    except (RuntimeError, ValueError) as error:
        return Declined(f"its inputs cannot be had here: {' '.join(str(error).split())[:80]}")
    found: dict[str, RunDifferences] = {}
    sizes = [t.numel() * t.element_size() for t in captured.what.outputs.values()]
    for run in range(runs):
        byte, alone = pattern(run), not busy(run)
        conditions = contextlib.nullcontext() if alone else company(kernels.device)
        with conditions, memory(byte, sizes, kernels.device):
            made = kernels.run(call, byte)
        if isinstance(made, Declined):
            return made if not run else Declined(f"run {run} of {runs}: {made.reason}", True)
        sizes = [t.numel() * t.element_size() for t in made.values()]
        if run and set(made) != set(found):
            return Declined(f"run {run} of {runs} has other outputs than the first", True)
        for role, output in made.items():
            try:
                found.setdefault(role, RunDifferences()).add(output, byte)
            except ValueError as why:
                return Declined(str(why), True)
    return found


def _switched(captured: Captured, kernels: MachineKernels, before: Mapping[str, RunDifferences]) -> str:
    """What torch's switch for deterministic algorithms makes of it, where it is not switched on anyway."""
    if torch.are_deterministic_algorithms_enabled():
        return "torch's deterministic algorithms were on"
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        found = _runs(captured, kernels, max(_SWITCHED, min(d.runs for d in before.values())))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    if isinstance(found, Declined):
        if "deterministic" in found.reason:
            return "torch.use_deterministic_algorithms refuses it"
        return f"under torch.use_deterministic_algorithms: {found.reason}"
    equal = all(d.kind == EQUAL for d in found.values())
    return f"torch.use_deterministic_algorithms {'makes all runs equal' if equal else 'does not change that'}"


def equal_row(c: Captured, role: str, output: Any) -> CheckResult:
    """The row of an output that is equal in all runs."""
    row = without_verdict(c, role, c.records.get(role), PASS, "")
    return replace(row, dtype=_name(output), shape=tuple(output.shape), measured=0.0, allowed=1.0)


def concluded(
    row: CheckResult, v: Verdict | None, wrong: bool, strict: bool, message: str, about: Mapping[str, Any], **more: Any
) -> CheckResult:
    """The row of an output that is not equal. v: how far it is off, None where that is not known; strict: any
    difference fails; about: as JSON has it; more: further fields."""
    status, measured = FAIL if wrong or strict else WARNING, float(v.severity) if v is not None else 2.0
    measured = max(measured, 1.0 + 2**-20) if status == FAIL else measured
    return replace(row, status=status, message=message, evidence=json.dumps(about), measured=measured, **more)


def _row(
    c: Captured, role: str, d: RunDifferences, floors: CallFloors | None, note: str, options: RepeatOptions
) -> CheckResult:
    shape = tuple(d.first.shape)
    rows = shape[0] if shape else 1
    row = replace(equal_row(c, role, d.first), rows=rows, checked=rows, measure=REPEAT)
    kind = d.kind
    if kind == EQUAL:
        return row
    about: dict[str, Any] = {"kind": kind, "runs": d.runs, "differing": d.differing, "switch": note}
    v: Verdict | None = None
    if kind == UNWRITTEN:
        at = where(d.unwritten, shape)
        message = f"uninitialised: {place(at)} contain what memory contained before"
    else:
        at = where(d.at, shape)
        message = f"differs in {d.differing} of {d.runs} runs: {place(at)}"
        if floors is not None and d.furthest is not None:
            v, against = floors.judge(role, d.furthest)
            about |= {"against": against, "furthest": d.gap, "floors": v.value, "allowed": v.limit}
            size = f"{v.measure} error {v.value:.3g} of {v.limit:.3g} allowed"
            size = "non-finite" if v.measure == "nonfinite" else size
            message += f"; run {d.furthest_run}: {gap_words(d.gap)}, {size} against {against}"
        if kind == MEMORY:
            message += "; it follows what memory contained before: it reads memory that was never written"
        elif v is not None and v.passed:
            message += "; within rounding, as sums in another order are"
        else:
            message += "; beyond rounding: a race"
    wrong = kind in (UNWRITTEN, MEMORY) or v is None or not v.passed
    return concluded(
        row, v, wrong, options.strict, f"{message}; {note}" if note else message, about | at,
        position=at["first_rows"][0] if at["first_rows"] else None,
        column=at["first_column"] if at["first_column"] >= 0 else None,
    )  # fmt: skip
