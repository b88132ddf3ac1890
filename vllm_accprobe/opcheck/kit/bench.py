"""A written-down call on the bench: what was captured, and what a device makes of it, against float64.

The problem: a failed operator is to be shown to whoever wrote it, on a machine where only torch is. The idea: a case
is checked in up to three ways: ``captured``, what the engine gave against the reference; ``device``, what the operator
gives on a device here and now from the same inputs; ``drawn``, the same from inputs drawn with a seed. Each output is
a `CaseOutcome`, and a line of a csv with the columns of opcheck.csv, which `accprobe compare` reads. This file is
copied with the tests that gentest writes, and they are all that uses it. Not here: which calls become cases
(testgen.py).
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.case import decode, load
from vllm_accprobe.opcheck.calls.random_inputs import WEAKER, redrawn
from vllm_accprobe.opcheck.calls.views import laid_out
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.measures import measure
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import families
from vllm_accprobe.opcheck.references.aten import outputs_by_role
from vllm_accprobe.opcheck.references.parts import on

CAPTURED, DEVICE, DRAWN = "captured", "device", "drawn"
TENSORS = ("value", "noise", "bound", "rows")
"""Of an Expected that was written down."""


@dataclass(frozen=True)
class Case:
    """One call. about: op, class, tap, call, step, rank, id, and row_dims by role; expected: exact outputs that were
    written down where the reference is other code's, by role, {} otherwise."""

    about: Mapping[str, Any]
    call: Call
    expected: Mapping[str, Expected]


@dataclass(frozen=True)
class CaseOutcome:
    """One output of a case, checked in one way. status: pass, fail or skip."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    status: str
    message: str
    verdict: Verdict | None = None
    measures: Mapping[str, float | int | None] | None = None


class Bench:
    """The references and the device that cases are checked with. device: torch's name, ``cpu``, ``cuda``, ``npu:1``;
    columns: of the csv; kernel: a function that runs in the operator's place, see `kernel_outputs`."""

    def __init__(
        self, device: str = "cpu", seed: int = 0, columns: Sequence[str] = (),
        kernel: Callable[..., Any] | None = None, references: References | None = None,
    ):  # fmt: skip
        self.device, self.seed, self.columns, self.kernel = device, seed, tuple(columns), kernel
        self.references = References(families()) if references is None else references

    def check(self, case: Case, way: str) -> list[CaseOutcome]:
        """One CaseOutcome per output; one that skips where there is nothing to check."""
        call = case.call
        drawn = any(t.is_meta for t in call.outputs.values())
        if way == CAPTURED and drawn:
            return [_skipped("only statistics were captured: the inputs here were drawn from them")]
        if way == DRAWN:
            try:
                call = redrawn(call, self.seed)
            except Declined as why:
                return [_skipped(str(why))]
        expected: Mapping[str, Expected] | Declined = case.expected
        if not expected or way == DRAWN:
            expected = self.references.evaluate(call)
        if isinstance(expected, Declined):
            return [_skipped(expected.reason)]
        if way == CAPTURED:
            return [self._outcome(case, call, role, call.outputs[role], expected) for role in call.outputs]
        mine = self.made(call)
        if isinstance(mine, Declined):
            if mine.failed and self.kernel is not None:
                return [CaseOutcome("", "", (), "fail", mine.reason)]
            return [_skipped(mine.reason)]
        found = []
        for role, captured in call.outputs.items():
            if role in mine:
                way = DRAWN if drawn else way
                found.append(self._outcome(case, call, role, mine[role].to("cpu", captured.dtype), expected, way))
        return found or [_skipped("nothing that was captured comes out of it")]

    def made(self, call: Call) -> Mapping[str, Any] | Declined:
        """What the kernel, or else the device, gives for ``call`` by role, each input in its captured layout."""
        ready = on(call, self.device)
        return self.references.run(ready) if self.kernel is None else kernel_outputs(self.kernel, laid_out(ready))

    def _outcome(
        self, case: Case, call: Call, role: str, mine: Any, expected: Mapping[str, Expected], way: str = CAPTURED
    ) -> CaseOutcome:
        dtype, shape = str(mine.dtype).removeprefix("torch."), tuple(mine.shape)
        if role not in expected:
            return CaseOutcome(role, dtype, shape, "skip", f"no reference for {role}")
        e = expected[role]
        if tuple(e.value.shape) != shape:
            return CaseOutcome(role, dtype, shape, "fail", f"shape {list(shape)} instead of {list(e.value.shape)}")
        row_dim = int(case.about.get("row_dims", {}).get(role, 0))
        found = OutputRows.of(e, mine, row_dim)
        if not len(found.at) and e.rows is not None:
            return CaseOutcome(role, dtype, shape, "skip", e.reason)
        v = found.judge(dtype)
        message = "" if v.passed else _say(v, found.reference, found.mine)
        if way == DRAWN:
            message = f"{message}; {WEAKER}".lstrip("; ")
        measures = asdict(measure(found.reference, found.mine, dtype)) | _range(mine)
        return CaseOutcome(role, dtype, shape, "pass" if v.passed else "fail", message, v, measures)

    def lines(self, case: Case, outcomes: Sequence[CaseOutcome]) -> list[list[object]]:
        """A csv line per outcome, in the order of ``columns``."""
        found = []
        for o in outcomes:
            cell: dict[str, Any] = {**case.about, **(o.measures or {}), "role": o.role, "dtype": o.dtype}
            cell |= {"shape": "[" + ", ".join(map(str, o.shape)) + "]", "status": o.status, "message": o.message}
            if o.verdict is not None:
                v = o.verdict
                cell |= {"measure": v.measure, "measured": v.value, "allowed": v.limit, "created": v.worst_row_rel_l2}
                cell["rounding"] = v.rounding
            found.append(["" if cell.get(c) is None else cell[c] for c in self.columns])
        return found


