"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """``level``: ok; warning: capture works, but look at it; error: capture would not work. ``check`` names what was
    looked at, ``text`` says what was found in one line, ``todo`` what to do about it ("" where there is nothing)."""

    level: str
    check: str
    text: str
    todo: str = ""

    def to_json(self) -> dict[str, str]:
        """As `accprobe doctor --json` prints it."""
        return asdict(self)
