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
from typing import Any

import numpy as np
from scipy import special

HERE = Path(__file__).resolve().parents[1]
for folder in (".", "tests", "scripts"):
    sys.path.insert(0, str(HERE / folder))

from lab.cases import TUNED  # noqa: E402
from lab.judging import Pair  # noqa: E402
from lab.ways import CLEAN, MORE_CLEAN  # noqa: E402
from vllm_accprobe.comparison import engine  # noqa: E402
from vllm_accprobe.judge import constants as c, origins  # noqa: E402
from vllm_accprobe.judge.siblings import Siblings, TensorStats, deviation  # noqa: E402


def stats_of(roots: list[Path]) -> Iterator[TensorStats]:
    """All places of the clean pairs kept under ``roots`` that are tuned on."""
    found: list[TensorStats] = []

    class Kept(Siblings):
        def __init__(self, stats: list[TensorStats], rate: float, keeper: Any):
            super().__init__(stats, rate, keeper)
            found.extend(stats)

    origins.Siblings = Kept  # type: ignore[misc]
    for root in roots:
        for model, golden, mine in [*CLEAN, *MORE_CLEAN]:
            runs = (root / "_runs" / f"{model}-{golden}", root / "_runs" / f"{model}-{mine}")
            pair = Pair(None, model, golden, mine, runs)
            if pair.half == TUNED and pair.there:
                engine.compare(*runs)
                yield from found
                found.clear()


def tails(stats: Iterator[TensorStats]) -> None:
    """Of rows' gain, places of 64 rows and more."""
    ratios = []
    for here in stats:
        rows = len(here.keys)
        if rows < 64 or here.width < c.NARROW or not np.isfinite(here.err).all() or not here.err.any():
            continue
        expected = float(-special.ndtri(0.5 / rows))
        middle, bulk = deviation(here.gain)
        outer = float(np.quantile(np.abs(here.gain - middle), 0.9)) / float(special.ndtri(0.95))
        if max(bulk, outer) > 0:
            ratios.append(float(np.abs(here.gain - middle).max()) / max(bulk, outer) / expected)
    told = {q: round(float(np.quantile(ratios, q)), 2) for q in (0.5, 0.9, 0.99, 1.0)}
    print(f"tails of {len(ratios)} numbers of places, outermost row over a normal distribution's: {told}")


def created(stats: Iterator[TensorStats]) -> None:
    """In roundings, what the typical row of an honest place adds."""
    made = [x.made / x.unit for x in stats if len(x.keys) >= c.FEW and np.isfinite(x.err).all()]
    told = {q: round(float(np.quantile(made, q)), 2) for q in (0.5, 0.9, 0.99, 1.0)}
    print(f"created at {len(made)} places, u: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("tails", "created"))
    parser.add_argument("roots", nargs="+", type=Path, metavar="ROOT")
    args = parser.parse_args()
    {"tails": tails, "created": created}[args.what](stats_of(args.roots))


if __name__ == "__main__":
    main()
