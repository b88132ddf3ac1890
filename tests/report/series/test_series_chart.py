"""The chart of a series."""

import math
import re

from report_examples import EVIL, comparison, pair
from series_examples import four_days

from vllm_accprobe.report.series.dump_entry import entry_of
from vllm_accprobe.report.series.series_chart import HEIGHT, chart, step


def circles(text):
    return [(kind, float(y)) for kind, y in re.findall(r'<circle class="(\w+)" cx="[\d.]+" cy="([-\d.]+)"', text)]


def test_steps_are_the_page_s():
    assert [step(x) for x in (0, 0.003, 0.004, 1, 1.01, 30, 31, math.inf, math.nan)] == [0, 1, 2, 5, 6, 7, 8, 8, 8]


def test_a_line_per_tap_breaks_where_a_dump_is_missing():
    tap = "model.layers.3.mlp.down_proj"
    drawn = chart(four_days(), [tap])
    assert drawn.count('class="line origin"') == 1
    path = re.search(r'<path d="([^"]+)"', drawn)[1]
    assert re.sub(r"[\d. ]", "", path) == "MLM"
    assert [kind for kind, _ in circles(drawn)] == ["held", "failed", "failed"]
    limit = float(re.search(r'class="limit" x1="\d+" x2="\d+" y1="([\d.]+)"', drawn)[1])
    (_, low), (_, high), _ = circles(drawn)
    assert high < limit < low  # y goes down
    assert drawn.count('class="mark ') == 4


def test_what_has_no_place_on_the_axis():
    days = [
        entry_of(comparison(pairs=[pair(tap="t", status="fail", **kind)]), str(i), "", "")
        for i, kind in enumerate([{"nonfinite_mismatch": 1}, {"worst_row_rel_l2": 0.032}])
    ]
    days.append(entry_of(comparison(pairs=[pair(tap="t")]), "2", "", ""))
    infinite, finite, zero = (y for _, y in circles(chart(days, ["t"])))
    assert 0 < infinite < finite < zero < HEIGHT
    assert chart(days, []) == ""


def test_names_are_text():
    day = entry_of(comparison(pairs=[pair(tap=EVIL, status="fail")]), EVIL, "", "")
    drawn = chart([day], [EVIL])
    assert "<img" not in drawn
    assert "</script" not in drawn
