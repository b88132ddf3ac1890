"""A whole check: processes that get taps, rows in the dump's order, a csv that survives."""
