"""A whole check: processes that are given taps, rows in the dump's order, a csv that survives."""
