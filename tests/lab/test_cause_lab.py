"""The laboratory of causes: its cases are stable and balanced, its predicates tell causes apart, its totals count."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from accprobe_cause_kinds import NO_CAUSE, VARIANTS
from accprobe_faults import Fault, parse, plant

from lab import causes
from lab.cases import HELD_OUT, TUNED
from lab.cause_cases import ARCHITECTURES, CASES, FAMILIES, NONE, PLANTS, SETTING, CauseCase, Right
from lab.causes import ERROR, NOT_FOUND, RIGHT, SILENT, WRONG, Results, judged, table, totals

torch = pytest.importorskip("torch")
PLANTED = [one for one in CASES if one.right is not None]
NAMES = "03915adf217c4efe"
"""Of all cases' names, a digest: what is held out stays so."""


def test_as_many_cases_as_promised_half_of_them_held_out() -> None:
    assert len(PLANTED) >= 120
    assert len(CASES) - len(PLANTED) == 60
    assert {one.family for one in PLANTED} == set(FAMILIES)
    assert {one.case.model for one in PLANTED} == set(ARCHITECTURES)
    assert len({one.name for one in CASES}) == len(CASES)
    for family in (*FAMILIES, NONE):
        halves = Counter(one.half for one in CASES if one.family == family)
        assert 0.35 < halves[HELD_OUT] / halves.total() < 0.65, family
    names = "\n".join(one.name for one in CASES)
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == NAMES, "the held-out half must not change"


def test_each_case_can_be_planted() -> None:
    for one in CASES:
        (fault,) = parse(json.dumps(one.case.faults))
        assert fault.param in VARIANTS[fault.kind], one.name
    assert {(p.kind, p.variant) for p in PLANTS} == {(f["kind"], f["param"]) for c in PLANTED for f in c.case.faults}
    assert {f["param"] for c in CASES if c.family == NONE for f in c.case.faults} == set(NO_CAUSE)


SENTENCES: dict[tuple[str, str], str] = {
    ("attention_as", "scale"): "with the softmax scale {0:.4g}",
    ("attention_as", "no cap"): "without its soft cap of 4",
    ("attention_as", "cap"): "with a soft cap of {0:.4g}",
    ("attention_as", "window"): "with a sliding window of {0}",
    ("attention_as", "no sinks"): "without its attention sinks",
    ("attention_as", "heads in turn"): "with key heads dealt out in turn (query head h reads key head h modulo 2)",
    ("attention_as", "heads further"): "with its heads' results {0} places further on",
    ("attention_as", "keys and values exchanged"): "with keys and values exchanged",
    ("attention_as", "tail of keys"): "without the keys behind the last whole block of {0}",
    ("attention_as", "cache times"): "with keys and values times {0:.4g} in its cache",
    ("attention_as", "cache in fp8"): "with keys and values of its cache in float8_e4m3fn (of each head)",
    ("attention_as", "probabilities in bits"): "with its probabilities in 4 bits of mantissa",
    ("norm_as", "epsilon"): "with the epsilon {0:.3g}",
    ("norm_as", "no weight"): "without its weight",
    ("norm_as", "weight and one"): "with 1 + its weight instead of its weight",
    ("norm_as", "weight without one"): "with its weight instead of 1 + its weight",
    ("norm_as", "residual twice"): "with its residual added twice",
    ("norm_as", "squares in bf16"): "with the sum of its squares added up in bfloat16 by 2",
    ("linear_as", "no bias"): "without its bias",
    ("linear_as", "bias twice"): "with its bias added twice",
    ("linear_as", "tail left out"): "without the last {0} of its inputs",
    ("linear_as", "transposed"): "with its weight transposed",
    ("linear_as", "input in fp8"): "with its input input_ in float8_e4m3fn",
    ("linear_as", "weight in int4"): "with its weight in int4 with a scale for each block of 32",
    ("linear_as", "split in k"): "with its sums over {0} inputs at a time in the result's dtype (each part rounded)",
    ("rotary_as", "base"): "with the base {0:.5g}",
    ("rotary_as", "key as it was"): "without turning its key",
    ("activation_as", "limit"): "with its gate cut at {0:.4g} and up at that to both sides",
    ("activation_as", "sigmoid in bits"): "with its sigmoid in 5 bits of mantissa",
    ("experts_as", "one left out"): "without expert {1}",
    ("output_as", "columns stale"): "with columns {1} to 127 of the row 1 before (not written again)",
    ("output_as", "never written"): "with 0 in its place (never written)",
    ("output_as", "bits cut off"): "with its result in 6 bits of mantissa, cut off",
}
"""Of some plants, the clause that is right, with the number of the case."""


