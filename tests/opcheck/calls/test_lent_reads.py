"""Inputs that a compiled engine's dump has not, told by an eager one's bytes."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2] / "comparison"))

from synthetic_model import capture, scaled, write  # noqa: E402

from vllm_accprobe.formats import open_dump  # noqa: E402
from vllm_accprobe.opcheck.calls.neighbours import lend  # noqa: E402
from vllm_accprobe.opcheck.calls.records import Calls  # noqa: E402
from vllm_accprobe.opcheck.reference import UNROUNDED, Call, Expected, half_a_unit_off, reference  # noqa: E402
from vllm_accprobe.opcheck.reference_table import References  # noqa: E402
from vllm_accprobe.opcheck.registry import default_references  # noqa: E402
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap  # noqa: E402

MLP = "model.layers.1.mlp"
GRAPHS = {"engine": {"graphs": {"set": "named"}}}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return Calls(open_dump(write(capture(together=False), tmp_path_factory.mktemp("golden"))), None)


@pytest.fixture
def blind(tmp_path):
    """Makes the calls of a dump of outputs alone."""

    def made(faults=None, run=GRAPHS):
        dump = capture(chunk=4, faults=faults)
        kept = [r for r in dump.records if r.step is None or not r.role.startswith("input.") or r.tap == "<root>"]
        at = tmp_path / f"mine{len(list(tmp_path.iterdir()))}"
        return Calls(open_dump(write(replace(dump, records=kept, run=run), at)), None)

    return made


def statuses(calls, tap):
    references = default_references()
    evaluate = partial(_evaluated, references)
    return {c.status for c in check_tap(calls, 0, tap, evaluate, Options(habits=False))}


def _evaluated(references, captured):
    return references.evaluate(captured.what)


def test_an_operator_is_lent_the_output_that_it_read(golden, blind):
    mine = blind({f"{MLP}.down_proj": scaled(1.05)})
    assert lend(golden, mine) > 0
    records = mine.records_of(0, f"{MLP}.down_proj", 0, 0)
    made = mine.records_of(0, f"{MLP}.act_fn", 0, 0)["output.0"]
    assert (records["input.input_"].payload, records["input.input_"].cls) == (made.payload, "RowParallelLinear")
    assert statuses(mine, f"{MLP}.down_proj") == {"fail"}
    assert statuses(mine, f"{MLP}.gate_up_proj") == {"pass"}


def test_what_is_a_slice_or_a_sum_is_not_lent(golden, blind):
    mine = blind()
    lend(golden, mine)
    for tap in ("model.layers.1.self_attn.attn", "model.layers.1.post_attention_layernorm"):
        assert not any(role.startswith("input.") for role in mine.records_of(0, tap, 0, 0))


def test_only_what_a_compiler_fuses_may_have_read_more_than_was_captured(golden, blind):
    mine, eager = blind(), blind(run={"engine": {}})
    lend(golden, mine)
    lend(golden, eager)
    assert (0, f"{MLP}.act_fn") in mine.unrounded
    assert (0, f"{MLP}.down_proj") not in mine.unrounded
    assert not eager.unrounded


def test_half_a_unit_of_each_input_widens_the_limits():
    @reference("Twice")
    def twice(call):
        x = call.inputs["x"].double()
        return {"output.0": Expected(2.0 * x, bound=torch.zeros((), dtype=torch.float64))}

    table, x = References([twice]), torch.tensor([[1.0, 3.0, 0.0]], dtype=torch.bfloat16)
    plain = table.evaluate(Call("t", "Twice", {"x": x}))["output.0"]
    wide = table.evaluate(Call("t", "Twice", {"x": x}, extra={UNROUNDED: True}))["output.0"]
    half = torch.tensor([[2.0**-8, 2.0**-7, 0.0]], dtype=torch.float64)
    assert plain.noise is None
    assert torch.equal(wide.value, plain.value)
    assert torch.allclose(wide.noise, 2 * half / 3**0.5)
    assert torch.equal(wide.bound, 4 * half)
    assert torch.equal((half_a_unit_off({"x": x}, 0)["x"] - x.double()).abs(), half)
