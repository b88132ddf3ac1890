"""A golden without the module: its rows, in mine's calls, through mine's reference."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.align.derived import rope
from vllm_accprobe.comparison.plan.make_plan import make_plan
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.proof import golden_reads
from vllm_accprobe.opcheck.proof.explained import GOLDEN_TOO, WRONG, Explained, explain, place_of
from vllm_accprobe.opcheck.proof.golden_reads import GoldenReads
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap
from vllm_accprobe.opcheck.run.pair import LEFT
from vllm_accprobe.opcheck.run.result_row import CheckResult

ROWS, WIDTH = 12, 64
PLACE = place_of("act", "output.0", 0)
X = torch.randn(ROWS, 2 * WIDTH, generator=torch.Generator().manual_seed(4))
REFERENCES = default_references()
WRONG_ROW = (3, 1.1)


def dump(
    root: Path, x: torch.Tensor, cls: str, steps: list[tuple[int, int]], wrong: tuple[int, float] | None = None
) -> Dump:
    """silu(a) b. wrong: a row with another output, and what that is multiplied by."""
    m = Maker(root)
    m.module("<root>", "Tiny")
    m.module("act", cls)
    m.request(0, len(x))
    y = torch.nn.functional.silu(x[:, :WIDTH].float()) * x[:, WIDTH:].float()
    if wrong is not None:
        y[wrong[0]] *= wrong[1]
    for step, (start, n) in enumerate(steps):
        m.step(step, [(0, start, n)])
        m.call("act", cls, {"x": x[start : start + n]}, y[start : start + n].to(x.dtype))
    return open_dump(m.close())


def replayed(of: Dump, tap: str = "act") -> list[CheckResult]:
    calls = Calls(of, None)
    return list(check_tap(calls, 0, tap, lambda c: REFERENCES.evaluate(c.what), Options()))


def found(golden: Dump, mine: Dump, tap: str = "act", **more) -> Explained:
    place = place_of(tap, "output.0", 0)
    checked = replayed(golden, tap), replayed(mine, tap)
    assert not explain(golden, mine, checked, [place], (), lambda: make_plan(golden, mine)).rows[place]
    return explain(golden, mine, checked, [place], (), lambda: make_plan(golden, mine), None,
                   lambda plan: GoldenReads(golden, Calls(mine, None), REFERENCES, plan, **more).rows)  # fmt: skip


@pytest.mark.parametrize("most", [golden_reads.MOST, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_of_a_class_without_reference_is_checked_by_mine_s(
    tmp_path: Path, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_reads, "MOST", most)  # in parts as well
    x, n = torch.cat([X, X.flip(0)]), 2 * ROWS
    golden = dump(tmp_path / "golden", x.to(dtype), "Unknown", [(0, n)])
    mine = dump(tmp_path / "mine", (x * 1.02).bfloat16(), "SiluAndMul", [(0, 5), (5, n - 5)])
    assert found(golden, mine).rows[PLACE] == {"r0": [(0, n)]}


@pytest.mark.parametrize("most", [golden_reads.MOST, 1])
def test_a_golden_that_computed_something_else_explains_nothing_of_that_step(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_reads, "MOST", most)
    golden = dump(tmp_path / "golden", X, "Unknown", [(0, ROWS)], wrong=WRONG_ROW)
    mine = dump(tmp_path / "mine", X.bfloat16(), "SiluAndMul", [(0, 5), (5, 7)])
    result = found(golden, mine)
    assert (result.rows[PLACE], PLACE in result.why) == ({"r0": [(5, ROWS)]}, True)


def test_what_a_replay_of_golden_found_wrong_stays_wrong(tmp_path: Path) -> None:
    """Wrong for float32, within the rounding of mine's bfloat16."""
    golden = dump(tmp_path / "golden", X, "SiluAndMul", [(0, ROWS)], wrong=(3, 1.001))
    mine = dump(tmp_path / "mine", X.bfloat16(), "SiluAndMul", [(0, ROWS)])
    result = found(golden, mine)
    assert (dict(result.rows[PLACE]), result.why[PLACE]) == ({}, GOLDEN_TOO + WRONG)


