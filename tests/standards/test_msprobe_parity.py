"""Our measures and verdicts beside msprobe's own functions, on the same tensors.

msprobe (the test extra's mindstudio-probe, 26.2) is called, never imitated: its comparator for what stands in
accuracy_checking_details.csv, its compare classes for the algorithms that its float outputs no longer reach, and its
api_precision_compare for two machines. Where the two differ, the test says by how much and why; the same list stands in
docs/opcheck.md.
"""

import csv
import math
from dataclasses import asdict

import numpy as np
import pytest
from standards.named_rules import judge, judge_two

from vllm_accprobe.opcheck.measures import Measures, measure
from vllm_accprobe.standards.dtype_limits import CURRENT, Domain

torch = pytest.importorskip("torch")
pytest.importorskip("msprobe", reason="the test extra brings mindstudio-probe")

# What 26.2's code takes for small values; its documents say otherwise (CURRENT).
_SMALL = {"float16": 2.0**-10, "bfloat16": 2.0**-10, "": 2.0**-20}
BENCHMARK_DOMAIN = Domain(_SMALL, {"float16": 1e-16, "bfloat16": 1e-16, "": 2.0**-30}, CURRENT.rtol)
ABSOLUTE_DOMAIN = Domain(_SMALL, {"float16": 2.0**-16, "bfloat16": 1e-16, "": 2.0**-30}, CURRENT.rtol)
DTYPES = ("bfloat16", "float16", "float32")
WIDER = {"bfloat16": torch.float32, "float16": torch.float32, "float32": torch.float64, "float64": torch.float64}


@pytest.fixture(scope="module")
def msprobe(tmp_path_factory):
    """Their modules, imported once: four seconds."""
    from msprobe.pytorch.api_accuracy_checker.compare import algorithm, api_precision_compare, compare, compare_input
    from msprobe.pytorch.api_accuracy_checker.compare.compare_column import CompareColumn
    from msprobe.pytorch.api_accuracy_checker.precision_standard import (
        absolute_threshold,
        accumulative_error_compare,
        benchmark_compare,
        thousandth_standard,
        ulp_compare,
    )

    root = tmp_path_factory.mktemp("msprobe")
    comparator = compare.Comparator(str(root / "result.csv"), str(root / "details.csv"), False)

    class Msprobe:
        algorithms = algorithm
        two_sided = api_precision_compare
        absolute = absolute_threshold.AbsolutethdCompare
        accumulative = accumulative_error_compare.AccumulativeErrorCompare
        benchmark = benchmark_compare.BenchmarkCompare
        dual_1000 = thousandth_standard.ThousandthStdCompare
        ulp = ulp_compare.UlpCompare

        @staticmethod
        def details(api, bench, device):
            """Status and columns of one tensor, by the class that fills accuracy_checking_details.csv."""
            status, rows = comparator._compare_core_wrapper(api, bench, device, False)
            return status, dict(zip(compare.DETAIL_TEST_ROWS[0][1:], rows[0], strict=True))

        @staticmethod
        def metrics(kind, bench, device, dtype):
            g, m = _numpy(bench), _numpy(device)
            column = CompareColumn()
            _, with_eps = algorithm.get_abs_bench_with_eps(g, dtype)
            rel = algorithm.get_rel_err_origin(algorithm.get_abs_err(g, m), with_eps)
            kind(compare_input.CompareInput(g, m, column, dtype, rel)).compare()
            return {n: getattr(column, n) for n in column.__slots__ if getattr(column, n) != " "}

    return Msprobe


def _numpy(t):
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy()


def tensors(seed: int, dtype: str):
    """A reference in the next wider dtype and an output in ``dtype``: eight kinds of error, with zeros, small values
    and shapes of its own for each seed."""
    r = np.random.default_rng(seed)
    shape = tuple(int(x) for x in r.integers(1, 40, size=int(r.integers(1, 4))))
    g = r.standard_normal(shape) * 10.0 ** r.uniform(-4, 3)
    if seed % 3 == 0:
        g = np.where(r.random(shape) < 0.3, g * 1e-5, g)  # small values
    if seed % 5 == 0:
        g = np.where(r.random(shape) < 0.1, 0.0, g)
    noise = r.standard_normal(shape)
    m = [
        g, g * (1 + noise * 2.0**-10), g * (1 + noise * 2.0**-7), g * (1 + noise * 0.1), g * 1.02,
        g + noise * 1e-4, -g, g * (1 + noise * 2.0**-13),
    ][seed % 8]  # fmt: skip
    wide = WIDER[dtype]
    return torch.from_numpy(np.asarray(g)).to(wide), torch.from_numpy(np.asarray(m)).to(getattr(torch, dtype))


