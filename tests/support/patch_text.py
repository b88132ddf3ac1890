"""The text of patch files as a user writes them (docs/capture.md), for tests of what is captured through them."""

import json


def target(module: str, function: str, *taps: dict[str, str]) -> str:
    """A ``[[target]]`` with its ``[[target.tap]]`` tables; a tap's keys as in the file."""
    tables = [("[[target]]", {"module": module, "function": function}), *(("[[target.tap]]", tap) for tap in taps)]
    lines = ["\n".join([head, *(f"{key} = {json.dumps(value)}" for key, value in of.items())]) for head, of in tables]
    return "\n".join(lines) + "\n"