def _cause(one: CauseCase, number: float | None = None) -> dict[str, Any] | None:
    """What opcheck would say of a case. number: another one than the case's."""
    (fault,) = one.case.faults
    text = SENTENCES.get((fault["kind"], fault["param"]))
    if text is None or one.right is None:
        return None
    value = number if number is not None else one.right.values[0] if one.right.values else 0
    where = one.right.where[0] if one.right.where else 0
    said = f"mine's output is what this Operator gives {text.format(value, where)}"
    return {"family": one.right.families[0], "text": said, "parameter": value if "{0" in text else None}


def test_a_predicate_accepts_its_own_sentence_and_no_other() -> None:
    said = {one.name: cause for one in PLANTED if (cause := _cause(one)) is not None}
    assert {(c.case.faults[0]["kind"], c.case.faults[0]["param"]) for c in PLANTED if c.name in said} == set(SENTENCES)
    for one in PLANTED:
        if one.name not in said or one.right is None:
            continue
        assert one.right.accepts(said[one.name]), one.name
        assert not one.right.accepts({**said[one.name], "family": "another"}), one.name
        if one.right.values and (wrong := _cause(one, 1.3 * one.right.values[0] + 1)) is not None:
            assert not one.right.accepts(wrong), (one.name, wrong)
        for other in PLANTED:
            (mine, theirs) = (c.case.faults[0] for c in (one, other))
            if other.name in said and mine["kind"] == theirs["kind"] and mine["param"] != theirs["param"]:
                assert not one.right.accepts(said[other.name]), (one.name, said[other.name])


def test_one_of_several_clauses_is_enough_and_its_own_number_counts() -> None:
    right = Right((SETTING,), r"softmax scale", (0.5,))
    text = "mine's output is what this Attention gives with a soft cap of 0.5, or with the softmax scale {}"
    assert right.accepts({"family": "factor", "text": text.format(0.5), "parameter": 0.5})
    assert not right.accepts({"family": SETTING, "text": text.format(0.7), "parameter": 0.5})


CASE = next(one for one in PLANTED if _cause(one) and one.half == TUNED)
SECRET = next(one for one in CASES if one.half == HELD_OUT)
NO_FAMILY = next(one for one in CASES if one.family == NONE and one.half == TUNED)
TURNED = next(one for one in PLANTED if one.case.faults[0]["param"] == "key as it was")
TURNS, OWN_TURN = TURNED.case.expected[0], _cause(TURNED)
HERE, FAR = CASE.case.expected[0], "model.elsewhere"
OWN, OTHER = _cause(CASE), {"family": SETTING, "text": "mine's output is what this Operator gives for no reason"}


@pytest.mark.parametrize(
    ("one", "origins", "outcome"),
    [
        (CASE, [(HERE, OWN)], RIGHT),
        (CASE, [(FAR, None), (HERE, OWN)], RIGHT),
        (CASE, [(HERE, OTHER)], WRONG),
        (CASE, [(HERE, OWN), (FAR, OTHER)], WRONG),
        (CASE, [(FAR, OTHER)], WRONG),
        (CASE, [(HERE, OWN), (FAR, OWN)], WRONG),
        (TURNED, [(TURNS, OWN_TURN), (TURNS.replace(".0.", ".1."), OWN_TURN)], RIGHT),
        (TURNED, [(TURNS, OWN_TURN), (TURNS.replace(".0.", ".1."), OTHER)], WRONG),
        (TURNED, [(TURNS, OWN_TURN), (FAR, OWN_TURN)], WRONG),
        (CASE, [(HERE, None)], SILENT),
        (CASE, [(FAR, None)], NOT_FOUND),
        (CASE, [], NOT_FOUND),
        (NO_FAMILY, [(NO_FAMILY.case.expected[0], None)], SILENT),
        (NO_FAMILY, [(NO_FAMILY.case.expected[0], OTHER)], WRONG),
        (NO_FAMILY, [], NOT_FOUND),
    ],
)
def test_an_outcome(one: CauseCase, origins: list[tuple[str, Any]], outcome: str) -> None:
    found = judged(one, "fail", [{"module": m, "cause": c} for m, c in origins])
    assert found.outcome == outcome