def ours(bench, device, dtype, **domains) -> Measures:
    return measure(_numpy(bench).astype(np.float64), _numpy(device), dtype, **domains)


def number(text):
    return None if text in (" ", None) else float(text)


def near(a, b, rel=2e-6, abs_=1e-12):
    """Equal but for msprobe's arithmetic in float32, ours in float64."""
    return a == pytest.approx(b, rel=rel, abs=abs_)


def boundary(bench, device, dtype, limit, eps):
    """Elements whose relative error is within float32's rounding of a limit: either tool may count them."""
    g, m = _numpy(bench).astype(np.float64), _numpy(device).astype(np.float64)
    rel = np.abs(m - g) / (np.abs(g) + eps)
    return int((np.abs(rel - limit) < limit * 1e-4).sum())


EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-23, "float32": 2.0**-52}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_columns_of_details_are_equal_and_so_is_the_status(dtype, msprobe):
    """Columns that msprobe left blank ("skip other check") are measured here nevertheless."""
    seen: dict[str, int] = {}
    verdicts = set()
    for seed in range(160):
        bench, device = tensors(seed, dtype)
        status, row = msprobe.details("exp", bench, device)
        m = ours(bench, device, dtype, current=BENCHMARK_DOMAIN)
        n = bench.numel()
        pairs = {
            "余弦相似度": m.cosine, "最大绝对误差": m.max_abs_err, "误差均衡性": m.error_balance,
            "均方根误差": m.normal_rmse, "小值域错误占比": m.small_value_err_ratio,
            "相对误差最大值": m.normal_max_rel_err, "相对误差平均值": m.normal_mean_rel_err,
        }  # fmt: skip
        for name, value in pairs.items():
            theirs = number(row[name])
            if theirs is not None:
                seen[name] = seen.get(name, 0) + 1
                assert near(value, theirs), (seed, name, value, theirs)
        for name, value, limit in (
            ("双百指标", m.dual_100, 1e-2), ("双千指标", m.dual_1000, 1e-3), ("双万指标", m.dual_10000, 1e-4)
        ):  # fmt: skip
            theirs = number(row[name])
            if theirs is not None:
                seen[name] = seen.get(name, 0) + 1
                assert abs(value - theirs) * n <= boundary(bench, device, dtype, limit, EPS[dtype]) + 1e-6, (seed, name)
        finding = judge("msprobe", m, "exp", dtype)
        assert finding.status == status, (seed, finding, row)
        verdicts.add(status)
    assert verdicts == {"pass", "warning", "error"}
    assert min(seen.values()) >= 16
    assert len(seen) == 9  # dual-10000 is float32's alone, dual-100 the others'


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_absolute_dual_and_accumulative_are_equal(dtype, msprobe):
    """Through the classes themselves: 26.2 judges every float output by the benchmark ratio and never gets to them."""
    kind = getattr(torch, dtype)
    for seed in range(120):
        bench, device = tensors(seed, dtype)
        n = bench.numel()
        m = ours(bench, device, dtype, current=ABSOLUTE_DOMAIN)
        theirs = msprobe.metrics(msprobe.absolute, bench, device, kind)
        assert theirs["inf_nan_error_ratio"] == m.inf_nan_err_ratio == 0
        limit = CURRENT.of(dtype)[2]
        slack = boundary(bench, device, dtype, limit, EPS[dtype])
        normal = int((np.abs(_numpy(bench)) > ABSOLUTE_DOMAIN.of(dtype)[0]).sum())
        assert abs(theirs["rel_err_ratio"] - m.rel_err_ratio) * normal <= slack + 1e-6, seed
        assert near(m.abs_err_ratio, theirs["abs_err_ratio"])
        theirs = msprobe.metrics(msprobe.ulp, bench, device, kind)
        assert near(m.ulp_max, theirs["max_ulp_error"])
        assert near(m.ulp_mean, theirs["mean_ulp_error"])
        at_bound = _ulps(bench, device, dtype)
        bound = 32 if dtype == "float32" else 1
        slack = int((np.abs(at_bound - bound) < bound * 1e-5).sum())
        assert abs(m.ulp_share - theirs["ulp_error_proportion"]) * n <= slack + 1e-6
        theirs = msprobe.metrics(msprobe.dual_1000, bench, device, kind)
        slack = boundary(bench, device, dtype, 1e-3, EPS[dtype])
        assert abs(m.dual_1000 - theirs["rel_err_thousandth"]) * n <= slack + 1e-6
        theirs = msprobe.metrics(msprobe.accumulative, bench, device, kind)
        slack = boundary(bench, device, dtype, {"float16": 2**-8, "bfloat16": 2**-7}.get(dtype, 2**-11), EPS[dtype])
        big = int((np.abs(_numpy(bench)) > 1).sum())
        assert abs(theirs["rel_err_ratio"] - m.acc_rel_err_ratio) * big <= slack + 1e-6
        assert near(m.acc_abs_err_ratio, theirs["abs_err_ratio"])
        assert near(m.error_balance, theirs["eb"])


