"""What sums make of a tensor's metrics, by hand."""

from vllm_accprobe.kernels.formulas import Metrics, eps_of, metrics


def test_metrics_of_sums():
    # g = (3, 4), m = (3, 3)
    found = metrics(n=2, gg=25, mm=18, gm=21, dd=1, abs_d=1, max_d=1, max_rel=0.25, nonfinite=1, mismatch=0)
    assert found == Metrics(21 / (5 * 18**0.5), 1, 0.5, 0.5**0.5, 0.2, 0.25, 1, 0)


def test_what_is_not_defined_is_none():
    nothing = metrics(0, 0, 0, 0, 0, 0, -1, -1, 3, 1)
    assert nothing == Metrics(None, None, None, None, None, None, 3, 1)
    zeros = metrics(2, 0, 8, 0, 8, 4, 2, -1, 0, 0)
    assert (zeros.cosine, zeros.rel_l2, zeros.max_rel_err, zeros.rmse) == (None, None, None, 2.0)


def test_eps_is_the_goldens():
    assert [eps_of(d) for d in ("bfloat16", "float16", "float32", "int8")] == [2.0**-8, 2.0**-10, 2.0**-23, 0.0]