def test_nothing_is_computed_when_the_time_is_over_or_too_short_for_a_call(tmp_path: Path) -> None:
    golden = dump(tmp_path / "golden", X, "Unknown", [(0, ROWS)])
    mine = dump(tmp_path / "mine", X.bfloat16(), "SiluAndMul", [(0, 5), (5, 7)])
    for more in ({"seconds": lambda: 0.0}, {"seconds": lambda: 1.0, "cost": lambda tap, place: 2.0}):
        result = found(golden, mine, **more)
        assert (dict(result.rows[PLACE]), result.why[PLACE]) == ({}, GOLDEN_TOO + LEFT)
    left = iter([9.0, 9.0, 0.0])
    result = found(golden, mine, seconds=lambda: next(left, 0.0))  # two places are begun, one is done
    assert (result.rows[PLACE], result.why[PLACE]) == ({"r0": [(0, 5)]}, GOLDEN_TOO + LEFT)


def test_rows_that_golden_did_not_read_are_not_explained(tmp_path: Path) -> None:
    def rows(golden: Dump) -> int:
        plan = make_plan(golden, mine)
        unit = next(u for u in plan.units if u.key == ("act", "output.0", 0))
        return len(GoldenReads(golden, Calls(mine, None), REFERENCES, plan).rows(unit)[0])

    mine = dump(tmp_path / "mine", X.bfloat16(), "SiluAndMul", [(0, ROWS)])
    assert rows(dump(tmp_path / "golden", X, "Unknown", [(0, 8)])) == 8
    x = X.clone()
    x[2] = float("nan")  # a value that is none shows nothing
    assert rows(dump(tmp_path / "nan", x, "Unknown", [(0, 8)])) == 7


