"""errcheck in real engines: a NaN of one decode step of one layer, one of rank 1 only, none where nothing is wrong."""

import csv
import json
import stat
from typing import Any

import numpy as np
import pytest
from support.captures import Engines
from support.engine import EngineError, Run

from vllm_accprobe.cli import main
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.findings import GOOD_BAD, PARAMETER, RankReport, earliest, lines, read
from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine

BOTH = {"VLLM_ACCPROBE_ERRCHECK": "overflow,nan"}
TP2: dict[str, Any] = {"host": "tp2", "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def reports(engines: Engines, name: str) -> list[RankReport]:
    return read(engines.root / "dumps" / name)


def test_a_clean_engine_is_silent_and_answers_the_same(engines: Engines) -> None:
    bare = engines.run("bare", host="bare")
    run = engines.run("errcheck-clean", host="bare", env=BOTH)
    assert run.tokens == bare.tokens
    (report,) = reports(engines, "errcheck-clean")
    assert (report.state, report.first, report.parameters) == ("closed", None, ())
    assert report.steps >= 8
    assert report.taps > 40
    out = engines.root / "dumps" / "errcheck-clean"
    assert [p.name for p in out.iterdir()] == ["errcheck-rank0000.json"]  # no tensors are written


def test_a_nan_of_one_decode_step_of_one_layer(engines: Engines) -> None:
    """Only the fifth request, 70 tokens long, ever reaches position 72: its third generated token."""
    fault = {"kind": "nan", "module": "model.layers.2.mlp.down_proj", "rows": "position:72", "features": [3]}
    run = engines.run("errcheck-decode", host="bare", env=BOTH, fault=fault)
    bare = engines.run("bare", host="bare")
    assert run.tokens[:4] == bare.tokens[:4]  # serving went on
    (report,) = reports(engines, "errcheck-decode")
    first = report.first
    assert first is not None
    assert (first.tap, first.cls, first.role, first.call) == (
        "model.layers.2.mlp.down_proj", "RowParallelLinear", "output.0", 0,
    )  # fmt: skip
    assert (first.kind, first.nan, first.inf, first.verdict) == ("NaN", 1, 0, GOOD_BAD)
    assert first.step == 3
    (row,) = first.rows
    assert (row["request"], row["position"], row["phase"]) == ("ask-4", 72, "decode")
    assert [(i["role"], i["state"]) for i in first.inputs] == [("input.input_", "good")]
    assert lines([report])[0] == (
        "first: NaN in model.layers.2.mlp.down_proj output.0 [RowParallelLinear], step 3, "
        "request ask-4 position 72 (decode): good in, bad out (1 NaN), rank 0"
    )
    check_dump(run, row["row"])


def check_dump(run: Run, row: int) -> None:
    """The call's tensors, of the bad row and of nobody else."""
    assert run.dump is not None
    dump = open_dump(run.dump)
    assert dump.problems == []
    tap = "model.layers.2.mlp.down_proj"
    assert {r.name for r in dump.records} == {f"{tap}/{n}" for n in ("input.input_", "output.0", "param.weight")}
    (weight,) = [r for r in dump.records if r.step is None]
    assert (weight.payload, weight.shape) == (None, (128, 256))  # its values are the checkpoint's
    for record in [r for r in dump.records if r.step is not None]:
        assert record.shape[0] == 1
        values = widen(np.array(dump.read(record)), record.dtype)
        assert int(np.isnan(values).sum()) == (1 if record.role == "output.0" else 0)
        if record.role == "output.0":
            assert np.isnan(values[0, 3])
    (space,) = dump.rows.values()
    assert [(s.pos, s.n, s.row) for s in space.segments] == [(72, 1, row)]
    assert [r.id for r in dump.requests.values()] == ["ask-4"]
    for path in (run.dump, run.dump / "rank0000"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in run.dump.rglob("*.*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["inspect", str(run.dump), f"{tap}/output.0"]) == 0
    out = run.dump.parent / "errcheck-opcheck"
    # A replay has numbers where the engine has NaN.
    assert main(["opcheck", str(run.dump), "-j", "0", "--out", str(out)]) == 1
    with (out / "opcheck.csv").open() as file:
        (line,) = list(csv.DictReader(file))
    assert (line["status"], tap in line.values()) == ("fail", True)


def test_a_bad_weight_is_said_and_exit_stops_the_engine(engines: Engines) -> None:
    fault = {"kind": "weight", "module": "model.layers.1.mlp.gate_up_proj", "factor": float("nan"), "features": [5]}
    with pytest.raises(EngineError, match=r"ErrcheckExit: accprobe errcheck stops .*: NaN in model\.layers\.1"):
        engines.run("errcheck-exit", host="bare", env={"VLLM_ACCPROBE_ERRCHECK": "nan,exit"}, fault=fault)
    (report,) = reports(engines, "errcheck-exit")
    assert report.parameters == ("model.layers.1.mlp.gate_up_proj.weight: 128 NaN, 0 Inf",)  # as wide as the model
    first = report.first
    assert first is not None
    assert (first.tap, first.verdict, first.step) == ("model.layers.1.mlp.gate_up_proj", PARAMETER, 0)
    assert first.bad_rows == first.all_rows == 221  # every token of the prompts
    assert "parameter model.layers.1.mlp.gate_up_proj.weight: 128 NaN" in "\n".join(lines([report]))


def test_a_nan_of_rank_1_only(engines: Engines) -> None:
    """Rank 1's attention is bad; the sum over ranks after it makes rank 0 bad, too, one module later.

    The probe is on: the capture is as ever, and what errcheck keeps lies beside it, in a dump of its own."""
    fault = {"kind": "nan", "module": "model.layers.2.self_attn.attn", "rows": "position:72", "rank": 1}
    run = engines.run("errcheck-tp2", env=BOTH, fault=fault, **TP2)
    root = engines.root / "dumps" / "errcheck-tp2" / "errcheck"
    found = read(root)
    assert [r.rank for r in found] == [0, 1]
    (first,) = earliest(found)
    assert first.rank == 1
    assert first.first is not None
    assert first.first.tap == "model.layers.2.self_attn.attn"
    assert first.first.rows[0]["request"] == "ask-4"
    assert [i["role"] for i in first.first.inputs] == ["input.query", "input.key", "input.value"]
    zero = found[0].first
    assert zero is not None
    assert (zero.tap, zero.step, zero.verdict) == ("model.layers.2.self_attn.o_proj", first.first.step, GOOD_BAD)
    text = "\n".join(lines(found))
    assert text.startswith("first: NaN in model.layers.2.self_attn.attn output.0 [Attention], step 3")
    assert "\nrank 0: NaN in model.layers.2.self_attn.o_proj" in text
    assert json.loads((root / "run.json").read_text())["parallel"]["tp"][1] == 2
    assert {(r.rank, r.tap) for r in open_dump(root).records if r.step is not None} == {
        (0, "model.layers.2.self_attn.o_proj"), (1, "model.layers.2.self_attn.attn"),
    }  # fmt: skip
    assert run.dump is not None
    whole = open_dump(run.dump)
    assert whole.problems == []
    assert len(whole.records) > 2000
    assert len(whole.ends) == 2
