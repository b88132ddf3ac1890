"""What else may stand in the place of the exact reference: a device, vLLM's own native code, another dump.

The problem: "is it wrong?" is one question, "is it what that machine, or that code, would have computed?" another. The
idea: each is a source of expected outputs like the references, with one rounding more allowed, because it rounds too.
`Device` runs the operator there and now; `Again` runs vLLM's ``forward_native`` where vLLM is installed and has one,
else torch's operators, on this machine's CPU; `Golden` takes what another dump captured, and decides only where both
had the same inputs to the bit. Not here: the operators themselves and the exact references (references/).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.opcheck.calls.case import closed
from vllm_accprobe.opcheck.calls.module_index import to_torch
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.calls.views import laid_out
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import api
from vllm_accprobe.opcheck.references.parts import on
from vllm_accprobe.opcheck.run.check_calls import Options, check_call
from vllm_accprobe.opcheck.run.result_row import SKIP, CheckResult, Unavailable, unchecked

OTHER_INPUTS = "golden's call had other inputs: what differs need not have been created here"


def accelerator() -> str | None:
    """This machine's accelerator as torch names it, ``cuda``, ``npu``, ``xpu``; None where there is none."""
    try:
        if torch.accelerator.is_available():
            return str(torch.accelerator.current_accelerator())
    except (AttributeError, RuntimeError):  # torch before 2.6 has no torch.accelerator
        if torch.cuda.is_available():
            return "cuda"
    return None


def device_named(name: str) -> str:
    """torch's name of a device: ``0`` is the accelerator's first. Raises Unavailable where it is not here."""
    found = accelerator()
    kind = (found or "").partition(":")[0]
    full = f"{kind}:{name}" if name.isdecimal() else name
    if name.isdecimal() and not found:
        raise Unavailable(f"--device {name}: torch sees no accelerator on this machine; --device cpu runs the calls on "
                          "the processor")  # fmt: skip
    try:
        torch.empty(1, device=full)
    except Exception as why:  # an unknown name, a missing backend, a number that is too large
        raise Unavailable(f"--device {name}: {' '.join(str(why).split())[:120]}") from None
    return full


def compiled_operators(device: str) -> list[str]:
    """Has an NPU compile its operators; a sentence where there is nothing to compile."""
    choose = getattr(getattr(torch, "npu", None), "set_compile_mode", None)
    if not device.startswith("npu") or choose is None:
        return [f"--jit_compile: of an NPU's operators, without effect on {device}"]
    choose(jit_compile=True)
    return []


def _rounded(
    call: Call, mine: Mapping[str, Any], exact: Mapping[str, Expected] | Declined
) -> dict[str, Expected]:  # fmt: skip
    """Outputs that were rounded themselves, with the noise that the exact reference knows of."""
    found = {}
    for role, value in mine.items():
        if role not in call.outputs:
            continue
        known = exact.get(role) if not isinstance(exact, Declined) else None
        wide = value.detach().to("cpu")
        if wide.is_floating_point():
            wide = wide.double()
            own = call.unit * wide.abs()
            if known is not None and tuple(known.value.shape) == tuple(wide.shape):
                noise = combined(known.noise, known.noise, own)
                found[role] = replace(known, value=wide, noise=noise, exact=known.value, bound=None)
            else:
                found[role] = Expected(wide, own)
        else:
            rows = known.rows if known is not None else None
            found[role] = Expected(wide, rows=rows, reason=known.reason if known is not None else "")
    return found


class Device:
    """The operator on ``device``, here and now."""

    def __init__(self, references: References, device: str):
        self.references, self.device = references, device

    def evaluate(self, captured: Captured) -> Mapping[str, Expected] | Declined:
        call = closed(captured.what, self.references)
        mine = self.references.run(on(call, self.device))
        if isinstance(mine, Declined):
            return mine
        return _rounded(call, mine, self.references.evaluate(call))


class Again(Device):
    """vLLM's own native implementation, or torch's operators, on the CPU."""

    def __init__(self, references: References):
        super().__init__(references, "cpu")

    def evaluate(self, captured: Captured) -> Mapping[str, Expected] | Declined:
        found = forward_native(captured.what)
        if found is None:
            return super().evaluate(captured)
        return _rounded(captured.what, found, self.references.evaluate(captured.what))


