"""The measures against their definitions, written out with the standard library and scipy."""

import math
from pathlib import Path

import numpy as np
import pytest

from vllm_accprobe.gate import trainer
from vllm_accprobe.gate.trainer import RatioError, Scored, Trained, TrainerLine, compare, effective


def pair(off: float, n: int = 8, tokens: int = 40, seed: int = 1) -> tuple[Trained, dict[str, Scored]]:
    """n sequences of 3 + tokens; the trainer's log-probabilities are ``off`` (deviation) from the server's."""
    draw = np.random.default_rng(seed)
    golden, mine = Trained(Path("t")), {}
    for k in range(n):
        ids = tuple(int(i) for i in draw.integers(0, 99, 3 + tokens))
        q = -draw.exponential(1.0, tokens)
        p = np.minimum(q + draw.normal(0, off, tokens), 0.0)
        nones: tuple[float | None, ...] = (None,) * 3
        golden.lines.append(TrainerLine(f"s{k}", ids, 3, (*nones, *map(float, p))))
        mine[f"s{k}"] = Scored(ids, (*nones, *map(float, q)))
    return golden, mine


def test_against_the_definitions() -> None:
    golden, mine = pair(0.2)
    found = compare(golden, mine)
    p = [v for line in golden.lines for v in line.logprobs if v is not None]
    q = [v for line in golden.lines for v in mine[line.name].logprobs if v is not None]
    r = [math.exp(a - b) for a, b in zip(p, q, strict=True)]
    n = len(r)
    every = found.spans[0]
    assert every.n == n == 320
    assert every.k1 == pytest.approx(sum(-math.log(v) for v in r) / n)
    assert every.k3 == pytest.approx(sum(v - 1 - math.log(v) for v in r) / n)
    assert every.mean == pytest.approx(sum(abs(math.log(v)) for v in r) / n)
    assert every.worst == pytest.approx(max(abs(math.log(v)) for v in r))
    assert every.ess == pytest.approx(sum(r) ** 2 / sum(v * v for v in r) / n)
    assert every.clipped == pytest.approx(sum(not 0.8 <= v <= 1.2 for v in r) / n)
    assert every.beyond == pytest.approx(sum(not 0.5 <= v <= 2 for v in r) / n)
    assert found.mult == pytest.approx(sum(math.exp(abs(math.log(v))) for v in r) / n)
    assert found.prob_worst == pytest.approx(max(abs(math.exp(a) - math.exp(b)) for a, b in zip(p, q, strict=True)))
    assert found.quantiles == pytest.approx(np.quantile(r, trainer.QUANTILES))
    sums = [sum(math.log(v) for v in r[k * 40 : k * 40 + 40]) for k in range(8)]
    assert found.product[2] == pytest.approx(np.median(sums))
    assert found.geometric[2] == pytest.approx(np.median([math.exp(s / 40) for s in sums]))
    weights = [math.exp(s) for s in sums]
    assert found.sequence_ess == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / 8)
    assert [s.where for s in found.spans[:4]] == [
        "all tokens", "answer's token 0", "answer's token 1", "answer's tokens 2-3"
    ]  # fmt: skip
    assert sum(s.n for s in found.spans[1:]) == n
    assert found.verdict == "fail"
    assert compare(*pair(0.01)).verdict == "pass"


def test_the_kl_that_is_estimated() -> None:
    """Two distributions over 50 tokens: 200,000 draws from q give their KL(q || p) by k1 and by k3."""
    draw = np.random.default_rng(3)
    q = draw.dirichlet(np.ones(50))
    p = q * np.exp(draw.normal(0, 0.3, 50))
    p /= p.sum()
    at = draw.choice(50, 200_000, p=q)
    ids = tuple(range(len(at)))
    golden = Trained(Path("t"), [TrainerLine("s", ids, 0, tuple(np.log(p[at])))])
    span = compare(golden, {"s": Scored(ids, tuple(np.log(q[at])))}).spans[0]
    kl = float((q * np.log(q / p)).sum())
    assert span.k3 == pytest.approx(kl, rel=0.02)
    assert span.k1 == pytest.approx(kl, rel=0.1)


def test_effective_sample_size_of_extremes() -> None:
    assert effective(np.zeros(7)) == 1.0
    assert effective(np.array([0.0, -800.0, -900.0, 5000.0])) == pytest.approx(0.25)


def test_nan_never_passes_and_what_is_left_out_is_counted() -> None:
    golden, mine = pair(0.001)
    for bad in (math.nan, -math.inf):
        line = golden.lines[0]
        spoilt = Trained(golden.path, [TrainerLine("s0", line.ids, 3, (*line.logprobs[:-1], bad)), *golden.lines[1:]])
        found = compare(spoilt, mine)
        assert (found.verdict, found.nonfinite) == ("fail", 1)
    other = mine["s1"]
    mine["s1"] = Scored((*other.ids[:10], 1000, *other.ids[11:]), other.logprobs)
    mine["s2"] = Scored((1000, *mine["s2"].ids[1:]), mine["s2"].logprobs)
    del mine["s3"]
    found = compare(golden, mine)
    assert found.left_out == {
        "tokens after the first that the server did not write": 33,
        "sequences whose prompt the server read as other tokens": 1,
        "sequences that the server did not answer": 1,
    }
    with pytest.raises(RatioError, match="did not answer"):
        compare(golden, {})
