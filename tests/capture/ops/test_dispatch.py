"""Operator calls by dispatch: what a call was given and gave, what it changed, where it was, what was left out."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Toy

from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.journal import inputs, tensors
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import OpCall


class Small(torch.nn.Module):
    """Runs ``body`` on its argument."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.weight = torch.nn.Parameter(torch.arange(9.0).reshape(3, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def captured(tmp_path: Path, model: torch.nn.Module, *calls: torch.Tensor, **settings: Any) -> Dump:
    out = tmp_path / f"dump{len(list(tmp_path.iterdir()))}"
    with Probe(model, dir=out, ops=True, **settings), torch.inference_mode():
        for x in calls:
            model(x)
    dump = open_dump(out)
    assert dump.errors == []
    return dump


def record(dump: Dump, call: OpCall, role: str) -> Any:
    found = [r for r in dump.records if (r.step, r.tap, r.call, r.role) == (call.step, call.tap, call.call, role)]
    assert len(found) == 1, (role, [r.role for r in dump.records if r.tap == call.tap])
    return found[0]


def read(dump: Dump, call: OpCall, role: str) -> list[Any]:
    found = record(dump, call, role)
    return widen(dump.read(found), found.dtype).tolist()


def named(dump: Dump, op: str) -> list[OpCall]:
    return [c for c in dump.ops if c.op == op]


