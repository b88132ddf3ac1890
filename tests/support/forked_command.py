"""What a `support.forked_children.Command` runs: Ctrl-C ends it as a command in the foreground."""

import contextlib
import signal

from support.interrupts import in_the_foreground

from vllm_accprobe.cli import main as accprobe

with contextlib.redirect_stdout(None):
    accprobe(["--version"])  # imports what every command does


def main() -> int:
    in_the_foreground()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return accprobe()
