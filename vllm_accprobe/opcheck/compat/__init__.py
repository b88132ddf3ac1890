"""What other tools' own words and files mean here: msprobe's accuracy check, ait's opcheck, torch_xray's table."""


class CompatError(ValueError):
    """One line: what another tool's words require and cannot have."""
