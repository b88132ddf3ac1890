"""A measured floor: what correct runs of one model differ by, tap by tap, and the file that holds it.

The problem: a model of rounding knows dtypes and depths, not that this model amplifies at layer 30. The idea: golden's
side is run twice, with other batches, reduction order or dtype, and compared with itself. The result is a few numbers
per tap, made once on the reference machine and carried to the other as a file. A limit is never below MARGIN times the
floor, an origin that golden's own runs show as strongly is none; a floor never makes a limit tighter. Not here: making
one from dumps (comparison/verdict/judging.py), the model of rounding (rounding_unit.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_accprobe.dump.decode import DecodeError, Size, parse
from vllm_accprobe.judge.constants import FLOOR_MARGIN
from vllm_accprobe.whole_file import write_text

NAME = "calibration.json"
KIND = "accprobe calibration"
VERSION = 1
MARGIN = FLOOR_MARGIN
"""How much further than two correct runs of one machine an correct run of another may be."""
PHASES = ("prefill", "decode", "any")
SECOND_RUN, FLOAT32, MODEL = "second golden run", "float32 golden", "rounding model"
_MOST_BYTES = 256 << 20

Floors = dict[tuple[str, str], dict[str, float]]
"""(tap, role) → phase (PHASES) → the worst row's relative L2 error, finite."""


class CalibrationError(Exception):
    """The file is no calibration; the message is one line."""


@dataclass(frozen=True)
class Calibration:
    """floors: see `Floors`. origins: tap → the worst error that golden's own runs create there. model, dtype: of the
    golden; runs: what was compared with it; source: SECOND_RUN or FLOAT32."""

    floors: Floors
    origins: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    dtype: str = ""
    runs: tuple[str, ...] = ()
    source: str = SECOND_RUN

    def floor(self, tap: str, role: str, phase: str | None) -> float | None:
        """The measured floor of a pair, or None where there is none or the runs agree to the bit."""
        found = self.floors.get((tap, role))
        if found is None:
            return None
        value = found.get(phase or "any", 0.0) or found.get("any", 0.0)
        return value if value > 0 else None

    def excuses(self, tap: str, worst: float) -> bool:
        return tap in self.origins and worst <= MARGIN * self.origins[tap]

    def save(self, directory: Path) -> Path:
        """Writes ``directory``/calibration.json, whole or not at all, and returns its path. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        rows = [[tap, role, [phases.get(p) for p in PHASES]] for (tap, role), phases in sorted(self.floors.items())]
        text = json.dumps(
            {
                "kind": KIND, "version": VERSION, "model": self.model, "dtype": self.dtype, "runs": list(self.runs),
                "source": self.source, "phases": list(PHASES), "origins": dict(self.origins), "floors": rows,
            }
        )  # fmt: skip
        path = directory / NAME
        write_text(path, text + "\n")
        return path


def joined(calibrations: Iterable[Calibration]) -> Calibration | None:
    """The floor of several: the larger where they meet. None of none."""
    every = list(calibrations)
    if len(every) < 2:
        return every[0] if every else None
    floors: Floors = {}
    origins: dict[str, float] = {}
    for one in every:
        for key, phases in one.floors.items():
            here = floors.setdefault(key, {})
            for phase, value in phases.items():
                here[phase] = max(value, here.get(phase, 0.0))
        for tap, worst in one.origins.items():
            origins[tap] = max(worst, origins.get(tap, 0.0))
    first = every[0]
    second = any(c.source == SECOND_RUN for c in every)
    runs = tuple(r for c in every for r in c.runs)
    return Calibration(floors, origins, first.model, first.dtype, runs, SECOND_RUN if second else FLOAT32)


def is_calibration(path: Path) -> bool:
    return (path / NAME).is_file() if path.is_dir() else path.name == NAME and path.is_file()


def load(path: Path) -> Calibration:
    """What `Calibration.save` wrote, from its directory or the file itself. Raises CalibrationError."""
    path = path / NAME if path.is_dir() else path
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        raw = parse(_CalibrationFile, text, _MOST_BYTES, {"kind": KIND, "version": VERSION, "phases": list(PHASES)})
    except (OSError, DecodeError) as e:
        raise CalibrationError(f"{path} cannot be read as a calibration ({str(e)[:100]}): make it anew with "
                               "`accprobe compare --calibrate`") from None  # fmt: skip
    floors = {
        (tap, role): {p: v for p, v in zip(PHASES, values, strict=True) if v is not None}
        for tap, role, values in raw.floors
    }
    source = FLOAT32 if raw.source == FLOAT32 else SECOND_RUN
    return Calibration(floors, raw.origins, raw.model, raw.dtype, raw.runs, source)


@dataclass(frozen=True)
class _CalibrationFile:
    """floors: (tap, role, the worst error in each of PHASES)."""

    floors: list[tuple[str, str, tuple[Size | None, Size | None, Size | None]]]
    origins: Mapping[str, Size]
    model: str
    dtype: str
    runs: tuple[str, ...]
    source: str = SECOND_RUN