def test_a_call_says_all_that_is_needed_to_make_it_again(tmp_path: Path) -> None:
    def body(self: Small, x: torch.Tensor) -> torch.Tensor:
        y = torch.masked_fill(x.t(), x > 2, -float("inf"))
        z = torch.full((2,), 7, dtype=torch.bfloat16, device="cpu")
        return torch.cat([y, y * 2.5], dim=1), z

    dump = captured(tmp_path, Small(body), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    (fill,) = named(dump, "aten.masked_fill.Scalar")
    x, mask = inputs(fill)
    assert (x["dtype"], x["shape"], x["stride"], x["device"]) == ("float32", [2, 2], [1, 2], "cpu")
    assert (x["min"], x["max"], x["mean"], x["count"], x["nan"]) == (1.0, 4.0, 2.5, 4, 0)
    assert mask["dtype"] == "bool"
    assert fill.args[2] == {"float": "-inf"}
    assert read(dump, fill, "input.0") == [[1.0, 3.0], [2.0, 4.0]]
    assert read(dump, fill, "output.0") == [[1.0, 3.0], [-float("inf"), -float("inf")]]
    (full,) = named(dump, "aten.full.default")
    assert full.args[:2] == ({"list": [2]}, 7)
    assert full.kwargs["dtype"] == {"dtype": "bfloat16"}
    assert full.kwargs["device"] == {"device": "cpu"}
    (cat,) = named(dump, "aten.cat.default")
    assert [t["role"] for t in inputs(cat)] == ["input.0.0", "input.0.1"]
    assert cat.kwargs == {} or cat.kwargs == {"dim": 1}
    assert read(dump, cat, "input.0.1")[0] == [2.5, 7.5]
    assert [t["role"] for t in tensors(cat.outputs)] == ["output.0"]
    (times,) = named(dump, "aten.mul.Tensor")
    assert times.args[1] == 2.5
    assert {c.tap.partition("::")[0] for c in dump.ops} == {"<root>"}
    views = {s.tap: s.count for s in dump.skips if s.reason == "a view, computes nothing"}
    assert views == {"::aten.t.default": 1}


def test_what_is_changed_in_place_is_taken_before_and_after(tmp_path: Path) -> None:
    def body(self: Small, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.mul_(2.0)
        y.mul_(1.0)  # writes, and changes nothing
        out = torch.empty(2)
        torch.add(y, 1.0, out=out)
        return out

    dump = captured(tmp_path, Small(body), torch.tensor([1.0, 3.0]))
    double, once = named(dump, "aten.mul_.Tensor")
    assert double.mutates == ("input.0",)
    assert read(dump, double, "input.0") == [1.0, 3.0]
    assert read(dump, double, "inplace.input.0") == [2.0, 6.0]
    assert once.mutates == ()
    assert not [r for r in dump.records if r.tap == once.tap and r.call == 1 and r.role.startswith("inplace")]
    (add,) = named(dump, "aten.add.out")
    assert add.mutates == ("input.out",)
    assert add.kwargs["out"]["tensor"]["fresh"] is True
    assert "min" not in add.kwargs["out"]["tensor"]
    assert not [r for r in dump.records if r.tap == add.tap and r.role == "input.out"]
    assert read(dump, add, "inplace.input.out") == [3.0, 7.0]


def test_the_enclosing_module_and_its_call(tmp_path: Path) -> None:
    dump = captured(tmp_path, Toy(layers=2), torch.tensor([[1, 2, 3]]))
    modules = Counter(c.module for c in dump.ops)
    assert modules["layers.0.qkv"] == modules["layers.1.qkv"] == 1
    rotations = [c for c in dump.ops if c.op == "aten.mul_.Tensor"]
    assert [c.tap for c in rotations] == ["layers.0.rotary::aten.mul_.Tensor", "layers.1.rotary::aten.mul_.Tensor"]
    assert [c.call for c in rotations] == [0, 0]
    assert all(c.mutates == ("input.0",) for c in rotations)
    seqs = [c.seq for c in dump.ops]
    assert seqs == sorted(seqs)
    weights = {t["param"] for c in dump.ops for t in inputs(c) if "param" in t}
    assert {"layers.0.qkv/param.weight", "lm_head/param.weight", "embed/param.weight"} <= weights


def test_a_weight_is_stored_once_per_run(tmp_path: Path) -> None:
    model = Small(lambda self, x: x @ self.weight)
    dump = captured(tmp_path, model, torch.ones(2, 3), torch.zeros(2, 3))
    calls = named(dump, "aten.mm.default") or named(dump, "aten.matmul.default")
    assert [c.step for c in calls] == [0, 1]
    stored = {record(dump, c, "input.1").payload for c in calls}
    stored |= {r.payload for r in dump.records if r.role == "param.weight"}
    assert len(stored) == 1
    assert read(dump, calls[1], "input.1") == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    assert all(t["max"] == 8.0 and t["param"] == "<root>/param.weight" for c in calls for t in list(inputs(c))[1:])


def test_parameters_beyond_the_budgets_quarter_and_large_tensors_are_named_with_their_shape(tmp_path: Path) -> None:
    dump = captured(tmp_path, Small(lambda self, x: x @ self.weight), torch.ones(100, 3), parts="input,output",
                    ops_max_mb=0.001)  # fmt: skip
    (call,) = (c for c in dump.ops if "matmul" in c.op or "mm" in c.op)
    assert call.args[0] == {"skipped": "larger than 0.001 MB", "role": "input.0", "dtype": "float32",
                            "shape": [100, 3], "stride": [3, 1], "device": "cpu"}  # fmt: skip
    assert call.args[1]["skipped"] == "a parameter, kept as a fingerprint"
    assert call.args[1]["param"] == "<root>/param.weight"
    reasons = Counter({(s.tap, s.role): s.count for s in dump.skips if "operator" in s.reason})
    assert reasons == {(call.tap, role): 1 for role in ("input.0", "input.1", "output.0")}


def test_trace_has_ranges_and_no_tensors(tmp_path: Path) -> None:
    model = Small(lambda self, x: (x * 2).add_(1))
    dump = captured(tmp_path, model, torch.tensor([1.0, 5.0]), ops_mode="trace", modules="none")
    assert dump.ops == []  # no module is chosen, so none of its operators
    dump = captured(tmp_path, model, torch.tensor([1.0, 5.0]), ops_mode="trace")
    assert not [r for r in dump.records if "::" in r.tap]
    times, add = dump.ops
    assert [(t["min"], t["max"]) for t in inputs(times)] == [(1.0, 5.0)]
    assert [(t["min"], t["max"]) for t in tensors(times.outputs)] == [(2.0, 10.0)]
    assert [(t["min"], t["max"]) for t in inputs(add)] == [(2.0, 10.0)]
    assert add.mutates == ("input.0",)


def test_dedup_keeps_one_call_of_each_set_of_shapes_and_dtypes(tmp_path: Path) -> None:
    model = Small(lambda self, x: x * 2 + x * 3)
    calls = [torch.ones(2), torch.ones(2) * 5, torch.ones(3), torch.ones(2).bfloat16()]
    dump = captured(tmp_path, model, *calls, ops_mode="dedup")
    times = named(dump, "aten.mul.Tensor")
    assert [(c.step, next(inputs(c))["dtype"], next(inputs(c))["shape"]) for c in times] == [
        (0, "float32", [2]), (2, "float32", [3]), (3, "bfloat16", [2]),
    ]  # fmt: skip
    left = {s.tap: s.count for s in dump.skips if s.reason == "same shapes and dtypes as an earlier call"}
    assert left == {"::aten.mul.Tensor": 5, "::aten.add.Tensor": 1}
    assert all(record(dump, c, "output.0").payload is not None for c in times)


def test_a_random_sample_keeps_exactly_n_calls_and_the_same_ones_again(tmp_path: Path) -> None:
    model = Small(lambda self, x: x * 2)
    steps = [torch.full((2,), float(k)) for k in range(40)]

    def kept(seed: int) -> list[int]:
        dump = captured(tmp_path, model, *steps, ops_mode="sample", ops_calls=3, seed=seed)
        assert len(dump.ops) == 40
        assert all("min" in next(inputs(c)) for c in dump.ops)
        return sorted({r.step for r in dump.records if "::" in r.tap and r.step is not None})

    first = kept(1)
    assert len(first) == 3
    assert kept(1) == first
    assert kept(2) != first


def test_the_sample_is_uniform() -> None:
    """Each of 12 calls is kept with probability 3/12: over 2000 seeds the counts lie within five deviations."""
    from vllm_accprobe.capture.ops.dispatch import Choice
    from vllm_accprobe.config import ProbeConfig

    counts: Counter[int] = Counter()
    for seed in range(2000):
        choice = Choice(ProbeConfig(ops_mode="sample", ops_calls=3, seed=seed))
        places = {}
        for call in range(12):
            keep, slot = choice.keeps("aten.mm.default")
            if keep:
                places[slot] = call
        counts.update(places.values())
    deviation = (2000 * 0.25 * 0.75) ** 0.5
    assert all(abs(counts[call] - 500) < 5 * deviation for call in range(12)), counts


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        ("aten.mul*", {"aten.mul.Tensor"}),
        ("aten.mul", {"aten.mul.Tensor"}),
        ("!aten.mul*", {"aten.add.Tensor", "aten.clone.default"}),
        ("aten.view*,aten.empty*", {"aten.empty.memory_format"}),
        ("<root>::aten.add*", {"aten.add.Tensor"}),
        ("!*::aten.add*", {"aten.mul.Tensor", "aten.clone.default"}),
        ("other::*", set()),
    ],
)
def test_globs_choose_operators_and_places(tmp_path: Path, globs: str, expected: set[str]) -> None:
    def body(self: Small, x: torch.Tensor) -> torch.Tensor:
        torch.empty(2)
        return (x.view(2) * 2 + 1).clone()

    dump = captured(tmp_path, Small(body), torch.ones(2), ops_list=globs)
    assert {c.op for c in dump.ops} == expected
    assert {s.reason for s in dump.skips} >= {"not selected by VLLM_ACCPROBE_OPS_LIST"}


