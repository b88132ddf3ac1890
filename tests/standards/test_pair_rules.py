"""Other tools' rules, at and around their thresholds, on tensors made for it."""

from dataclasses import asdict

import numpy as np
import pytest

from vllm_accprobe.kernels import definition
from vllm_accprobe.kernels.formulas import eps_of
from vllm_accprobe.opcheck.measures import measure
from vllm_accprobe.standards import OUTPUT, PAIRS, find
from vllm_accprobe.standards.declaration import OF_PAIRS, Numbers


def numbers(golden, mine, dtype="float32", *, identical=False, kl=True):
    g, m = np.asarray(golden, float), np.asarray(mine, float)
    found = asdict(definition.tensor_metrics(definition.row_table(g.reshape(1, -1), m.reshape(1, -1))))
    found["kl"] = definition.kl_divergence(definition.softmax_sums(g, m)) if kl else None
    values = {name: found[name] for name in OF_PAIRS}
    elements = dict(zip(definition.ELEMENT_FIELDS, definition.element_sums(g, m, eps_of(dtype)), strict=True))
    return Numbers.of(dtype, g.size, values, elements, identical)


def judged(name, *arguments, **more):
    standard = find(name, PAIRS).pairs
    cells, word, why = standard.rule(numbers(*arguments, **more))
    return dict(zip(standard.columns, cells, strict=True)), word, why


def test_msprobe_says_of_a_pair_what_it_says_of_an_output():
    """One rule: opcheck's numbers and compare's of the same tensors, but for what pairs have not."""
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "int64"):
        for scale in (1e-20, 1e-4, 1.0, 100.0):
            for spread in (0.0, 3e-5, 2e-3, 0.5):
                g = np.round(rng.normal(0, 100, 2000)) if dtype == "int64" else rng.normal(0, scale, 2000)
                m = np.where(rng.random(2000) < 0.1, g * (1 + spread), g)
                g[:5] = m[:5] = np.nan if dtype != "int64" else 0.0
                _, word, why = judged("msprobe", g, m, dtype)
                found = find("msprobe", OUTPUT).output(numbers(g, m, dtype).measures, "exp", dtype)
                assert (word, why) == (found.status, found.message)
                full = find("msprobe", OUTPUT).output(measure(g, m, dtype), "exp", dtype)
                assert full.status == word, (dtype, scale, spread)


def test_msprobe_counts_what_both_sides_hold_as_right():
    """A mask of infinities is agreed on: shares are of all elements, as opcheck's are."""
    g = np.array([-np.inf] * 900 + [10.0] * 100)
    m = g.copy()
    m[900:902] *= 1.05
    cells, word, _ = judged("msprobe", g, m, "bfloat16")
    assert (cells["Dual-100 metric"], word) == (0.998, "warning")
    assert judged("msprobe", [np.nan, 1e-3], [np.nan, -1e-3], "bfloat16")[2] == "dual-100: 0.5 is not above 0.99"


def test_msprobe_of_nothing_but_its_largest_error():
    """What was not measured passes nowhere."""
    bare = Numbers.of("int64", 4, {"max_abs_err": 2.0}, None, False)
    rule = find("msprobe", PAIRS).pairs.rule
    assert rule(bare)[1:] == ("error", "values differ and must be equal")
    bare = Numbers.of("float32", 4, {"cosine": 0.999, "max_abs_err": 2.0}, None, False)
    assert rule(bare)[1:] == ("SKIP", "dual_1000 was not measured")


def test_xray_fails_by_its_largest_error():
    cells, word, _ = judged("xray", [1.0, 2.0, 4.0, 0.0], [1.0, 2.0078125, 4.0, 0.0])
    assert word == "pass"
    assert cells == {
        "Status": "", "Cosine": pytest.approx(1.0, abs=1e-5), "RMSE": pytest.approx(0.0078125 / 2),
        "IsClose (%)": 75.0, "Max Err (t)": 0.0078125, "GtNum": 1,
    }  # fmt: skip
    cells, word, _ = judged("xray", [1.0, 2.0], [1.0, 2.015625])
    assert (cells["Status"], word) == ("Fail", "error")


def test_ait_has_seven_metrics_and_no_verdict():
    g, m = np.array([1.0, -2.0, 0.0, 4.0]), np.array([1.1, -2.0, 5.0, 4.0])
    cells, word, _ = judged("ait", g, m)
    assert word == ""
    soft = [np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (g, m)]
    assert cells["kl_divergence"] == pytest.approx(float((soft[0] * np.log(soft[0] / soft[1])).sum()))
    # errors where the golden is zero are left out, but not of the divisor
    assert (cells["max_relative_error"], cells["mean_relative_error"]) == (pytest.approx(0.1), pytest.approx(0.025))
    assert (cells["max_absolute_error"], cells["mean_absolute_error"]) == (pytest.approx(0.1), pytest.approx(0.025))
    assert cells["relative_euclidean_distance"] == pytest.approx(np.sqrt((25 + 0.01) / 21))
    assert judged("ait", g, m, kl=False)[0]["kl_divergence"] is None


def test_kl_of_parts_is_that_of_the_whole():
    rng = np.random.default_rng(1)
    g, m = rng.normal(0, 30, 1000), rng.normal(0, 30, 1000)
    m[3] = np.inf
    whole = definition.softmax_sums(g, m)
    parts = definition.joined_softmax_sums(
        definition.softmax_sums(g[:400], m[:400]), definition.softmax_sums(g[400:], m[400:])
    )
    assert definition.kl_divergence(parts) == pytest.approx(definition.kl_divergence(whole), rel=1e-12)
    assert definition.kl_divergence(definition.softmax_sums(g[:0], m[:0])) is None


@pytest.mark.parametrize(("golden", "mine", "word"), [
    ([1.0, 2.0], [1.0, 2.00009], "pass"),
    ([1.0, 2.0], [1.0, 2.0002], "error"),
    ([1e-5, 0.0], [0.0, 1e-5], "error"),
    ([np.nan], [1.0], "error"),
    ([0.0, 0.0], [0.0, 0.0], "pass"),
])  # fmt: skip
def test_mindspore(golden, mine, word):
    assert judged("mindspore", golden, mine)[1] == word
