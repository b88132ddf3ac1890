"""Ctrl-C and hang-ups in children of the tests, wherever the suite was started.

The problem: a shell starts what stands before `&` with SIGINT ignored, every child inherits that through fork and exec,
and then no Ctrl-C that a test sends arrives. For `accprobe run` that is as it must be: what a shell protects stays
protected. `nohup` does the same with SIGHUP. So a test that is about a signal starts its child as a shell starts a
command in the foreground.
"""

import signal


def in_the_foreground() -> None:
    """For ``preexec_fn``, or in the child after a fork: an interrupt and a hang-up arrive."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
