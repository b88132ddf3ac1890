"""What an 8-bit cache does to attention, against the definition written out in numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from opcheck.samples.definitions import attend as defined, lower
from opcheck.samples.sample import Draw

from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.references.attention import attend, probabilities
from vllm_accprobe.opcheck.references.caches import CacheFormat, cache_format, rounding_of, through_cache

KINDS = ["fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head", "fp8_per_token_head"]
SETTINGS: dict[str, Any] = {"scale": 0.2, "window": None, "cap": None, "slopes": None, "sinks": None, "step": 0.0}


def replayed(found: CacheFormat | None, q: Any, k: Any, v: Any, positions: Any) -> tuple[Any, ...]:
    assert found is not None
    plain = attend(q, k, v, query_positions=positions, **SETTINGS)[0]
    p = probabilities(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), SETTINGS["scale"], positions)

    def again(k: Any, v: Any, noise: Any, most: Any) -> tuple[Any, Any, Any]:
        return attend(q, k, v, query_positions=positions, score_noise=noise, score_bound=most, **SETTINGS)

    return through_cache(found, q, (k, v), p, plain, SETTINGS["scale"], again)


def read_back(x: np.ndarray, kind: str, scale: float) -> np.ndarray:
    """The nearest of a format's numbers times the scale; x [m, heads, width]. Sign, exponent, mantissa, no infinity."""
    table = np.arange(-127.0, 128.0)
    if not kind.startswith("int8"):
        bits, bias, largest, last = (2, 15, 57344.0, 32) if "e5m2" in kind else (3, 7, 448.0, 16)
        some = [m * 2.0 ** (1 - bias - bits) for m in range(2**bits)]
        some += [(1 + m / 2**bits) * 2.0 ** (e - bias) for e in range(1, last) for m in range(2**bits)]
        table = np.array(sorted({s * x for x in some if x <= largest for s in (-1, 1)}))
    by = np.abs(x).max(-1, keepdims=True) / table[-1] if "per_token" in kind else scale
    return np.asarray(table[np.abs((x / by)[..., None] - table).argmin(-1)] * by)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.037])
def test_what_is_read_back_and_how_far_that_moves_the_output(kind: str, scale: float) -> None:
    d = Draw(KINDS.index(kind), torch.float64)
    n, m = 7, d.below(20, 60)
    small = scale if "int8" not in kind else 0.05 * scale  # so that most codes of int8 are used, none clipped at 1.0
    q, *sides = (d(*s).numpy() for s in ((n, 4, 16), (m, 2, 16), (m, 2, 16)))
    k, v = (np.clip(x, -126 * small, 126 * small) if kind == "int8" else x for x in sides)
    found = cache_format({"kv_cache_dtype": kind, "_k_scale_float": small, "_v_scale_float": small})
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    out, _, _, same, usual, most = replayed(found, *tensors, torch.arange(m - n, m))
    wanted = defined(q, read_back(k, kind, small), read_back(v, kind, small), 0.2, lower(n, m))
    exact = defined(q, k, v, 0.2, lower(n, m))
    assert np.allclose(out, wanted, rtol=1e-9, atol=1e-12)
    assert np.allclose(same, exact, rtol=1e-9, atol=1e-12)
    moved = np.abs(wanted - exact)
    assert (moved <= most.numpy()).all()
    share = rounding_of(kind, (out, same, usual, most), torch.ones(n, dtype=torch.bool))
    assert 0.2 < np.sqrt((moved**2).sum() / (usual.numpy() ** 2).sum()) < 2.0  # 448 elements of a standard error each
    assert 0 < share.share < 5 * share.expected < share.most * 5


def test_a_wrong_block_is_beyond_the_rounding() -> None:
    """Two blocks of keys exchanged: further from the reference with the cache than its own noise by far."""
    d = Draw(1, torch.float64)
    q, k, v = (d(s, 2, 16) for s in (1, 64, 64))
    found = cache_format({"kv_cache_dtype": "fp8_e4m3", "_k_scale_float": 1.0, "_v_scale_float": 1.0})
    right, _, bound, *_ = replayed(found, q, k, v, torch.arange(63, 64))
    wrong = replayed(found, q, k, torch.cat((v[:16], v[32:48], v[16:32], v[48:])), torch.arange(63, 64))[0]
    assert float((wrong - right).abs().max()) > 20 * float(bound.max())


def test_which_caches_have_a_reference() -> None:
    assert cache_format({}) is None
    assert cache_format({"kv_cache_dtype": "auto", "_k_scale_float": 1.0}) is None
    for attrs, why in (({"kv_cache_dtype": "fp8"}, "scales of its fp8 cache were not captured"),
                       ({"impl.kv_cache_dtype": "fp8_ds_mla"}, "kind fp8_ds_mla")):  # fmt: skip
        with pytest.raises(Declined, match=why):
            cache_format(attrs)
