"""Whether an output that came out otherwise is still what an honest kernel may give.

The problem: sums in another order differ in the last bit, and so does a kernel that lost an addend, only further. The
idea: the same floors as everywhere in opcheck. Where the operator has a reference and the output at hand passes it,
the other output is held against the reference; else against the output at hand, with a rounding of its own more, as
`--rerun` does with another machine's. Not here: which outputs (repeated.py, by_rows.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.judge.floor import unit
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.reference_table import References


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
        """(verdict on ``other`` in the place of base[role], what it was held against)."""
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
