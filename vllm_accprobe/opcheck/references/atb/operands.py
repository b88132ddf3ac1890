"""One ATB operator's call: its inputs by number, its outputs, its parameters by name.

The problem: ATB's operators have no named arguments; which tensor is what follows from the parameters, and a dump may
lack them, or have inputs only as they were after the operator. The idea: `Operands` gives inputs by number and
parameters by name, and declines in the same words everywhere; ``operator`` marks a function from Operands to its
outputs as a reference, and adds what is true of all: an input that the operator does not write to is unchanged after
it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, Reference, decline_if, reference, required
from vllm_accprobe.opcheck.references.parts import equal, unit_of

Tensor = Any  # a torch.Tensor
Outputs = Mapping[str, "Expected | Tensor"]
UNKNOWN = "its parameters are not in the dump (op_param.json, the table of operators, the topology)"
AFTER = "an input that was kept behind the operator only: nothing to hold it against"
ACL = {
    0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16, 9: torch.int64,
    11: torch.float64, 12: torch.bool, 27: torch.bfloat16, 35: torch.float8_e5m2, 36: torch.float8_e4m3fn,
}  # fmt: skip
"""aclDataType; -1 stands for none."""
UNDEFINED = -1
_NAMES = """
activationType allReduceType asymmetric axes axis backend batch batchDims batchRunStatusEnable beginNormAxis
beginParamsAxis cacheType calcType clampMax clampMin clampType commDomain commMode compressType concatDim
cosFormat cumSumInt64 cumSumNum depth deviceExpert dim dynamicQuantType elewiseType enAccum enableExpertMapping
ends epSize epsilon exclusive faUpdateType geluMode groupMultiFlag groupNum groupTopk hasBias hasQuantOffset
hasResidual hcclComm headNum indexType inputLayout inputOffset inputScale isNorm isTriuMask k keepIntermediate
kernelType kvCacheCfg kvHeadNum kvcacheCfg layerNormEps layerType lda ldb ldc local_expert_nums logProbsSize m
maskType matmulType maxSeqLen mlaVHeadSize modelType mulsParam multiples n normParam num numSamples offset offsets
opMode outCrops outDataType outDim outTensorType perm postNormParam preNormParam precisionMode qScale qSeqLen
qkScale quantGroupSize quantMode quantParam quantType randSeed randSeeds rank rankRoot rankSize rankTableFile
reduceType reduction reverse rotaryCoeff rstd scale scaleType seqLen size sp splitDim splitNum splitSizes starts
stride strideA strideB strideC strides tilingK tilingN topk topkExpertNum topkToppSamplingType tpSize transWeight
transdataType transposeA transposeB type value varAttr windowSize withMask zoomScaleValue activationFuncType
linearType rmsNormEps transA transB
"""
KNOWN = frozenset(_NAMES.split())
"""Parameters that are known here, and the few of ATB before 2.0 that are. Another one that is set makes another
operator of it: one of a newer or an older release, which nothing here was compared with."""


class Operands:
    """call: as calls/module_index.py makes it, inputs ``0``, ``1``, ..., attribute ``param``."""

    def __init__(self, call: Call):
        self.call = call
        found = call.attrs.get("param")
        self._known = isinstance(found, Mapping)
        self._param: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        _only_known(self._param)

    def __len__(self) -> int:
        """How many inputs there are, gaps counted."""
        numbers = [int(k) for k in self.call.inputs if k.isdecimal()]
        return max(numbers, default=-1) + 1

    @property
    def unit(self) -> float:
        """One rounding of the first output's dtype."""
        return self.call.unit

    @property
    def input_unit(self) -> float:
        """One rounding of input 0's dtype."""
        return unit_of(self.tensor(0))

    def maybe(self, k: int) -> Tensor | None:
        """Input k; None where there is none. An empty one (ATB's way to leave one out) is none."""
        found = self.call.inputs.get(str(k))
        return found if found is not None and found.numel() else None

    def tensor(self, k: int) -> Tensor:
        """Input k in its own dtype; raises Declined."""
        return required(self.call.inputs.get(str(k)), f"input {k} was not captured")

    def wide(self, k: int) -> Tensor:
        """Input k in float64."""
        return self.tensor(k).double()

    def counts(self, k: int) -> list[int]:
        """Input k, integers, as a flat list."""
        return [int(n) for n in self.tensor(k).reshape(-1)]

    def output(self, k: int = 0) -> Tensor:
        """What was captured as output k; raises Declined."""
        return required(self.call.outputs.get(f"output.{k}"), f"output {k} was not captured")

    def has(self, *names: str) -> bool:
        return any(name in self._param for name in names)

    def param(self, name: str, default: Any) -> Any:
        """A parameter, ATB's ``default`` where others are there. Raises Declined: none is, or it is of another kind."""
        decline_if(not self._known, UNKNOWN)
        found = self._param.get(name, default)
        kinds: dict[type, Any] = {bool: (bool, int), float: (int, float)}
        if not isinstance(found, kinds.get(type(default), type(default))):
            raise Declined(f"parameter {name} is {str(found)[:40]!r}")
        if not isinstance(found, (str, list)) and not _is_finite(found):
            raise Declined(f"parameter {name} is no finite number")
        return type(default)(found) if isinstance(default, (bool, float)) else found

    def part(self, name: str) -> Operands:
        """The parameters below ``name`` (``normParam``), with the same tensors."""
        found = Operands(self.call)
        inner = self._param.get(name, {})
        if not isinstance(inner, Mapping):
            raise Declined(f"parameter {name} is {str(inner)[:40]!r}")
        found._known, found._param = self._known, inner
        return found

    def numbers(self, name: str, default: Sequence[float] | None = None) -> list[Any]:
        """A parameter that is a list of numbers; raises Declined."""
        found = self.param(name, list(default) if default is not None else [])
        decline_if(not found and default is None, f"parameter {name} was not recorded")
        if not all(type(n) in (int, float) and _is_finite(n) for n in found) or len(found) > 1 << 16:
            raise Declined(f"parameter {name} is no list of numbers")
        return found

    def integers(self, name: str, default: Sequence[int] | None = None) -> list[int]:
        """`numbers`, as integers."""
        return [int(n) for n in self.numbers(name, default)]

    def axis(self, name: str, default: int, k: int = 0) -> int:
        """A parameter that is a dimension of input k, counted from the front; raises Declined."""
        return axis_of(self.param(name, default), self.tensor(k).dim())

    def exactly(self, count: int) -> None:
        """Raises Declined where there are more inputs than the parameters require: one of them is unknown."""
        if len(self) > count:
            raise Declined(f"{len(self)} inputs, where its parameters ask for {count}")

    def fits(self, size: int) -> None:
        """Raises Declined where ``size``, which a parameter requires, is not output 0's: a dump must not decide on
        memory."""
        decline_if(size != self.output().numel(), "its parameters do not fit the output that was captured")


