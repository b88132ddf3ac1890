"""How well a sketch's interval holds the true error, over many tensors.

    python scripts/sketch_coverage.py                              10,000 made tensors, 2,000 of each of five kinds
    python scripts/sketch_coverage.py --pair GOLDEN MINE ...       tensors of captures; can be repeated
    ... --figure FILE.svg                                          a histogram of estimate / true error

Exit code 1 where fewer than 95 % of the rows lie within the interval of 95 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vllm_accprobe.comparison.engine import open_both
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.plan.make_plan import Indices, make_plan
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.golden.pack import place_name
from vllm_accprobe.golden.sketch import NUMBERS, ROUNDING, Sketch, distances, quantile, signs_of, turned

KINDS = ("normal", "one element", "one column in ten", "a factor", "heavy tails")
EDGES = np.linspace(0.0, 2.5, 51)
Tensor = tuple[str, np.ndarray, np.ndarray]
"""Name, and golden's and mine's rows."""


def made(count: int) -> Iterator[Tensor]:
    random = np.random.default_rng(0)
    for number in range(count):
        kind, width = KINDS[number % len(KINDS)], int(random.integers(32, 4096))
        golden, error = (random.standard_normal((4, width)).astype(np.float32) for _ in range(2))
        if kind == "one element":
            error *= np.arange(width) == width // 2
        elif kind == "one column in ten":
            error *= np.arange(width) % 10 == 0
        elif kind == "a factor":
            error = golden
        elif kind == "heavy tails":
            error = error**5
        yield f"{kind}#{number}", golden, golden + np.float32(10.0 ** random.uniform(-3, 0)) * error


def captured(golden: Path, mine: Path) -> Iterator[Tensor]:
    """Rows that meet and differ, tensor by tensor: those of one step of mine and one of golden."""
    dumps = open_both(golden, mine)
    plan = make_plan(*dumps)
    indices, loaders = Indices((plan.tokens.golden, plan.tokens.mine)), [Loader(d) for d in dumps]
    for unit in plan.units:
        groups = [g for g in unit.golden if g.where is not None and g.readable]
        for group in unit.mine if groups and not unit.is_param else ():
            float_kind = DTYPES[group.first.dtype].kind == "float" == DTYPES[groups[0].first.dtype].kind
            if group.where is None or not group.readable or not float_kind:
                continue
            met = indices.meet(group.where, tuple(g.where for g in groups if g.where is not None))
            if met is None:
                continue
            ours = loaders[1].load(group)
            for number in met.used:
                at = np.flatnonzero(met.number == number)
                theirs = loaders[0].load(groups[number])
                if theirs.data.shape[1] == ours.data.shape[1] >= NUMBERS:
                    g, m = widen(theirs.data[met.other[at]], theirs.dtype), widen(ours.data[met.row[at]], ours.dtype)
                    yield place_name(unit.golden_key) + f"|{group.moment}|{number}", g, m
        for loader in loaders:
            loader.forget()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, nargs=2, action="append", default=[], metavar=("GOLDEN", "MINE"))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--figure", type=Path, metavar="FILE")
    args = parser.parse_args()
    sources = [captured(*pair) for pair in args.pair] or [made(args.count)]
    tensors, held, ratios, squares = 0, [], [], []
    for source in sources:
        for name, golden, mine in source:
            true = np.linalg.norm(golden.astype(np.float64) - mine, axis=1)
            some = np.isfinite(true) & (true > 0)
            if not some.any():
                continue
            signs = signs_of(0, name.partition("|")[0], golden.shape[1])
            golden, mine = (turned(side[some], np.arange(some.sum())) for side in (golden, mine))
            sides = Sketch.unpacked(*Sketch.of(golden, signs).packed()), Sketch.of(mine, signs)
            found, low, high = distances(*sides, 0.05)
            tensors += 1
            held.append((low <= true[some]) & (true[some] <= high))
            seen = true[some] > 10 * ROUNDING * sides[0].norm
            ratios.append((found / true[some])[seen])
            squares.append((found**2 / true[some] ** 2)[seen])
    inside, ratio, square = (np.concatenate(x) for x in (held, ratios, squares))
    spread = np.sqrt(2 / NUMBERS)
    print(f"{tensors:,} tensors, {len(inside):,} rows with an error: {inside.mean():.2%} within the interval of 95 %")
    print(f"estimate² / error²: mean {square.mean():.4f} (1 expected), standard deviation {square.std():.3f} "
          f"(at most {spread:.3f} where elements are many)")  # fmt: skip
    if args.figure:
        args.figure.write_text(figure(ratio, f"{tensors:,} tensors, {len(ratio):,} rows"))
    return int(inside.mean() < 0.95)


def figure(ratio: np.ndarray, about: str) -> str:
    """Bars of estimate / true error, and the interval's ends for a row whose error is the estimate."""
    counts, _ = np.histogram(ratio, EDGES)
    wide, high = 12, 220
    bars = "".join(
        f'<rect x="{40 + i * wide}" y="{20 + high - high * n / max(counts.max(), 1):.1f}" width="{wide - 1}" '
        f'height="{high * n / max(counts.max(), 1):.1f}" fill="#3b6ea5"/>'
        for i, n in enumerate(counts.tolist())
    )
    per = wide / (EDGES[1] - EDGES[0])
    lines = "".join(
        f'<line x1="{40 + x * per:.1f}" x2="{40 + x * per:.1f}" y1="10" y2="{20 + high}" stroke="#b03030" '
        'stroke-dasharray="4"/>'
        for x in (np.sqrt(quantile(0.975) / NUMBERS), np.sqrt(quantile(0.025) / NUMBERS))
    )
    marks = "".join(
        f'<text x="{40 + x * per:.1f}" y="{38 + high}" text-anchor="middle">{x:g}</text>' for x in (0, 0.5, 1, 1.5, 2)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="680" height="290" font-family="sans-serif" font-size="13">'
        f'{bars}{lines}{marks}<text x="340" y="{60 + high}" text-anchor="middle">estimate / true error ({about}); '
        "dashed: 95 % of rows lie between</text></svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
