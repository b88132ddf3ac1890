"""docs/cli.md has every option as --help has it."""

import command_page


def test_the_page_is_what_the_script_writes() -> None:
    text = command_page.PAGE.read_text(encoding="utf-8")
    assert command_page.page(text) == text, "run python scripts/command_page.py"
    assert "### compare" in text
    assert "--golden-path" not in text.partition(command_page.MARK)[2], "another tool's spelling"