def axis_of(axis: Any, dims: int) -> int:
    """A dimension counted from the front; raises Declined where there is none of this number."""
    if not isinstance(axis, int) or not -dims <= axis < max(dims, 1):
        raise Declined(f"{axis!r} is none of {dims} dimensions")
    return axis % max(dims, 1)


def _is_finite(value: float) -> bool:
    """JSON as tools write it has NaN, and integers of any size."""
    return abs(value) <= sys.float_info.max


def _only_known(param: Mapping[str, Any], depth: int = 0) -> None:
    for name, value in param.items():
        if isinstance(value, Mapping) and depth < 4:
            _only_known(value, depth + 1)
        elif value and name not in KNOWN:
            raise Declined(f"parameter {name[:40]} is not known here")


_REFUSALS = (RuntimeError, IndexError, ValueError, ArithmeticError)
"""What torch raises for parameters that do not fit its tensors."""
NO_FIT = "its parameters do not fit its inputs"


def operator(*names: str, moves: bool = False, writes: int | None = None) -> Callable[[Any], Reference]:
    """Marks a function of Operands as the reference of these types. It returns outputs by role (``output.0``,
    ``inplace.2``), or output 0, or a list of outputs; a tensor must be equal to the bit. moves: numbers are moved by
    torch's own operations alone, which refuse parameters that do not fit: then the call is declined. writes: the input
    that output 0 is written over."""

    refusals = _REFUSALS if moves else ()

    def mark(function: Callable[[Operands], Any]) -> Reference:
        @functools.wraps(function)
        def judged(call: Call) -> Outputs:
            try:
                found = function(Operands(call))
            except refusals:
                raise Declined(NO_FIT) from None
            if not isinstance(found, Mapping):
                found = {f"output.{k}": y for k, y in enumerate(found if isinstance(found, (list, tuple)) else [found])}
            found = {role: equal(y) if isinstance(y, torch.Tensor) else y for role, y in found.items()}
            if writes is not None:
                found[f"inplace.{writes}"] = found["output.0"]
            return {**_unchanged(call), **found}

        return reference(*names)(judged)

    return mark


def _unchanged(call: Call) -> dict[str, Expected]:
    """Inputs as they are after the operator: as before it."""
    found = {}
    for role, after in call.outputs.items():
        if not role.startswith("inplace."):
            continue
        name = role.removeprefix("inplace.")
        before = call.inputs.get(name)
        if before is None or name in call.attrs.get("kept_after", ()) or before.shape != after.shape:
            found[role] = equal(after, only_measured=AFTER)
        else:
            found[role] = equal(before)
    return found
