"""The page without a browser: what it holds, and what it lets run."""

import base64
import gzip
import hashlib
import json
import re
from html import unescape

import pytest
from report_examples import EVIL, comparison, hostile, pair, realistic

import vllm_accprobe.report.html as html
from vllm_accprobe.report.html.sections import asset


def unpacked(text, name):
    return gzip.decompress(base64.b64decode(re.search(rf'id="{name}">(.*?)</script>', text, re.S)[1])).decode()


def data(text, name):
    return json.loads(unpacked(text, name))


def values(column, n):
    if "c" in column:
        return [column["c"]] * n
    return column["v"] if "v" in column else [column["d"][i] for i in column["i"]]


def test_no_name_can_end_a_script_or_become_markup():
    text = html.page(hostile())
    blocks = [unpacked(text, name) for name in ("pairs-json", "view-json")]
    assert text.lower().count("</script") == len(html.SCRIPTS) + 2  # two blocks of data
    for own in (text, *blocks):
        assert "<img" not in own
        assert "onerror" in own
        assert "\x1b" not in own
        assert "\u202e" not in own
    assert not any("<" in block for block in blocks)
    seen = EVIL.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
    assert data(text, "pairs-json")["cols"]["message"]["c"] == seen


def test_policy_lets_only_our_scripts_run_and_nothing_load():
    text = html.page(realistic(layers=1, steps=1))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline'; img-src data:" in policy
    assert "script-src 'unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert len(scripts) == len(html.SCRIPTS)
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r'<(?:link|img|iframe)\b|\bsrc="', text)


def test_a_page_is_small():
    """It is sent by mail and put into tickets: what is not a pair's takes less than a picture."""
    text = html.page(realistic(layers=1, steps=1))
    assert len(text.encode()) < 150_000


def test_too_many_pairs_keep_the_worst_and_say_so(tmp_path):
    pairs = [pair(tap=f"t{i}", order=i, status="fail" if i == 7 else "pass", worst_row_rel_l2=0.1) for i in range(10)]
    html.write_html(comparison(pairs=pairs, verdict="fail"), tmp_path / "x.html", max_pairs=3)
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "The worst 3 of 10 pairs are on this page; compare.csv has all of them." in text
    assert "t7" in values(data(text, "pairs-json")["cols"]["tap"], 3)


GPU = {
    "model": {"path": "/models/q2", "class": "Qwen2", "dtype": "bfloat16"}, "device": {"type": "cuda", "name": EVIL},
    "versions": {"torch": "2.9.0", "vllm": "0.32.0", "accprobe": "0.1.0"}, "parallel": {"tp": [0, 2]},
    "start_time": "2026-11-27T01:49:28+00:00", "engine": {"block_size": 16}, "seed": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("golden", "mine", "lines"),
    [
        (GPU, GPU, ["Both q2 (Qwen2) · EVIL (cuda) · bfloat16 · tp 2 · torch 2.9.0 · vLLM 0.32.0 · accprobe 0.1.0",
                    "Golden 2026-11-27 01:49 UTC · golden", "Mine 2026-11-27 01:49 UTC · mine"]),
        (GPU, GPU | {"versions": {"torch": "2.8.0", "vllm": "0.32.0"}, "engine": {"block_size": 32}, "seed": 1},
         ["*torch 2.9.0* · *accprobe 0.1.0*", "*torch 2.8.0* · *accprobe not recorded*",
          "Also different: engine.block_size 16 / 32; seed – / 1."]),
        ({"format": "npy"}, {"format": "npy"}, ["model, device, dtype and versions are not recorded"]),
    ],
)  # fmt: skip
def test_both_runs_are_on_the_first_screen_and_what_differs_is_marked(golden, mine, lines):
    text = html.sections.identity(comparison(golden_run=golden, mine_run=mine))
    assert "<img" not in text
    plain = re.sub(r"</?mark>", "*", text).replace("</dt>", " ")
    shown = EVIL.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
    plain = unescape(re.sub(r"<[^>]+>", "", plain)).replace(shown, "EVIL")
    assert [line for line in lines if line not in plain] == []



def test_what_a_pack_does_not_record_is_no_difference():
    run = {"model": "m", "versions": {"vllm": "0.32.0"}}
    probe = {"enabled": True, "ranks": None, "force": "/there"}
    text = html.sections.identity(comparison(golden_run=run | {"packed": True}, mine_run=run | {"probe": probe}))
    assert "ifferent" not in text
    sides = [run | {"probe": probe | {"force": here, **more}} for here, more in (("/here", {}), ("/there", {"x": []}))]
    text = html.sections.identity(comparison(golden_run=sides[0], mine_run=sides[1]))
    assert "Different: probe.force /here / /there. <a" in text

def test_a_pass_shows_what_it_covers_and_draws_nothing_where_all_is_equal():
    equal = html.page(comparison(pairs=[pair(tap="model.layers.0.mlp", identical=True), pair(status="skip")]))
    assert 'class="pass-page equal-page"' in equal
    assert equal.index('id="h-coverage"') < equal.index('id="h-depth"') < equal.index('id="h-tree"')
    assert "modules compared</dt><dd>1 <small>1 layer" in equal
    failed = html.page(realistic())
    assert failed.index('id="h-depth"') < failed.index('id="h-coverage"')


def test_pass_and_empty_comparisons_make_a_page():
    assert "2,760 pairs and 28,980 rows agree" in html.page(realistic(fail=False))
    empty = html.page(comparison())
    assert "No output tensor with an error to draw was compared" in empty
    assert data(empty, "pairs-json")["n"] == 0


def test_text_can_be_read_on_its_ground_in_light_and_dark():
    """WCAG 2.2, 1.4.3: a contrast of 4.5 for text of normal size."""
    css = asset("page.css")
    light, dark = re.findall(r":root(?::not\(\.paper\))? \{(.*?)\}", css, re.S)[:2]

    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for block in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        grounds = {"bg", "panel", "soft", "pick", "bad-row"}
        pairs = [(t, g) for t in ("ink", "dim", "fail") for g in grounds]
        pairs += [("pass", "panel"), ("prefill", "panel"), ("decode", "panel"), ("other", "panel"), ("panel", "fail")]
        for text, ground in pairs:
            high, low = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground, colours[text], colours[ground])
