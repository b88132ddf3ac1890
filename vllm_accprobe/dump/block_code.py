"""The attribute under which a dump has the formulas of a block's own forward; generated tests carry a copy."""

FORWARD = "forward"
"""Attribute of modules with parts: role → formula of what the module's own code makes of its inputs and its parts'
outputs (capture/taps/formulas.py); {} where that was not followed. Also the name of the reference that evaluates it."""

INSIDE = "inside."
"""Before the names of what lies inside a block: what its parts received, what a mixer keeps."""

CODE = "code"
"""Attribute of norms and rotary embeddings without parts: what their source shows (capture/taps/leaf_code.py): the
functions that it calls, and the words below."""
MINUS_MEAN, ONE_PLUS_WEIGHT, GATE_FIRST = "- mean", "1 + weight", "gate first"
