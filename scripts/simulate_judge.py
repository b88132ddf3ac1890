"""How often an honest machine is blamed whose layers honestly differ: a simulation of what judge/siblings.py
sees.

The problem: one layer's rounding may be twice another's on a machine that is not at hand, and a judge that was tuned on
layers that are alike blames it. The idea: comparisons of honest noise are made up, in which the noise of each layer is
a lognormal factor times the usual, and alarms are counted. ``single``: one operator in a few layers, nothing else to
learn from; ``model``: eight operators per layer, with an attention among them, each passing on what came in.
    python scripts/simulate_judge.py [--comparisons 2000] [--sigma 0.5 0.8]
Not here: faults (lab).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from vllm_accprobe.judge.siblings import Siblings, TensorStats
from vllm_accprobe.judge.tensor_errors import Columns
from vllm_accprobe.kernels.structure import structure

UNIT = 2.0**-8
ROWS, WIDTH = 120, 64
Places = list[TensorStats]


def stats(tap: str, noise: float, before: np.ndarray, random: np.random.Generator, mixing: bool = False) -> TensorStats:
    """A tensor whose elements are off by ``noise`` times a normal number; before: float64 [ROWS], its inputs' error."""
    golden = random.standard_normal((ROWS, WIDTH))
    off = noise * random.standard_normal(golden.shape)
    power = (golden * golden).sum(1)
    err, gain = np.sqrt((off * off).sum(1) / power), (off * golden).sum(1) / power
    sums = Columns(structure(golden, golden + off))
    nothing = np.zeros(ROWS)
    rows = np.arange(ROWS), err, gain, before, nothing
    return TensorStats(tap, "output.0", UNIT, *rows, WIDTH, sums, (), mixing)


def single(random: np.random.Generator, sigma: float, layers: int, noise: float, before: float) -> Places:
    """One operator in ``layers`` layers."""

    def one(layer: int) -> TensorStats:
        came = before * (1.0 + 0.1 * random.standard_normal(ROWS))
        return stats(f"model.layers.{layer}.proj", noise * np.exp(sigma * random.standard_normal()), came, random)

    return [one(i) for i in range(layers)]


KINDS = ("input_layernorm", "qkv_proj", "attn", "o_proj", "post_attention_layernorm", "gate_up_proj", "act_fn", "down")


def model(random: np.random.Generator, sigma: float, layers: int, noise: float, before: float) -> Places:
    """All operators of a model, whose noise adds up."""

    def every() -> Iterator[TensorStats]:
        came = before * (1.0 + 0.1 * random.standard_normal(ROWS))
        for layer in range(layers):
            for kind in KINDS:
                made = noise * np.exp(sigma * random.standard_normal())
                size = float(np.hypot(np.median(came), made))
                here = stats(f"model.layers.{layer}.{kind}", size, came, random, kind == "attn")
                yield here
                came = here.err

    return list(every())


def alarms(make: Callable[[np.random.Generator], Places], comparisons: int, seed: int = 0) -> tuple[int, Counter[str]]:
    """(comparisons with an alarm, alarms by kind of sign)."""
    count, how = 0, Counter[str]()
    for i in range(comparisons):
        places = make(np.random.default_rng((seed, i)))
        siblings = Siblings(places)
        found = [f for f in map(siblings.judge, places) if f is not None]
        count += bool(found)
        how.update(f.how for f in found)
    return count, how


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=2000)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    args = parser.parse_args()
    for sigma in args.sigma:
        for name, kind in (("single", single), ("model", model)):
            for layers in args.layers:
                for noise, before in ((0.004, 0.005), (0.008, 0.005)):
                    # A model of eight operators takes eight times as long.
                    n = args.comparisons if kind is single else args.comparisons // 4
                    found, how = alarms(partial(kind, sigma=sigma, layers=layers, noise=noise, before=before), n)
                    what = f"noise {noise / UNIT:.1f} u, before {before / UNIT:.1f} u"
                    print(f"sigma {sigma}: {name}, {layers} layers, {what}: {found} of {n} {dict(how)}", flush=True)


if __name__ == "__main__":
    main()
