"""Module taps: which modules, what went into a call and what came out, parameters, patched values."""
