"""Rows of an encoder: one instance of a module in encoder and decoder, and images that are dealt out to ranks."""

from typing import Any

import pytest
from support.captures import Engines, explain
from support.engine import Ask, Run
from support.prompts import prompt

from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine
SPOKEN = [Ask([0, *prompt(6, i)], 6, audio=(1.5, i)) for i in range(2)]
DEALT = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "mm_encoder_tp_mode": "data"}
START = [*prompt(12, 1), 4, 6, 5]
PICTURES = {
    # 64, 60 and 36 patches: the first rank gets one picture of the first request, the second rank the other two
    "uneven": [
        Ask([*START, *prompt(9, 2), 4, 6, 5, *prompt(3, 9)], 6, images=((112, 112, 5), (84, 140, 6))),
        Ask(prompt(20, 3), 6),
        Ask([*prompt(5, 4), 4, 6, 5, *prompt(9, 2)], 6, images=((84, 84, 7),)),
    ],
    # two pictures of one size: half of the rows could be half of each
    "even": [Ask([*START, *prompt(9, 2), 4, 6, 5], 6, images=((112, 112, 5), (112, 112, 6)))],
    # one picture: one rank has none
    "alone": [Ask([*START, *prompt(9, 2)], 6, images=((112, 112, 5),))],
}


def test_one_instance_in_encoder_and_decoder_has_the_rows_of_each(engines: Engines, compared: Any) -> None:
    """vLLM has one GELU for a whole process (model_executor/layers/activation.py)."""
    golden, mine = (
        engines.run(f"whisper-{how}", "whisper", SPOKEN, how=how, max_model_len=128) for how in ("serial", "together")
    )
    assert golden.dump is not None
    dump = open_dump(golden.dump)
    rows = {(r.tap, r.rows) for r in dump.records if r.cls == "GELU"}
    assert rows == {
        *((f"model.encoder.layers.{i}.mlp.activation_fn", "vision/1") for i in range(2)),
        *((f"model.decoder.layers.{i}.mlp.activation_fn", "tokens") for i in range(2)),
    }
    result = compared(golden, mine)
    assert result.verdict == "pass", explain(result)
    gelu = [p for p in result.pairs if p.tap == "model.decoder.layers.1.mlp.activation_fn" and p.role == "output.0"]
    assert sum(p.rows or 0 for p in gelu) == sum(len(a.ids) + a.max_tokens - 1 for a in SPOKEN)


def images(run: Run, tap: str) -> dict[int, dict[tuple[str, int], int]]:
    """rank → (request, image) → rows of ``tap``'s output."""
    assert run.dump is not None
    dump = open_dump(run.dump)
    found: dict[int, dict[tuple[str, int], int]] = {rank: {} for rank in dump.ranks}
    for r in dump.records:
        if (r.tap, r.role) == (tap, "output.0"):
            assert r.rows is not None
            assert r.step is not None
            for s in dump.rows[r.rank, r.step, r.rows].segments:
                found[r.rank][dump.requests[r.rank, s.req].id, s.image or 0] = s.n
    return found


@pytest.mark.parametrize(
    "case", ["uneven", *(pytest.param(case, marks=pytest.mark.extra("as uneven")) for case in ("even", "alone"))]
)
def test_images_that_are_dealt_out_to_ranks(engines: Engines, compared: Any, case: str) -> None:
    asks, limit = PICTURES[case], {"limit_mm_per_prompt": {"image": 2}}
    golden = engines.run(f"dealt-{case}-golden", "qwen2.5-vl", asks, how="serial", **limit)
    mine = engines.run(f"dealt-{case}", "qwen2.5-vl", asks, host="tp2", **limit, **DEALT)
    whole = images(golden, "visual.blocks.1")[0]
    parts = images(mine, "visual.blocks.1")
    assert {name: n for by in parts.values() for name, n in by.items()} == whole
    assert not parts[0].keys() & parts[1].keys()
    assert len(parts[0]) > 0
    for one, other in ((golden, mine), (mine, golden)):
        result = compared(one, other)
        assert result.verdict == "pass", explain(result)
        assert (result.coverage["rows_only_golden"], result.coverage["rows_only_mine"]) == (0, 0), explain(result)
        patches = [p for p in result.pairs if p.tap == "visual.blocks.1" and p.role == "output.0"]
        assert sum(p.rows or 0 for p in patches) == sum(whole.values()), explain(result)


@pytest.mark.extra("an encoder's fault: test_golden_engine.py; one rank's: test_errcheck_engine.py")
def test_a_fault_in_one_ranks_encoder_is_found(engines: Engines, compared: Any) -> None:
    asks, limit = PICTURES["even"], {"limit_mm_per_prompt": {"image": 2}}
    golden = engines.run("dealt-even-golden", "qwen2.5-vl", asks, how="serial", **limit)
    fault = {"kind": "scale", "module": "visual.blocks.1.mlp.down_proj", "factor": 1.2, "rank": 1}
    wrong = engines.run("dealt-wrong", "qwen2.5-vl", asks, host="tp2", fault=fault, **limit, **DEALT)
    result = compared(golden, wrong)
    assert result.verdict == "fail"
    assert result.origins[0]["module"] == "visual.blocks.1.mlp.down_proj", explain(result)