def by_mindspore(dump: Dump, captured: Captured, references: References, options: Options) -> Iterator[CheckResult]:
    """Rows ``mindspore.<role>`` of a call of ``mint``: what MindSpore gives here and now, against the reference."""
    try:
        made = api.run(captured.what)
        by = f"run here by {api.described()}"
    except Declined as why:
        c = captured
        yield unchecked(c.tap, c.what.cls, c.rank, c.step, c.call, c.seq, why.reason, status=SKIP, role="mindspore")
        return
    inputs = {role: t for role, t in made.items() if role in captured.records}
    records = {
        role: replace(r, dtype=str(inputs[role].dtype).removeprefix("torch."), shape=tuple(inputs[role].shape))
        for role, r in captured.records.items() if role in inputs
    }  # fmt: skip
    again = replace(captured, what=replace(captured.what, outputs=inputs), records=records)
    for row in check_call(dump, again, lambda c: references.evaluate(c.what), options):
        yield replace(row, role=f"mindspore.{row.role}", message=f"{row.message}; {by}".lstrip("; "))


class Golden:
    """The same call of another dump: same rank, step, tap and ordinal."""

    def __init__(self, dump: Dump):
        self.dump = dump
        self.calls: dict[tuple[int, int | None, str, int], dict[str, Record]] = {}
        for r in dump.records:
            if r.step is not None:
                self.calls.setdefault((r.rank, r.step, r.tap, r.call), {})[r.role] = r

    def evaluate(self, captured: Captured) -> Mapping[str, Expected] | Declined:
        theirs = self.calls.get((captured.rank, captured.step, captured.tap, captured.call))
        if theirs is None:
            return Declined("golden has no such call")
        inputs = [r for r in captured.records if r.startswith("input.")]
        same = all(
            r in theirs and theirs[r].hash is not None and theirs[r].hash == captured.records[r].hash for r in inputs
        )
        found = {}
        for role, output in captured.what.outputs.items():
            record = theirs.get(role)
            if record is None or record.payload is None or record.shape != tuple(output.shape):
                continue
            value = to_torch(self.dump.read(record), record.dtype)
            noise = captured.what.unit * value.double().abs() if value.is_floating_point() else None
            wide = value.double() if value.is_floating_point() else value
            found[role] = Expected(wide, noise, only_measured="" if same else OTHER_INPUTS)
        return found or Declined("golden has no output of this shape")


_MODULES = {
    "vllm.model_executor.layers.layernorm": ("RMSNorm", "GemmaRMSNorm"),
    "vllm.model_executor.layers.activation": (
        "SiluAndMul", "MulAndSilu", "GeluAndMul", "NewGELU", "FastGELU", "QuickGELU", "ReLUSquaredActivation",
        "SwigluOAIAndMul",
    ),
}  # fmt: skip
_PLACED = {"RMSNorm": ("x", "residual"), "GemmaRMSNorm": ("x", "residual")}


def forward_native(call: Call) -> dict[str, Any] | None:
    """What vLLM's forward_native gives for this call, by role; None where vLLM is not installed, or has none for it
    that can be run by itself. Never raises."""
    cls = _native_class(call.cls)
    if cls is None:
        return None
    try:
        module = object.__new__(cls)
        torch.nn.Module.__init__(module)
        for name, value in call.attrs.items():
            setattr(module, name, value)
        for name, value in call.params.items():
            setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
        module.__dict__ |= {"variance_size_override": None, "pass_weight": True, "pass_weight_add": True}
        names = _PLACED.get(call.cls, ("x", "input", "0"))
        placed = laid_out(replace(call, inputs={n: call.inputs[n].clone() for n in names if n in call.inputs}))
        with torch.no_grad():
            result = module.forward_native(*placed.inputs.values())  # bound, or static as some of vLLM's are
    except Exception:  # another version of vLLM needs more than was recorded: torch's operators stand in
        return None
    values = result if isinstance(result, (tuple, list)) else (result,)
    return {f"output.{k}": v for k, v in enumerate(values)}


@functools.cache
def _native_class(name: str) -> Any | None:
    for path, names in _MODULES.items():
        if name in names and importlib.util.find_spec("vllm") is not None:
            before = logging.root.manager.disable
            logging.disable(logging.WARNING)  # that Triton has no CPU backend concerns nobody who runs opcheck
            try:
                return getattr(importlib.import_module(path), name, None)
            except Exception:  # a vLLM that cannot be imported here is none
                return None
            finally:
                logging.disable(before)
    return None
