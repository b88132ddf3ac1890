"""What a `support.forked_children.Command` runs: Ctrl-C ends it as a command in the foreground."""

import contextlib
import signal
import sys

from support.interrupts import in_the_foreground

from vllm_accprobe.cli import main as accprobe

with contextlib.redirect_stdout(None):
    accprobe(["--version"])  # imports what every command does


def main() -> int:
    in_the_foreground()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1:2] == ["-c"]:
        program = compile(sys.argv[2], "<string>", "exec")
        sys.argv[:] = ["-c", *sys.argv[3:]]
        exec(program, {"__name__": "__main__"})
        return 0
    return accprobe()
