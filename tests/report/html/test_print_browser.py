"""The page on paper, by a real Chromium: emulated, and as a PDF whose colours, pictures and pages are read."""

import re
import zlib
from dataclasses import replace

import pytest
from report_examples import pair, realistic, with_rows

pytestmark = pytest.mark.browser

A4 = 703
"""Pixels between the margins of print.css."""


def drawn(pdf):
    """All content streams of a PDF, unpacked."""
    out = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.S):
        try:
            out.append(zlib.decompress(stream).decode("latin-1"))
        except zlib.error:
            continue
    return "\n".join(out)


def fills(pdf):
    """The colours that areas are filled with, as #rrggbb."""
    found = re.findall(r"([\d.]+) ([\d.]+) ([\d.]+) rg\b", drawn(pdf))
    return {"#" + "".join(f"{round(float(x) * 255):02x}" for x in rgb) for rgb in found}


def pages(pdf):
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))


def cut_off(page):
    """What lies beyond the paper's right edge or is hidden in its own box."""
    return page.evaluate(
        """() => {
            const width = document.documentElement.clientWidth, out = [];
            for (const e of document.querySelectorAll("main *, header *, footer *")) {
                if (e.closest("option, svg") || getComputedStyle(e).display === "none" || !e.offsetParent) continue;
                const box = e.getBoundingClientRect();
                if (box.right > width + 1) out.push("wide: " + e.tagName + " " + e.className);
                const own = e.closest("#chart, #heat, .small-plot, .node");
                if (own || getComputedStyle(e).overflowX === "visible") continue;
                if (e.scrollWidth > e.clientWidth + 1) out.push("hidden: " + e.tagName + " " + e.className);
            }
            return out;
        }"""
    )


def with_classes(result):
    """By class what the verdict covers, with the widest numbers and a name that has no place to wrap."""
    sizes = {"row": 0.0034, "column": 1.23e-7, "one_row": 0.011}
    classes = [
        {"class": name, "calls": 1234, "rows": 1234567, "checked": 1000000, "compared": 234567, "unseen": 12,
         "smallest": sizes}
        for name in ("MergedColumnParallelLinear", "Attention", "x" * 80)
    ]  # fmt: skip
    return replace(result, coverage=result.coverage | {"by_class": classes})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_keeps_badge_chart_and_legend(visit, scheme):
    page = visit(with_rows(realistic()))
    page.wait_for_selector("#heat[data-ready]")
    page.emulate_media(color_scheme=scheme)
    pdf = page.pdf(format="A4")
    assert 3 <= pages(pdf) <= 8
    coloured = fills(pdf)
    assert "#b3261e" in coloured  # the badge, light whatever the screen has
    steps = {"#dfe9e2", "#e3ebf5", "#c3d5ec", "#9dbbe0", "#7299cc", "#4674b0", "#f2b35e", "#de6b33", "#a3160f"}
    assert steps <= coloured  # the legend
    strokes = set(re.findall(r"([\d. ]+) RG\b", drawn(pdf)))
    assert any(round(float(s.split()[0]) * 255) == 0x1D and round(float(s.split()[2]) * 255) == 0xBF for s in strokes)
    cells = page.locator("#heat .cells path").count()
    assert 1 < cells <= 9
    assert drawn(pdf).count(" re") > 200  # the cells of the heat map, beside the boxes of the page


def test_nothing_is_cut_off_and_nothing_opens(visit):
    wide = [
        pair(
            tap=f"model.layers.{i}.a_module_with_quite_a_long_name.{'x' * 60}", status="fail", order=i, message="m" * 90
        )
        for i in range(120)
    ]
    result = with_rows(realistic())
    origins = [
        result.origins[0] | {"module": wide[0].tap, "shape": "columns 400–511 of 512", "tier": "replay", "times": 12.0}
    ]
    result = with_classes(replace(result, pairs=result.pairs + wide, origins=origins))
    page = visit(result, width=A4, height=1000)
    page.wait_for_selector("#heat[data-ready]")
    closed = page.locator("details:not([open])").count()
    assert closed
    page.emulate_media(media="print")
    page.wait_for_selector("html.paper")
    assert cut_off(page) == []
    names = page.eval_on_selector_all(".scroll th", "all => all.map(e => [e.textContent, e.clientWidth])")
    assert [name for name, width in names if len(name) > 4 and width < 30] == []  # no column of a letter a line
    assert page.locator("#covers + .scroll th:visible").count() == 9
    for part in ("#chart svg", "#heat svg", ".legend", ".badge", "#grid", "#tree"):
        assert page.is_visible(part), part
    for part in (".find", ".status", "#save", "#grid-help"):
        assert page.is_hidden(part), part
    assert page.locator("details:not([open])").count() == closed
    assert page.is_hidden("#detail")
    assert page.locator("#body tr.row").count() == 50
    assert (
        page.inner_text("#body tr:last-child")
        == f"The first 50 of {page.inner_text('#shown').split(' pairs')[0]} pairs; compare.csv has all of them."
    )
    page.emulate_media(media="screen")
    page.wait_for_selector("html:not(.paper)")
    assert page.is_visible(".find")
    assert page.locator("#body tr.space").count() == 1
