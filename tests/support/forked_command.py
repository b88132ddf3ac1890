"""What a `support.forked_children.Command` runs: Ctrl-C ends it as a command in the foreground."""

import signal

from support.interrupts import in_the_foreground

from vllm_accprobe.cli import main as accprobe


def main() -> int:
    in_the_foreground()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return accprobe()