@pytest.mark.parametrize(("scale", "explained"), [(0.25, True), (0.2, False)])
def test_an_attention_s_earlier_keys_are_golden_s(tmp_path: Path, scale: float, explained: bool) -> None:
    """Mine comes in two steps, golden in one; golden's with another scale is none that mine's constants explain."""
    q, k, v = (torch.randn(ROWS, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def attention(root: Path, cls: str, scale: float, dtype: torch.dtype, cuts: list[int]) -> Dump:
        m = Maker(root)
        m.module("attn", cls, num_heads=2, num_kv_heads=2, head_size=16, scale=0.25)
        m.request(0, ROWS)
        own = [x.to(dtype).float() for x in (q * 1.02 if dtype == torch.bfloat16 else q, k, v)]
        mask = torch.full((ROWS, ROWS), -math.inf).triu(1)
        p = torch.softmax(torch.einsum("qhd,khd->hqk", *own[:2]) * scale + mask, -1)
        y = torch.einsum("hqk,khd->qhd", p, own[2]).reshape(ROWS, -1)
        for step, (a, b) in enumerate(pairwise(cuts)):
            m.step(step, [(0, a, b - a)])
            named = zip(("query", "key", "value"), own, strict=True)
            m.call("attn", cls, {n: x[a:b].reshape(b - a, -1).to(dtype) for n, x in named}, y[a:b].to(dtype))
        return open_dump(m.close())

    golden = attention(tmp_path / "golden", "Unknown", scale, torch.float32, [0, ROWS])
    mine = attention(tmp_path / "mine", "Attention", 0.25, torch.bfloat16, [0, 5, ROWS])
    result = found(golden, mine, "attn").rows[place_of("attn", "output.0", 0)]
    assert result == ({"r0": [(0, ROWS)]} if explained else {})


@pytest.mark.parametrize("base", [10000.0, 20000.0])
def test_a_rotation_of_golden_is_explained_where_mine_turns_its_inputs_so(tmp_path: Path, base: float) -> None:
    """Mine's is right for its own base, which may be another than golden's."""
    block, size = "model.layers.0.self_attn", 16
    q, k = (torch.randn(ROWS, n * size, generator=torch.Generator().manual_seed(n)) for n in (4, 2))

    def angles(base: float) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.arange(ROWS)[:, None] * base ** (-torch.arange(0, size, 2) / size)
        return torch.cat([angle.cos()] * 2, 1), torch.cat([angle.sin()] * 2, 1)

    def side(root: Path, run: dict[str, object]) -> Maker:
        m = Maker(root, run={"model": {"path": "", "class": "Tiny"}, **run})
        m.module(f"{block}.rotary_emb", "RotaryEmbedding", base=base, head_size=size, rotary_dim=size,
                 is_neox_style=True)  # fmt: skip
        m.request(0, ROWS)
        m.step(0, [(0, 0, ROWS)])
        return m

    m = side(tmp_path / "golden", {"engine": {"runner": "accprobe.Probe"}, "versions": {"transformers": "5"}})
    cos, sin = angles(10000.0)
    m.call("model.rotary_emb", "Rotary", {}, cos, sin)
    m.call(block, "Attention", {"position_embeddings.0": cos, "position_embeddings.1": sin})
    for name, x in (("q_proj", q), ("k_proj", k)):
        m.call(f"{block}.{name}", "Linear", {}, x)
    golden = open_dump(m.close())
    m = side(tmp_path / "mine", {"versions": {"vllm": "0.32"}})
    own = [(x * 1.02).bfloat16() for x in (q, k)]
    y = [rope(x.float().numpy(), *(t.numpy() for t in angles(base)), size) for x in own]
    inputs = {"positions": torch.arange(ROWS), "query": own[0], "key": own[1]}
    m.call(f"{block}.rotary_emb", "RotaryEmbedding", inputs, *(torch.from_numpy(t).bfloat16() for t in y))
    mine = open_dump(m.close())
    theirs = [CheckResult(r.tap, r.cls, r.role, r.rank, r.step, r.call, r.seq, shape=r.shape, status="pass")
              for r in golden.records if r.role.startswith("output")]  # fmt: skip
    checked, place = (theirs, replayed(mine, f"{block}.rotary_emb")), place_of(f"{block}.rotary_emb", "output.0", 0)
    assert [c.status for c in checked[1]] == ["pass", "pass"]
    result = explain(golden, mine, checked, [place], (), lambda: make_plan(golden, mine), None,
                     lambda plan: GoldenReads(golden, Calls(mine, None), REFERENCES, plan).rows)  # fmt: skip
    assert result.rows[place] == ({"r0": [(0, ROWS)]} if base == 10000.0 else {}), result.why


def test_integers_are_none_of_golden_s(tmp_path: Path) -> None:
    """Mine's own choice of experts would stand for golden's."""
    root, mine = (Maker(tmp_path / name) for name in ("golden", "mine"))
    logits = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    for m, cls, ids in ((root, "Unknown", logits.topk(2).indices.flip(0)), (mine, "TopK", logits.topk(2).indices)):
        m.module("gate", cls)
        m.request(0, ROWS)
        m.step(0, [(0, 0, ROWS)])
        m.call("gate", cls, {"x": logits}, ids)
    golden, own = open_dump(root.close()), open_dump(mine.close())
    plan = make_plan(golden, own)
    reads = GoldenReads(golden, Calls(own, None), REFERENCES, plan)
    unit = next(u for u in plan.units if u.key == ("gate", "output.0", 0))
    captured = next(iter(reads._calls.of(0, "gate")))
    keys, passed = reads._checked(captured, "output.0", golden_reads.Expected(captured.what.outputs["output.0"]))
    assert (len(keys), passed, len(reads.rows(unit)[0])) == (0, False, 0)