def _ulps(bench, device, dtype):
    g, m = _numpy(bench).astype(np.float64), _numpy(device).astype(np.float64)
    low, bits = {"float16": (-14, 10), "bfloat16": (-126, 7), "float32": (-126, 23)}[dtype]
    with np.errstate(divide="ignore"):
        exponent = np.where(g == 0, 0, np.floor(np.log2(np.abs(g))))
    return np.abs(m - g) * 2.0 ** (bits - np.maximum(exponent, low))


NAN, INF = math.nan, math.inf
EDGES = {
    "all zero": ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], "pass", ""),
    "reference zero": ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0], "error", ""),
    "mine zero": ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], "error", ""),
    "one wrong element": ([2.0], [2.5], "error", ""),
    "one equal element": ([2.0], [2.0], "pass", ""),
    "signed zero": ([0.0, 1.0], [-0.0, 1.0], "pass", ""),
    "subnormal": ([1e-7, 1e-8], [1.1e-7, 1e-8], "pass", ""),
    "NaN of mine": ([1.0, 2.0, 3.0, 4.0], [1.0, NAN, 3.0, 4.0], "error", ""),
    "NaN of the reference": ([1.0, NAN, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], "error", ""),
    "infinity of mine": ([1.0, 2.0, 3.0, 4.0], [1.0, INF, 3.0, 4.0], "error", ""),
    "infinity of the reference": ([1.0, INF, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], "error", ""),
    "opposite infinities": ([1.0, INF, 3.0, 4.0], [1.0, -INF, 3.0, 4.0], "error", ""),
    # What both hold is agreed on here; msprobe divides NaN by NaN and counts the position as wrong.
    "NaN of both": ([1.0, NAN, 3.0, 4.0], [1.0, NAN, 3.0, 4.0], "pass", "error"),
    "infinity of both": ([1.0, INF, 3.0, 4.0], [1.0, INF, 3.0, 4.0], "pass", "error"),
    "all NaN": ([NAN, NAN], [NAN, NAN], "skip", "error"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EDGES)
def test_edge_cases(case, dtype, msprobe):
    g, m, status, theirs = EDGES[case]
    bench, device = torch.tensor(g, dtype=WIDER[dtype]), torch.tensor(m, dtype=getattr(torch, dtype))
    found = judge("msprobe", ours(bench, device, dtype), "exp", dtype)
    assert found.status == status, found
    assert msprobe.details("exp", bench, device)[0] == (theirs or status)


def _spoilt(reference, at, value):
    mine = reference.clone()
    mine[at] = value
    return mine


def _wrong(kind, wrong):
    """A hundred values and the same of which ``wrong`` differ."""
    r = np.random.default_rng(7)
    g = torch.from_numpy(r.integers(0, 2 if kind == "bool" else 100, 100)).to(getattr(torch, kind))
    at = torch.from_numpy(r.permutation(100)[:wrong])
    return g, _spoilt(g, at, ~g[at] if kind == "bool" else g[at] + 2)