@pytest.fixture(scope="module")
def library() -> Any:
    lib = torch.library.Library("accprobe_test", "FRAGMENT")
    lib.define("opaque(Tensor x, Tensor(a!) y, str layer) -> ()")
    lib.define("broken(Tensor x) -> Tensor")

    def opaque(x: torch.Tensor, y: torch.Tensor, layer: str) -> None:
        y.copy_(torch.sin(x) * 2)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the kernel's own")

    lib.impl("opaque", opaque, "CPU")
    lib.impl("broken", broken, "CPU")
    return lib


def test_a_custom_operator_and_what_it_calls(tmp_path: Path, library: Any) -> None:
    def body(self: Small, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(2)
        torch.ops.accprobe_test.opaque(x, y, "layer.0")
        return y

    x = torch.tensor([0.5, 1.0])
    dump = captured(tmp_path, Small(body), x)
    (call,) = named(dump, "accprobe_test.opaque.default")
    assert call.args[2] == "layer.0"
    assert call.outputs == ()
    assert call.mutates == ("input.1",)
    assert read(dump, call, "inplace.input.1") == (torch.sin(x) * 2).tolist()
    inner = [c.op for c in dump.ops if c.op.startswith("aten")]
    assert inner == ["aten.sin.default", "aten.mul.Tensor", "aten.copy_.default"]
    assert all(c.seq > call.seq for c in dump.ops if c is not call)


def test_an_operators_own_exception_is_the_models(tmp_path: Path, library: Any) -> None:
    model = Small(lambda self, x: torch.ops.accprobe_test.broken(x))
    with Probe(model, dir=tmp_path / "d", ops=True), pytest.raises(ArithmeticError, match="the kernel's own"):
        model(torch.ones(2))
    dump = open_dump(tmp_path / "d")
    assert dump.errors == []
    assert dump.stops == {}


def test_a_failure_inside_the_tap_ends_the_capture_and_not_the_model(tmp_path, monkeypatch, caplog):
    from vllm_accprobe.capture.ops.op_tensors import Takes

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Takes, "take", fails)
    model = Small(lambda self, x: x * 2 + 1)
    with Probe(model, dir=tmp_path / "d", ops=True):
        assert model(torch.ones(2)).tolist() == [3.0, 3.0]
        assert model(torch.ones(2)).tolist() == [3.0, 3.0]
    dump = open_dump(tmp_path / "d")
    assert "planted" in dump.errors[0]["message"]
    assert "operator aten.mul.Tensor" in dump.stops[0].reason
    assert caplog.text.count("capture is off, serving goes on") == 1


