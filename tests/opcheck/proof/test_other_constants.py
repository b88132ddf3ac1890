"""A constant that differs, with both values through the reference: it matters, it does not, or that is not known."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.notes import other_values, with_effects
from vllm_accprobe.dump.decode import decode
from vllm_accprobe.dump.schema import Module
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.proof.apply_proof import ConstantEffect
from vllm_accprobe.opcheck.proof.make_proof import computed_otherwise, effects
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.registry import default_references

NORM = "layers.0.norm"


def dump(root, eps, size=1.0, **attrs):
    """A norm with this epsilon over rows of ``size``, and a module that nobody knows, with ``attrs``."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(12, 64, generator=g, dtype=torch.float64) * size).bfloat16()
    weight = torch.ones(64).bfloat16()
    m = Maker(root)
    m.module(NORM, "RMSNorm", variance_epsilon=eps)
    m.module("layers.0.odd", "NobodyKnows", **attrs)
    m.request(0, 12)
    m.param(NORM, "RMSNorm", weight=weight)
    m.step(0, [(0, 0, 12)])
    wide = x.double()
    y = (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).bfloat16()
    m.call(NORM, "RMSNorm", {"x": x}, y)
    m.call("layers.0.odd", "NobodyKnows", {"x": x}, (x * (1.0 + attrs.get("scale", 0.0))).bfloat16())
    return open_dump(m.close())