RAMP, BYTES = torch.linspace(1, 2, 10000).bfloat16(), torch.arange(-50, 50, dtype=torch.int8)
CASES = {
    # Their cosine of NaN passes, and 99.99 % of the elements are right.
    "one NaN among ten thousand": ("exp", (RAMP.float(), _spoilt(RAMP, 5000, NAN)), "error", "pass"),
    # 70,000 is infinite in float16.
    "overflow to infinity": (
        "exp", (torch.tensor([7e4, 1.0, 2.0, 3.0]), torch.tensor([INF, 1.0, 2.0, 3.0]).half()), "pass", "error"
    ),
    # Theirs says SKIP in the row and pass of the call.
    "empty": ("exp", (torch.zeros(0).double(), torch.zeros(0)), "skip", "pass"),
    "int16": ("eq", (torch.arange(10, dtype=torch.int16),) * 2, "pass", "error"),
    **{f"{kind}, {wrong} wrong": ("eq", _wrong(kind, wrong), status, status)
       for kind in ("int8", "uint8", "int32", "int64", "bool")
       for wrong, status in ((0, "pass"), (1, "error"), (9, "error"))},
    # A quantiser may be off by one.
    **{f"{api} off by {off}": (api, (BYTES, _spoilt(BYTES, 3, BYTES[3] + off)), status, status)
       for api, off, status in (("npu_dynamic_quant", 1, "pass"), ("npu_dynamic_quant", 2, "error"),
                                ("neg", 1, "error"))},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_statuses_here_and_there(case, msprobe):
    api, (bench, device), status, theirs = CASES[case]
    dtype = str(device.dtype).removeprefix("torch.")
    mine = ours(bench, device, dtype) if device.is_floating_point() else measure(bench.numpy(), device.numpy(), dtype)
    found, row = msprobe.details(api, bench, device)
    assert (judge("msprobe", mine, api, dtype).status, found) == (status, theirs)
    if " wrong" in case:
        assert mine.binary_err_ratio == row["二进制一致错误率"]


def test_inf_nan_error_rate_is_of_all_elements_and_sees_an_infinite_reference(msprobe):
    """The document counts inconsistent elements among all; the code among those that are not finite, and divides by
    the infinite reference, so that anything agrees with it."""
    bench, device = torch.tensor([1.0, NAN, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, INF], dtype=torch.float16)
    theirs = msprobe.metrics(msprobe.absolute, bench, device, torch.float16)
    assert theirs["inf_nan_error_ratio"] == 1.0
    assert ours(bench, device, "float16").inf_nan_err_ratio == 0.5
    bench, device = torch.tensor([1.0, INF, 3.0, 4.0]), torch.tensor([1.0, -7.0, 3.0, 4.0], dtype=torch.float16)
    assert msprobe.metrics(msprobe.absolute, bench, device, torch.float16)["inf_nan_error_ratio"] == 0.0
    assert ours(bench, device, "float16").inf_nan_err_ratio == 0.25


def _sides(seed, dtype):
    """Two machines' outputs for one reference; mine's error is 0.5 to 20 times golden's."""
    r = np.random.default_rng(seed)
    g = r.standard_normal(400) * 10.0 ** r.uniform(-2, 2)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-17}[dtype]
    outs = [g * (1 + r.standard_normal(400) * unit * f) for f in (1.0, float(10 ** r.uniform(-0.3, 1.3)))]
    return torch.from_numpy(g).to(WIDER[dtype]), [torch.from_numpy(o).to(getattr(torch, dtype)) for o in outs]


