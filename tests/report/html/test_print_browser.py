"""The page on paper, by a real Chromium: emulated, and as a PDF whose colours, pictures and pages are read."""

import re
import zlib
from dataclasses import replace

import pytest
from report_examples import CULPRIT, EVIL, comparison, pair, realistic, with_rows

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


@pytest.mark.parametrize("paper", [{"format": "A4"}, {"format": "Letter"}, {"format": "A4", "landscape": True}])
def test_a_pdf_of_many_long_names_has_room_for_them(visit, paper):
    """Paper is told wider than its margins leave room for, so that only a PDF shows which columns it has."""
    long = [
        pair(tap=f"model.layers.{i}.self_attn.mla_attn.kv_a_proj_with_mqa", status="fail", measure="created", order=i)
        for i in range(120)
    ]
    page = visit(with_rows(replace(realistic(), pairs=realistic().pairs + long)))
    page.wait_for_selector("#heat[data-ready]")
    assert 4 <= pages(page.pdf(**paper)) <= 14


def test_each_sheet_of_the_table_has_its_columns_names(visit):
    """Chromium draws the head again on each sheet, but no button of it."""
    long = [pair(tap=f"model.layers.{i}.mlp", status="fail", measure="created", order=i) for i in range(120)]
    page = visit(comparison(pairs=long))
    page.wait_for_selector("#body tr.row")
    page.emulate_media(media="print")
    page.wait_for_selector("html.paper")
    assert page.locator("#grid th:visible").all_inner_texts() == ["Status", "Tap", "Tensor", "Step", "× limit", "Value"]
    boxes = page.eval_on_selector_all("#grid th *", "all => all.map(e => getComputedStyle(e).display)")
    assert set(boxes) == {"contents"}


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


@pytest.mark.parametrize(("width", "columns"), [(1440, 9), (390, 7)])
def test_the_table_by_class_fits_its_box_on_a_screen(visit, width, columns):
    page = visit(with_classes(realistic()), width=width, height=900)
    box = page.locator("#covers + .scroll")
    assert box.evaluate("e => e.scrollWidth - e.clientWidth") <= 1
    assert box.locator("th:visible").count() == columns


def test_a_wide_window_prints_its_charts_within_the_page_and_gets_them_back(visit):
    page = visit(with_rows(realistic()), width=1200, height=900)
    page.wait_for_selector("#heat[data-ready]")
    page.click("h1 .culprit")
    page.wait_for_selector("#detail .small-plot[data-ready] >> nth=1")
    widths = "[...document.querySelectorAll('svg.drawing')].map(s => s.width.baseVal.value)"
    before = page.evaluate(widths)
    assert max(before) > A4
    page.emulate_media(media="print")
    page.wait_for_selector("html.paper")
    assert max(page.evaluate(widths)) <= A4
    assert page.is_visible("#detail")  # what was open stays open
    page.emulate_media(media="screen")
    page.wait_for_selector("html:not(.paper)")
    page.wait_for_timeout(300)
    assert page.evaluate(widths) == before
    assert 3 <= pages(page.pdf(format="A4")) <= 8
    assert page.evaluate("document.documentElement.className") == ""  # after the PDF it is a screen's again


def test_paper_of_a_pass_and_of_hostile_names(visit):
    page = visit(comparison(pairs=[pair(tap=EVIL, message=EVIL)]))
    pdf = page.pdf(format="A4")
    assert 1 <= pages(pdf) <= 3
    assert "#17703f" in fills(pdf)
    assert page.evaluate("window.pwned") is None
    page = visit(realistic(layers=60))
    assert 3 <= pages(page.pdf(format="A4")) <= 8
    assert CULPRIT in page.inner_text("h1")