def test_operators_of_steps_that_are_not_armed_are_not_seen(tmp_path: Path) -> None:
    dump = captured(tmp_path, Small(lambda self, x: x * 2), *[torch.ones(2)] * 4, steps="1,3")
    assert [c.step for c in dump.ops] == [1, 3]


def test_gradients_are_left_alone(tmp_path: Path) -> None:
    model = Small(lambda self, x: (x * self.weight).sum())
    model.weight.requires_grad_(True)
    with Probe(model, dir=tmp_path / "d", ops=True):
        model(torch.ones(3, 3)).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0] * 3] * 3
    assert {c.op for c in open_dump(tmp_path / "d").ops} >= {"aten.mul.Tensor", "aten.sum.default"}


def test_odd_arguments_have_words(tmp_path: Path) -> None:
    def body(self: Small, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        x.clone().normal_(generator=generator)
        torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2), check_invariants=True).to_dense()
        torch.empty(2, device="meta") * 2
        (torch.ones(2, dtype=torch.complex64) * 1j).conj().clone()
        return torch.ops.aten.sum.IntList_out(x, [0], out=torch.empty(()))

    dump = captured(tmp_path, Small(body), torch.ones(2))
    (normal,) = named(dump, "aten.normal_.default")
    assert normal.kwargs["generator"] == {"skipped": "a Generator"}
    reasons = {s.reason for s in dump.skips}
    assert "a tensor of an operator: not a plain tensor (sparse_coo, float32)" in reasons
    assert "a tensor of an operator: without values (meta)" in reasons
    assert any(v == {"complex": [0.0, 1.0]} for c in named(dump, "aten.mul.Tensor") for v in c.args)
    conjugated = [t for c in dump.ops for t in tensors(c.outputs) if t["dtype"] == "complex64"]
    assert conjugated


def test_the_line_says_what_became_of_a_written_argument(tmp_path: Path) -> None:
    for mode in ("trace", "full"):
        model = Small(lambda self, x: x.clone().mul_(3.0))
        dump = captured(tmp_path, model, torch.tensor([1.0, 5.0]), ops_mode=mode)
        (times,) = named(dump, "aten.mul_.Tensor")
        (x,) = (t for t in inputs(times) if t["role"] == "input.0")
        assert x["written"] is True
        assert (x["min"], x["max"], x["after"]["min"], x["after"]["max"]) == (1.0, 5.0, 3.0, 15.0)
        assert x["hash"] != x["after"]["hash"] == next(tensors(times.outputs))["hash"]


def test_operators_of_steps_with_other_peoples_rows_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "d"
    with Probe(Toy(), dir=out, ops=True, requests="call-0,call-3") as probe:
        probe.model(torch.tensor([[1, 2, 3], [4, 5, 6]]))  # call-0 and call-1
        probe.model(torch.tensor([[7, 8, 9]]))  # call-2
        probe.model(torch.tensor([[7, 8, 1]]))  # call-3
    dump = open_dump(out)
    assert {r.step for r in dump.records if r.step is not None} == {0, 2}
    assert {c.step for c in dump.ops} == {2}
    left = sum(s.count for s in dump.skips if s.reason.startswith("its rows cannot be distinguished, and not all"))
    assert left > 10
    ids = [r for r in dump.records if r.role == "input.input_ids" and r.tap == "<root>"]
    assert [dump.read(r).reshape(-1).tolist() for r in ids] == [[1, 2, 3], [7, 8, 1]]


@pytest.mark.parametrize("warm", [False, True])
def test_a_compiled_function_runs_as_it_is_written(tmp_path: Path, warm: bool) -> None:
    compiled = torch.compile(lambda x: (x * 2 + 1).sum(), backend="eager", dynamic=True)
    model = Small(lambda self, x: compiled(x * 3))
    if warm:
        assert model(torch.ones(3)).item() == 21.0
    dump = captured(tmp_path, model, torch.ones(3), torch.ones(4))
    expected = ["aten.mul.Tensor", "aten.mul.Tensor", "aten.add.Tensor", "aten.sum.default"]
    assert [c.op for c in dump.ops] == expected * 2
    assert read(dump, dump.ops[-1], "output.0") == 28.0
    assert model(torch.ones(5)).item() == 35.0