@pytest.mark.parametrize("api", ["exp", "embedding", "layer_norm"])
def test_api_precision_compare_gives_the_same_statuses_and_ratios(api, msprobe, tmp_path):
    """Their csv files through their command and through ours: levels L0, L1 and L2."""
    from msprobe.pytorch.api_accuracy_checker.compare import compare

    from vllm_accprobe.opcheck.diff import open_diff

    files = [tmp_path / "gpu.csv", tmp_path / "npu.csv"]
    writers = [compare.Comparator(str(tmp_path / f"r{i}.csv"), str(f), False) for i, f in enumerate(files)]
    for seed in range(60):
        bench, sides = _sides(seed, DTYPES[seed % 3])
        for writer, device in zip(writers, sides, strict=True):
            status, rows = writer._compare_core_wrapper(api, bench, device, False)
            writer.write_detail_csv([f"Functional.{api}.{seed}", status, " ", rows, [], 0])
    result, details = tmp_path / "result.csv", tmp_path / "details.csv"
    config = msprobe.two_sided.CompareConfig(str(files[1]), str(files[0]), str(result), str(details))
    msprobe.two_sided.api_precision_compare(config)
    with details.open(encoding="utf-8-sig", newline="") as f:
        theirs = {row["API Name"]: row for row in csv.DictReader(f)}
    assert len(theirs) == 60
    statuses = set()
    for row in open_diff(*files, "msprobe", ["*=benchmark"]).rows():
        other = theirs[row.row.key[0]]
        assert (row.finding.status, row.finding.algorithm) == (other["比对结果"], "benchmark ratio")
        judged = {j.name: j for j in row.finding.judged}
        for name, column in (
            ("small_value_ratio", "小值域错误比值"), ("rmse_ratio", "均方根误差比值"),
            ("max_rel_ratio", "相对误差最大值比值"), ("mean_rel_ratio", "相对误差平均值比值"),
            ("error_balance_ratio", "误差均衡性比值"),
        ):  # fmt: skip
            assert judged[name].value == pytest.approx(float(other[column]), rel=1e-9, abs=1e-12)
        statuses.add(row.finding.status)
    assert statuses == {"pass", "error"}


def test_the_other_algorithms_give_the_same_statuses(msprobe):
    """ULP, absolute threshold, binary, dual-1000 and accumulative, on rows that 26.2 sends there no more."""
    from msprobe.pytorch.api_accuracy_checker.compare.compare_column import ApiPrecisionOutputColumn
    from msprobe.pytorch.api_accuracy_checker.compare.compare_input import PrecisionCompareInput

    from vllm_accprobe.standards import msprobe as apis

    r = np.random.default_rng(3)
    rules = {
        apis.ULP: msprobe.two_sided.record_ulp_compare_result,
        apis.ABSOLUTE: msprobe.two_sided.record_absolute_threshold_result,
        apis.BINARY: msprobe.two_sided.record_binary_consistency_result,
        apis.DUAL_1000: msprobe.two_sided.record_thousandth_threshold_result,
        apis.ACCUMULATIVE: msprobe.two_sided.record_accumulative_error_compare_result,
    }
    for algorithm, rule in rules.items():
        seen = set()
        for _ in range(60):
            dtype = DTYPES[int(r.integers(3))]
            sides = []
            for _side in range(2):
                zero = float(r.random() < 0.5)
                sides.append({
                    "ulp_mean": float(10 ** r.uniform(-1, 3)), "ulp_share": float(10 ** r.uniform(-4, 0)),
                    "inf_nan_err_ratio": 0.0, "rel_err_ratio": float(r.random()) * zero, "abs_err_ratio": 0.0,
                    "binary_err_ratio": float(r.random()) * zero, "dual_1000": float(1 - 10 ** r.uniform(-5, -1)),
                    "error_balance": float(10 ** r.uniform(-7, 0)),
                })  # fmt: skip
                sides[-1] |= {f"acc_{n}": sides[-1][n] for n in ("inf_nan_err_ratio", "rel_err_ratio", "abs_err_ratio")}
            golden, mine = sides
            if algorithm == apis.ULP and mine["ulp_share"] < 2**-7:
                continue  # below their smallest divisor: see the next test
            columns = {
                "ULP误差平均值": "ulp_mean", "ULP误差大于阈值占比": "ulp_share", "inf/nan错误率": "inf_nan_err_ratio",
                "相对误差错误率": "rel_err_ratio", "绝对误差错误率": "abs_err_ratio",
                "二进制一致错误率": "binary_err_ratio", "双千指标": "dual_1000", "误差均衡性": "error_balance",
            }  # fmt: skip
            rows = [{c: s[n] for c, n in columns.items()} | {"DEVICE Dtype": f"torch.{dtype}"} for s in (mine, golden)]
            theirs = rule(PrecisionCompareInput(*rows, f"torch.{dtype}", ApiPrecisionOutputColumn(), "x"))
            found = judge_two("msprobe", golden, mine, "x", dtype, algorithm=algorithm)
            assert (found.status, found.algorithm) == (theirs, algorithm), (golden, mine, found)
            seen.add(found.status)
        assert seen == {"pass", "error"}


