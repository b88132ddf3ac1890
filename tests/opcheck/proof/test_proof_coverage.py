"""What a replay says of itself: how many rows it checked, and the smallest error that it would have named there."""

import json
from dataclasses import replace

import pytest
import torch
from opcheck.layer_dumps import build
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.comparison.coverage import ModuleCover, to_plain, with_covers
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.decode import decode
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.proof.make_proof import covers, wrong
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.check_calls import Options
from vllm_accprobe.opcheck.run.pair import ReplaySide, Task, check_task

ROWS, CALLS, WIDTH = 48, 2, 64
NORM, LINEAR = "layers.0.norm", "layers.0.o_proj"
PLANTED = {
    "row": lambda y: torch.ones(len(y), y.shape[1], dtype=bool),
    "column": lambda y: torch.arange(y.shape[1]).expand(len(y), -1) == 7,
    "one_row": lambda y: (torch.arange(len(y)) == 3)[:, None].expand(-1, y.shape[1]),
}


def dump(root, where="", sizes=None, seed=0):
    """A norm and a projection whose outputs are rounded to nearest. sizes: tap → of the error that is planted there,
    without order (another sign in each element, as large as a step of bfloat16 is there): relative L2, of each row, of
    column 7 in all rows, or of row 3."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).bfloat16()

    x, weight, matrix = draw(CALLS, ROWS, WIDTH), draw(WIDTH).abs() + 0.5, draw(WIDTH, WIDTH) * 0.125
    m = Maker(root)
    m.module("<root>", "TinyForCausalLM")
    m.module("layers", "ModuleList")
    m.module(NORM, "RMSNorm", variance_epsilon=1e-5)
    m.module(LINEAR, "RowParallelLinear", tp_size=1, reduce_results=True)
    m.module("layers.0.rope", "RotaryEmbedding")
    m.request(0, ROWS * CALLS)
    m.param(NORM, "RMSNorm", weight=weight)
    m.param(LINEAR, "RowParallelLinear", weight=matrix)
    for step in range(CALLS):
        wide = x[step].double()
        m.step(step, [(0, step * ROWS, ROWS)])
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        projected = wide @ matrix.double().T
        for at, cls, what, y in (
            (NORM, "RMSNorm", {"x": x[step]}, normed), (LINEAR, "RowParallelLinear", {"input_": x[step]}, projected)
        ):  # fmt: skip
            if sizes and (step == 0 or where != "one_row"):
                signs = torch.randint(0, 2, y.shape, generator=g).double() * 2 - 1
                steps = torch.ldexp(torch.ones_like(y), torch.frexp(y).exponent) * PLANTED[where](y) * signs
                along = 0 if where == "column" else 1
                own = y.square().sum(along, keepdim=True)
                if where == "column":
                    own = own.clamp(min=float(own.mean()))
                y = y + sizes[at] * steps * own.sqrt() / steps.norm(dim=along, keepdim=True).clamp(min=1e-30)
            m.call(at, cls, what, y.bfloat16())
    return m.close()


def replayed(root):
    calls = Calls(open_dump(root), None)
    references, options = default_references(), Options(measured=False, budget=calls.budget())
    found = ReplaySide([], [])
    for rank, tap, _ in calls.taps(()):
        for to, more in zip(found, check_task(calls, Task(0, rank, tap), references, options), strict=True):
            to.extend(more)
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    found = replayed(dump(tmp_path_factory.mktemp("clean") / "d"))
    assert not wrong(found.rows)
    return covers(*found)


@pytest.mark.parametrize("where", list(PLANTED))
def test_what_is_twice_the_smallest_error_is_named_and_what_is_half_is_not(tmp_path, clean, where):
    sizes = {tap: getattr(clean[tap], where) for tap in (NORM, LINEAR)}
    assert all(1e-4 < size < 0.03 for size in sizes.values())

    def named(times):
        planted = {tap: times * size for tap, size in sizes.items()}
        return set(wrong(replayed(dump(tmp_path / str(times), where, planted)).rows))

    assert named(0.5) == set()
    assert named(1.0) <= set(sizes)
    assert named(2.0) == set(sizes)


def test_a_class_is_counted_row_by_row(tmp_path, clean):
    root = dump(tmp_path / "d")
    result = with_covers(compare(root, dump(tmp_path / "e")), clean)
    found = {e["class"]: e for e in result.coverage["by_class"]}
    assert found["RMSNorm"] == {"class": "RMSNorm", "calls": 2, "rows": 96, "checked": 96, "compared": 0, "unseen": 0,
                                "smallest": {k: getattr(clean[NORM], k) for k in PLANTED}}  # fmt: skip
    assert found["RotaryEmbedding"] == {
        "class": "RotaryEmbedding", "calls": 0, "rows": 0, "checked": 0, "compared": 0, "unseen": 1, "smallest": None,
    }  # fmt: skip
    assert "ModuleList" not in found
    alone = {e["class"]: e for e in compare(root, root).coverage["by_class"]}["RMSNorm"]
    assert (alone["checked"], alone["compared"]) == (0, 96)
    limit = result.pairs[-1].limit
    assert alone["smallest"] == {"row": limit, "column": limit * WIDTH**0.5, "one_row": limit}
    assert decode(dict[str, ModuleCover], json.loads(json.dumps(to_plain(clean)))) == clean


def test_rows_that_parts_received_are_none_of_a_block(tmp_path):
    rows, pooled = replayed(build(tmp_path / "d"))
    for heads, checked in ((8, 8), (8, 4)):
        more = [replace(r, role="part/input.x", rows=heads * r.rows, checked=checked * r.rows) for r in rows]
        found = covers([*rows, *more], pooled)["layers.0.self_attn.attn"]
        assert found[:3] == ("Attention", 3, 23)
        assert (found.checked == 23) == (heads == checked)


def test_a_row_is_checked_where_all_that_came_out_of_it_is(tmp_path):
    found = covers(*replayed(build(tmp_path / "d")))
    assert found["layers.0.self_attn.attn"][:4] == ("Attention", 3, 23, 23)
    assert found["layers.0.odd"] == ModuleCover("NobodyKnows", 3, 0, 0, None, None, None)
