"""What says that a thing cannot be had on this machine.

Not here: what could not be had (worker.py, repeat/here.py).
"""


class Unavailable(Exception):
    """What was asked for cannot be had on this machine; one line."""