def test_totals_and_what_they_require() -> None:
    good = judged(CASE, "fail", [{"module": HERE, "cause": OWN}])
    bad = judged(CASE, "fail", [{"module": HERE, "cause": OTHER}])
    none = judged(NO_FAMILY, "fail", [{"module": NO_FAMILY.case.expected[0], "cause": OTHER}])
    (whole, *_) = totals([good] * 3 + [bad])
    assert (whole.counts, whole.missed) == ({RIGHT: 3, WRONG: 1, SILENT: 0, NOT_FOUND: 0, ERROR: 0}, ["wrong 1 of 4"])
    assert totals([good])[0].missed == []
    silent = judged(NO_FAMILY, "fail", [{"module": NO_FAMILY.case.expected[0], "cause": None}])
    assert "| no family, tuned | 1 | 1 of 1" in table(totals([silent]))
    assert totals([none])[-1].missed == ["1 causes of faults of no family"]
    assert "| all, tuned | 4 | 3 of 4 (0.30 to 0.95) | 1 | 0 | 0, 0 |" in table(totals([good] * 3 + [bad]))


def test_what_is_held_out_is_kept_but_not_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path)
    for one in (CASE, SECRET):
        results.add(judged(one, "fail", []))
    assert set(Results(tmp_path).by_name) == {CASE.name, SECRET.name}
    assert not any(SECRET.name.encode() in path.read_bytes() for path in tmp_path.iterdir())
    words = ["--keep", str(tmp_path), "--resume", "--only", f"{CASE.name},{SECRET.name}"]
    page = tmp_path / "page.md"
    assert causes.main([*words, "--markdown", str(page)]) == 1
    assert SECRET.name not in capsys.readouterr().out + page.read_text()
    assert CASE.name in page.read_text()
    assert causes.main(["--only", "nothing"]) == 2


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class _Root(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Any, positions: Any, *args: Any) -> Any:
        return self.inner(*args)


def _planted(inner: torch.nn.Module, *args: Any, **fault: Any) -> Any:
    root = _Root(inner)
    plant(root, Fault(module="inner", **fault))
    with torch.no_grad():
        return root(None, None, *args)


@pytest.mark.parametrize(
    ("kind", "variant", "n", "expected"),
    [
        ("linear_as", "no bias", 1, lambda m, x: x @ m.weight.T),
        ("linear_as", "tail left out", 2, lambda m, x: x[:, :6] @ m.weight[:, :6].T + m.bias),
        ("linear_as", "transposed", 1, lambda m, x: x @ m.weight + m.bias),
        ("linear_as", "k and v exchanged", 4, lambda m, x: m(x)[:, [0, 1, 2, 3, 6, 7, 4, 5]]),
        ("output_as", "rows further", 1, lambda m, x: m(x).roll(1, 0)),
        ("output_as", "cut at", 0.25, lambda m, x: m(x).clamp(-0.25, 0.25)),
        ("output_as", "wrapped", 0.5, lambda m, x: m(x) - torch.floor(m(x) + 0.5)),
        ("output_as", "squashed", 1.0, lambda m, x: (m(x) / (s := m(x).square().mean(1, True).sqrt())).tanh() * s),
    ],
)
def test_a_plant_does_what_its_name_says(kind: str, variant: str, n: float, expected: Any) -> None:
    layer = torch.nn.Linear(8, 8)
    with torch.no_grad():
        right = expected(layer, X)
    assert torch.allclose(_planted(layer, X, kind=kind, param=variant, factor=n), right, atol=1e-6)


def test_a_norm_and_a_spoiled_column() -> None:
    layer = torch.nn.LayerNorm(8)
    expected = X * (X.square().mean(1, keepdim=True) + layer.eps).rsqrt()
    assert torch.allclose(_planted(layer, X, kind="norm_as", param="not centred"), expected, atol=1e-6)
    found = _planted(torch.nn.Identity(), X, kind="output_as", param="columns at 0", features=(3,))
    assert not found[:, 3].any()
    assert torch.equal(found[:, :3], X[:, :3])
