"""What the browser tests read from the page, and how they point at a cell of the heat map."""


def shown(page):
    return page.inner_text("#shown")


def column(page, n):
    return page.eval_on_selector_all("#body tr.row", f"rows => rows.map(r => r.children[{n}].textContent)")


def cell(page, row, column):
    """The middle of a cell of the heat map, in pixels of the page."""
    return page.evaluate(
        """([r, c]) => {
            const heat = document.getElementById("heat"), box = heat.querySelector(".area").getBoundingClientRect();
            const [rows, columns] = heat.dataset.cells.split(" ").map(Number);
            return [box.x + (c + 0.5) / columns * box.width, box.y + (r + 0.5) / rows * box.height];
        }""",
        [row, column],
    )


def click_cell(page, row, column, name):
    """Clicks a cell once the map has settled under the pointer: the chart says whose it is before it is clicked."""
    for attempt in range(50):
        x, y = cell(page, row, column)
        page.mouse.move(x + attempt % 2, y)
        page.wait_for_timeout(100)
        if page.inner_text("#heat-readout").startswith(name) and cell(page, row, column) == [x, y]:
            page.mouse.click(x + attempt % 2, y)
            return
    raise AssertionError(f"no cell of {name} there: {page.inner_text('#heat-readout')}")
