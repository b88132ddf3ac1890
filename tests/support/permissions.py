"""Files that even root may not read."""

import contextlib
import ctypes
import os
from collections.abc import Iterator


@contextlib.contextmanager
def permissions_count() -> Iterator[None]:
    """This thread of root heeds the permissions of its own files: without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    (capabilities(7)) among the effective capabilities. Nothing to do for anybody else."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(head, sets) == 0
    before = sets[0]
    sets[0] = before & ~0b110
    assert libc.capset(head, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(head, sets) == 0