def two_modules(root, approximate, cls, tp_rank=0):
    """A gated GELU and a norm."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(12, 64, generator=g, dtype=torch.float64) * 2).bfloat16()
    m = Maker(root)
    m.module("act", "GeluAndMul", approximate=approximate, tp_rank=tp_rank)
    m.module("norm", cls, variance_epsilon=1e-6)
    m.request(0, 12)
    m.param("norm", cls, weight=torch.full((64,), 0.3).bfloat16())
    m.step(0, [(0, 0, 12)])
    m.call("act", "GeluAndMul", {"x": x}, (torch.nn.functional.gelu(x[:, :32].double()) * x[:, 32:]).bfloat16())
    m.call("norm", cls, {"x": x}, x)
    return Calls(open_dump(m.close()), None)


@pytest.mark.parametrize(("golden", "mine", "why"), [
    (("tanh", "RMSNorm"), ("tanh", "RMSNorm", 1), {}),
    (("tanh", "RMSNorm"), ("none", "RMSNorm"), {"act": "its approximate is none, golden's is tanh"}),
    (("none", "GemmaRMSNorm"), ("none", "RMSNorm"), {"norm": "it is a RMSNorm, golden's is a GemmaRMSNorm"}),
    (("none", "RMSNorm"), ("none", "NobodyKnows"), {}),
])  # fmt: skip
def test_what_golden_s_module_would_compute_otherwise(tmp_path, golden, mine, why):
    sides = two_modules(tmp_path / "g", *golden), two_modules(tmp_path / "m", *mine)
    assert computed_otherwise(sides, default_references(), ["act", "norm", "nowhere"], ()) == why
    assert computed_otherwise(sides, default_references(), ["act", "norm"], ["act", "norm"]) == {}


BOTH, ONE = "((x + self_attn[0]) + mlp[0])", "(x + self_attn[0])"
SAYS = f"its own code computes output.0 = {ONE}, golden's {BOTH}"
RENAMED = "((x + self_attn[0]) + ffn[0])"


def layer(code, parts=("self_attn", "mlp"), wrong=False, source="v/a.py:1"):
    """A layer whose own code computes ``code``; None: golden of an older release, or right but for ``wrong``."""
    g = torch.Generator().manual_seed(0)
    x, a, m = ((torch.randn(4, 8, generator=g)).bfloat16() for _ in range(3))
    out = (x + a) if code == ONE or wrong else (x + a + m)

    def kept(t):
        return SimpleNamespace(shape=tuple(t.shape), layout=None, t=t, row_dim=0, rows=None, dtype="bfloat16")

    attrs = {} if code is None else {"forward": {"output.0": code} if isinstance(code, str) else code}
    children = tuple((path, "output.0", kept(t)) for path, t in (("self_attn", a), ("mlp", m)) if path in parts)
    call = Call("l", "OddDecoderLayer", inputs={"hidden_states": x, "x": x}, attrs=attrs, outputs={"output.0": out},
                extra={"children": children, "read": lambda r: r.t})  # fmt: skip
    captured = SimpleNamespace(what=call, missing="", records={"output.0": kept(out)})
    modules = {"l": Module("l", "OddDecoderLayer", 0, attrs, source)}
    modules |= {f"l.{name}": Module(f"l.{name}", "Odd", 1) for name in ("self_attn", "mlp")}
    return SimpleNamespace(modules={0: modules}, taps=lambda _: [(0, "l", None)], of=lambda *_: iter([captured]))


@pytest.mark.parametrize(("golden", "mine", "why"), [
    (layer(BOTH), layer(ONE), SAYS),
    (layer(BOTH), layer(ONE, ("self_attn",)), SAYS),  # mine never called mlp
    (layer(BOTH), layer(BOTH), ""),
    (layer(None), layer(ONE), "its own code computes something else than golden's class, whose code was not recorded"),
    (layer(None), layer(BOTH), ""),
    (layer(None, wrong=True), layer(ONE), ""),  # golden's class is not what golden computes
    (layer(RENAMED), layer(ONE), ""),
    (layer(BOTH, source="w/a.py:1"), layer(ONE), ""),
    (layer(BOTH), layer({}), ""),
    (layer({"output.0": BOTH, "own_code": "mlp"}), layer({"output.0": "x", "own_code": 3}),
     f"its own code computes output.0 = x, golden's {BOTH}"),
    (layer({"output.0": BOTH, "output.1": "x"}), layer({"output": "self_attn"}), ""),
    (layer({"output": "mlp"}), layer({"output": "self_attn"}),
     "its own code computes output = self_attn, golden's mlp"),
])  # fmt: skip
def test_a_layer_whose_own_code_is_not_golden_s(golden, mine, why):
    found = computed_otherwise((golden, mine), default_references(), ["l"], ())
    assert found == ({"l": why} if why else {})


def found(golden, mine):
    return effects(Calls(mine, None), default_references(), other_values(golden, mine))


def test_what_moves_no_output_beyond_rounding_does_not_matter(tmp_path):
    golden, mine = dump(tmp_path / "g", 1e-6), dump(tmp_path / "m", 1e-5)
    effect = found(golden, mine)
    assert effect[NORM]["matters"] is False
    assert effect[NORM]["times"] < 0.1
    small = found(dump(tmp_path / "gs", 1e-6, 3e-3), dump(tmp_path / "ms", 1e-5, 3e-3))
    assert small[NORM]["matters"] is True
    assert small[NORM]["times"] > 3
    assert decode(dict[str, ConstantEffect], json.loads(json.dumps(small))) == small


def test_a_constant_that_no_reference_reads_stays_open(tmp_path):
    golden, mine = dump(tmp_path / "g", 1e-6, scale=0.0), dump(tmp_path / "m", 1e-6, scale=0.0025)
    effect = found(golden, mine)
    assert effect == {"layers.0.odd": {"matters": None, "times": 0.0}}
    result = with_effects(compare(golden, mine), effect)
    assert (result.verdict, [o["role"] for o in result.origins]) == ("fail", ["setting"])


def test_what_follows_for_the_verdict(tmp_path):
    golden, mine = dump(tmp_path / "g", 1e-6, 0.3), dump(tmp_path / "m", 1e-4, 0.3)
    result = compare(golden, mine)
    assert (result.verdict, result.counts.failed, result.origins[0]["role"]) == ("fail", 0, "setting")
    passed = with_effects(result, {NORM: {"matters": False, "times": 0.02}})
    assert (passed.verdict, passed.origins) == ("pass", [])
    assert passed.notes[0] == (
        f"replay: {NORM}: variance_epsilon is 0.0001, golden has 1e-06, which does not matter here: with "
        "golden's value its outputs move by 0.02 times what rounding allows (replay)"
    )
    kept = with_effects(result, {NORM: {"matters": True, "times": 4.0}})
    assert kept.verdict == "fail"
    assert kept.origins[0]["cause"]["matters"] is True
    assert kept.origins[0]["cause"]["sentence"].endswith("move by 4 times what rounding allows (replay)")
    failing = replace(result, pairs=[replace(p, status="fail") for p in result.pairs])
    assert with_effects(failing, {NORM: {"matters": False, "times": 0.02}}).verdict == "fail"
