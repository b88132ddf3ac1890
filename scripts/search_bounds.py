"""Searches for right kernels that break the error bounds and limits of references/, and prints the worst of each.

The problem: a bound holds by its derivation, and one that forgets a rounding calls a right kernel wrong, with a
chance of 0. The idea: inputs of eight kinds are drawn (normal, heavy-tailed, a large offset, cancelling, tiny, near
powers of two, of few values, of few bits), kernels that are right (rounding_kernels.py) round wherever the reference
allows it, and the largest error in units of its limit counts; then the worst inputs are changed, element by element,
for as long as that grows. The same outputs go through the judge: alarms are counted, of the kinds whose roundings are
as good as independent apart from those that are made of few values or bits.
A ratio of 1 is the limit: rounding to nearest against bound + half a step, rounding toward zero against twice that,
which is what the judge has. Exit codes: 0 where no ratio is above 1 and at most 1 alarm in 10,000 is raised, else 1.

    python scripts/search_bounds.py [--trials 200] [--climb 300] [--seed 0] [--only NAME] [--list]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rounding_kernels import KINDS, MIXED, NEAREST, ORDERS, ZERO, Case, Inputs, Way, as_type, cases, draw, on_grid

from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.kernels.float_formats import smallest
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.floors.verdict import proved
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.registry import default_references

Tensor = Any  # a torch.Tensor
MOST = 1e-4
"""Of all calls, above their limits (issue 25)."""
STRUCTURED = ("tiny", "powers", "few", "edges")
"""Kinds whose roundings are not independent, a row of one large number and many small ones among them: counted
apart."""
_GRID = 2.0**-12
_TINY = 2.0**-110
"""Numbers below that are left out, where float32 has few bits."""
TABLE = default_references()


@dataclass
class Found:
    """Of one reference. worst: by direction (ratio, dtype, kind, role); alarms, calls: of the judge, by whether the
    inputs are structured; errors: calls whose error was measured."""

    worst: dict[str, tuple[float, str]] = field(default_factory=lambda: {NEAREST: (0.0, ""), ZERO: (0.0, "")})
    alarms: Counter[bool] = field(default_factory=Counter)
    calls: Counter[bool] = field(default_factory=Counter)
    errors: int = 0
    samples: list[str] = field(default_factory=list)
    best: tuple[float, Inputs, Way] | None = None

    def see(self, ratio: float, way: Way, what: str) -> None:
        self.errors += 1
        if ratio > self.worst[way.direction][0]:
            self.worst[way.direction] = ratio, what

    @property
    def ratio(self) -> float:
        return max(r for r, _ in self.worst.values())


def expected(case: Case, inputs: Inputs, dtype: str) -> dict[str, Expected]:
    """What the reference says of these inputs; raises Declined."""
    call = case.call({n: as_type(t, dtype) for n, t in inputs.items()}, dtype)
    found = TABLE.evaluate(call)
    if isinstance(found, Declined):
        raise found
    return found


def limits(rows: OutputRows, dtype: str, direction: str) -> Tensor:
    """What is proved of each element, float64 [rows, width], as verdict.py has it. To nearest, a number just below a
    power of two may be rounded above it, half a step of the grid there."""
    y = torch.nan_to_num(rows.reference.double(), posinf=0.0, neginf=0.0)
    u = unit(dtype) if rows.expected.unit is None else rows.expected.unit
    far = y.abs() + (rows.bound if direction == NEAREST else 0.0)
    steps = torch.ldexp(torch.ones_like(y), torch.frexp(far).exponent - 1) * (far != 0)
    half = (steps * u if u >= _GRID else u * y.abs()).clamp(min=0.5 * smallest(dtype))
    return proved(y, half, rows.bound, y.square().sum(1))


def ratios(rows: OutputRows, dtype: str, direction: str) -> Tensor:
    """Error over limit, float64 [rows, width]."""
    y = rows.reference.double()
    d = (rows.mine.double() - y).abs()
    seen = torch.isfinite(d) & ((y.abs() > _TINY) | (dtype == "float16"))
    d = torch.where(seen, d, 0.0)
    return d / ((0.5 if direction == NEAREST else 1.0) * limits(rows, dtype, direction)).clamp(min=1e-300)


def outputs(case: Case, said: dict[str, Expected], inputs: Inputs, way: Way) -> Iterable[tuple[str, str, OutputRows]]:
    """(role, its dtype, exact and rounded) of each output that both the reference and the kernel give."""
    made = case.kernel(way, inputs)
    for role, y in made.items():
        if role in said:
            dtype = case.widths.get(role, "float32" if role == "input.topk_weights" else way.dtype)
            mine = as_type(y, dtype)
            if bool(torch.isfinite(mine).all()):  # float16 overflows, which is no rounding
                yield role, dtype, OutputRows.of(said[role], mine, 0)


def ways(g: torch.Generator, dtype: str, count: int) -> list[Way]:
    """Those of a draw: all roundings, none, and each or not; both directions; functions exact or off."""

    def one() -> Way:
        a, b, c, d, seed = (int(torch.randint(0, 60, (1,), generator=g)) for _ in range(5))
        off = (None, None, None, 1.0, -1.0, MIXED)[c % 6]
        cuts = 1 if off is None else 1 << 30  # the judge allows for one intermediate result that is cut (rounding.py)
        early, direction = (1.0, 0.5, 0.0)[a % 3], (NEAREST, NEAREST, ZERO)[b % 3]
        return Way(dtype, early, direction, ORDERS[d % 4], off, cuts, seeded(seed))

    return [one() for _ in range(count)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def again(way: Way) -> Way:
    """The same way from its beginning: the same roundings take place."""
    return replace(way, generator=seeded(way.generator.initial_seed()))


def search(case: Case, trials: int, seed: int, found: Found, judged: bool = True) -> None:
    """Random inputs of each kind and dtype in turn."""
    g = seeded(seed)
    for n in range(trials):
        kind, dtype = KINDS[n % len(KINDS)], case.dtypes[n // len(KINDS) % len(case.dtypes)]
        inputs = case.inputs(g, kind, dtype)
        said = expected(case, inputs, dtype)
        for way in ways(g, dtype, 4):
            way = again(way)
            for role, own, rows in outputs(case, said, inputs, way):
                if rows.bound is not None:
                    worst = float(ratios(rows, own, way.direction).max()) if rows.reference.numel() else 0.0
                    found.see(worst, way, f"{dtype}, {kind} inputs, {role}")
                    weight = worst * (1.0 if dtype != "float32" else 0.5)
                    if way.off is not None and (found.best is None or weight > found.best[0]):
                        found.best = weight, inputs, again(way)
                if judged and way.off is None:
                    verdict = rows.judge(own)
                    found.calls[kind in STRUCTURED] += 1
                    found.alarms[kind in STRUCTURED] += not verdict.passed
                    if not verdict.passed and len(found.samples) < 8:
                        found.samples.append(
                            f"{dtype}, {kind}, {role}, early {way.early}, {way.direction}: {verdict.measure} "
                            f"{verdict.value:.3g} of {verdict.limit:.3g}, {verdict.tier}"
                        )


def climb(case: Case, steps: int, seed: int, found: Found) -> None:
    """From the worst inputs that were drawn, changes that make it worse; rows that stand alone, each by itself."""
    for n, dtype in enumerate(case.dtypes[:2]):
        g = seeded(seed + n)
        for direction in (NEAREST, ZERO):
            off, seed = (int(torch.randint(0, 60, (1,), generator=g)) for _ in range(2))
            way = Way(dtype, 1.0, direction, "forward", (1.0, -1.0, MIXED)[off % 3], generator=seeded(seed))
            inputs = case.inputs(g, "few", dtype)
            if found.best is not None and found.best[2].dtype == dtype:
                inputs, way = found.best[1], replace(found.best[2], direction=direction)
            worst = _ratio(case, inputs, way, found)
            for step in range(steps):
                other = changed(g, case, inputs, dtype)
                new = _ratio(case, other, way, found)
                if case.by_rows and step % 4 and new.shape == worst.shape:
                    better = new > worst
                    inputs = {k: torch.where(better.reshape(-1, *[1] * (t.dim() - 1)), other[k], t)
                              if k in case.by_rows else t for k, t in inputs.items()}  # fmt: skip
                    worst = torch.maximum(new, worst)
                elif float(new.max()) >= float(worst.max()):
                    inputs, worst = other, new


def _ratio(case: Case, inputs: Inputs, way: Way, found: Found) -> Tensor:
    """The worst of each row of output.0, or of whatever there is."""
    said = expected(case, inputs, way.dtype)
    most = torch.zeros(1)
    for role, own, rows in outputs(case, said, inputs, again(way)):
        if rows.bound is None or not rows.reference.numel():
            continue
        each = torch.zeros(int(rows.at.max()) + 1 if rows.expected.rows is None else len(rows.expected.rows))
        each[rows.at] = ratios(rows, own, way.direction).amax(1).float()
        found.see(float(each.max()), way, f"{way.dtype}, climbing, {role}")
        most = torch.maximum(most, each) if most.shape in (each.shape, (1,)) else most
    return most


def changed(g: torch.Generator, case: Case, inputs: Inputs, dtype: str) -> Inputs:
    """Some elements drawn anew, moved to a neighbour, copied from another place, or a row made of few values."""
    found = {}
    whole = not case.by_rows or int(torch.randint(0, 4, (1,), generator=g)) == 0
    for name, t in inputs.items():
        if not whole and name not in case.by_rows:
            found[name] = t
            continue
        kind = KINDS[int(torch.randint(0, len(KINDS), (1,), generator=g))]
        fresh = on_grid(draw(g, kind, dtype, *t.shape) * case.scale.get(name, 1.0), dtype)
        near = on_grid(t * (1.0 + 2.0**-7 * torch.randint(-1, 2, t.shape, generator=g)), dtype)
        copied = t[..., torch.randint(0, t.shape[-1], (1,), generator=g)].expand_as(t)
        what = (fresh, near, copied)[int(torch.randint(0, 3, (1,), generator=g))]
        share = (0.03, 0.2, 1.0)[int(torch.randint(0, 3, (1,), generator=g))]
        found[name] = torch.where(torch.rand(t.shape, generator=g) < share, what, t)
    return found


def run(case: Case, trials: int, steps: int, seed: int = 0) -> Found:
    found = Found()
    search(case, trials, seed, found)
    if steps:
        climb(case, steps, seed, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="inputs of each reference, four kernels each")
    parser.add_argument("--climb", type=int, default=300, help="steps from the worst, for two dtypes and directions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="references whose name contains this")
    parser.add_argument("--list", action="store_true", help="show alarms of the judge")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    whole, broken = Counter[str](), 0
    print(f"{'reference':<34}  nearest  to zero  kernels  alarms     of   few     of")
    for case in cases():
        if args.only not in case.name:
            continue
        begin = time.monotonic()
        try:
            found = run(case, args.trials, args.climb, args.seed)
        except Declined as why:
            print(f"{case.name:<34} declined: {why.reason}")
            broken += 1
            continue
        (near, where), (zero, where_zero) = found.worst[NEAREST], found.worst[ZERO]
        broken += found.ratio > 1.0
        whole.update(alarms=found.alarms[False], calls=found.calls[False])
        judged = (f"{found.alarms[k]:>{n}} {found.calls[k]:>6}" for k, n in ((False, 7), (True, 5)))
        print(f"{case.name:<34} {near:8.3f} {zero:8.3f} {found.errors:>8} {' '.join(judged)}  "
              f"{time.monotonic() - begin:.1f} s  {where}; {where_zero}", flush=True)  # fmt: skip
        if args.list:
            print("".join(f"    {s}\n" for s in found.samples), end="")
    print(f"{whole['alarms']} alarms in {whole['calls']:,} calls; {broken} bounds broken")
    return 1 if broken or whole["alarms"] > MOST * whole["calls"] else 0


if __name__ == "__main__":
    sys.exit(main())
