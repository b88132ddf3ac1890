"""How many elements the compiled loops (loops.py) take at a time, known where numba is not imported (native.py) too."""

CHUNK = 2048
"""Elements that are turned into float32 at a time: both sides and what is made of them stay in the nearest caches."""
