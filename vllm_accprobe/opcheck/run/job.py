"""What one check of opcheck was requested to do, as its processes get it. Needs no torch.

Elsewhere: the processes (process_pool.py), the dump that is opened for it (open_job.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_accprobe.dump.decode import decode

EXACT, DEVICE, GOLDEN, AGAIN = "float64", "device", "golden", "rerun"
_FIRST = ("dump", "model", "ops", "ids", "against", "golden", "standard", "kl", "backward", "seed", "save")
"""Fields that are always in its JSON. Others are left out while empty, so that what was begun before them goes on."""


@dataclass(frozen=True)
class Job:
    """What is requested. dump, model, golden: paths, the last two may be ""; against: EXACT, DEVICE, GOLDEN or AGAIN;
    standard, kl, ids: as check_calls.Options has them; backward: gradients too; seed: of drawn inputs and gradients;
    save: where failed calls are written, "" for nowhere. repeat, batch: instead of a reference, runs of each call
    here (repeated.py), and sizes of batches (by_rows.py); named: an operator (named_operator.py), as JSON, without a
    dump; load: modules to import first; attributes: of modules, that were not recorded (records.py). devices: what
    is checked is what the operators give here, on these; white, black: API names (opcheck/compat/msprobe.py); once:
    calls that differ in values alone are checked once; jit: an NPU compiles its operators. Of ATB's dumps:
    operations: only these, as ``24_1`` (opcheck/compat/ait.py); op_csv: the table of operators; within: the share of
    elements within ait's tolerance, absolute (opcheck/compat/ait.py)."""

    dump: str
    model: str = ""
    ops: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    against: str = EXACT
    golden: str = ""
    standard: str = "operator"
    kl: bool = False
    backward: bool = False
    seed: int = 0
    save: str = ""
    repeat: int = 0
    batch: tuple[str, ...] = ()
    named: Mapping[str, Any] | None = None
    load: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    white: tuple[str, ...] = ()
    black: tuple[str, ...] = ()
    once: bool = False
    jit: bool = False
    operations: tuple[str, ...] = ()
    op_csv: str = ""
    within: bool = False

    @property
    def runs_here(self) -> bool:
        """Whether this machine's own kernels are run, which need all of its threads."""
        return bool(self.repeat or self.batch or self.named is not None)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {k: v for k, v in asdict(self).items() if v or k in _FIRST}

    def on(self, device: str) -> Job:
        """The same for one of its devices."""
        return replace(self, devices=(device,))

    @classmethod
    def from_json(cls, tree: Any) -> Job:
        return decode(cls, tree)


Tap = tuple[int, str, str]
"""(rank, tap, class); STORED stands for the parameters."""
TOGETHER = (None, -1)
"""What begins where several calls are evaluated as one: whose fault a crash is then shows when each is alone."""
STORED: Tap = (-1, "", "")