def test_where_the_documents_and_the_code_of_the_two_sided_standard_differ(msprobe):
    """The documents are followed: a ULP share below golden's own, without their smallest divisor; dual-1000 above
    0.999, not at it; the algorithm by API, which their registry does for no float output."""
    from msprobe.pytorch.api_accuracy_checker.compare.compare_column import ApiPrecisionOutputColumn
    from msprobe.pytorch.api_accuracy_checker.compare.compare_input import PrecisionCompareInput

    def theirs(rule, mine, golden, dtype):
        rows = [s | {"DEVICE Dtype": dtype} for s in (mine, golden)]
        return rule(PrecisionCompareInput(*rows, dtype, ApiPrecisionOutputColumn(), "x"))

    share = "ULP误差大于阈值占比"
    rows = {"ULP误差平均值": 0.3, share: 0.003}, {"ULP误差平均值": 0.3, share: 0.002}
    assert theirs(msprobe.two_sided.record_ulp_compare_result, *rows, "torch.bfloat16") == "pass"
    found = judge_two("msprobe", {"ulp_share": 0.002}, {"ulp_share": 0.003}, "mm", "bfloat16")
    assert (found.status, found.algorithm) == ("error", "ULP")
    assert (
        theirs(msprobe.two_sided.record_thousandth_threshold_result, {"双千指标": 0.999}, {}, "torch.float32") == "pass"
    )
    assert judge_two("msprobe", {}, {"dual_1000": 0.999}, "conv2d", "float32").status == "error"
    from msprobe.pytorch.api_accuracy_checker.precision_standard.standard_register import StandardRegistry

    from vllm_accprobe.standards import msprobe as apis

    names = {
        "absolute_threshold": apis.ABSOLUTE, "binary_consistency": apis.BINARY, "ulp_compare": apis.ULP,
        "thousandth_threshold": apis.DUAL_1000, "benchmark": apis.BENCHMARK,
    }  # fmt: skip
    registry = StandardRegistry()
    for api in ("mul", "mul_", "sort", "mm", "conv2d", "exp", "embedding"):
        assert registry._get_standard_category(api, torch.bfloat16, torch.float32) == "benchmark"
        listed = next((n for n, apis_ in registry.api_standard_function_map.items() if api in apis_), "benchmark")
        assert apis.algorithm_of(api, "bfloat16") == names.get(listed, listed)


def test_the_lists_of_apis_are_those_of_the_release(msprobe):
    """Every API of api_precision_standard.yaml but its placeholder falls under the list's algorithm."""
    from msprobe.pytorch.api_accuracy_checker.compare import compare_utils
    from msprobe.pytorch.api_accuracy_checker.precision_standard.standard_config import StandardConfig

    from vllm_accprobe.standards import msprobe as apis

    lists = {
        apis.ABSOLUTE: compare_utils.absolute_standard_api, apis.BINARY: compare_utils.binary_standard_api,
        apis.ULP: compare_utils.ulp_standard_api, apis.DUAL_1000: compare_utils.thousandth_standard_api,
    }  # fmt: skip
    for algorithm, members in lists.items():
        assert {apis.algorithm_of(apis.api_of(a), "float32") for a in members} == {algorithm}, algorithm
    listed = StandardConfig.L1_API_LIST | StandardConfig.L2_API_LIST
    assert {a: apis.level_of(a) for a in listed} == {a: StandardConfig.get_api_level(a) for a in listed}


def test_the_single_side_measures_with_the_documents_small_values_differ_from_the_code(msprobe):
    """0.0015 in bfloat16 is small by the document (2**-8) and normal by the code (2**-10)."""
    bench, device = torch.full((4,), 0.0015), torch.full((4,), 0.0016).bfloat16()
    theirs = msprobe.metrics(msprobe.benchmark, bench, device, torch.bfloat16)
    assert (theirs["small_value_err_ratio"], theirs["max_rel_error"] > 0) == (0, True)
    m = ours(bench, device, "bfloat16")
    assert (m.small_value_err_ratio, m.normal_max_rel_err) == (1.0, 0.0)
    assert asdict(ours(bench, device, "bfloat16", current=BENCHMARK_DOMAIN))["normal_max_rel_err"] > 0
