"""series.html without a browser: what it holds, and what it lets run."""

import base64
import hashlib
import re

from report_examples import comparison, pair
from series_examples import four_days, hostile_days

from vllm_accprobe.report.series import series_page
from vllm_accprobe.report.series.dump_entry import entry_of


def test_only_its_own_script_runs_and_nothing_is_loaded():
    text = series_page.series_page("golden", four_days())
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.S)
    hashes = ["'sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() + "'" for s in scripts]
    said = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1].replace("&#x27;", "'")
    assert len(scripts) == 1
    assert re.search(r"script-src ([^;]+);", said)[1] == hashes[0]
    assert "default-src 'none'" in said
    assert not re.search(r"(src|href)=\"?(https?:|//)", text)
    assert len(text) < 60_000


def test_a_row_per_dump_links_its_page():
    text = series_page.series_page("golden", four_days())
    assert re.findall(r'href="(\./[^"]+)"', text) == [f"./day{i}/compare.html" for i in (1, 2, 4)]
    assert re.findall(r'<span class="badge (\w+)">(\w+)<', text) == [
        ("pass", "PASS"), ("fail", "FAIL"), ("unreadable", "UNREADABLE"), ("fail", "FAIL"),
    ]  # fmt: skip
    assert "<title>FAIL · accprobe series</title>" in text


def test_origins_come_first_and_what_is_left_out_is_counted(monkeypatch):
    assert series_page.worst_taps(four_days())[0] == "model.layers.3.mlp.down_proj"
    pairs = [pair(tap=f"t{i}", order=i, status="fail", worst_row_rel_l2=0.02 + i) for i in range(9)]
    day = entry_of(comparison(pairs=pairs, verdict="fail"), "d", "", "d/compare.html")
    assert series_page.worst_taps([day]) == [f"t{i}" for i in range(8, -1, -1)]
    monkeypatch.setattr(series_page, "MAX_TAPS", 4)
    text = series_page.series_page("golden", [day])
    assert "4 of 9 taps are listed" in text
    assert text.count('<tr id="tap-') == 4


def test_nothing_failed():
    text = series_page.series_page("golden", four_days()[:1])
    assert "No tap failed in any dump." in text
    assert '<body class="pass-page">' in text


def test_names_never_become_markup():
    text = series_page.series_page("<b>", hostile_days())
    assert text.count("<img") == 0
    assert "{{data}}" in text  # not taken for a hole of the template
    assert all(link.startswith("./") for link in re.findall(r'href="([^"]*)"', text))
