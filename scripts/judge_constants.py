"""Remakes the numbers of judge/constants.py that are measured, from clean pairs of a laboratory's tuned half.

The problem: a number that was measured once cannot be checked by who comes later. The idea: one subcommand per number.
``tails``: how far the outermost rows of honest tensors lie, in units of what a normal distribution's would.
``created``: what honest operators add to their inputs' errors, in roundings, and how far layers lie apart in it.
    python scripts/judge_constants.py tails|created ROOT [ROOT ...]     (ROOT: kept by scripts/faults.sh --keep)
Not here: opcheck's numbers (opcheck_floors.py), alarms among honest layers that differ (simulate_judge.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import special

HERE = Path(__file__).resolve().parents[1]
for folder in (".", "tests", "scripts"):
    sys.path.insert(0, str(HERE / folder))

from lab.cases import TUNED  # noqa: E402
from lab.judging import Pair  # noqa: E402
from lab.ways import CLEAN, MORE_CLEAN  # noqa: E402
from vllm_accprobe.comparison import engine  # noqa: E402
from vllm_accprobe.judge import constants as c  # noqa: E402
from vllm_accprobe.judge.chance import deviation, tail  # noqa: E402
from vllm_accprobe.judge.origins import origin  # noqa: E402
from vllm_accprobe.judge.origins.outliers import Peers  # noqa: E402
from vllm_accprobe.judge.origins.peer_evidence import Known, Look  # noqa: E402


def looks_of(roots: list[Path]) -> Iterator[Look]:
    """All places of the clean pairs kept under ``roots`` that are tuned on."""
    found: list[Look] = []

    class Kept(Peers):
        def __init__(self, looks: list[Look], rate: float):
            super().__init__(looks, rate)
            found.extend(looks)

    origin.Peers = Kept  # type: ignore[misc]
    for root in roots:
        for model, golden, mine in [*CLEAN, *MORE_CLEAN]:
            runs = (root / "_runs" / f"{model}-{golden}", root / "_runs" / f"{model}-{mine}")
            pair = Pair(None, model, golden, mine, runs)
            if pair.half == TUNED and pair.there:
                engine.compare(*runs)
                yield from found
                found.clear()


def tails(looks: Iterator[Look]) -> None:
    """Of rows' growth and gain, places of 64 rows and more."""
    ratios = []
    for look in looks:
        rows = len(look.keys)
        if rows < 64 or look.width < c.NARROW or not np.isfinite(look.err).all() or not look.err.any():
            continue
        expected = float(-special.ndtri(0.5 / rows))
        for values in (look.growth, look.gain):
            middle, bulk = deviation(values)
            spread = max(bulk, tail(values, middle), c.LEAST_ROW_SPREAD if values is look.growth else 0.0)
            if spread > 0:
                ratios.append(float(np.abs(values - middle).max()) / spread / expected)
    told = {q: round(float(np.quantile(ratios, q)), 2) for q in (0.5, 0.9, 0.99, 1.0)}
    print(f"tails of {len(ratios)} numbers of places, outermost row over a normal distribution's: {told}")


def created(looks: Iterator[Look]) -> None:
    """In roundings, what the typical row of an honest place adds."""
    made = [Known(x).made / x.unit for x in looks if len(x.keys) >= c.FEW and np.isfinite(x.err).all()]
    told = {q: round(float(np.quantile(made, q)), 2) for q in (0.5, 0.9, 0.99, 1.0)}
    print(f"created at {len(made)} places, u: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("tails", "created"))
    parser.add_argument("roots", nargs="+", type=Path, metavar="ROOT")
    args = parser.parse_args()
    {"tails": tails, "created": created}[args.what](looks_of(args.roots))


if __name__ == "__main__":
    main()
