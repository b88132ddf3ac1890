"""Routing operators of ATB against numpy, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atb_dumps import MadeCall, bits, holds, judged, normal, wide

INT = torch.int32
Make = Callable[[np.random.Generator], MadeCall]
Array = np.ndarray[Any, Any]


def gating(own: list[int]) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        each, count, tokens = 2, 6, 5
        chosen = np.concatenate([rng.permutation(count)[:each] for _ in range(tokens)])
        kept = [(e, i) for i, e in enumerate(chosen) if not own or e in own]
        places = [i for _, i in sorted(kept)]
        padded = np.zeros(len(chosen), int)
        padded[: len(places)] = places
        sums = np.cumsum([(chosen == e).sum() for e in (own or range(count))])
        held = padded // each
        held[len(places) :] = 0
        out = [held, sums, padded, *([np.array([len(places)])] if own else [])]
        inputs = [bits(chosen, INT), bits(np.arange(len(chosen)), INT)]
        param = {"topkExpertNum": each, "cumSumNum": count, "deviceExpert": own}
        return MadeCall("GatingOperation", param, inputs, [bits(t, INT) for t in out])

    return make


def _groups(x: Array, groups: int, keep: int, n: int) -> Array:
    """x with the groups that are not kept set to 0."""
    y = x.copy().reshape(len(x), groups, -1)
    for row in y:
        score = [np.sort(g)[::-1][:n].sum() for g in row]
        for g in np.argsort(score)[: groups - keep]:
            row[g] = 0
    return y.reshape(x.shape)


def group_topk(multi: bool) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x = bits(rng.uniform(0.1, 1, (5, 16)))
        y = _groups(wide(x), 4, 2, 2 if multi else 1)
        param = {"groupNum": 4, "k": 2, "groupMultiFlag": int(multi), "n": 2}
        return MadeCall("GroupTopkOperation", param, [x, torch.arange(16, dtype=INT)], [], {0: bits(y)})

    return make


def fused(mapped: bool) -> Make:
    def make(rng: np.random.Generator) -> MadeCall:
        x, bias = normal(rng, 5, 16, dtype=torch.float32), bits(rng.uniform(0, 0.3, 16), torch.float32)
        s = 1 / (1 + np.exp(-wide(x)))
        kept = _groups(s + wide(bias), 4, 2, 2)
        at = np.argsort(-kept, -1)[:, :3]
        y = np.take_along_axis(s, at, -1)
        y = y / y.sum(-1, keepdims=True) * 2.5
        copies, where = rng.integers(1, 3, 16), rng.integers(0, 30, (16, 2))
        experts = np.array([[where[e, i % copies[e]] for e in row] for i, row in enumerate(at)]) if mapped else at
        param = {"groupNum": 4, "groupTopk": 2, "n": 2, "k": 3, "activationType": 8, "isNorm": True, "scale": 2.5,
                 "enableExpertMapping": mapped}  # fmt: skip
        inputs = [x, bias, *([bits(copies, INT), bits(where, INT)] if mapped else [])]
        return MadeCall("FusedAddTopkDivOperation", param, inputs, [bits(y, torch.float32), bits(experts, INT)])

    return make


CASES: dict[str, Make] = {
    "gating": gating([]), "gating of a device": gating([1, 4]), "groups": group_topk(False),
    "groups of two": group_topk(True), "fused": fused(False), "fused mapped": fused(True),
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_routing(tmp_path: Path, name: str, seed: int) -> None:
    holds(tmp_path, CASES[name](np.random.default_rng([seed, len(name)])))


def test_tied_groups_have_no_reference(tmp_path: Path) -> None:
    x = torch.full((3, 8), 0.5, dtype=torch.float16)
    param = {"groupNum": 4, "k": 2, "groupMultiFlag": 0, "n": 1}
    after = x.clone()
    after[:, :4] = 0
    found = judged(tmp_path, MadeCall("GroupTopkOperation", param, [x, torch.arange(8, dtype=INT)], [], {0: after}))
    assert (found["inplace.0"].status, found["inplace.0"].message) == ("skip", "two of its groups or experts are tied")
