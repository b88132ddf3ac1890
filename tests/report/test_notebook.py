"""A comparison in a notebook: frame, figure and markup."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from report_examples import comparison, hostile, pair, realistic

from vllm_accprobe.comparison.result import COLUMNS


def test_frame_has_every_pair_and_column_with_numbers_as_numbers():
    result = comparison(pairs=[pair(rel_l2=0.25, step=None), pair(tap="x", rank=3, cosine=None, status="fail")])
    frame = result.to_pandas()
    assert tuple(frame.columns) == COLUMNS
    assert frame["rel_l2"].tolist() == [0.25, 0.0]
    assert frame["rel_l2"].dtype == frame["cosine"].dtype == "float64"
    assert math.isnan(frame["cosine"][1])
    assert str(frame["step"].dtype) == "Int64"
    assert frame["step"].isna().tolist() == [True, False]
    assert frame.query("status == 'fail'")["tap"].tolist() == ["x"]
    assert len(comparison().to_pandas()) == 0


@pytest.mark.parametrize(("library", "method"), [("plotly", "plot_depth"), ("pandas", "to_pandas")])
def test_without_the_extra_it_says_what_to_install(monkeypatch, library, method):
    for module in (library, "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{method}: .*pip install 'vllm-accprobe\[notebook\]'"):
        getattr(comparison(), method)()


def test_figure_has_what_was_created_the_phases_the_limit_and_each_origin():
    figure = replace(realistic(), created={"model.layers.2.mlp": 0.25}).plot_depth()
    assert [t.name for t in figure.data] == ["prefill", "decode", "created"]
    _, decode, created = figure.data
    at = decode.text.index("model.layers.3.mlp.down_proj (RowParallelLinear)")
    limit = next(p.limit for p in realistic().pairs if p.tap == "model.layers.3.mlp.down_proj")
    assert decode.y[at] == pytest.approx(0.21 / limit)
    assert created.y[at] == pytest.approx(0.21 / 0.016)
    assert next(y for y in created.y if y is not None) == 0.25
    assert figure.layout.yaxis.type == "log"
    assert (figure.layout.shapes[0].y0, figure.layout.shapes[1].x0) == (1.0, at)
    assert comparison().plot_depth().data == ()


def test_markup_is_small_says_the_verdict_and_holds_no_script():
    result = realistic()
    text = result._repr_html_()
    assert "FAIL: model.layers.3.mlp.down_proj (RowParallelLinear) introduces the error" in text
    assert text.count("<tr>") == 11
    assert len(text) < 10_000
    bad = hostile()._repr_html_()
    assert "<script" not in bad
    assert "<img" not in bad
    assert "onerror" in bad
    assert "PASS: " in realistic(fail=False)._repr_html_()


def test_nothing_heavy_is_imported_before_it_is_used():
    code = (
        "import sys; import vllm_accprobe.report.notebook, vllm_accprobe.comparison.result\n"
        "print(sorted({'pandas', 'plotly', 'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
