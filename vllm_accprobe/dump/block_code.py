"""Where a dump has what a block's own code does. A module of its own: generated tests carry a copy."""

FORWARD = "forward"
"""Attribute of modules with parts: role → formula of what the module's own code makes of its inputs and its parts'
outputs (capture/taps/formulas.py); {} where that was not followed. Also the name of the reference that evaluates it."""