def loaded(name: str) -> Any:
    """A module by its name or by the path of its file. Raises ValueError with a sentence."""
    path = Path(name).resolve()
    if name.endswith(".py") and not path.is_file():
        raise ValueError("there is no such file")
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # a library may raise anything while it is imported
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from None


def load_function(name: str) -> Callable[..., Any]:
    """The function of ``package.module:name`` or ``path/to/file.py:name``. Raises ValueError with a sentence."""
    place, _, attribute = name.rpartition(":")
    try:
        found = getattr(loaded(place), attribute, None)
    except ValueError as why:
        raise ValueError(f"{name}: {why}") from None
    if not callable(found):
        raise ValueError(f"{name}: {place} has no function {attribute}")
    return found  # type: ignore[no-any-return]


def kernel_outputs(kernel: Callable[..., Any], call: Call) -> Mapping[str, Any] | Declined:
    """What ``kernel`` gives by role. An operator's arguments are passed as they are. Of a module's call it gets, by the
    names of its own parameters, inputs, weights, attributes, and ``cache``, attention's history (case.StoredCache).
    What is no name of the call has its default."""
    inputs = {f"arg{k}" if k.isdigit() else k: t for k, t in call.inputs.items()}
    known: dict[str, Any] = {**call.extra, **call.attrs, **call.params, **inputs}
    args, kwargs = call.args, dict(call.kwargs)
    if not args and not kwargs:
        for name, parameter in inspect.signature(kernel).parameters.items():
            if name in known:
                kwargs[name] = known[name]
            elif parameter.default is parameter.empty:
                return Declined(f"the kernel's argument {name} is none of {', '.join(sorted(known)) or 'the call'}")
    try:
        with torch.no_grad():
            result = kernel(*args, **kwargs)
    except Exception as error:  # whatever a kernel raises is its result
        return Declined(f"the kernel raised {type(error).__name__}: {' '.join(str(error).split())[:160]}", failed=True)
    if args:
        return outputs_by_role(result, args, kwargs)
    if isinstance(result, Mapping):
        return result
    if result is None:
        return {f"inplace.{name}": t for name, t in kwargs.items()}
    return {f"output.{k}": t for k, t in enumerate(result if isinstance(result, (list, tuple)) else [result])}


def _range(tensor: Any) -> dict[str, float | None]:
    """The smallest and the largest of the finite numbers that the device gave."""
    wide = tensor.detach()
    wide = torch.view_as_real(wide).flatten() if wide.is_complex() else wide.flatten()
    wide = wide[torch.isfinite(wide.float())].double() if wide.is_floating_point() else wide.double()
    low, high = (float(wide.min()), float(wide.max())) if wide.numel() else (None, None)
    return {"min_val": low, "max_val": high}


def _skipped(why: str) -> CaseOutcome:
    return CaseOutcome("", "", (), "skip", why)


def _say(v: Verdict, reference: Any, mine: Any) -> str:
    where = f" in row {v.row}" if v.row >= 0 else ""
    where += f", column {v.column}" if v.column >= 0 else ""
    if v.measure == "exact":
        return f"{v.value:.0f} values that should be equal are not; first{where}"
    if v.measure == "nonfinite":
        return f"{v.value:.0f} non-finite values on one side{where}"
    top = (mine.double() - reference.double()).abs()
    return (
        f"{v.measure} error {v.value:.3g} times rounding alone, allowed {v.limit:.3g}{where}; "
        f"largest absolute difference {float(top.max()):.6g}"
    )


def load_case(path: Path) -> Case:
    tree = json.loads(path.read_text(encoding="utf-8"))
    tensors = load(path.with_suffix(".safetensors"))
    expected = {}
    for role, e in tree.get("expected", {}).items():
        named: dict[str, Any] = {k: None if e.get(k) is None else tensors[e[k]] for k in TENSORS}
        plain = {k: e[k] for k in ("unit", "common", "reason", "groups", "shared") if k in e}
        expected[role] = Expected(**named, **plain)
    return Case(tree["about"], decode(tree["call"], tensors), expected)


def write_csv(path: Path, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
