"""Numbers that say how far two arrays are apart: their definition and a fast way to get them."""

BLOCK = 2048
"""Elements that are turned into float32 at a time: both sides and what is built from them stay in the nearest
caches."""
ROWS_AT_ONCE, MOST_ROWS = 16 << 10, 64
"""Elements, and rows, whose columns are summed up together: they fit into the second-level cache."""
