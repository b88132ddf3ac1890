"""Samples of samplers' operators: penalties, filters, draws."""

import numpy as np
import torch
from opcheck.samples.definitions import softmax
from opcheck.samples.dtypes import BRAIN, DOUBLE, LONG, SINGLE
from opcheck.samples.sample import Array, Draw, Made, made, sample, wide

ROWS = 4
PENALTIES = ("prompt tokens do not count", "divides below 0", "frequency counts once")


def _penalised(z: Array, prompt: Array, output: Array, factors: tuple[Array, Array, Array], fault: str) -> Array:
    presence, frequency, repetition = (f[:, None] for f in factors)
    tokens = np.arange(z.shape[1])
    times = (output[:, :, None] == tokens).sum(1)
    seen = (times > 0) | ((prompt[:, :, None] == tokens).any(1) & (fault != "prompt tokens do not count"))
    divided = (z > 0) | (fault == "divides below 0")
    y = np.where(seen, np.where(divided, z / repetition, z * repetition), z)
    return (
        y - frequency * (np.minimum(times, 1) if fault == "frequency counts once" else times) - presence * (times > 0)
    )


@sample(*PENALTIES, seeds=3, dtypes=(SINGLE, BRAIN), variants=[{"alone": a} for a in (False, True)])
def penalties(d: Draw, fault: str, alone: bool) -> Made | None:
    """alone: the repetition penalty, by masks of the tokens."""
    if alone and fault == "frequency counts once":
        return None
    words = d.below(11, 90)
    z, prompt, output = (
        d(ROWS, words, scale=2),
        d.ints(0, words + 1, ROWS, 6, dtype=LONG),
        d.ints(0, 9, ROWS, 7, dtype=LONG),
    )
    presence, frequency = (d.between(0, 0 if alone else 1, ROWS, dtype=DOUBLE) for _ in range(2))
    repetition = d.between(1, 2, ROWS, dtype=DOUBLE)
    factors = (wide(presence), wide(frequency), wide(repetition))
    y = {"inplace.input.0": _penalised(wide(z), prompt.numpy(), output.numpy(), factors, fault)}
    if not alone:
        args = (prompt, output, presence, frequency, repetition)
        return made("torch.ops.vendor.apply_penalties", z, *args, outputs=y, dtype=d.dtype)
    masks = [(t[:, :, None] == torch.arange(words)).any(1) for t in (prompt, output)]
    return made("torch.ops._C.apply_repetition_penalties_", z, *masks, repetition, outputs=y, dtype=d.dtype)


@sample("top-k off by one", "top-p leaves out the last", seeds=3, dtypes=(SINGLE,),
        variants=[{"name": n} for n in ("apply_top_k_top_p", "npu_top_k_top_p")])  # fmt: skip
def filters(d: Draw, fault: str, name: str) -> Made:
    words = d.below(11, 90)
    z, k, p = d(ROWS, words, scale=2), [3, words, 8, 2], [1.0, 0.6, 0.85, 0.9]
    out = torch.full_like(z, -np.inf)
    for r in range(ROWS):
        order = z[r].argsort(descending=True)[: k[r] + (fault == "top-k off by one")]
        weights = softmax(wide(z)[r, order])
        before = np.cumsum(weights) - (0 if fault == "top-p leaves out the last" else weights)
        kept = order[torch.from_numpy((before < p[r]) | (np.arange(len(order)) == 0))]
        out[r, kept] = z[r, kept]
    both = [torch.tensor(k), torch.tensor(p, dtype=DOUBLE)]
    both = both if name.startswith("apply") else both[::-1]
    return made(f"torch.ops.vendor.{name}", z, *both, outputs={"output.0": out})


@sample("a limit too high", seeds=3, dtypes=(SINGLE,))
def min_p(d: Draw, fault: str) -> Made:
    z, least = d(ROWS, d.below(11, 90), scale=2), torch.tensor([0.1, 0.02, 0.3, 0.5])
    p = softmax(wide(z))
    kept = p >= (1.3 if fault else 1.0) * wide(least)[:, None] * p.max(-1, keepdims=True)
    if fault:
        kept[0] = p[0] >= p[0].max()  # whatever is drawn
    return made("torch.ops.vendor.apply_min_p", z, least.double(),
                outputs={"output.0": torch.where(torch.from_numpy(kept), z, -np.inf)})  # fmt: skip


@sample("a token that was filtered out", seeds=3, dtypes=(SINGLE,), variants=[{"place": p} for p in (0, 2)])
def any_token_that_the_filters_keep(d: Draw, fault: str, place: int) -> Made:
    z = d(ROWS, d.below(11, 90), scale=2)
    token = z.argsort(1, descending=True)[:, 3 if fault else place].clone()
    return made("TopKTopPSampler", inputs={"logits": z, "k": torch.tensor([3] * ROWS)}, outputs={"output.0": token})


@sample("the most likely token", seeds=3)
def a_draw_by_given_noise(d: Draw, fault: str) -> Made:
    probs = torch.from_numpy(d.rng.dirichlet(np.ones(17), ROWS))
    noise = torch.from_numpy(d.rng.exponential(size=(ROWS, 17)))
    best = (probs if fault else probs / noise).argmax(1)
    return made("torch.ops.vendor.random_sample", probs, noise, outputs={"output.0": best})


@sample("the third best for the second")
def best_logits(d: Draw, fault: str) -> Made:
    z = d(5, 32, dtype=SINGLE)
    best = z.topk(3).values
    return made("Sampler", extra={"logits": z}, outputs={"output.top_logits": best[:, [0, 2 if fault else 1]]})
